"""Loops of a kernel's machine code, and what a run really executes of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from .code_object import CodeObject
from .decoder import Instruction, disassemble
from .wave import Wave, sign_extend

Path = tuple[int, ...]
_ARITHMETIC = ("VOP", "SOP")


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop: offsets in the code of its first instruction and of the last branch that goes back there."""

    start: int
    end: int

    def __contains__(self, offset: int) -> bool:
        return self.start <= offset <= self.end


class Listing:
    """The disassembled kernel.

    Args:
        code: a code object, or anything that holds one: a compiled kernel (`asm["hsaco"]`) or a launch (`hsaco`).
    """

    def __init__(self, code: Any) -> None:
        self.hsaco = hsaco_of(code)
        self.code_object = CodeObject(self.hsaco)
        start, size = self.code_object.code_range
        # Sites count from the entry, as everywhere in this package.
        before = self.code_object.file_offset(self.code_object.entry_address) - start
        self.instructions: dict[int, Instruction] = {
            offset - before: instruction for offset, instruction in disassemble(self.hsaco[start : start + size])
        }

    def branch_target(self, offset: int) -> int | None:
        """Where a branch goes; None for any other instruction."""
        instruction = self.instructions[offset]
        if not instruction.opcode.startswith(("S_BRANCH", "S_CBRANCH")):
            return None
        return offset + 4 + 4 * sign_extend(instruction.fields.simm16, 16)

    @cached_property
    def loops(self) -> list[Loop]:
        """The targets of backward branches, each with the last branch that goes there."""
        ends: dict[int, int] = {}
        for offset in self.instructions:
            target = self.branch_target(offset)
            if target is not None and target <= offset:
                ends[target] = offset
        return [Loop(start, end) for start, end in ends.items()]

    @cached_property
    def hot_loop(self) -> Loop | None:
        """The loop with the most matrix instructions, the shortest of them; None if no loop has any."""

        def rank(loop: Loop) -> tuple[int, int]:
            names = [i.name for offset, i in self.instructions.items() if offset in loop]
            return sum("MFMA" in name for name in names), -len(names)

        best = max(self.loops, key=rank, default=None)
        return best if best is not None and rank(best)[0] else None

    def typical_path(self, loop: Loop) -> Path:
        """One trip round a loop, read off the code: a branch over a block of mere arithmetic is taken.

        Such a block is what most tiles do not need, as the masking of the last one. A block with memory or matrix
        instructions (say, the copy of the next tile) is gone through. A Profile knows instead of guessing.
        """
        path = []
        offset = loop.start
        while True:
            path.append(offset)
            if offset == loop.end:
                return tuple(path)
            target = self.branch_target(offset)
            following = offset + self.instructions[offset].size
            forward = target is not None and offset < target <= loop.end
            if forward and self.instructions[offset].opcode != "S_BRANCH":
                forward = all(
                    instruction.format.startswith(_ARITHMETIC) and "MFMA" not in instruction.name
                    for skipped, instruction in self.instructions.items()
                    if target is not None and following <= skipped < target
                )
            offset = target if forward and target is not None else following


def hsaco_of(code: Any) -> bytes:
    """The code object inside a compiled kernel or a launch, or the bytes themselves."""
    if isinstance(code, bytes):
        return code
    hsaco: bytes = code.hsaco if hasattr(code, "hsaco") else code.asm["hsaco"]
    return hsaco


class Profile:
    """What a run executed, trip by trip round the hot loop. Pass it to `run` as `trace`, then read it.

    Args:
        code: the kernel that will run.
    """

    def __init__(self, code: Any) -> None:
        self.listing = Listing(code)
        self._waves: list[list[int]] = []
        self._current: dict[int, list[int]] = {}

    def __call__(self, wave: Wave, site: int, opcode: str) -> None:
        if not wave.executed:
            self._current[wave.index] = []
            self._waves.append(self._current[wave.index])
        self._current[wave.index].append(site)

    @property
    def waves(self) -> int:
        return len(self._waves)

    @cached_property
    def trips(self) -> Counter[Path]:
        """How often each path round the hot loop was taken."""
        return self._split[0]

    @cached_property
    def outside(self) -> Counter[int]:
        """How often each instruction was executed outside the trips, all waves together."""
        return self._split[1]

    @cached_property
    def typical_trip(self) -> Path | None:
        """The path taken most often; None if the loop never ran."""
        return self.trips.most_common(1)[0][0] if self.trips else None

    @cached_property
    def _split(self) -> tuple[Counter[Path], Counter[int]]:
        loop = self.listing.hot_loop
        trips: Counter[Path] = Counter()
        outside: Counter[int] = Counter()
        for sites in self._waves:
            starts = [i for i, site in enumerate(sites) if loop is not None and site == loop.start]
            outside.update(sites[: starts[0]] if starts else sites)
            for first, following in pairwise([*starts, len(sites)]):
                # A trip ends with its last instruction inside the loop: it may leave for a block that lies elsewhere
                # and come back, and the last one leaves for good.
                trip = sites[first:following]
                length = next(n for n in range(len(trip), 0, -1) if loop is not None and trip[n - 1] in loop)
                trips[tuple(trip[:length])] += 1
                outside.update(trip[length:])
        return trips, outside


def instructions_of(listing: Listing, path: Sequence[int]) -> list[Instruction]:
    return [listing.instructions[offset] for offset in path]
