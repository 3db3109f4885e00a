"""What only a GPU can show; `sh do.sh gpu-check` runs it, elsewhere each test says why it did not run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import yaml
from cases import ROOT

import reference
import submission

HAS_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not HAS_GPU, reason="reason: no GPU on this machine, so nothing here was checked")
SHAPES = [
    (c["batchsize"], c["kvseqlen"], c["seed"]) for c in yaml.safe_load((ROOT / "task.yml").read_text())["benchmarks"]
]
REL_L2 = 5e-3


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    yield
    if HAS_GPU:
        submission._picks.clear()
        torch.cuda.empty_cache()


def worst(data: Any, out: torch.Tensor, rows: list[int] | None = None) -> float:
    """Worst relative L2 per (sequence, head) against float64 over the dequantised MXFP4 cache."""
    truth, _ = reference.attention_truth(data, cache="mxfp4", dtype=torch.float64, rows=rows)
    return float(reference.relative_l2(out if rows is None else out[rows], truth.to(out.device)).max())


def on_gpu(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data.cuda()
    if isinstance(data, dict):
        return {k: on_gpu(v) for k, v in data.items()}
    return tuple(on_gpu(x) for x in data) if isinstance(data, tuple) else data


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"b{s[0]}-kv{s[1]}")
def test_every_right_candidate_on_ranked_shape(shape: tuple[int, int, int]) -> None:
    batch, kv, seed = shape
    data = reference.generate_input(batch, 1, kv, seed)
    out = submission.custom_kernel(data)
    assert worst(data, out) <= REL_L2
    inputs = submission._unpack(data)
    pick = submission._picks[submission._shape_key(data)]
    assert [c.dropped for c in pick.candidates if c.backend.name not in ("torch", "aiter") and c.dropped] == []
    for candidate in pick.ranking:
        if candidate.backend.name == "aiter":
            continue
        assert worst(data, candidate.backend.run(candidate.plan, inputs)) <= REL_L2, str(candidate)


RAGGED = [[0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 4097, 0], [1], [20000] + [3] * 40, [7] * 300]


@pytest.mark.parametrize("lengths", RAGGED, ids=lambda x: f"b{len(x)}-max{max(x)}")
def test_every_backend_on_ragged_lengths_and_again_with_others(lengths: list[int]) -> None:
    gen = torch.Generator(device="cuda").manual_seed(1)
    batch, total = len(lengths), sum(lengths)
    q = torch.randn(batch, 16, 576, device="cuda", generator=gen).bfloat16()
    kv = torch.randn(total, 1, 576, device="cuda", generator=gen).bfloat16()
    data = reference.assemble_input(q, kv, lengths)
    out = submission.custom_kernel(data)
    truth, _ = reference.attention_truth(data, cache="mxfp4", dtype=torch.float64)
    assert float(reference.relative_l2(out, truth.to(out.device)).max()) <= REL_L2
    pick = submission._picks[submission._shape_key(data)]
    assert not [c.dropped for c in pick.candidates if c.dropped and not c.dropped.startswith("not tried")]
    # The same shapes, other lengths: no new pick may be needed.
    turned = lengths[1:] + lengths[:1]
    data = reference.assemble_input(q, kv, turned)
    truth, _ = reference.attention_truth(data, cache="mxfp4", dtype=torch.float64)
    for candidate in pick.ranking:
        out = candidate.backend.run(candidate.plan, submission._unpack(data))
        assert float(reference.relative_l2(out, truth.to(out.device)).max()) <= REL_L2, str(candidate)


def test_overlapping_calls_on_two_queues_do_not_disturb_each_other() -> None:
    datas = [reference.generate_input(32, 1, 2048, seed) for seed in (1, 2)]
    inputs = [submission._unpack(data) for data in datas]
    want = [submission.custom_kernel(data) for data in datas]
    pick = submission._picks[submission._shape_key(datas[0])]
    queues = [torch.cuda.Stream() for _ in datas]
    for candidate in pick.ranking:
        if candidate.backend.name in ("torch", "aiter"):
            continue
        want = [candidate.backend.run(candidate.plan, x) for x in inputs]
        torch.cuda.synchronize()
        outs: list[list[torch.Tensor]] = [[], []]
        for _ in range(50):
            for i, queue in enumerate(queues):
                with torch.cuda.stream(queue):
                    outs[i].append(candidate.backend.run(candidate.plan, inputs[i]))
        torch.cuda.synchronize()
        for i in range(2):
            assert all(torch.equal(out, want[i]) for out in outs[i]), str(candidate)


def test_threads_on_one_queue_do_not_disturb_each_other() -> None:
    """Threads share the default queue: what a launch reads on the host is not another thread's."""
    datas = [reference.generate_input(4, 1, kv, kv) for kv in (500, 1000, 1500, 500)]
    datas[3] = (datas[3][0] * 2, *datas[3][1:])
    want = [submission.custom_kernel(data) for data in datas]
    with ThreadPoolExecutor(8) as pool:
        outs = list(pool.map(lambda i: submission.custom_kernel(datas[i % 4]), range(400), timeout=300))
    torch.cuda.synchronize()
    assert [i for i, out in enumerate(outs) if not torch.equal(out, want[i % 4])] == []
    assert all(worst(data, out) <= REL_L2 for data, out in zip(datas, want, strict=True))


def test_calls_over_many_shapes_do_not_grow_memory() -> None:
    datas = [reference.generate_input(2, 1, kv, kv) for kv in range(100, 120)]

    def calls(rounds: int) -> int:
        for data in datas * rounds:
            submission.custom_kernel(data)
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated()

    before = calls(5)
    assert calls(100) <= before


