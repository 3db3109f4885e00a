"""Skips this folder, with the reason, where the development packages that it needs are missing."""

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

_NEEDED = ("numpy", "tinygrad", "torch", "triton")
_MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]

collect_ignore_glob = ["test_*.py"] if _MISSING else []
if _MISSING:
    print(f"tests/gfx950 not collected: packages missing: {', '.join(_MISSING)}", file=sys.stderr)
