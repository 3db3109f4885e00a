"""Benchmarks: against other kernels (`python -m bench.peers`) and of growing cost (`python -m bench.scaling`)."""
