"""Inputs to a worker and outputs from it, as bytes in memory files."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import reference
from evalkit.protocol import escape
from evalkit.supervisor import REQUEST_LIMIT_S, Worker, WorkerFailure, memory_files, reading_answer


def _input_tensors(data: Any) -> dict[str, Any]:
    q, kv, qo_indptr, kv_indptr, _ = data
    return {
        "q": q,
        "bf16": kv["bf16"],
        "fp8": kv["fp8"][0],
        "fp8_scale": kv["fp8"][1],
        "fp4": kv["mxfp4"][0],
        "fp4_scale": kv["mxfp4"][1],
        "qo_indptr": qo_indptr,
        "kv_indptr": kv_indptr,
    }


def input_layout(data: Any) -> dict[str, Any]:
    """Where each tensor of an input lies in its memory file."""
    tensors, offset = {}, 0
    for name, tensor in _input_tensors(data).items():
        size = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(tensor.shape), "offset": offset, "bytes": size}
        offset += -(-size // 256) * 256
    return {"tensors": tensors, "bytes": offset, "config": data[4]}


def write_input(data: Any, layout: dict[str, Any], fd: int) -> None:
    """Fill a memory file with an input's bytes."""
    import torch

    for name, tensor in _input_tensors(data).items():
        raw = memoryview(tensor.contiguous().view(torch.uint8).cpu().numpy()).cast("B")
        entry, written = layout["tensors"][name], 0
        while written < entry["bytes"]:
            written += os.pwrite(fd, raw[written : written + (1 << 28)], entry["offset"] + written)


def give_input(worker: Worker, slot: int, data: Any, over: int | None = None) -> None:
    """Hand an input to a worker: in new storage, or over the tensors of the slot `over`."""
    layout = input_layout(data)
    with memory_files(layout["bytes"]) as (fd,):
        write_input(data, layout, fd)
        worker.request("input", [fd], slot=slot, layout=layout, over=over)


def read_output(fd: int, offset: int, shape: tuple[int, ...], device: Any) -> Any:
    """A bf16 tensor from a memory file."""
    import torch

    count = math.prod(shape)
    raw = bytearray(count * 2)
    view, done = memoryview(raw), 0
    while done < len(raw):
        more = os.preadv(fd, [view[done : done + (1 << 28)]], offset + done)
        if more == 0:
            raise WorkerFailure("the output's memory file is too short", "protocol")
        done += more
    return torch.frombuffer(raw, dtype=torch.bfloat16).view(shape).to(device)


@dataclass
class CallResult:
    """What one call returned, as far as the worker can tell, and the output's bytes if it is well-formed."""

    output: Any
    error: str | None
    call_s: float
    aliases_input: bool
    changed: list[str]
    begin: int
    later: Any = None


def output_error(meta: dict[str, Any], shape: tuple[int, ...], device: str) -> str | None:
    """Why what came back is not the tensor the contest asks for, or None."""
    if not meta.get("plain"):
        return f"output: expected a torch.Tensor, got {escape(str(meta.get('type')), 80)}"
    if meta.get("dtype") != "torch.bfloat16":
        return f"output: expected torch.bfloat16, got {escape(str(meta.get('dtype')), 80)}"
    if meta.get("layout", "torch.strided") != "torch.strided":
        return f"output: expected a strided tensor, got {escape(str(meta.get('layout')), 80)}"
    if tuple(meta.get("shape", ())) != shape:
        return f"output: expected shape {shape}, got {escape(str(tuple(meta.get('shape', ()))), 80)}"
    if meta.get("device") != device:
        return f"output: expected a tensor on {device}, got one on {escape(str(meta.get('device')), 80)}"
    if meta.get("late"):
        return "output: it changed after its call had returned: written late, or one tensor for several calls"
    if not meta.get("saved", True):
        return "output: its bytes could not be read"
    return None


def call(
    worker: Worker,
    slots: list[int],
    datas: list[Any],
    *,
    check_inputs: bool = False,
    poison: bool = False,
    pause_s: float = 0.0,
    hold: list[int] | None = None,
    limit_s: float = REQUEST_LIMIT_S,
) -> list[CallResult]:
    """Call the submission once per slot, read every output after the last call, and bring them here."""
    shapes = [reference.output_shape(data) for data in datas]
    sizes = [2 * math.prod(shape) for shape in shapes]
    device = datas[0][0].device
    with memory_files(sum(sizes) * (2 if pause_s else 1)) as (fd,):
        answer = worker.request(
            "call",
            [fd],
            limit_s,
            slots=slots,
            bytes=sizes,
            hash=check_inputs,
            poison=poison,
            pause_s=pause_s,
            hold=hold or [],
        )
        results = []
        offset = 0
        with reading_answer():
            for meta, shape, size in zip(answer["results"], shapes, sizes, strict=True):
                error = output_error(meta, shape, device.type)
                output = None if error else read_output(fd, offset, shape, device)
                later = None if error or not pause_s else read_output(fd, offset + sum(sizes), shape, device)
                results.append(
                    CallResult(
                        output,
                        error,
                        float(meta.get("call_s", 0.0)),
                        bool(meta.get("aliases_input")),
                        [str(name) for name in meta.get("changed", [])],
                        int(meta.get("begin", -1)),
                        later,
                    )
                )
                offset += size
    return results
