"""Everything that needs a GPU, in one call: sh do.sh gpu-check. Exit 0 only if all of it held."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent

# Small, ragged, split: what the memory checker can finish in reasonable time.
SMALL = """
import torch, submission as s
q = torch.randn(4, 16, 576, device="cuda").bfloat16()
codes = torch.randint(0, 255, (300, 288), dtype=torch.uint8, device="cuda")
scales = torch.randint(120, 130, (300, 18), dtype=torch.uint8, device="cuda")
indptr = torch.tensor([0, 0, 65, 66, 300], dtype=torch.int32, device="cuda")
qo = torch.arange(5, dtype=torch.int32, device="cuda")
data = (q, {"mxfp4": (codes, scales)}, qo, indptr, {"sm_scale": 1 / 24})
out = s.custom_kernel(data)
inputs = s._unpack(data)
pick = s._picks[s._shape_key(data)]
for c in pick.ranking:
    assert s._relative_l2(c.backend.run(c.plan, inputs)[1:], s.torch_attention(inputs)[0][1:]).max() < 5e-3, str(c)
for splits in (1, 3):
    s.run_decode(inputs, s.Plan(num_splits=splits, num_warps=8), out)
torch.cuda.synchronize()
print("checked", [str(c) for c in pick.ranking])
"""


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu-check: no GPU on this machine; nothing was checked", file=sys.stderr)
        return 2
    python = sys.executable
    steps: list[tuple[str, list[str]]] = [
        ("tests", [python, "-m", "pytest", "-q", "tests/test_gpu.py", "tests/test_hopper.py"]),
        ("gallery", [python, "-m", "pytest", "-q", "-rs", "tests/test_audit_gallery.py", "-k", "gpu"]),
        ("eval.py test", [python, "eval.py", "test"]),
        ("eval.py benchmark", [python, "eval.py", "benchmark"]),
        ("eval.py leaderboard", [python, "eval.py", "leaderboard"]),
        ("eval.py audit", [python, "eval.py", "audit"]),
    ]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "small.py"
        script.write_text(SMALL)
        checker = shutil.which("compute-sanitizer")
        if checker:
            command = [checker, "--tool", "memcheck", "--error-exitcode", "9", python, str(script)]
            steps.insert(1, ("memory checker", ["env", f"PYTHONPATH={ROOT}", *command]))
        wanted = sys.argv[1:]
        failed = []
        for name, command in steps:
            if wanted and not any(word in name for word in wanted):
                continue
            print(f"\n=== {name}", flush=True)
            began = time.monotonic()
            status = subprocess.run(command, cwd=ROOT, check=False).returncode
            print(f"=== {name}: exit {status}, {time.monotonic() - began:.0f} s", flush=True)
            failed += [name] if status else []
        if not checker:
            print("memory checker: not run, compute-sanitizer is not installed")
    print("gpu-check: " + (f"FAILED: {', '.join(failed)}" if failed else "all held"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
