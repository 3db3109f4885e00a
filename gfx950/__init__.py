"""Executes, checks and prices the machine code that Triton makes for gfx950 (MI355X), on any machine.

Development only: needs numpy and tinygrad 0.14.0 (for the decoder's encoding tables); `compile` also needs triton.
What it shows is that the generated code computes the right thing. Not modelled: time,
coherence of caches across dies, workgroups that run at the same time, the order of summation inside the matrix core.
"""

from .driver import RunStats, findings, run, run_compiled
from .errors import MemoryFault, UnsupportedInstructionError

__all__ = ["MemoryFault", "RunStats", "UnsupportedInstructionError", "findings", "run", "run_compiled"]
