"""Tests against other releases of torch and Triton, each installed into a folder of its own: sh do.sh versions.

    python tests/versions.py [--folder FOLDER] [torch==2.10.0 triton==3.7.1 ...]

FOLDER keeps what was installed for the next time (up to 7 GB for a torch); without it a temporary one is removed again.
Prints a line for each release and exits 1 if one failed. No GPU is used.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ("torch==2.10.0", "torch==2.11.0", "torch==2.12.1", "torch==2.14.1", "triton==3.7.1", "triton==3.9.0")
TESTS = {
    "torch": (
        "test_submission_host.py", "test_submission_file.py", "test_submission_kernel.py", "test_reference.py",
        "test_faults.py", "test_concurrency.py", "test_aiter_contract.py",
    ),
    "triton": (
        "test_submission_kernel.py", "test_submission_compile.py", "test_faults.py", "test_gfx950_plans.py",
        "test_layouts.py",
    ),
}  # fmt: skip
LOADED = "import torch, triton; print(f'torch {torch.__version__} triton {triton.__version__} from {PACKAGE.__file__}')"


def run_release(release: str, folder: Path) -> tuple[bool, str]:
    """Install the release unless it is there, run its tests; (all passed, what to tell)."""
    package = release.partition("==")[0]
    target = folder / release.replace("==", "-")
    environment = {**os.environ, "PYTHONPATH": str(target), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if not target.exists():
        # torch brings the Triton that it was built for; Triton is put beside the torch that is here.
        alone = ["--no-deps"] if package == "triton" else []
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-compile", *alone]
        subprocess.run([*pip, "--target", str(target), release], check=True)
    loaded = subprocess.run(
        [sys.executable, "-c", LOADED.replace("PACKAGE", package)], env=environment, capture_output=True, text=True
    )
    if loaded.returncode or str(target) not in loaded.stdout:
        return False, f"not loaded: {loaded.stdout}{loaded.stderr[-500:]}"
    began = time.monotonic()
    tests = [f"tests/{name}" for name in TESTS[package]]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    versions = loaded.stdout.partition(" from ")[0]
    told = "\n    ".join([f"{versions}: {lines[-1] if lines else done.stderr[-500:]}", *failed])
    return done.returncode == 0, f"{told} ({time.monotonic() - began:.0f} s)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", default=RELEASES)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    held = True
    for release in options.releases:
        if release.partition("==")[0] not in TESTS:
            parser.error(f"{release}: expected torch==VERSION or triton==VERSION")
        with tempfile.TemporaryDirectory() as temporary:
            passed, told = run_release(release, options.folder or Path(temporary))
        print(f"{'held  ' if passed else 'FAILED'} {told}", flush=True)
        held &= passed
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
