"""Threads, devices, child processes and long runs; queues, graphs and a real second device are in test_gpu.py."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_ins import REL_L2, Backend, all_warnings, contest_data, least_growth, use, worst

import submission
from mla_backends import hopper

WAIT_S = 60  # nothing here takes a second; past this it hangs


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(submission, "_extra_backends", tuple)
    submission._picks.clear()
    yield
    submission._picks.clear()


# Threads


def test_threads_over_several_shapes_are_right_and_pick_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Backend("counted")
    use(monkeypatch, counted)
    datas = [contest_data(2, kv) for kv in range(20, 25)]
    calls = [(i, datas[i % 5]) for i in range(80)]
    with ThreadPoolExecutor(8) as pool:
        outs = list(pool.map(lambda c: submission.custom_kernel(c[1]), calls, timeout=WAIT_S))
    for i, data in enumerate(datas):
        assert worst(data, outs[i]) <= REL_L2
        assert all(torch.equal(out, outs[i]) for out in outs[i::5])
    assert len({out.data_ptr() for out in outs}) == len(outs), "two calls share one output"
    assert counted.runs == {"only": 5 * 2 + 80}, "two checks a pick, one run a call"


def test_backend_that_fails_in_eight_threads_at_once_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(8)

    def act(out: torch.Tensor, number: int, plan: Any) -> torch.Tensor:
        if number > 3:
            together.wait(WAIT_S)
            raise RuntimeError("launch failed")
        return out

    bad = Backend("bad", act)
    use(monkeypatch, bad)
    data = contest_data()
    submission.custom_kernel(data)
    with all_warnings() as told, ThreadPoolExecutor(8) as pool:
        outs = list(pool.map(lambda _: submission.custom_kernel(data), range(8), timeout=WAIT_S))
        submission.custom_kernel(data)
    assert bad.runs == {"only": 3 + 8} and len(told) == 1
    assert all(worst(data, out) <= REL_L2 for out in outs)


def test_other_threads_wait_for_a_slow_pick_and_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(out: torch.Tensor, number: int, plan: Any) -> torch.Tensor:
        time.sleep(0.2 if number <= 2 else 0)
        return out

    backend = Backend("slow", slow)
    use(monkeypatch, backend)
    data = contest_data()
    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda _: submission.custom_kernel(data), range(4), timeout=WAIT_S))
    assert backend.runs == {"only": 2 + 4} and all(worst(data, out) <= REL_L2 for out in outs)


def test_hopper_arguments_of_one_thread_do_not_reach_the_launch_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share the default queue, and with it the struct that a launch reads."""

    class Launch:
        def __init__(self) -> None:
            self.args = hopper._Args()

        def __call__(self, queue: int) -> None:
            q, scale, time_to_switch = self.args.q, self.args.log2_scale, 0.001
            time.sleep(time_to_switch)
            seen.append((q, round(scale, 4), self.args.q, round(self.args.log2_scale, 4)))

    seen: list[tuple] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(hopper, "load_kernel", lambda *key: SimpleNamespace(prepare=lambda *shape: Launch()))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a CPU tensor
    backend, plan = hopper.HopperBackend(), hopper.HopperPlan(1, 2)
    data = contest_data(2, 33)
    inputs = [submission._unpack((data[0] * i, *data[1:4], {"sm_scale": i / 24})) for i in range(1, 5)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: backend.run(plan, inputs[i % 4]), range(40), timeout=WAIT_S))
    sent = {(x.q.data_ptr(), round(x.sm_scale * 1.4426950408889634, 4)) for x in inputs}
    assert len(seen) == 40 and all(row[:2] == row[2:] and row[:2] in sent for row in seen)


# Devices


def test_each_device_has_its_own_pick() -> None:
    """Where the tensors lie is part of the key; `meta` stands in for a second device."""
    data = contest_data()
    keys = {submission._shape_key(data)}
    for i in (0, 2, 3):
        elsewhere = list(data)
        elsewhere[i] = data[i].to("meta")
        keys.add(submission._shape_key(tuple(elsewhere)))
    assert len(keys) == 4


