"""Leaves this folder out, and says so, where the development packages that it needs are missing."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

_NEEDED = ("numpy", "tinygrad", "torch", "triton")
_MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]

collect_ignore_glob = ["test_*.py"] if _MISSING else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _MISSING:
        terminalreporter.write_line(f"tests/gfx950 left out: these packages are missing: {', '.join(_MISSING)}")
