"""The side of the evaluator that runs the submission: it computes outputs and answers, and decides nothing.

    parent (eval.py) --socket--> nursery --fork--> one worker per case --runs--> custom_kernel
           <--------------------------------------- outputs through a memory file

The nursery imports torch once and forks; where a GPU is used the fork starts a fresh interpreter, since a device
context does not survive a fork. A worker holds no result pipe, no secret seed, no reference value and no checker; it
runs in its own session with its own standard output, and the parent may kill it at any moment.

This file stands alone: it imports torch and, only to generate large inputs on a GPU, the `reference` beside eval.py.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import hashlib
import importlib.util
import json
import mmap
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

MAX_MESSAGE_BYTES = 1 << 20
CONTROL_FD = 3
TRACE_CHARS = 2000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
# Capabilities that reach into other processes or the kernel: sys_module, sys_rawio, sys_ptrace, sys_admin, perfmon,
# bpf, checkpoint_restore.
REACHING_CAPABILITIES = (16, 17, 19, 21, 38, 39, 40)

# Attributes of a worker that its own steps assign to after the submission is loaded.
CHANGING = ("entry", "module", "durations", "frozen", "methods", "codes", "names", "used")

# What a submission has no business replacing. Names that a library adds later are nobody's concern.
GUARDED = {
    "time": (
        "time",
        "time_ns",
        "perf_counter",
        "perf_counter_ns",
        "monotonic",
        "monotonic_ns",
        "process_time",
        "sleep",
    ),
    "torch": (
        "Generator",
        "Tensor",
        "abs",
        "allclose",
        "empty",
        "empty_like",
        "equal",
        "isclose",
        "isnan",
        "no_grad",
        "ones",
        "randint",
        "randn",
        "randn_like",
        "tensor",
        "zeros",
    ),
    "torch.Tensor": ("clone", "copy_", "cpu", "cuda", "data_ptr", "detach", "numel", "numpy", "to", "view", "__eq__"),
    "torch.cuda": ("Event", "Stream", "current_stream", "is_available", "synchronize"),
    "torch.cuda.Event": ("elapsed_time", "record", "synchronize", "query"),
    "torch.testing": ("assert_close",),
    "json": ("dumps", "loads"),
    "hashlib": ("blake2b",),
    "os": ("write", "read", "pwrite", "close", "fstat", "_exit", "kill"),
    "gc": ("enable", "disable", "collect"),
    "mmap": ("mmap",),
    "contextlib": ("suppress",),
    "threading": ("enumerate",),
    "builtins": ("print", "isinstance", "type", "len", "abs", "max", "min", "sum", "float", "int"),
    "reference": ("generate_input", "ref_kernel", "check_implementation", "attention_truth", "relative_l2"),
    "utils": ("clear_l2_cache_large", "verbose_allclose", "match_reference", "make_match_reference"),
}


# ---------------------------------------------------------------------------------------------------------------------
# Messages: four bytes of length, then JSON; file descriptors travel beside them


def send_message(sock: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    """Send one message and, with it, open file descriptors."""
    payload = json.dumps(message).encode()
    frame = len(payload).to_bytes(4, "big") + payload
    if fds:
        sent = socket.send_fds(sock, [frame], fds)
        frame = frame[sent:]
    sock.sendall(frame)


def receive_message(sock: socket.socket, max_fds: int = 4) -> tuple[dict[str, Any], list[int]] | None:
    """Wait for one message; None when the other side is gone."""
    head, fds, _, _ = socket.recv_fds(sock, 4, max_fds)
    while len(head) < 4:
        more = sock.recv(4 - len(head))
        if not more:
            return None
        head += more
    size = int.from_bytes(head, "big")
    body = b""
    while len(body) < size:
        more = sock.recv(size - len(body))
        if not more:
            return None
        body += more
    return json.loads(body), list(fds)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def set_dumpable(value: bool) -> None:
    """Whether other processes of this user may look into this one: memory, descriptors, environment, debugger."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, int(value), 0, 0, 0)


