"""The Hopper backend: its plans, its compiler, and the text of its kernel run on a CPU; on sm_90 the kernel itself.

`hopper_cpu/` implements the kernel's one header of PTX instructions over fibers, so that index arithmetic, barriers,
schedule and merge of `hopper.cu` are executed here as they are written. Only speed, and races that fibers cannot show,
are left to a GPU.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import timing
from mla_backends import backends, hopper, nvrtc

HERE = Path(__file__).parent
PITCH = 24  # bytes between two tokens' scales, as aiter pads them
REL_L2_LIMIT = 5e-3
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 [tokens, 576] from uint8 [tokens, 288] and uint8 [tokens, >= 18]."""
    pairs = torch.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], hopper.QK_DIM).long()
    exponent = scales[:, : hopper.SCALE_BLOCKS].double() - 127
    factor = torch.where(exponent == 128, torch.nan, torch.exp2(exponent))
    return E2M1.to(codes.device)[pairs] * factor.repeat_interleave(32, 1)


def attention(x: SimpleNamespace) -> torch.Tensor:
    """float64 attention over the dequantised cache; zero for an empty sequence."""
    out = torch.zeros((*x.q.shape[:2], hopper.LATENT_DIM), dtype=torch.float64, device=x.q.device)
    bounds = x.kv_indptr.tolist()
    for b, (begin, end) in enumerate(pairwise(bounds)):
        if end > begin:
            k = dequantise(x.kv_fp4[begin:end], x.kv_scale[begin:end])
            out[b] = torch.softmax(x.q[b].double() @ k.T * x.sm_scale, -1) @ k[:, : hopper.LATENT_DIM]
    return out


