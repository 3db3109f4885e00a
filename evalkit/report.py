"""The JSON file, and what a report says about the machine."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import tempfile
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from evalkit.judge import tolerances
from evalkit.protocol import EXIT_PASS
from evalkit.running import CaseResult, Run
from evalkit.timing import geometric_mean


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a file whole or not at all; numbers that JSON lacks become null."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): clean(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [clean(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    write_whole(path, (json.dumps(clean(document), indent=2) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, whatever interrupts it."""
    with tempfile.NamedTemporaryFile(dir=path.resolve().parent, prefix=".eval-", delete=False) as file:
        try:
            file.write(content)
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def environment(device: str) -> dict[str, Any]:
    """Card and versions, for the header and the JSON file."""
    found: dict[str, Any] = {"device": device, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "aiter", "amd-aiter"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    if device == "cuda":
        found["card"] = torch.cuda.get_device_name()
        found["runtime"] = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    else:
        found["card"] = "none (gfx950 code in the emulator)" if device == "gfx950" else "none (CPU)"
    return found


def report_document(run: Run, results: list[CaseResult], code: int) -> dict[str, Any]:
    """The JSON file."""
    means = [r.stats.mean for r in results if r.stats is not None]
    complete = bool(means) and len(means) == len(results)
    return {
        "mode": run.mode,
        "official": False,
        "submission": run.submission.name,
        "environment": environment(run.device),
        "reduced_shapes": run.reduced,
        "tolerances": tolerances(run.tolerance),
        "cases": [asdict(result) for result in results],
        "geomean_us": geometric_mean(means) / 1e3 if complete else None,
        "passed": code == EXIT_PASS,
        "exit_code": code,
    }