def test_checks_runs_and_launches_happen_on_the_device_of_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device: with tensors on another it must be switched, and switched back."""
    current: list[torch.Tensor] = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    def act(out: torch.Tensor, number: int, plan: Any) -> torch.Tensor:
        assert len(current) == 1 and current[0].device == out.device and current[0].shape == (2, 16, 576)
        return out

    def run_decode(inputs: Any, plan: Any, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        assert len(current) == 1
        return out

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    watched = Backend("watched", act)
    use(monkeypatch, watched)
    data = contest_data()
    with all_warnings() as told:
        submission.custom_kernel(data)
    assert watched.runs == {"only": 3} and told == [] and current == []
    monkeypatch.setattr(submission, "run_decode", run_decode)
    monkeypatch.setattr(submission.TritonBackend, "supports", lambda self, problem: None)
    submission.mla_decode(data[0], *data[1]["mxfp4"], data[3], 1 / 24)
    assert current == []


# Child processes; that both start methods work after first use is in test_submission_host.py


@pytest.mark.skipif(not hasattr(os, "fork"), reason="reason: this system has no fork")
def test_child_forked_while_another_thread_picks_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, picking, done = os.getpid(), threading.Event(), threading.Event()

    def act(out: torch.Tensor, number: int, plan: Any) -> torch.Tensor:
        if os.getpid() == parent:
            picking.set()
            done.wait(WAIT_S)
        return out

    use(monkeypatch, Backend("blocked", act))
    data = contest_data(1, 20)
    thread = threading.Thread(target=submission.custom_kernel, args=(data,))
    thread.start()
    assert picking.wait(WAIT_S)
    child = multiprocessing.get_context("fork").Process(target=_answer_or_exit, args=(data,))
    child.start()
    child.join(WAIT_S / 2)
    code = child.exitcode
    child.kill()
    done.set()
    thread.join(WAIT_S)
    assert code == 0, "the child hangs" if code is None else f"the child ended with {code}"


def _answer_or_exit(data: Any) -> None:
    torch.set_num_threads(1)
    os._exit(0 if worst(data, submission.custom_kernel(data)) <= REL_L2 else 1)


# Memory


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Cheap(Backend):
    """Right in the pick's checks, afterwards no work at all: what is left is the host's own."""

    picking = False

    def run(self, plan: Any, inputs: submission.Inputs) -> torch.Tensor:
        if self.picking:
            return submission.torch_attention(inputs)[0].to(torch.bfloat16)
        return inputs.q.new_empty((len(inputs.q), 16, 512))


def test_ten_thousand_calls_over_a_hundred_shapes_do_not_grow_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, pick = Cheap("cheap"), submission.Pick

    def watched(inputs: Any, config: Any) -> Any:
        backend.picking = True
        try:
            return pick(inputs, config)
        finally:
            backend.picking = False

    monkeypatch.setattr(submission, "Pick", watched)
    use(monkeypatch, backend)
    datas = [contest_data(1, kv) for kv in range(1, 101)]

    def calls(number: int) -> None:
        for i in range(number):
            submission.custom_kernel(datas[i % 100])

    calls(1000)
    assert len(submission._picks) == 100
    tracemalloc.start()
    traced, resident = least_growth(
        lambda: (tracemalloc.get_traced_memory()[0], _resident_bytes()), lambda: calls(2500)
    )
    tracemalloc.stop()
    assert traced < 8 << 10, f"{traced} bytes of Python objects are left"
    assert resident < 2 << 20, f"{resident} bytes are left"


def test_shapes_picked_forgotten_and_dropped_again_do_not_grow_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "MAX_PICKS", 5)
    bad = Backend("bad", lambda out, number, plan: 1 / 0)
    use(monkeypatch, bad, Backend("good"))
    datas = [contest_data(1, kv) for kv in range(1, 21)]

    def calls() -> None:
        for data in datas * 3:
            submission.custom_kernel(data)

    with all_warnings():
        tracemalloc.start()
        calls()
        (grown,) = least_growth(lambda: (tracemalloc.get_traced_memory()[0],), calls)
        tracemalloc.stop()
    assert grown < 8 << 10, f"{grown} bytes are left by 60 picks"
    assert bad.runs == {"only": 1} and len(submission._picks) == 5
    assert len(submission._dropped) == 1
