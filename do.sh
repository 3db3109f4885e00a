#!/bin/sh
# Sets up what this machine lacks, then does one thing:
#   sh do.sh run           check and time submission.py on whatever this machine has (AMD, NVIDIA or CPU only)
#   sh do.sh test          lint, types and all tests
#   sh do.sh gpu-check     on a GPU: ranked shapes, overlapping queues, every mode of eval.py, memory checker
#   sh do.sh versions      the tests that depend on it against other releases of torch and Triton, in turn (7 GB)
#   sh do.sh submit-check  lint and audit submission.py as it would be uploaded, and print the upload command
# Needs a shell and Python 3.10 or newer. A torch or triton that is already there is kept, whatever its version.
set -eu
cd "$(dirname "$0")"
job=${1:-help}
case $job in run | test | gpu-check | versions | submit-check) ;; *)
    sed -n '2,8p' "$0" | cut -c3-
    [ "$job" = help ] || { echo "do.sh: unknown job '$job'" >&2; exit 2; }
    exit 0 ;;
esac

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "do.sh: $python is older than Python 3.10; set PYTHON to a newer one" >&2; exit 2; }
# An active environment is used as it is; a system Python gets .venv, which still sees the system's torch and triton.
if "$python" -c 'import os, sys; sys.exit(sys.prefix == sys.base_prefix and "CONDA_PREFIX" not in os.environ)'; then :
else
    [ -x .venv/bin/python ] || "$python" -m venv --system-site-packages .venv || {
        echo "do.sh: cannot make .venv; install your system's venv package (Debian: python3-venv)" >&2; exit 2; }
    python=.venv/bin/python
fi

lacks() { ! "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }
install() { echo "installing $*"; "$python" -m pip install --quiet --disable-pip-version-check "$@"; }

if lacks torch; then install torch==2.13.0; fi
if lacks triton; then install triton==3.6.0; fi
# Triton 3.6.0's interpreter fails on numpy 2.4 and newer.
"$python" - <<'END' || install 'numpy>=1.26,<2.4'
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    numpy, triton = (tuple(int(n) for n in version(p).split("+")[0].split(".")[:2]) for p in ("numpy", "triton"))
except (PackageNotFoundError, ValueError):
    sys.exit(1)
sys.exit(numpy >= (2, 4) and triton < (3, 7))
END
wanted=""
need() { if lacks "$1"; then wanted="$wanted $2"; fi; }
# What does not support Python 3.10 is left out there.
need_311() {
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then need "$1" "$2"
    else echo "do.sh: without $2, which needs Python 3.11: $3" >&2; fi
}
need_emulator() { need_311 tinygrad tinygrad==0.14.0 "the gfx950 emulator will not run"; }
need yaml pyyaml
need rich rich
if [ "$job" = test ] || [ "$job" = versions ]; then
    need pytest 'pytest>=8'
    need xdist 'pytest-xdist>=3.5'
    need hypothesis 'hypothesis>=6.100'
    need matplotlib 'matplotlib>=3.8'
    need_emulator
    need ruff ruff==0.17.6
    need mypy mypy==2.4.1
fi
# Without a GPU the emulator runs and prices the gfx950 code.
if [ "$job" = run ] && "$python" -c 'import sys, torch; sys.exit(torch.cuda.is_available())'; then
    need_emulator
fi
if [ "$job" = test ] || [ "$job" = submit-check ]; then
    need_311 kernelguard kernelguard==0.3.2 "the lint will not ask it"
fi
# shellcheck disable=SC2086
[ -z "$wanted" ] || install $wanted

case $job in
run)
    "$python" eval.py test
    "$python" eval.py benchmark ;;
test)
    "$python" -m ruff format --check .
    "$python" -m ruff check .
    "$python" -m mypy
    "$python" -m pytest -n "${TEST_WORKERS:-2}" --dist loadfile ;;
gpu-check)
    "$python" tests/gpu_check.py ;;
versions)
    shift
    "$python" tests/versions.py "$@" ;;
submit-check)
    "$python" -m evalkit.lint submission.py || {
        echo "do.sh: not ready: correct the lines marked \`refused\`, then run submit-check again" >&2; exit 1; }
    "$python" eval.py audit --submission submission.py || {
        echo "do.sh: not ready: the audit refuses the file; docs/evaluator.md tells what each check asks" >&2; exit 1; }
    echo
    echo "Ready ($(wc -c < submission.py) bytes). Upload, each step once the one before has passed:"
    for mode in test benchmark leaderboard; do
        echo "  popcorn-cli submit --gpu MI355X --leaderboard amd-mixed-mla --mode $mode submission.py"
    done ;;
esac