def make_inputs(
    lengths: list[int], *, seed: int = 0, start: int = 0, low: int = 123, high: int = 126, device: str = "cpu"
) -> SimpleNamespace:
    """Random codes, scale bytes in [low, high); NaN scales before, behind and beside what belongs to a sequence."""
    generator = torch.Generator().manual_seed(seed)
    total = start + sum(lengths) + 5
    codes = torch.randint(0, 256, (total, hopper.TOKEN_BYTES), dtype=torch.uint8, generator=generator)
    scales = torch.full((total, PITCH), 255, dtype=torch.uint8)
    used = slice(start, total - 5)
    scales[used, : hopper.SCALE_BLOCKS] = torch.randint(
        low, high, (total - 5 - start, hopper.SCALE_BLOCKS), dtype=torch.uint8, generator=generator
    )
    q = torch.randn((len(lengths), hopper.HEADS, hopper.QK_DIM), generator=generator).bfloat16()
    indptr = torch.tensor([start, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return SimpleNamespace(
        q=q.to(device),
        kv_fp4=codes.to(device),
        kv_scale=scales.to(device),
        kv_indptr=indptr.to(device),
        sm_scale=1 / math.sqrt(hopper.QK_DIM),
    )


def worst_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest relative L2 over (sequence, head); infinite where anything is NaN or where zeros were expected."""
    error, size = (out.double() - expected).norm(dim=-1), expected.norm(dim=-1)
    relative = torch.where(size > 0, error / size, torch.where(error > 0, torch.inf, error))
    return math.inf if relative.isnan().any() else relative.max().item()


class CpuKernel:
    """hopper.cu compiled for the CPU."""

    def __init__(self, folder: Path, edit: tuple[str, str] | None = None) -> None:
        source = hopper.SOURCE.read_text().replace('#include "ptx.cuh"\n', "")
        if edit is not None:
            assert edit[0] in source
            source = source.replace(*edit)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernel.inc").write_text(source)
        self._folder, self._program = folder, folder / "kernel"
        defines = [option for option in hopper.options(PITCH) if option.startswith("-D")]
        command = ["g++", "-O1", "-std=c++17", "-w", *defines, f"-I{HERE / 'hopper_cpu'}", f"-I{folder}"]
        subprocess.run([*command, "-o", str(self._program), str(HERE / "hopper_cpu" / "main.cpp")], check=True)

    def __call__(
        self, x: SimpleNamespace, cluster: int, clusters: int, launches: int = 1, order: int = 0
    ) -> torch.Tensor:
        for name, tensor in (
            ("q", x.q.view(torch.int16)),
            ("kv", x.kv_fp4),
            ("scale", x.kv_scale),
            ("indptr", x.kv_indptr),
        ):
            (self._folder / name).write_bytes(tensor.contiguous().numpy().tobytes())
        scale = repr(x.sm_scale * math.log2(math.e))
        numbers = [str(n) for n in (x.q.shape[0], cluster, clusters, scale, launches, order)]
        subprocess.run([str(self._program), str(self._folder), *numbers], check=True, timeout=120)
        data = bytearray((self._folder / "out").read_bytes())
        return torch.frombuffer(data, dtype=torch.bfloat16).reshape(x.q.shape[0], hopper.HEADS, hopper.LATENT_DIM)


@pytest.fixture(scope="module")
def cpu_kernel(cpu_compiler: None, tmp_path_factory: pytest.TempPathFactory) -> CpuKernel:
    return CpuKernel(tmp_path_factory.mktemp("hopper"))


RAGGED = [0, 1, 63, 0, 15, 16, 17, 64, 65, 200, 0]


@pytest.mark.parametrize(
    ("lengths", "cluster", "clusters"),
    [
        ([64], 1, 1),
        ([63], 1, 1),
        ([300], 1, 3),
        (RAGGED, 1, 5),
        (RAGGED, 1, 64),
        (RAGGED, 2, 3),
        ([200, 100], 4, 2),
        ([600], 8, 2),
        ([150], 16, 1),
        ([0, 0], 1, 4),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else str(value),
)
def test_kernel_text_matches_float64(cpu_kernel: CpuKernel, lengths: list[int], cluster: int, clusters: int) -> None:
    """Partial steps, empty sequences, an indptr that begins at 7, parts merged over clusters and through memory; a
    second launch over the counters that the first left behind."""
    x = make_inputs(lengths, start=7)
    out = cpu_kernel(x, cluster, clusters, launches=2, order=1)
    assert worst_error(out, attention(x)) <= REL_L2_LIMIT


def test_kernel_text_rescales_for_late_maximum(cpu_kernel: CpuKernel) -> None:
    """Scores that grow by far more than WEIGHT_LIMIT from step to step."""
    x = make_inputs([400])
    x.kv_scale[:400, : hopper.SCALE_BLOCKS] = (118 + torch.arange(400) // 40).to(torch.uint8)[:, None]
    assert worst_error(cpu_kernel(x, 1, 2), attention(x)) <= REL_L2_LIMIT


def test_kernel_text_dequantises_every_scale_byte(cpu_kernel: CpuKernel) -> None:
    """One token a sequence and q = 0: the output is the token's V, exactly; all 16 codes at all 256 scale bytes."""
    x = make_inputs([1] * 256)
    scale = torch.arange(256, dtype=torch.uint8)
    x.q.zero_()
    x.kv_scale[:256] = scale[:, None]
    x.kv_fp4[:256] = (torch.arange(hopper.TOKEN_BYTES) * 7 % 256).to(torch.uint8)
    # Codes that would leave bf16's range: 4 and over at 2^126, 2 and over at 2^127.
    x.kv_fp4[253] &= 0xDD
    x.kv_fp4[253] &= torch.where((x.kv_fp4[253] & 4) > 0, 0xFD, 0xFF).to(torch.uint8)
    x.kv_fp4[253:255] &= 0xBB
    out = cpu_kernel(x, 1, 7).double()
    expected = dequantise(x.kv_fp4[:256], x.kv_scale[:256])[:, None, : hopper.LATENT_DIM].expand_as(out)
    assert torch.equal(out[:255], expected[:255])
    assert out[255].isnan().all()


def test_kernel_text_keeps_nan_of_q_in_its_head(cpu_kernel: CpuKernel) -> None:
    x = make_inputs([50, 40])
    x.q[0, 3, 100] = math.nan
    out = cpu_kernel(x, 1, 2)
    assert out[0, 3].isnan().all()
    x.q[0, 3] = 0
    out[0, 3] = cpu_kernel(x, 1, 2)[0, 3]
    assert worst_error(out, attention(x)) <= REL_L2_LIMIT


@pytest.mark.parametrize(
    "edit",
    [
        ("constexpr int ROPE_BLOCK = 16;", "constexpr int ROPE_BLOCK = 15;"),
        ("return (g & 4) | ((g & 1) << 1)", "return (g & 4) | ((g & 1) << 0)"),
        ("if (token + 8 * ((i >> 1) & 1) >= own) e[i] = -__int_as_float(0x7F800000);", ""),
        ("(cluster * share + min(cluster, longer))", "(cluster * share)"),
        ("__syncthreads(); // in every warp", ""),
        ("wgmma_wait<1>(); // the products with V", ""),
        ("((2 * k + third) ^ row) * 16", "((2 * k + third) ^ 0) * 16"),
        ("raise_max(sh, t, e, a.log2_scale, max);", "running_max(sh, t.t, max);"),
    ],
    ids=["scale-block", "slot-order", "tail", "schedule", "barrier", "wait", "swizzle", "maximum"],
)
@pytest.mark.usefixtures("cpu_compiler")
def test_kernel_text_broken_is_caught(tmp_path: Path, edit: tuple[str, str]) -> None:
    """The comparison above can fail: one wrong constant or missing line each."""
    x = make_inputs([77, 300], start=7)
    kernel = CpuKernel(tmp_path, edit)
    try:
        error = worst_error(kernel(x, 1, 5, order=1), attention(x))
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        error = math.inf
    assert error > REL_L2_LIMIT


@pytest.mark.parametrize(
    ("place", "line", "status"),
    [
        ("out", "at[threadIdx.x == THREADS - 1 && head == HEADS - 1 ? 8 : 0] = 0;", 8),
        ("out", "if (threadIdx.x == 0) a.out[-1] = 0;", 8),
        ("parts", "((u8*)a.parts)[gridDim.x / cluster_size() * 2 * QUADS * 16] = 0;", 8),
        ("statistics", "((u8*)a.part_stats)[-1] = 0;", 8),
        ("counters", "((u8*)a.arrivals)[a.batch * MAX_CLUSTER * 4] = 0;", 8),
        ("q", "((u8*)a.q)[-1] = 0;", 9),
        ("scales", "((u8*)a.scale)[0] = 7;", 9),
        ("q, asked for", "bulk_prefetch(a.q + (i64)a.batch * Q_BYTES, 16);", 5),
    ],
)
@pytest.mark.usefixtures("cpu_compiler")
def test_kernel_text_that_writes_elsewhere_is_caught(tmp_path: Path, place: str, line: str, status: int) -> None:
    """A byte beside a buffer, one of the inputs, a copy from behind an input: the CPU program's own end tells which."""
    store = "*(uint2*)at = {"
    kernel = CpuKernel(tmp_path, (store, f"{line} {store}"))
    with pytest.raises(subprocess.CalledProcessError) as ended:
        kernel(make_inputs([70]), 1, 2)
    assert ended.value.returncode == status


@pytest.mark.usefixtures("cpu_compiler")
def test_kernel_text_answers_nan_where_shared_memory_lies_elsewhere(tmp_path: Path) -> None:
    kernel = CpuKernel(tmp_path, ("0xFFFFFF) != SHARED_BASE", "0xFFFFFF) != SHARED_BASE + 16"))
    assert kernel(make_inputs([70, 0, 9]), 2, 2).isnan().all()


@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize("pitch", [hopper.MIN_SCALE_PITCH, 24, hopper.MAX_SCALE_PITCH])
def test_source_compiles(pitch: int) -> None:
    """For sm_90a, with no host compiler and no GPU; the kernel asserts that its shared memory fits, two CTAs an SM."""
    cubin = nvrtc.compile_source(hopper.source_text(), "hopper.cu", hopper.options(pitch))
    assert cubin[:4] == b"\x7fELF" and b"mla_decode_mxfp4" in cubin
    assert hopper.CTAS_PER_SM * (hopper.shared_bytes(pitch) + 1024) <= 228 << 10


@pytest.mark.usefixtures("cuda_compiler")
def test_compile_error_holds_log() -> None:
    with pytest.raises(nvrtc.CompileError, match="nonsense"):
        nvrtc.compile_source("int f() { return nonsense; }", "x.cu", ("--gpu-architecture=sm_90",))


def test_unwritable_cache_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    calls = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: calls.append(1) or b"cubin")
    assert [nvrtc.compile_cubin("s", "n", ()) for _ in range(2)] == [b"cubin"] * 2
    assert len(calls) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [nvrtc.compile_cubin("s", "n", ()) for _ in range(2)] == [b"cubin"] * 2
    assert len(calls) == 3


PROBLEM = SimpleNamespace(
    batch=4, total_q=4, heads=16, total_kv=4096, kv_len_max=1024, arch="sm_90", num_cus=132, kv_row_bytes=288
)


@pytest.mark.parametrize(
    ("batch", "total_kv"), [(b, b * n) for b in (1, 4, 32, 64, 256, 512) for n in (1, 100, 1024, 8192)]
)
def test_choose_plans_offers_few_valid_plans(batch: int, total_kv: int) -> None:
    plans = hopper.choose_plans(batch, total_kv, 132)
    assert 1 <= len(plans) <= hopper.MAX_PLANS
    assert len(set(plans)) == len(plans)
    for plan in plans:
        assert plan.clusters <= hopper.max_clusters(plan.cluster)
        assert plan.cluster * plan.clusters <= 132 * hopper.CTAS_PER_SM


def test_choose_plans_fills_the_machine() -> None:
    """Every ranked shape has a plan that gives each multiprocessor work."""
    for batch in (4, 32, 64, 256):
        for length in (1024, 8192):
            plans = hopper.choose_plans(batch, batch * length, 132)
            assert max(plan.cluster * plan.clusters for plan in plans) >= min(120, batch * length // 64)


@pytest.mark.parametrize(
    ("fields", "match"), [({"cluster": 3}, "cluster: expected"), ({"clusters": 0}, "clusters: expected")]
)
def test_plan_refuses_what_the_kernel_cannot_run(fields: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        replace(hopper.HopperPlan(1, 1), **fields)


@pytest.mark.parametrize(
    ("fields", "word"),
    [({"arch": "gfx950"}, "gfx950"), ({"heads": 128}, "128"), ({"total_q": 8}, "8"), ({"kv_row_bytes": 320}, "320")],
)
def test_supports_names_the_reason(fields: dict[str, object], word: str) -> None:
    (backend,) = backends()
    reason = backend.supports(SimpleNamespace(**{**vars(PROBLEM), **fields}))
    assert reason is not None and word in reason


needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0")


def run_gpu(x: SimpleNamespace, plan: hopper.HopperPlan, backend: hopper.HopperBackend) -> torch.Tensor:
    shape = (x.q.shape[0], hopper.HEADS, hopper.LATENT_DIM)
    poison = torch.full(shape, math.nan, dtype=torch.bfloat16, device=x.q.device)
    del poison  # the allocator hands the same memory to the output
    return backend.run(plan, x)


def runs_that_differ(call: Callable[[], torch.Tensor], first: torch.Tensor, repeats: int) -> int:
    """How many of `repeats` calls give other bits than `first`."""
    return sum(not torch.equal(call(), first) for _ in range(repeats))


def test_one_wrong_run_of_many_is_counted() -> None:
    outs = [torch.zeros(4)] * 6 + [torch.tensor([0.0, 0.0, 1e-3, 0.0])] + [torch.zeros(4)] * 5
    assert runs_that_differ(iter(outs).__next__, torch.zeros(4), 12) == 1


@needs_hopper
@pytest.mark.parametrize(("cluster", "clusters"), [(1, 1), (1, 37), (1, 264), (2, 66), (4, 33), (8, 16), (16, 5)])
def test_kernel_matches_float64_on_gpu(cluster: int, clusters: int) -> None:
    backend = hopper.HopperBackend()
    x = make_inputs([*RAGGED, 1000, 129, 3000], start=7, device="cuda")
    plan, expected = hopper.HopperPlan(cluster, clusters), attention(x)
    first = run_gpu(x, plan, backend)
    assert worst_error(first, expected) <= REL_L2_LIMIT
    assert runs_that_differ(lambda: run_gpu(x, plan, backend), first, 20) == 0


@needs_hopper
@pytest.mark.parametrize(
    ("batch", "length", "plan"),
    [
        (256, 1024, hopper.HopperPlan(1, 256)),
        (64, 8192, hopper.HopperPlan(2, 128)),
        (32, 1024, hopper.HopperPlan(2, 64)),
    ],
)
def test_a_full_machine_gives_the_same_bits_every_time(batch: int, length: int, plan: hopper.HopperPlan) -> None:
    """Two CTAs an SM and a cold cache: what is read or replaced too early shows in one run of very many."""
    backend, x = hopper.HopperBackend(), make_inputs([length] * batch, device="cuda")
    flush = torch.empty(timing.ROTATED_BYTES, dtype=torch.uint8, device="cuda")

    def cold() -> torch.Tensor:
        flush.zero_()
        return run_gpu(x, plan, backend)

    assert runs_that_differ(cold, cold(), 3000) == 0


@needs_hopper
def test_lengths_may_change_between_calls_and_replays() -> None:
    backend, plan = hopper.HopperBackend(), hopper.HopperPlan(8, 16)
    x, y = make_inputs([700, 20, 300], device="cuda"), make_inputs([20, 990, 10], seed=1, device="cuda")
    assert worst_error(run_gpu(x, plan, backend), attention(x)) <= REL_L2_LIMIT
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.run(plan, x)
    for source in (y, x, y):
        for name in ("q", "kv_fp4", "kv_scale", "kv_indptr"):
            getattr(x, name).copy_(getattr(source, name))
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert worst_error(out, attention(source)) <= REL_L2_LIMIT


@needs_hopper
def test_calls_on_two_queues_do_not_disturb_each_other() -> None:
    backend, plan = hopper.HopperBackend(), hopper.HopperPlan(2, 66)
    inputs = [make_inputs([4000] * 8, seed=seed, device="cuda") for seed in (0, 1)]
    expected = [attention(x) for x in inputs]
    queues = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    outs = []
    for _ in range(10):
        for x, queue in zip(inputs, queues, strict=True):
            with torch.cuda.stream(queue):
                outs.append(backend.run(plan, x))
    torch.cuda.synchronize()
    for i, out in enumerate(outs):
        assert worst_error(out, expected[i % 2]) <= REL_L2_LIMIT


@needs_hopper
def test_cache_over_four_gib() -> None:
    """Token offsets times 288 bytes leave 32 bits; the sequences lie at the far end."""
    tokens = (1 << 32) // hopper.TOKEN_BYTES + 5000
    x = make_inputs([1000, 500], device="cuda")
    codes = torch.empty((tokens, hopper.TOKEN_BYTES), dtype=torch.uint8, device="cuda")
    scales = torch.full((tokens, PITCH), 255, dtype=torch.uint8, device="cuda")
    count = x.kv_fp4.shape[0]
    codes[-count:], scales[-count:] = x.kv_fp4, x.kv_scale
    far = SimpleNamespace(
        **{**vars(x), "kv_fp4": codes, "kv_scale": scales, "kv_indptr": x.kv_indptr + (tokens - count)}
    )
    out = run_gpu(far, hopper.HopperPlan(1, 37), hopper.HopperBackend())
    assert worst_error(out, attention(x)) <= REL_L2_LIMIT
