"""What the emulator raises when a program does what the hardware must not be asked to do."""


class MemoryFault(Exception):
    """An access outside the kernel's buffers, its LDS allocation or its scratch."""


class UnsupportedInstructionError(Exception):
    """An instruction, or a modifier of one, that the emulator does not implement."""
