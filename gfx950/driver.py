"""Runs a kernel: loads the code object, places the arguments, steps the waves of each workgroup in turn.

Workgroups run one after another; the waves of a workgroup run in turns, each up to its next barrier. So a kernel whose
last workgroup reduces works, while one that spins on a later workgroup never ends.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict

import numpy as np

from .arguments import ALIGNMENT, Arguments, Traffic
from .code_object import KERNARG_PRELOAD_PROLOGUE_BYTES, CodeObject
from .errors import MemoryFault, UnsupportedInstructionError
from .lds import LocalMemory
from .machine import Machine
from .memory import GUARD_BYTES, Arena
from .wave import LANES, POISON, Wave

MAX_LDS_BYTES = 160 * 1024
WAVE_LANES = 64
# A wave that runs longer than this is taken to be in an endless loop.
MAX_WAVE_INSTRUCTIONS = 20_000_000
_CODE_ALIGNMENT = 4096
_SMALLEST_ARENA_BYTES = 1 << 20

Trace = Callable[[Wave, int, str], None]
Group = tuple[int, int, int]


class RunStats(TypedDict):
    """What a run did and what it should not have done."""

    instructions: int  # wave-instructions executed
    executed: dict[int, tuple[str, int]]  # offset in the code -> opcode, times executed
    groups: int  # workgroups executed
    races: dict[tuple[str, int], int]  # (RAW | WAR | WAW, offset in the code) -> instructions
    uninit: dict[int, int]  # offset in the code -> LDS reads of bytes never written
    pending_reads: dict[int, int]  # offset in the code -> LDS reads of what a copy or store without a wait brings
    traffic: dict[int, Traffic]  # position of a buffer among the arguments -> what was loaded of it, if asked for
    lds_bytes: int
    scratch_bytes: int  # per lane
    seconds: float
    translate_seconds: float


def findings(stats: RunStats) -> list[str]:
    """The races, uninitialised and pending reads of a run in words; empty for a clean one."""
    lines = [f"{kind} race at +{site:#x}, {count} times" for (kind, site), count in stats["races"].items()]
    lines += [f"LDS read before any write at +{site:#x}, {count} times" for site, count in stats["uninit"].items()]
    lines += [
        f"LDS read without a wait for its copy or store at +{site:#x}, {count} times"
        for site, count in stats["pending_reads"].items()
    ]
    return lines


def run_compiled(compiled: Any, args: Sequence[Any], grid: Sequence[int] = (1, 1, 1), **options: Any) -> RunStats:
    """Run what triton.compile returned for gfx950.

    Args:
        compiled: a Triton CompiledKernel for GPUTarget("hip", "gfx950", 64).
        args: the runtime arguments in order: numpy arrays or CPU tensors (written back in place), ints and floats.
        grid: workgroups in x, y, z.
        options: further arguments of `run`.

    Raises:
        ValueError: compiled for another target, several CTAs per cluster, or more LDS than a CU has.
    """
    metadata = compiled.metadata
    if metadata.target.arch != "gfx950":
        raise ValueError(f"compiled: expected a kernel for gfx950, got one for {metadata.target.arch}")
    if metadata.num_ctas != 1:
        raise ValueError(f"compiled: expected num_ctas 1, got {metadata.num_ctas}")
    return run(
        compiled.asm["hsaco"], args, grid, shared=metadata.shared, num_warps=metadata.num_warps, **options
    )  # fmt: skip


def run(
    hsaco: bytes,
    args: Sequence[Any],
    grid: Sequence[int] = (1, 1, 1),
    *,
    shared: int = 0,
    num_warps: int | None = None,
    check: bool = True,
    groups: Iterable[Group] | None = None,
    trace: Trace | None = None,
    via_preload: bool = False,
    traffic: bool = False,
    arena_bytes: int | None = None,
) -> RunStats:
    """Execute the machine code of a kernel.

    Args:
        hsaco: the code object.
        args: numpy arrays or CPU tensors (written back in place), ints and floats; missing trailing ones are null.
        grid: workgroups in x, y, z.
        shared: bytes of LDS besides those in the kernel descriptor (Triton's LDS is not in it).
        num_warps: waves of a workgroup; by default the most that the kernel allows.
        check: track races, uninitialised and pending LDS reads.
        groups: run only these workgroups, in this order.
        trace: called before each instruction with the wave, its offset in the code and its opcode.
        via_preload: enter behind the prologue, with the arguments preloaded in SGPRs, as current firmware does.
        traffic: count what vector loads read of each buffer.
        arena_bytes: size of global memory; by default what the arguments need.

    Raises:
        MemoryFault: an access out of bounds.
        UnsupportedInstructionError: an instruction that is not implemented.
        ValueError: arguments that do not fit the kernel, or too much LDS.
    """
    started = time.perf_counter()
    code = CodeObject(hsaco)
    descriptor = code.descriptor
    lds_bytes = descriptor.static_lds_bytes + shared
    if lds_bytes > MAX_LDS_BYTES:
        raise ValueError(f"shared: at most {MAX_LDS_BYTES} bytes of LDS, got {lds_bytes}")
    arguments = Arguments(code, args)
    waves_per_group = num_warps or code.kernel[".max_flat_workgroup_size"] // WAVE_LANES
    scratch_bytes = descriptor.scratch_bytes_per_lane

    arena = Arena(arena_bytes or _arena_size(code, arguments, waves_per_group))
    if traffic:
        arena.count_reads()
    image = arena.allocate(code.image_bytes, _CODE_ALIGNMENT)
    arena.write(image, code.load(arena.base + image))
    kernarg = arguments.place(arena)
    scratch = [arena.allocate(scratch_bytes * WAVE_LANES) for _ in range(waves_per_group)] if scratch_bytes else []

    first_instruction = arena.base + image + code.entry_address
    machine = Machine(arena, LocalMemory(lds_bytes, check=check), first_instruction)
    entry = first_instruction + (KERNARG_PRELOAD_PROLOGUE_BYTES if via_preload else 0)
    order = groups if groups is not None else _all_groups(grid)
    clock = _TranslateClock()
    instructions = group_count = 0
    with np.errstate(all="ignore"):
        for group in order:
            waves = []
            for index in range(waves_per_group):
                wave = Wave(index, entry)
                _set_initial_registers(wave, code, arena, kernarg, group, via_preload=via_preload)
                if scratch:
                    wave.scratch_base, wave.scratch_bytes = arena.base + scratch[index], scratch_bytes
                    words = slice(scratch[index] >> 2, (scratch[index] + scratch_bytes * WAVE_LANES) >> 2)
                    arena.words[words] = POISON
                waves.append(wave)
            machine.lds.reset()
            _run_group(machine, waves, trace, clock)
            instructions += sum(wave.executed for wave in waves)
            group_count += 1
    arguments.write_back(arena)
    loaded = arguments.traffic(arena)
    return RunStats(
        instructions=instructions,
        executed={machine.site(pc): (item.opcode, item.count) for pc, item in sorted(machine.program.items())},
        groups=group_count,
        races=dict(machine.lds.races),
        uninit=dict(machine.lds.uninitialised_reads),
        pending_reads=dict(machine.lds.pending_reads),
        traffic=loaded,
        lds_bytes=lds_bytes,
        scratch_bytes=scratch_bytes,
        seconds=time.perf_counter() - started,
        translate_seconds=clock.seconds,
    )


class _TranslateClock:
    """Time spent on decoding, apart from execution."""

    def __init__(self) -> None:
        self.seconds = 0.0


def _all_groups(grid: Sequence[int]) -> Iterable[Group]:
    x_count, y_count, z_count = (*grid, 1, 1)[:3]
    return ((x, y, z) for z in range(z_count) for y in range(y_count) for x in range(x_count))


def _arena_size(code: CodeObject, arguments: Arguments, waves: int) -> int:
    """Bytes for the image, the arguments and scratch, each with its guard."""
    sizes = [code.image_bytes + _CODE_ALIGNMENT, *arguments.sizes()]
    sizes += [code.descriptor.scratch_bytes_per_lane * WAVE_LANES] * waves
    needed = sum(size + GUARD_BYTES + ALIGNMENT for size in sizes) + 2 * GUARD_BYTES
    return max(_SMALLEST_ARENA_BYTES, -(-needed // GUARD_BYTES) * GUARD_BYTES)


def _set_initial_registers(
    wave: Wave, code: CodeObject, arena: Arena, kernarg: int, group: Group, *, via_preload: bool
) -> None:
    """The registers as the hardware sets them up: kernarg pointer, preloaded arguments, workgroup and lane ids."""
    descriptor = code.descriptor
    pointer = descriptor.kernarg_sgpr
    if pointer is not None:
        wave.write_sgpr64(pointer, arena.base + kernarg)
    if via_preload:
        first, words = descriptor.preload_sgpr, descriptor.preload_words
        source = (kernarg >> 2) + descriptor.preload_word_offset
        wave.sgpr[first : first + words] = arena.words[source : source + words]
    register = descriptor.user_sgprs
    for enabled, position in zip(descriptor.workgroup_id_enabled, group, strict=True):
        if enabled:
            wave.sgpr[register] = position
            register += 1
    # Workgroups are one-dimensional here, so the y and z ids packed above bit 10 are 0.
    wave.vgpr[0] = (wave.index * WAVE_LANES + LANES).astype(np.uint32)


def _run_group(machine: Machine, waves: list[Wave], trace: Trace | None, clock: _TranslateClock) -> None:
    """Run a workgroup to its end: every wave up to a barrier, then the next round."""
    while True:
        running = [wave for wave in waves if not wave.done]
        if not running:
            return
        for wave in running:
            wave.at_barrier = False
            _run_wave(machine, wave, trace, clock)
        machine.lds.barrier(waves)


def _run_wave(machine: Machine, wave: Wave, trace: Trace | None, clock: _TranslateClock) -> None:
    """Step a wave until it ends or reaches a barrier."""
    program = machine.program
    while not (wave.done or wave.at_barrier):
        pc = wave.pc
        item = program.get(pc)
        if item is None:
            begun = time.perf_counter()
            item = machine.translate(pc)
            clock.seconds += time.perf_counter() - begun
        if trace is not None:
            trace(wave, machine.site(pc), item.opcode)
        wave.pc = pc + item.size
        item.count += 1
        wave.executed += 1
        try:
            item.step(wave)
        except (MemoryFault, UnsupportedInstructionError) as error:
            raise type(error)(f"{item.opcode} at +{machine.site(pc):#x}, wave {wave.index}: {error}") from error
        if wave.executed > MAX_WAVE_INSTRUCTIONS:
            raise RuntimeError(f"wave {wave.index} ran {wave.executed} instructions, now at +{machine.site(pc):#x}")