def give_up_reach() -> None:
    """Drop, for good and for all children, what would let root look into the evaluator all the same."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for capability in REACHING_CAPABILITIES:
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
        words = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then the same for capabilities from 32 on
        if libc.capget(header, words) == 0:
            for capability in REACHING_CAPABILITIES:
                for i in range(3):
                    words[3 * (capability // 32) + i] &= ~(1 << capability % 32) & 0xFFFFFFFF
            libc.capset(header, words)


# ---------------------------------------------------------------------------------------------------------------------
# Nursery


def nursery(fd: int, fork_only: bool) -> None:
    """Start workers on request, and say how they ended."""
    die_with_parent()
    set_dumpable(False)
    # A Ctrl-C in the terminal reaches the parent too, which ends everything in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if fork_only:
        import torch  # noqa: F401  (so that every fork has it)
    control = socket.socket(fileno=fd)
    while True:
        received = receive_message(control)
        if received is None:
            return
        request, fds = received
        if request["op"] == "start":
            pid = os.fork()
            if pid == 0:
                control.detach()
                os.close(fd)
                _become_worker(fds, request, fork_only)
            for passed in fds:
                os.close(passed)
            send_message(control, {"pid": pid})
        elif request["op"] == "wait":
            try:
                _, status = os.waitpid(request["pid"], 0)
            except ChildProcessError:
                status = -1
            send_message(control, {"status": status})


def _become_worker(fds: list[int], request: dict[str, Any], fork_only: bool) -> None:
    """Never returns: dress this fork as a worker and serve."""
    try:
        os.setsid()
        die_with_parent()
        set_dumpable(True)
        give_up_reach()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        moved = [os.dup(fd) for fd in fds]
        # Duplicates first: a target number may be the number of another source.
        high = [os.dup2(fd, 200 + i, inheritable=False) for i, fd in enumerate(moved)]
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(high[1], 1)
        os.dup2(high[2], 2)
        os.dup2(high[0], CONTROL_FD)
        os.closerange(CONTROL_FD + 1, 256)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if request["address_bytes"]:
            limit = _address_space_bytes() + request["address_bytes"]
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        if not fork_only:
            os.execv(sys.executable, [sys.executable, os.path.abspath(__file__), "serve", str(CONTROL_FD)])
        serve(CONTROL_FD)
    except BaseException:  # a fork must never fall back into the nursery's loop
        traceback.print_exc()
    os._exit(70)


def _address_space_bytes() -> int:
    with contextlib.suppress(OSError), open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()
    return 1 << 40


# ---------------------------------------------------------------------------------------------------------------------
# Worker


class Refusal(Exception):
    """Something the submission did that the worker can name itself."""


def _short_trace(error: BaseException) -> str:
    """The error and where the submission raised it, without the evaluator's own frames."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if os.path.abspath(f.filename) != _THIS_FILE]
    where = f" (at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    try:
        text = str(error)
    except Exception:  # an exception class of the submission may itself be broken
        text = "<message cannot be shown>"
    return f"{type(error).__name__}: {text}"[:TRACE_CHARS] + where


_THIS_FILE = os.path.abspath(__file__)