def test_tensors_on_the_second_device() -> None:
    """The first device stays the current one; Triton would launch there."""
    if torch.cuda.device_count() < 2:
        pytest.skip("reason: one GPU on this machine; a stand-in is in test_concurrency.py")
    data = reference.generate_input(4, 1, 1000, 3)
    want = submission.custom_kernel(data)
    other = _to(data, torch.device("cuda", 1))
    for _ in range(2):
        out = submission.custom_kernel(other)
        assert out.device == other[0].device and torch.cuda.current_device() == 0
        assert worst(data, out.to(want.device)) <= REL_L2
        assert worst(data, submission.custom_kernel(data)) <= REL_L2
    inputs = submission._unpack(other)
    with torch.cuda.device(1):
        outs = [c.backend.run(c.plan, inputs) for c in submission._picks[submission._shape_key(other)].ranking]
    assert all(worst(data, out.to(want.device)) <= REL_L2 for out in outs)
    out, _ = submission.mla_decode(other[0], *other[1]["mxfp4"], other[3], other[4]["sm_scale"])
    assert worst(data, out.to(want.device)) <= REL_L2


def _to(data: Any, device: torch.device) -> Any:
    if isinstance(data, torch.Tensor):
        return data.to(device)
    if isinstance(data, dict):
        return {k: _to(v, device) for k, v in data.items()}
    return tuple(_to(x, device) for x in data) if isinstance(data, tuple) else data


def test_captured_graph_replays_right_with_new_values() -> None:
    data = reference.generate_input(8, 1, 1024, 5)
    fresh = reference.generate_input(8, 1, 1024, 6)
    submission.custom_kernel(data)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = submission.custom_kernel(data)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert worst(data, out) <= REL_L2
    data[0].copy_(fresh[0])
    for key in ("fp8", "mxfp4"):
        for old, new in zip(data[1][key], fresh[1][key], strict=True):
            old.view(torch.uint8).copy_(new.view(torch.uint8))
    graph.replay()
    torch.cuda.synchronize()
    assert worst(fresh, out) <= REL_L2


def test_hot_call_synchronises_nothing_and_allocates_little() -> None:
    data = reference.generate_input(4, 1, 1024, 5)
    for _ in range(3):
        out = submission.custom_kernel(data)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = submission.custom_kernel(data)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    assert after["num_device_alloc"] == before["num_device_alloc"], "asked the device for memory"
    assert after["allocated_bytes.all.current"] - before["allocated_bytes.all.current"] <= out.numel() * 2


def test_cache_over_4_gib_and_7_5_million_tokens() -> None:
    tokens = 16_000_000  # 4.6 GB of codes
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("reason: less than 12 GiB of free device memory")
    gen = torch.Generator(device="cuda").manual_seed(9)
    codes = torch.randint(0, 256, (tokens, 288), dtype=torch.uint8, device="cuda", generator=gen)
    scales = torch.randint(124, 130, (tokens, 18), dtype=torch.uint8, device="cuda", generator=gen)
    q = torch.randn(3, 16, 576, device="cuda", generator=gen).bfloat16()
    bounds = [0, 5000, tokens - 9000, tokens]
    short = torch.tensor([0, 5000, 14000, 14000 + 9000], dtype=torch.int32, device="cuda")
    indptr = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    config = {"sm_scale": 576**-0.5}
    qo = torch.arange(4, dtype=torch.int32, device="cuda")
    # The middle sequence spans the whole cache; its neighbours sit at both ends.
    out = submission.custom_kernel((q, {"mxfp4": (codes, scales)}, qo, indptr, config))
    tail = torch.cat([codes[:5000], codes[:9000], codes[-9000:]])
    tail_scales = torch.cat([scales[:5000], scales[:9000], scales[-9000:]])
    near, _ = submission.torch_attention(submission.Inputs(q, tail, tail_scales, short, config["sm_scale"]), [0, 2])
    assert float(submission._relative_l2(out[[0, 2]], near).max()) <= REL_L2
    assert out.isfinite().all()


LONG = {"1M": [1 << 20], "4096": [(0, 3, 700, 64, 1)[i % 5] for i in range(4096)], "8.2M": [2000] * 4096}


@pytest.mark.parametrize("lengths", LONG.values(), ids=LONG)
def test_every_right_candidate_on_long_and_on_many_sequences(lengths: list[int]) -> None:
    """Codes and scales made on the device; the sequences at both ends and one between stand for all."""
    total, batch = sum(lengths), len(lengths)
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("reason: less than 24 GiB of free device memory")
    gen = torch.Generator(device="cuda").manual_seed(3)
    codes = torch.randint(0, 256, (total, 288), dtype=torch.uint8, device="cuda", generator=gen)
    scales = torch.randint(123, 127, (total, 18), dtype=torch.uint8, device="cuda", generator=gen)
    q = torch.randn(batch, 16, 576, device="cuda", generator=gen).bfloat16()
    indptr = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    inputs = submission.Inputs(q, codes, scales, indptr, 576**-0.5)
    rows = sorted({0, batch // 2, batch - 2, batch - 1} & set(range(batch)))
    config = {"v_head_dim": 512, "sm_scale": inputs.sm_scale}
    data = (q, {"mxfp4": (codes, scales)}, torch.arange(batch + 1, device="cuda"), indptr, config)
    problem = inputs.describe({})
    # Not through the pick, which would check every sequence in float32 and time it.
    for backend in (submission.TritonBackend(), *submission._extra_backends()):
        if backend.supports(problem) is None:
            out = backend.run(backend.plans(problem)[0], inputs)
            assert worst(data, out, rows) <= REL_L2, backend.name
            assert out.isfinite().all()