class Worker:
    """State of one worker: the loaded submission, the inputs it was given, and the references taken before loading."""

    def __init__(self, sock: socket.socket) -> None:
        # Everything used around the submission is looked up now, before its code can replace it.
        import torch
        from torch.utils._device import DeviceContext

        self.torch = torch
        self.sock = sock
        self.clock = time.perf_counter
        self.sleep = time.sleep
        self.send = send_message
        self.receive = receive_message
        self.type_of = type
        self.tensor_base: Any = torch._C.TensorBase
        self.function_modes = torch._C._len_torch_function_stack
        self.function_mode_at = torch._C._get_function_stack_at
        self.dispatch_modes = torch._C._len_torch_dispatch_stack
        self.device_context: Any = DeviceContext
        self.get_profile, self.get_trace = sys.getprofile, sys.gettrace
        self.get_handler, self.get_timer, self.collector_callbacks = signal.getsignal, signal.getitimer, gc.callbacks
        self.monitoring: Any = getattr(sys, "monitoring", None)
        self.handlers: dict[int, Any] = {}
        self.known_callbacks: list[Any] = []
        self.known_tools: list[Any] = []
        self.frozen: dict[str, Any] = {}
        self.methods: dict[str, Any] = {}
        self.codes: dict[str, Any] = {}
        self.names: dict[str, Any] = {}
        self.used: list[tuple[str, dict[str, Any], str, Any, Any]] = []
        self.pwrite = os.pwrite
        self.collector_on, self.collector_off = gc.enable, gc.disable
        self.blake2b = hashlib.blake2b
        self.entry: Callable[[Any], Any] | None = None
        self.module: Any = None
        self.inputs: dict[int, Any] = {}
        self.held: dict[int, Any] = {}
        self.durations: list[float] = []
        self.guard: dict[tuple[str, str], Any] = {}
        self.guarded_objects: dict[str, Any] = {}
        self.descriptors: list[tuple[int, int]] = []
        self.cuda = False
        self.generate: Callable[..., Any] | None = None
        self.flush: Callable[[], None] | None = None
        self.emulation: Any = None
        self.emulated: Any = None

    # -- setting up

    def op_setup(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Choose the device and, on a GPU, get ready to generate inputs here."""
        self.cuda = request["device"] == "cuda"
        if request["device"] == "gfx950":
            self._emulate(request["harness"])
        here = os.path.dirname(_THIS_FILE)
        paths = [request["folder"], request["harness"]]
        others = [path for path in sys.path if path not in (here, *paths)]
        # The evaluator's own modules come from its folder, whatever lies beside the submission.
        sys.path[:] = [request["harness"], *others]
        if self.cuda:
            if not self.torch.cuda.is_available():
                raise Refusal("device: no GPU is visible to the worker")
            import reference
            import utils

            self.generate = reference.generate_input
            self.flush = utils.clear_l2_cache_large
            self.torch.cuda.init()
            # The base class is a C type, whose methods cannot be replaced from Python.
            base: Any = self.torch._C._CudaEventBase
            self.event_type = self.torch.cuda.Event
            self.event_record, self.event_elapsed = base.record, base.elapsed_time
            self.device_synchronize = self.torch._C._cuda_synchronize
            self.current_queue = self.torch.cuda.current_stream
        self._remember()
        sys.path[:] = paths + others
        return {}

    def _emulate(self, harness: str) -> None:
        """From here on Triton compiles for gfx950 and launches in the emulator."""
        sys.path.insert(0, harness)
        from gfx950.device import emulated_device

        self.emulation = emulated_device()
        self.emulated = self.emulation.__enter__()

    def _remember(self) -> None:
        torch = self.torch
        self.guarded_objects = {
            "torch": torch,
            "torch.Tensor": torch.Tensor,
            "torch.cuda": torch.cuda,
            "torch.cuda.Event": torch.cuda.Event,
            "torch.testing": torch.testing,
        }
        for owner in GUARDED:
            if owner not in self.guarded_objects and owner in sys.modules:
                self.guarded_objects[owner] = sys.modules[owner]
        for owner, names in GUARDED.items():
            holder = self.guarded_objects.get(owner)
            for name in names:
                if hasattr(holder, name):
                    self.guard[owner, name] = getattr(holder, name)
        self.descriptors = [self._descriptor(fd) for fd in (1, 2)]
        self.handlers = {number: self.get_handler(number) for number in signal.valid_signals()}
        self.known_callbacks = list(self.collector_callbacks)
        self.known_tools = self._tools()

    @staticmethod
    def _descriptor(fd: int) -> tuple[int, int]:
        try:
            stat = os.fstat(fd)
        except OSError:
            return (-1, -1)
        return (stat.st_dev, stat.st_ino)

    def op_load(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Import the submission under the name the contest gives it."""
        path = request["path"]
        sys.argv = [path]
        self.frozen = {name: value for name, value in vars(self).items() if name not in CHANGING}
        self.methods = dict(vars(type(self)))
        self.codes = {name: value.__code__ for name, value in self.methods.items() if hasattr(value, "__code__")}
        self.names = dict(globals())
        self.used = self._what_is_used()
        start = self.clock()
        spec = importlib.util.spec_from_file_location("submission", path)
        if spec is None or spec.loader is None:
            raise Refusal(f"load: {os.path.basename(path)} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules["submission"] = module
        spec.loader.exec_module(module)
        entry = getattr(module, "custom_kernel", None)
        if not callable(entry):
            raise Refusal("load: the file defines no function `custom_kernel`")
        self.module, self.entry = module, entry
        return {"load_s": self.clock() - start}

    # -- inputs

    def op_input(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Take an input from the parent: into new storage, or over those tensors of an earlier one that fit."""
        slot, layout = request["slot"], request["layout"]
        tensors: dict[str, Any] = {}
        with mmap.mmap(fds[0], layout["bytes"], access=mmap.ACCESS_COPY) as raw:
            mapped = self.torch.frombuffer(raw, dtype=self.torch.uint8)
            for name, entry in layout["tensors"].items():
                part = mapped[entry["offset"] : entry["offset"] + entry["bytes"]]
                flat = part.to("cuda") if self.cuda else part.clone()
                tensors[name] = flat.view(getattr(self.torch, entry["dtype"])).view(entry["shape"])
            del mapped, part
        over = request.get("over")
        if over is not None:
            old = _named_tensors(self.inputs[over])
            fits = [name for name, tensor in tensors.items() if old[name].shape == tensor.shape]
            for name in fits:
                self._overwrite(old[name], tensors[name])
                tensors[name] = old[name]
            if len(fits) == len(tensors):
                self.inputs[slot] = self.inputs[over]
        if over is None or self.inputs.get(slot) is not self.inputs[over]:
            self.inputs[slot] = _build_input(tensors, layout["config"])
        if self.cuda:
            self.device_synchronize()
        return {}

    def op_generate(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Generate a case here (GPU only): the parent makes the same one for itself from the same seed."""
        assert self.generate is not None
        self.inputs.pop(request["slot"], None)
        self.inputs[request["slot"]] = self.generate(**request["args"])
        self.device_synchronize()
        return {}

    def op_drop(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Forget inputs and outputs."""
        for slot in request["slots"]:
            self.inputs.pop(slot, None)
        self.held.clear()
        return {}

    def _hash_inputs(self, slot: int) -> dict[str, str]:
        """A digest of every tensor's address and bytes, to see whether the call wrote to them or put others there."""
        data = self.inputs[slot]
        digests = {"config": repr(data[4]), "kv_data": repr([str(name) for name in data[1]])}
        for name, tensor in _named_tensors(data).items():
            flat = tensor.view(self.torch.uint8).reshape(-1)
            if self.cuda and flat.numel() > (64 << 20):
                # Too much to bring over: sums over 64-bit words, plain and weighted by position, piece by piece.
                words = flat[: flat.numel() // 8 * 8].view(self.torch.int64)
                sums = []
                for piece in words.split(1 << 24):
                    weights = self.torch.arange(piece.numel(), device=piece.device, dtype=self.torch.int64) | 1
                    sums.append(self.torch.stack((piece.sum(), (piece * weights).sum())))
                digests[name] = str(self.torch.stack(sums).tolist())
            else:
                digests[name] = self.blake2b(flat.cpu().numpy().tobytes(), digest_size=16).hexdigest()
            digests[name] += f" at {tensor.data_ptr()}"
        return digests

    # -- calls

    def _poison(self, slot: int) -> None:
        """Leave NaN in memory of the output's size, so that unwritten output shows."""
        q = self.inputs[slot][0]
        shape = (q.shape[0], q.shape[1], self.inputs[slot][4]["v_head_dim"])
        blocks = [self.torch.full(shape, float("nan"), dtype=self.torch.bfloat16, device=q.device) for _ in range(8)]
        blocks.clear()

    def _tools(self) -> list[Any]:
        """Who watches this interpreter's execution (Python 3.12 and newer)."""
        return [self.monitoring.get_tool(i) for i in range(6)] if self.monitoring is not None else []

    def _refuse_hooks(self, hook: Any) -> None:
        """A call that leaves something behind which sees the next steps could do its work there, untimed."""
        self._refuse_patches()
        stack = [self.function_mode_at(i) for i in range(self.function_modes())]
        # torch.set_default_device leaves a mode too, and an honest one.
        left = [self.type_of(mode).__name__ for mode in stack if self.type_of(mode) is not self.device_context]
        if left or self.dispatch_modes():
            raise Refusal(f"the call left a torch mode active: {', '.join(left) or 'a dispatch mode'}")
        if hook is not None:
            raise Refusal("the call left a trace or profile function active")
        if self.monitoring is not None and self._tools() != self.known_tools:
            raise Refusal("the call left a monitoring tool active")
        if any(self.get_handler(number) is not handler for number, handler in self.handlers.items()):
            raise Refusal("the call left a signal handler of its own")
        if any(self.get_timer(which) != (0.0, 0.0) for which in (signal.ITIMER_REAL, signal.ITIMER_PROF)):
            raise Refusal("the call left a timer running")
        if any(callback not in self.known_callbacks for callback in self.collector_callbacks):
            raise Refusal("the call left a callback with the garbage collector")

    def _refuse_patches(self) -> None:
        """Everything that this object looked up before the submission was loaded is still what it uses."""
        if not self.frozen:  # nothing is loaded yet
            return
        now, methods = vars(self), vars(type(self))
        changed = [name for name, value in self.frozen.items() if now.get(name) is not value]
        changed += [name for name in now if name not in self.frozen and name not in CHANGING]
        changed += [name for name, value in self.methods.items() if methods.get(name) is not value]
        changed += [name for name, code in self.codes.items() if self.methods[name].__code__ is not code]
        names = globals()
        changed += [name for name in {*names, *self.names} if names.get(name) is not self.names.get(name)]
        if changed:
            raise Refusal(f"the submission replaced parts of the evaluator's worker: {', '.join(changed)}")
        for owner, names, name, value, code in self.used:
            if names.get(name) is not value or getattr(value, "__code__", None) is not code:
                raise Refusal(f"the submission replaced {owner}.{name}")

    def _what_is_used(self) -> list[tuple[str, dict[str, Any], str, Any, Any]]:
        """(owner, its namespace, name, function, code) of all that this file's code may call by a name.

        A name that the tensor class inherits is None here, and must stay so: it would hide what is meant.
        """
        own: dict[str, Any] = globals()
        mentioned = {name for value in (*vars(type(self)).values(), *own.values()) for name in _names_in(value)}
        owners = {name: vars(value) for name, value in own.items() if isinstance(value, types.ModuleType)}
        owners |= {"torch": vars(self.torch), "builtins": vars(builtins)}
        found = []
        for owner, names in owners.items():
            for name in sorted(mentioned & set(names)):
                if callable(names[name]):
                    found.append((owner, names, name, names[name], getattr(names[name], "__code__", None)))
        tensor: Any = vars(self.torch.Tensor)
        for name in sorted(mentioned & set(dir(self.torch.Tensor))):
            found.append(("torch.Tensor", tensor, name, tensor.get(name), getattr(tensor.get(name), "__code__", None)))
        # On a GPU inputs are made here: all functions of the modules that do so.
        for owner in ("reference", "utils") if self.cuda else ():
            names = vars(sys.modules[owner])
            for name, value in list(names.items()):
                if isinstance(value, types.FunctionType):
                    found.append((owner, names, name, value, value.__code__))
        return found

    def _early_copy(self, out: Any, into: Any = None) -> Any:
        """The output as it is when the call returns, before anything else can run; None for what is no plain tensor.

        On a GPU the copy waits in the queue right behind the call's own work, and nobody waits for it here.
        """
        if self.type_of(out) is not self.torch.Tensor:
            return None
        # Through the C type, whose methods cannot be replaced; a wrong shape or layout is reported by others.
        with contextlib.suppress(RuntimeError):
            return self.tensor_base.clone(out) if into is None else self.tensor_base.copy_(into, out)
        return None

    def _same_bytes(self, one: Any, other: Any) -> bool:
        base, torch = self.tensor_base, self.torch
        raw = [base.view(base.contiguous(base.detach(tensor)), torch.uint8) for tensor in (one, other)]
        return bool(torch._C._VariableFunctions.equal(*raw))

    def _describe(self, out: Any) -> dict[str, Any]:
        """What came back, without touching the values."""
        torch = self.torch
        meta: dict[str, Any] = {"type": self.type_of(out).__name__, "plain": self.type_of(out) is torch.Tensor}
        if meta["plain"] and (out.is_nested or out.is_neg()):
            return {**meta, "dtype": str(out.dtype), "layout": "a nested one" if out.is_nested else "a negated view"}
        if isinstance(out, torch.Tensor):
            meta["shape"], meta["dtype"] = list(out.shape), str(out.dtype)
            meta["device"], meta["layout"] = out.device.type, str(out.layout)
            if meta["plain"] and out.layout == torch.strided:
                meta["begin"] = out.data_ptr()
                meta["end"] = meta["begin"] + out.untyped_storage().nbytes() - out.storage_offset() * out.element_size()
        return meta

    def _save(self, out: Any, fd: int, offset: int, capacity: int) -> bool:
        """Write a well-formed output's bytes for the parent; False when there is nothing to write."""
        torch = self.torch
        if self.type_of(out) is not torch.Tensor or out.dtype != torch.bfloat16 or out.layout != torch.strided:
            return False
        if out.is_nested or out.is_neg() or out.device.type == "meta":
            return False
        if out.numel() * 2 != capacity:
            return False
        # Through the C type, whose methods cannot be replaced: nothing may compute the output only now.
        base = self.tensor_base
        payload = memoryview(base.numpy(base.view(base.cpu(base.contiguous(base.detach(out))), torch.uint8))).cast("B")
        written = 0
        while written < capacity:
            written += self.pwrite(fd, payload[written : written + (1 << 28)], offset + written)
        return True

    def op_call(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Call once per slot, in order; what is judged is each output as it was when its call returned.

        Its own memory must hold the same after the last call; `pause_s` reads that after a pause. Results go to the
        memory file one after the other.
        """
        assert self.entry is not None
        results = []
        outputs = []
        copies = []
        # Names of this frame: nothing that the call does to the object changes what comes right behind it.
        early_copy, refuse_hooks, collector_off = self._early_copy, self._refuse_hooks, self.collector_off
        for slot in request["slots"]:
            data = self.inputs[slot]
            before = self._hash_inputs(slot) if request["hash"] else None
            if request["poison"]:
                self._poison(slot)
            start = self.clock()
            out = self.entry(data)
            # A finaliser in cyclic garbage computes when the collector comes by: not before all is read.
            collector_off()
            hook = self.get_profile() or self.get_trace()
            early = early_copy(out)
            if self.cuda:
                self.device_synchronize()
            took = self.clock() - start
            refuse_hooks(hook)
            result = self._describe(out)
            result["call_s"] = took
            if before is not None:
                after = self._hash_inputs(slot)
                result["changed"] = [name for name in before if before[name] != after[name]]
            ranges = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in _named_tensors(data).values()]
            if "begin" in result:
                result["aliases_input"] = any(result["begin"] < e and b < result["end"] for b, e in ranges)
            results.append(result)
            outputs.append(out)
            copies.append(early)
        offset = 0
        for repeat in range(2 if request["pause_s"] else 1):
            if repeat:
                self.sleep(request["pause_s"])
                if self.cuda:
                    self.device_synchronize()
            for out, result, capacity in zip(outputs if repeat else copies, results, request["bytes"], strict=True):
                result["saved"] = self._save(out, fds[0], offset, capacity)
                offset += capacity
        for early, out, result in zip(copies, outputs, results, strict=True):
            # What is not strided memory of this device is refused by what it says of itself.
            memory = result.get("layout") == "torch.strided" and result.get("device") == data[0].device.type
            result["late"] = memory and early is not None and not self._same_bytes(early, out)
        for hold, out in zip(request["hold"], outputs, strict=False):
            self.held[hold] = out
        return {"results": results, "threads": self._threads()}

    def op_repeat(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Call again and again on one input, back to back; stops after `within_s`.

        The mean of all outputs goes to the memory file, so that none of these calls is one that nobody looks at.
        """
        assert self.entry is not None
        data, started, done = self.inputs[request["slot"]], self.clock(), 0
        shape = (data[0].shape[0], data[0].shape[1], data[4]["v_head_dim"])
        total = self.torch.zeros(shape, dtype=self.torch.float32, device=data[0].device)
        add, plain, kind, size = self.tensor_base.add_, self.torch.Tensor, self.torch.bfloat16, self.torch.Size(shape)
        while done < request["count"] and self.clock() - started < request["within_s"]:
            out = self.entry(data)
            if self.type_of(out) is not plain or out.dtype is not kind or out.shape != size:
                raise Refusal(f"output: another kind of output in call {done + 1} on one input")
            add(total, out)
            done += 1
        if self.cuda:
            self.device_synchronize()
        mean = (total / max(1, done)).to(kind)
        return {"calls": done, "saved": self._save(mean, fds[0], 0, 2 * mean.numel())}

    def op_renew(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Generate new content into the tensors of an input that is there already (GPU only)."""
        assert self.generate is not None
        old, new = _named_tensors(self.inputs[request["slot"]]), _named_tensors(self.generate(**request["args"]))
        for name, tensor in new.items():
            self._overwrite(old[name], tensor)
        self.device_synchronize()
        return {}

    def _overwrite(self, old: Any, new: Any) -> None:
        """New bytes at the same address, in the same object and, thanks to `.data`, with the same version number."""
        # As bytes: copy_ does not know the fp4 and e8m0 types on every device.
        old.data.view(self.torch.uint8).copy_(new.view(self.torch.uint8))

    def op_reread(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Read an output that was held across later calls once more."""
        if self.cuda:
            self.device_synchronize()
        return {"saved": self._save(self.held[request["hold"]], fds[0], 0, request["bytes"])}

    @staticmethod
    def _threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t is not threading.main_thread()]

    # -- timing (GPU only)

    def op_time(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Time calls in the contest's order; outputs are validated by the parent after the clock has stopped.

        generate (when seeds are given) -> synchronize -> flush, not waited for -> start -> call -> end -> synchronize.
        With `inclusive`, the flush is waited for and the whole device is synchronised before the end event, so that
        work on other queues and threads counts, and the host's clock can be compared with the device's. `hosts` are the
        times, in ns, that the call itself took on the host.
        """
        torch, entry, flush = self.torch, self.entry, self.flush
        assert entry is not None and flush is not None
        base, get_profile, get_trace = self.tensor_base, self.get_profile, self.get_trace
        early_copy, refuse_hooks, collector_off = self._early_copy, self._refuse_hooks, self.collector_off
        slot, seeds, inclusive = request["slot"], request["seeds"], request["inclusive"]
        synchronize, record, elapsed = self.device_synchronize, self.event_record, self.event_elapsed
        if request["reset"]:
            self.durations = []
        data = self.inputs[slot]
        kept: list[Any] = []
        early: Any = None
        late: list[int] = []
        walls: list[float] = []
        hosts: list[float] = []
        durations: list[float] = []
        problem = None
        shape = (data[0].shape[0], data[0].shape[1], data[4]["v_head_dim"])
        if request["save"]:
            kept = [torch.empty(shape, dtype=torch.bfloat16, device=data[0].device) for _ in range(request["count"])]
            early = torch.empty_like(kept[0])
        started = self.clock()
        gc.collect()
        gc.disable()
        try:
            for i in range(request["count"]):
                if seeds is not None:
                    del data
                    self.inputs.pop(slot, None)
                    assert self.generate is not None
                    data = self.inputs[slot] = self.generate(**request["args"], seed=seeds[i])
                synchronize()
                flush()
                if inclusive:
                    synchronize()
                start, end = self.event_type(enable_timing=True), self.event_type(enable_timing=True)
                queue = self.current_queue()
                wall = self.clock()
                record(start, queue)
                called = self.clock()
                out = entry(data)
                collector_off()
                # A hook that acts on this very look does so while the clock still runs.
                hook = get_profile() or get_trace()
                hosts.append((self.clock() - called) * 1e9)
                if inclusive:
                    synchronize()
                record(end, queue)
                copied = early_copy(out, early) if kept else None
                synchronize()
                walls.append((self.clock() - wall) * 1e9)
                durations.append(elapsed(start, end) * 1e6)
                refuse_hooks(hook)
                if self.type_of(out) is not torch.Tensor or tuple(out.shape) != shape or out.dtype != torch.bfloat16:
                    problem = self._describe(out)
                    break
                if kept:
                    base.copy_(kept[i], out)
                    # What is written after the second event, by a thread or on another queue, is not in the early copy.
                    if copied is None or not self._same_bytes(early, kept[i]):
                        late.append(i)
                del out
                self.durations.append(durations[-1])
                if _enough(self.durations, request, self.clock() - started + request["spent_s"]):
                    break
        finally:
            gc.enable()
        if kept and problem is None:
            size = kept[0].numel() * 2
            for i in range(len(durations)):
                self._save(kept[i], fds[0], i * size, size)
        return {"durations": durations, "walls": walls, "hosts": hosts, "problem": problem, "late": late}

    def op_profile(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """One call under torch's profiler."""
        from torch.profiler import ProfilerActivity, profile

        assert self.entry is not None
        data = self.inputs[request["slot"]]
        self.entry(data)
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.cuda else [])
        with profile(activities=activities) as recorded:
            self.entry(data)
            if self.cuda:
                self.device_synchronize()
        order = "self_cuda_time_total" if self.cuda else "self_cpu_time_total"
        return {"report": recorded.key_averages().table(sort_by=order, row_limit=20)[:100_000]}

    # -- looking after the house

    def op_inspect(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """What the submission replaced, closed or left running, and what it says about its last pick."""
        replaced = [
            f"{owner}.{name}"
            for (owner, name), value in self.guard.items()
            if getattr(self.guarded_objects[owner], name, None) is not value
        ]
        closed = [
            name
            for name, fd, known in zip(("stdout", "stderr"), (1, 2), self.descriptors, strict=True)
            if self._descriptor(fd) != known
        ]
        for name in ("stdout", "stderr"):
            channel = getattr(sys, name)
            if name not in closed and (channel is None or channel.closed):
                closed.append(name)
            elif channel is not None and not channel.closed:
                with contextlib.suppress(OSError, ValueError):
                    channel.flush()
        pick = None
        report = getattr(self.module, "last_pick", None)
        if callable(report):
            with contextlib.suppress(Exception):
                pick = json.loads(json.dumps(report(), default=str)[:200_000])
        found = {"replaced": replaced, "closed": closed, "threads": self._threads(), "pick": pick}
        if self.emulated is not None:
            found["launches"] = len(self.emulated.launches)
            found["findings"] = self.emulated.findings()[:20]
        return found


def _names_in(value: Any) -> Iterator[str]:
    """Every name that a function's code mentions, inner functions included."""
    code = value if isinstance(value, types.CodeType) else getattr(getattr(value, "__func__", value), "__code__", None)
    if isinstance(code, types.CodeType):
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from _names_in(constant)


def _named_tensors(data: Any) -> dict[str, Any]:
    """The tensors of an input tuple by the names of the transport."""
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


def _build_input(tensors: dict[str, Any], config: dict[str, Any]) -> Any:
    kv = {
        "bf16": tensors["bf16"],
        "fp8": (tensors["fp8"], tensors["fp8_scale"]),
        "mxfp4": (tensors["fp4"], tensors["fp4_scale"]),
    }
    return (tensors["q"], kv, tensors["qo_indptr"], tensors["kv_indptr"], dict(config))


def _enough(durations: list[float], request: dict[str, Any], spent_s: float) -> bool:
    """The contest's stop rule, asked from the third run on."""
    runs = len(durations)
    if runs < 3:
        return False
    mean = sum(durations) / runs
    deviation = (sum((d - mean) ** 2 for d in durations) / (runs - 1)) ** 0.5
    error = deviation / runs**0.5
    return error < 0.001 * mean or mean * runs > request["max_time_ns"] or spent_s > request["max_wall_s"]


def serve(fd: int) -> None:
    """Answer requests until the parent hangs up; every answer repeats the token of its request."""
    sock = socket.socket(fileno=fd)
    worker = Worker(sock)
    refuse_patches, process_id, leave = worker._refuse_patches, os.getpid, os._exit
    own_id = process_id()
    # The submission finds an empty main module, and not this one.
    hidden_main = sys.modules["__main__"]
    sys.modules["__main__"] = type(sys)("__main__")
    assert hidden_main is not None
    while True:
        received = worker.receive(sock)
        if received is None:
            os._exit(0)
        request, fds = received
        token = request.pop("token")
        answer: dict[str, Any] = {}
        try:
            refuse_patches()
            answer = {"ok": True, **getattr(worker, "op_" + request["op"])(request, fds)}
            if request["op"] != "load":  # a file that replaces something is refused at its first call, as any other
                refuse_patches()
        except Refusal as error:
            answer = {"ok": False, "error": str(error), "kind": "refusal"}
        except SystemExit as error:
            answer = {"ok": False, "error": f"called sys.exit({error.code!r})"[:TRACE_CHARS], "kind": "exit"}
        except BaseException as error:  # whatever it is, it is an answer
            answer = {"ok": False, "error": _short_trace(error), "kind": type(error).__name__}
        if process_id() != own_id:
            leave(70)  # a child that a call has forked does not answer for its parent
        worker.collector_on()
        for passed in fds:
            with contextlib.suppress(OSError):
                os.close(passed)
        worker.send(sock, {"token": token, **answer})


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        nursery(int(sys.argv[2]), fork_only=sys.argv[3] == "fork")
