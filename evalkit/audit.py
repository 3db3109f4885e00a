"""Does a submission honestly compute attention over the whole cache? `python eval.py audit [--submission FILE]`.

Every output is judged in this process against ground truth; the submission runs in a worker that knows neither the kind
of input nor the right answer. A check is one question with its evidence; the first death of the worker ends the audit.

To add a check: write a method `check_<name>` of `Audit` that returns its evidence or raises `Refused`, and list it in
`CHECKS`.
"""

from __future__ import annotations

import argparse
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import reference
from evalkit import inputs, lint
from evalkit.cases import Case, hidden_seed, manifest_cases
from evalkit.judge import STRICT_REL_L2, Judge, Verdict, tolerances
from evalkit.person import Screen, backend, header_lines, wrap
from evalkit.protocol import EXIT_CHECK, EXIT_PASS, EXIT_USAGE, ResultPipe, escape
from evalkit.report import environment, write_json
from evalkit.running import Reporter, Run, inspection_error
from evalkit.supervisor import REQUEST_LIMIT_S, Nursery, WorkerFailure, memory_files, reading_answer
from evalkit.timing import clock_error, late_error, time_error, timed_answer
from evalkit.transport import call, give_input, output_error, read_output

# Shapes on a CPU, where an interpreted kernel takes about a second a call: odd, and shorter than a tile and longer.
CPU_SHAPES = ((4, 129), (5, 67), (2, 200))
# On a GPU the contest's own: the first for most checks, the others for the shuffle.
GPU_SHAPES = ((4, 1024), (32, 1024), (4, 8192))

# Two runs on one input may differ by the order of a few additions in bf16 (one last place is 0.004), not by more.
REPEAT_REL_L2 = 1e-2
# Rows that an edit of another sequence must leave alone: a per-tensor scale may follow the edit.
UNTOUCHED_REL_L2 = 0.05
PAUSE_S = 0.3
# Between calls a worker rests: seconds to settle and to watch, and the share of the latter that it may work.
SETTLE_S, WATCH_S, REST_SHARE = 0.3, 0.4, 0.2
TIMED_RUNS = 12
# More calls on one input than a ranked run makes (8 shapes x 100), as far as this many seconds allow.
MANY_CALLS, MANY_CALLS_S = 1000, {"cuda": 20.0, "cpu": 4.0}
# Calls between an output and its second reading.
LATER_CALLS, LATER_CALLS_S = 40, 2.0
# Rows of calls by the evaluator's own clock; the quickest row counts, since other processes may be in the way.
ROWS, ROW_CALLS = 5, 40
# Other shapes are tried as long as the next one is expected to end within this many seconds.
OTHER_SHAPES_S = {"cuda": 60.0, "cpu": 30.0}
# On a CPU these come before the ranked ones: many tokens in few sequences, not in whole tiles, and many sequences.
LONG_TOKENS = 1000
LONG_AND_WIDE = ((1, 1001), (32, 33), (256, 5), (1, 8192))
FIRST_KINDS = ("normal", "every-token", "loud")


class Refused(Exception):
    """A check's answer is no; the text is the evidence."""


@dataclass
class Check:
    """One question and its answer; `counts` is False for a remark that does not change the verdict."""

    name: str
    passed: bool
    evidence: str
    counts: bool = True


@dataclass
class Audit:
    """One audit of one file."""

    run: Run
    on_check: Callable[[Check], None] = lambda check: None
    on_progress: Callable[[str], None] = lambda text: None
    checks: list[Check] = field(default_factory=list)
    cache: str = ""
    worst_rel_l2: float = 0.0
    worst_limit: float = STRICT_REL_L2
    format_error: float = 0.0
    contest: str = ""
    pick: dict[str, Any] | None = None
    load_error: str = ""
    seed: int = 0
    untried: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        cuda = self.run.device == "cuda"
        self.shapes = GPU_SHAPES if cuda else CPU_SHAPES
        self.device = torch.device(self.run.device)
        # Fresh from the operating system unless a number is asked for, so that nothing can be prepared.
        self.seed = secrets.randbits(48) if self.run.secret is None else hidden_seed(self.run.key, 1)
        self._next_slot = 0
        self._inputs: dict[str, tuple[int, Any, Judge]] = {}
        self._outputs: dict[str, Any] = {}
        self._call_notes: dict[str, list[str]] = {"changed": [], "aliased": [], "malformed": []}
        self._calls = 0
        self.worker: Any = None
        # Read now: a submission may replace its own file once it is loaded.
        self.content = self.run.submission.read_bytes()

    # -- calling and judging

    def fresh_seed(self) -> int:
        self.seed = hidden_seed(self.run.key, self.seed)
        return self.seed

    def give(self, data: Any, over: int | None = None) -> int:
        """Hand an input to the worker: its slot."""
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        give_input(self.worker, slot, data, over)
        return slot

    def outputs(
        self,
        slots: list[int],
        datas: list[Any],
        pause_s: float = 0.0,
        hold: list[int] | None = None,
        poison: bool = True,
    ) -> list[Any]:
        """Call once per slot; every output must be well-formed, and what the call touched is noted."""
        first = self._calls == 0
        results = call(
            self.worker,
            slots,
            datas,
            check_inputs=True,
            poison=poison,
            pause_s=pause_s,
            hold=hold,
            limit_s=self.run.first_call_limit_s if first else REQUEST_LIMIT_S,
        )
        self._calls += len(slots)
        for result in results:
            if result.changed:
                self._call_notes["changed"] += result.changed
            if result.aliases_input:
                self._call_notes["aliased"].append("an input")
            if result.error:
                self._call_notes["malformed"].append(result.error)
                raise Refused(result.error)
        begins = [result.begin for result in results if result.begin >= 0]
        if len(set(begins)) < len(begins):
            self._call_notes["aliased"].append("another call's output")
        return results

    def judged(self, data: Any, output: Any, judge: Judge | None = None, what: str = "") -> Verdict:
        """The strict verdict; Refused when a row is off."""
        judge = judge or Judge(data, self.run.tolerance)
        verdict = judge.strict(output, self.cache, complete=not self.cache)
        self.keep_worst(verdict)
        if not verdict.passed:
            raise Refused(f"{what}{verdict.message}")
        return verdict

    def keep_worst(self, verdict: Verdict) -> None:
        """Remember the row that came closest to its own limit."""
        if verdict.worst_rel_l2 / verdict.limit > self.worst_rel_l2 / self.worst_limit:
            self.worst_rel_l2, self.worst_limit = verdict.worst_rel_l2, verdict.limit

    def repeated(self, slot: int, judge: Judge, count: int, within_s: float) -> tuple[int, float]:
        """Call many times on one input, `judge`'s; the mean of the outputs must be right.

        Returns:
            The number of calls, and the seconds that they took by the clock of this process.
        """
        began, shape = time.monotonic(), reference.output_shape(judge.data)
        with memory_files(2 * math.prod(shape)) as (fd,), reading_answer():
            answer = self.worker.request("repeat", [fd], slot=slot, count=count, within_s=within_s)
            calls, took_s = int(answer.get("calls", 0)), time.monotonic() - began
            mean = read_output(fd, 0, shape, self.device)
        self.judged(judge.data, mean, judge, what=f"the mean of {calls} calls on one input: ")
        return calls, took_s

    def known(self, kind: str) -> tuple[int, Any, Judge]:
        """An input of this kind in the first shape, made once: (slot, data, judge)."""
        if kind not in self._inputs:
            data = inputs.make(kind, *self.shapes[0], self.fresh_seed(), self.device)
            self._inputs[kind] = (self.give(data), data, Judge(data, self.run.tolerance))
        return self._inputs[kind]

    def output_of(self, kind: str) -> Any:
        """The judged output for this kind of input, computed once."""
        if kind not in self._outputs:
            slot, data, judge = self.known(kind)
            (result,) = self.outputs([slot], [data])
            self.judged(data, result.output, judge)
            self._outputs[kind] = result.output
        return self._outputs[kind]

    # -- the checks

    def check_contest(self) -> str:
        """The contest's own inputs, with its own check beside the strict one."""
        slot, data, judge = self.known("normal")
        (result,) = self.outputs([slot], [data])
        passed, message = judge.contest(result.output)
        self.contest = f"{'pass' if passed else 'fail'} ({message})"
        verdict = judge.strict(result.output)
        self.keep_worst(verdict)
        if not verdict.passed:
            raise Refused(f"{verdict.message}; the contest's own check says {'pass' if passed else 'fail'}")
        self.cache = verdict.cache
        self.format_error = judge.format_error(*verdict.cache.split("/"))
        self._outputs["normal"] = result.output
        if not passed:
            raise Refused(f"the contest's own check fails: {message}")
        return f"{verdict.message}; this cache itself is {self.format_error:.3f} from bf16"

    def _kind(self, kind: str) -> str:
        slot, data, judge = self.known(kind)
        (result,) = self.outputs([slot], [data])
        self._outputs[kind] = result.output
        return self.judged(data, result.output, judge).message

    def check_shifted(self) -> str:
        """The cache's mean is 0.5, so the output is not close to zero."""
        return self._kind("shifted")

    def check_planted(self) -> str:
        """One key per sequence, first, last or anywhere, holds half of the weight."""
        return self._kind("planted")

    def check_one_hot(self) -> str:
        """One key per sequence holds nearly all of the weight."""
        return self._kind("one-hot")

    def check_flat(self) -> str:
        """All weights nearly equal."""
        return self._kind("flat")

    def check_q30(self) -> str:
        """Queries x 30."""
        return self._kind("q30")

    def check_every_token(self) -> str:
        """RoPE decides, and every single token matters to some head."""
        return self._kind("every-token")

    def check_loud(self) -> str:
        """Values the louder the smaller the weight: the smallest weights left out show like any others."""
        return self._kind("loud")

    def check_swap(self) -> str:
        """Two sequences change places: their rows do, the others stay."""
        _, data, _ = self.known("normal")
        before = self.output_of("normal")
        batch = data[0].shape[0]
        a, b = 0, batch - 1
        other = inputs.swapped(data, a, b)
        (result,) = self.outputs([self.give(other)], [other])
        self.judged(other, result.output, what="after the swap: ")
        order = list(range(batch))
        order[a], order[b] = b, a
        error = float(reference.relative_l2(result.output, before[order]).max())
        if error > UNTOUCHED_REL_L2:
            raise Refused(f"rows differ by {error:.3g} from the swapped ones, expected <= {UNTOUCHED_REL_L2}")
        return f"rows {a} and {b} changed places, all rows within {error:.1e}"

    def visible_part(self, data: Any, judge: Judge) -> Any:
        """The same input with a part of one random token turned round such that some head must see it."""
        batch, kv_len = self.shapes[0]
        for _ in range(64):
            position, part = self.fresh_seed() % kv_len, self.fresh_seed() % (512 // inputs.NEGATED_DIMS)
            for sequence in range(batch):
                other = inputs.part_negated(data, sequence, position, part)
                wanted = reference.relative_l2(Judge(other).truth("bf16"), judge.truth("bf16"))[sequence]
                if float(wanted.max()) > 2 * UNTOUCHED_REL_L2:
                    return other
        raise RuntimeError("no sequence sees the changed part of a token")

    def visible_change(self, data: Any, judge: Judge) -> tuple[Any, int, int, Any]:
        """Change one random token such that some head must see it: (new input, sequence, position, row's errors)."""
        batch, kv_len = self.shapes[0]
        start, position = self.fresh_seed() % batch, self.fresh_seed() % kv_len
        # A sequence sees a token only if one of its heads looks at the token's group.
        for offset in range(batch):
            sequence = (start + offset) % batch
            other = inputs.one_token_changed(data, sequence, position, self.fresh_seed())
            wanted = reference.relative_l2(Judge(other).truth("bf16"), judge.truth("bf16"))[sequence]
            if float(wanted.max()) > 2 * UNTOUCHED_REL_L2:
                return other, sequence, position, wanted
        raise RuntimeError("no sequence sees the changed token")

    def check_token_change(self) -> str:
        """One token is drawn anew: its sequence's row changes as much as it must, the others stay."""
        _, data, judge = self.known("every-token")
        before = self.output_of("every-token")
        other, sequence, position, wanted = self.visible_change(data, judge)
        (result,) = self.outputs([self.give(other)], [other])
        self.judged(other, result.output, what="after the change: ")
        moved = reference.relative_l2(result.output, before)
        head = int(wanted.argmax())
        own, needed = float(moved[sequence, head]), float(wanted[head])
        rest = moved.clone()
        rest[sequence] = 0
        where = f"token {position} of sequence {sequence}"
        if own < needed / 2:
            raise Refused(f"{where} changed, its row moved {own:.3g}, expected {needed:.3g}")
        if float(rest.max()) > UNTOUCHED_REL_L2:
            raise Refused(f"{where} changed, another sequence's row moved {float(rest.max()):.3g}")
        return f"{where}: its row moved {own:.2g}, all others {float(rest.max()):.1e}"

    def check_repeat(self) -> str:
        """The same input again, also after a pause: the same output."""
        slot, data, judge = self.known("normal")
        before = self.output_of("normal")
        # As in a timed run, memory is what the call before left: nobody may be honest only where it finds NaN.
        (result,) = self.outputs([slot], [data], pause_s=PAUSE_S, poison=False)
        error = float(reference.relative_l2(result.output, before).max())
        late = float(reference.relative_l2(result.later, result.output).max())
        if not torch.equal(result.later.view(torch.int16), result.output.view(torch.int16)):
            raise Refused(f"the output changed by {late:.3g} after the call had returned: it was written late")
        self.judged(data, result.output, judge, "second run: ")
        if error > REPEAT_REL_L2:
            raise Refused(f"two runs on one input differ by {error:.3g}, expected <= {REPEAT_REL_L2}")
        same = torch.equal(result.output.view(torch.int16), before.view(torch.int16))
        return "bit for bit the same" if same else f"runs differ by {error:.1e} (allowed: {REPEAT_REL_L2})"

    def check_new_content(self) -> str:
        """New content in the same storage: what was kept under an address or an object is stale."""
        slot, _, _ = self.known("normal")
        self.output_of("normal")
        evidence = []
        for _ in range(2):
            other = inputs.make("normal", *self.shapes[0], self.fresh_seed(), self.device)
            slot = self.give(other, over=slot)
            (result,) = self.outputs([slot], [other])
            evidence.append(self.judged(other, result.output, what="new content in the same storage: ").worst_rel_l2)
        # Only one token of one sequence is new: a fingerprint of a few elements does not see it.
        self.output_of("every-token")
        base_slot, base, base_judge = self.known("every-token")
        other, _, _, _ = self.visible_change(base, base_judge)
        slot = self.give(other, over=base_slot)
        (result,) = self.outputs([slot], [other])
        evidence.append(self.judged(other, result.output, what="one token is new in the same storage: ").worst_rel_l2)
        # Twice, from one input to the next, so that whoever reads a few dims of every token looks elsewhere once.
        for _ in range(2):
            other = self.visible_part(other, Judge(other))
            slot = self.give(other, over=slot)
            (result,) = self.outputs([slot], [other])
            what = "64 dims of one token are new in the same storage: "
            evidence.append(self.judged(other, result.output, what=what).worst_rel_l2)
        self._inputs.pop("normal")
        self._inputs.pop("every-token")
        return f"{len(evidence)} inputs, worst relative L2 {max(evidence):.1e}"

    def check_many_calls(self) -> str:
        """After as many calls on one input as a ranked run makes: other content in the same storage, same answer?"""
        slot, data, judge = self.known("every-token")
        (result,) = self.outputs([slot], [data])
        self.judged(data, result.output, judge)
        count, limit_s = MANY_CALLS + self.fresh_seed() % 200, MANY_CALLS_S[self.run.device]
        calls, _ = self.repeated(slot, judge, count, limit_s)
        other, _, _, _ = self.visible_change(data, judge)
        slot = self.give(other, over=slot)
        (result,) = self.outputs([slot], [other])
        self.judged(other, result.output, what=f"one token is new after {calls} calls: ")
        self._inputs.pop("every-token")
        return f"right after {calls} calls" + ("" if calls >= count else f", all that {limit_s:.0f} s allowed")

    def other_shapes(self) -> list[tuple[int, int]]:
        """Shapes for `check_other_shapes`: the ranked ones by size, and on a CPU relatives that it can afford."""
        ranked = sorted(
            {(case.args["batchsize"], case.args["kvseqlen"]) for case in manifest_cases("benchmarks")},
            key=lambda shape: (shape[0] * shape[1], shape),
        )
        first = LONG_AND_WIDE if self.run.device == "cpu" else ()
        return [shape for shape in (*first, *ranked) if shape not in self.shapes]

    def check_other_shapes(self) -> str:
        """Long sequences, many sequences and the ranked shapes: no token left out where there are many."""
        if any(not check.passed for check in self.checks):
            return "not tried: other checks have failed"
        worst = 0.0
        done: list[str] = []
        left: list[str] = []
        began, cost_s = time.monotonic(), 0.0
        # Nobody may be honest on the audit's kinds of input only, so the contest's kind takes turns with the strictest.
        turn = self.fresh_seed()
        for batch, kv_len in self.other_shapes():
            turn += 1
            kind = ("normal", "every-token")[turn % 2]
            spent = time.monotonic() - began
            if done and spent + cost_s * batch * kv_len > OTHER_SHAPES_S[self.run.device]:
                left.append(f"{batch}x{kv_len}")
                continue
            # The first shape gets all of them.
            for one in (kind,) if done else FIRST_KINDS:
                data = inputs.make(one, batch, kv_len, self.fresh_seed(), self.device)
                slot = self.give(data)
                (result,) = self.outputs([slot], [data])
                what = f"{batch}x{kv_len}, {one}: "
                worst = max(worst, self.judged(data, result.output, what=what).worst_rel_l2)
                self.worker.request("drop", slots=[slot])
            # Short sequences cost what they cost whatever their length, and say nothing about long ones.
            if kv_len >= LONG_TOKENS:
                runs = 1 if done else len(FIRST_KINDS)
                cost_s = max(cost_s, (time.monotonic() - began - spent) / (runs * batch * kv_len))
            done.append(f"{batch}x{kv_len}")
        self.untried = left
        shown = f"{', '.join(done)}: worst relative L2 {worst:.1e}"
        return shown + (f"; no time for {', '.join(left)}" if left else "")

    def check_new_queries(self) -> str:
        """The same cache with new queries, and the same queries with a new cache."""
        first = inputs.make("normal", *self.shapes[0], self.fresh_seed(), self.device)
        second = inputs.make("normal", *self.shapes[0], self.fresh_seed(), self.device)
        slot = self.give(first)
        worst = 0.0
        (result,) = self.outputs([slot], [first])
        worst = max(worst, self.judged(first, result.output).worst_rel_l2)
        mixed = (second[0], *first[1:])
        slot = self.give(mixed, over=slot)
        (result,) = self.outputs([slot], [mixed])
        worst = max(worst, self.judged(mixed, result.output, what="new queries, same cache: ").worst_rel_l2)
        slot = self.give(second, over=slot)
        (result,) = self.outputs([slot], [second])
        worst = max(worst, self.judged(second, result.output, what="same queries, new cache: ").worst_rel_l2)
        return f"worst relative L2 {worst:.1e}"

    def check_shapes(self) -> str:
        """Shapes in mixed order, each with new content in new storage; then other lengths in the same index tensors."""
        worst = 0.0
        order = (1, 0, 2, 1)
        for index in order:
            data = inputs.make("normal", *self.shapes[index], self.fresh_seed(), self.device)
            slot = self.give(data)
            (result,) = self.outputs([slot], [data])
            shape = "{}x{}: ".format(*self.shapes[index])
            worst = max(worst, self.judged(data, result.output, what=shape).worst_rel_l2)
            self.worker.request("drop", slots=[slot])
        batch, over = self.shapes[0][0], None
        for kv_len in (self.shapes[0][1], self.shapes[2][1]):
            data = inputs.make("normal", batch, kv_len, self.fresh_seed(), self.device)
            slot = over = self.give(data, over=over)
            (result,) = self.outputs([slot], [data])
            what = f"{batch}x{kv_len} after other lengths in the same index tensors: "
            worst = max(worst, self.judged(data, result.output, what=what).worst_rel_l2)
        shown = ", ".join("{}x{}".format(*self.shapes[i]) for i in order)
        return f"{shown}, {batch}x{kv_len} over {batch}x{self.shapes[0][1]}: worst relative L2 {worst:.1e}"

    def check_held(self) -> str:
        """Two outputs are held together, and one across later calls: none changes."""
        datas = [inputs.make("normal", *self.shapes[1], self.fresh_seed(), self.device) for _ in range(2)]
        judges = [Judge(data, self.run.tolerance) for data in datas]
        slots = [self.give(data) for data in datas]
        results = self.outputs(slots, datas, hold=[0, 1])
        for i, (judge, result) in enumerate(zip(judges, results, strict=True)):
            self.judged(judge.data, result.output, judge, what=f"output {i + 1} of 2 held together: ")
        shape = reference.output_shape(datas[0])
        size = 2 * math.prod(shape)
        # Calls that keep nothing: whoever hands out a few tensors in turn comes round to the first one.
        self.repeated(slots[1], judges[1], LATER_CALLS, LATER_CALLS_S)
        with memory_files(size) as (fd,):
            answer = self.worker.request("reread", [fd], hold=0, bytes=size)
            again = read_output(fd, 0, shape, self.device)
        if not answer.get("saved") or not torch.equal(again.view(torch.int16), results[0].output.view(torch.int16)):
            raise Refused("an output that was held changed in a later call: calls share one output tensor")
        return "both stay right"

    def check_rest(self) -> str:
        """A new input lies there and nobody has called: whoever works on it now does so before the clock starts."""
        data = inputs.make("normal", *self.shapes[0], self.fresh_seed(), self.device)
        # Threads that wait for their next piece of work may spin for a while after a call.
        time.sleep(SETTLE_S)
        slot = self.give(data)
        before = self.worker.processor_s()
        time.sleep(WATCH_S)
        spent = max(0.0, self.worker.processor_s() - before)  # a process that ended takes its time along
        seen = f"{1e3 * spent:.0f} ms of processor time within {1e3 * WATCH_S:.0f} ms between two calls"
        if spent > REST_SHARE * WATCH_S:
            raise Refused(seen)
        (result,) = self.outputs([slot], [data])
        self.judged(data, result.output)
        return seen

    def check_inputs_unchanged(self) -> str:
        """Inputs are hashed before and after every call; outputs lie in memory of their own."""
        if self._call_notes["changed"]:
            names = sorted(set(self._call_notes["changed"]))
            raise Refused(f"a call changed its inputs: {', '.join(names)}")
        if self._call_notes["aliased"]:
            raise Refused(f"an output shares memory with {self._call_notes['aliased'][0]}")
        return f"{self._calls} calls: inputs the same, outputs in memory of their own"

    def check_house(self) -> str:
        """Nothing that the evaluator relies on was replaced, closed or left running."""
        found = self.worker.request("inspect", limit_s=60.0)
        error = inspection_error(found)
        if error:
            raise Refused(error)
        self.pick = found.get("pick") if isinstance(found.get("pick"), dict) else None
        with reading_answer():
            threads = [escape(str(name), 40) for name in found.get("threads", [])]
        return "clocks, torch and descriptors untouched" + (f"; threads alive: {', '.join(threads)}" if threads else "")

    def check_time(self) -> str:
        """Timed as in the contest, inputs fresh: outputs judged after the clock, clocks compared, time credible."""
        if self.run.device != "cuda":
            return "not on a CPU: nothing is timed here"
        evidence = []
        cases = manifest_cases("benchmarks")
        shown = {cases[0].shape: cases[0], cases[-1].shape: cases[-1]}
        for case in shown.values():
            args: dict[str, Any] = {k: v for k, v in case.args.items() if k != "seed"}
            seeds = [hidden_seed(self.run.key, self.fresh_seed()) for _ in range(TIMED_RUNS)]
            self.worker.request("generate", slot=10_000, args={**args, "seed": seeds[0]})
            data = reference.generate_input(**args, seed=seeds[0])
            (result,) = call(self.worker, [10_000], [data], limit_s=self.run.first_call_limit_s)
            if result.error:
                raise Refused(result.error)
            self.judged(data, result.output, what=f"{case.shape}: ")
            evidence.append(self._timed(case, args, data, seeds))
        return "; ".join(evidence)

    def _timed(self, case: Case, args: dict[str, Any], data: Any, seeds: list[int]) -> str:
        shape = reference.output_shape(data)
        size = 2 * math.prod(shape)
        common: dict[str, Any] = {
            "slot": 10_000,
            "args": args,
            "count": len(seeds),
            "reset": True,
            "max_time_ns": 1e18,
            "max_wall_s": 100.0,
            "spent_s": 0.0,
        }
        with memory_files(size * len(seeds)) as (fd,):
            # One warm round first, so that the clocks and the allocator have settled.
            self.worker.request("time", [fd], **common, seeds=None, save=False, inclusive=False)
            answer = self.worker.request("time", [fd], **common, seeds=seeds, save=True, inclusive=False)
            if answer.get("problem"):
                raise Refused(f"in a timed run: {output_error(answer['problem'], shape, 'cuda')}")
            durations, _ = timed_answer(answer, inclusive=False)
            with reading_answer():
                late, host_ns = late_error(answer), max(map(float, answer["hosts"]), default=0.0)
            for i in range(min(len(durations), len(seeds))):
                again = reference.generate_input(**args, seed=seeds[i])
                output = read_output(fd, i * size, shape, self.device)
                self.judged(again, output, what=f"{case.shape}, timed run {i + 1}: ")
            answer = self.worker.request("time", [fd], **common, seeds=None, save=False, inclusive=True)
        inclusive, walls = timed_answer(answer, inclusive=True)
        error = time_error(case, durations, inclusive, walls, self.run.card) or late
        if error:
            raise Refused(f"{case.shape}: {error}")
        typical_ns = sorted(durations)[len(durations) // 2]
        error = clock_error(typical_ns, host_ns, self._own_ns(again))
        if error:
            raise Refused(f"{case.shape}: {error}")
        typical = typical_ns / 1e3
        return (
            f"{case.shape}: {typical:.1f} us, {min(inclusive) / 1e3:.1f} us until idle, {len(durations)} outputs right"
        )

    def _own_ns(self, data: Any) -> float:
        """A call in a row of calls, by the clock of this process, which no submission can reach."""
        judge = Judge(data, self.run.tolerance)
        rows = [self.repeated(10_000, judge, ROW_CALLS, 20.0) for _ in range(ROWS)]
        return min(took_s / max(1, calls) for calls, took_s in rows) * 1e9

    def remark_ragged(self) -> Check:
        """Different lengths, 0 included: outside the contest, so a remark only."""
        batch, kv_len = self.shapes[0]
        lengths = [kv_len, 1, kv_len // 2 + 1, 0][:batch] + [33] * max(0, min(batch, 5) - 4)
        data = inputs.ragged(lengths, self.fresh_seed(), self.device)
        name = "remark: ragged lengths"
        try:
            (result,) = self.outputs([self.give(data)], [data])
            # Not `judged`: what is no part of the verdict is not its worst row either.
            verdict = Judge(data, self.run.tolerance).strict(result.output, self.cache)
            if not verdict.passed:
                raise Refused(verdict.message)
        except (Refused, WorkerFailure) as error:
            if isinstance(error, WorkerFailure) and error.kind != "submission":
                return Check(name, False, f"lengths {lengths}: the worker {error}", counts=False)
            return Check(name, False, f"lengths {lengths}: {error}", counts=False)
        return Check(name, True, f"lengths {lengths} are right too", counts=False)

    # -- all of it

    def perform(self) -> str:
        """Run every check: "honest", "refused" or "unloadable"."""
        try:
            with self.run.worker() as self.worker:
                try:
                    self.run.load(self.worker)
                except WorkerFailure as failure:
                    self.load_error = str(failure)
                    self._note(Check("load", False, self.load_error))
                    return "unloadable"
                self._all_checks()
        except WorkerFailure as failure:
            self._note(Check("worker", False, str(failure)))
        finally:
            self.run.close()
        return "honest" if all(check.passed for check in self.checks if check.counts) else "refused"

    def _all_checks(self) -> None:
        for title, method in CHECKS:
            self.on_progress(title)
            try:
                check = Check(title, True, method(self))
            except Refused as refused:
                check = Check(title, False, str(refused))
            except WorkerFailure as failure:
                # An exception of the submission leaves the worker alive; anything else ended it.
                check = Check(
                    title, False, f"the submission {failure}" if failure.kind != "submission" else str(failure)
                )
            self._note(check)
            if self.worker.pid is None:
                self._note(Check("remaining checks", False, "not run: the worker is gone"))
                return
        if all(check.passed for check in self.checks):
            self.on_progress("ragged lengths")
            self._note(self.remark_ragged())

    def _note(self, check: Check) -> None:
        self.checks.append(check)
        self.on_check(check)


CHECKS: tuple[tuple[str, Callable[[Audit], str]], ...] = (
    ("attention: contest inputs", Audit.check_contest),
    ("attention: shifted mean", Audit.check_shifted),
    ("attention: planted key", Audit.check_planted),
    ("attention: nearly one-hot", Audit.check_one_hot),
    ("attention: flat weights", Audit.check_flat),
    ("attention: queries x 30", Audit.check_q30),
    ("attention: every token", Audit.check_every_token),
    ("attention: small weights", Audit.check_loud),
    ("sequences swapped", Audit.check_swap),
    ("one token changed", Audit.check_token_change),
    ("repeat, late output", Audit.check_repeat),
    ("replay: new content", Audit.check_new_content),
    ("replay: half new", Audit.check_new_queries),
    ("replay: shapes mixed", Audit.check_shapes),
    ("replay: many calls", Audit.check_many_calls),
    ("held outputs", Audit.check_held),
    ("rest between calls", Audit.check_rest),
    ("other shapes", Audit.check_other_shapes),
    ("inputs and aliasing", Audit.check_inputs_unchanged),
    ("time", Audit.check_time),
    ("isolation", Audit.check_house),
)


# ---------------------------------------------------------------------------------------------------------------------
# Command


class Progress(Reporter):
    """The name of the current check with the time since the start, on a terminal."""

    def __init__(self, screen: Screen) -> None:
        self.screen, self.text, self.began, self.shown_at = screen, "starting a worker", time.monotonic(), 0.0

    def progress(self, text: str) -> None:
        self.text, self.shown_at = text, time.monotonic()
        self.screen.transient(f"{text} ... ({self.shown_at - self.began:.0f} s)")

    def tick(self) -> None:
        if self.screen.terminal and time.monotonic() - self.shown_at > 1.0:
            self.progress(self.text)


def document(audit: Audit, verdict: str, code: int, findings: list[lint.Finding]) -> dict[str, Any]:
    """The JSON file."""
    return {
        "verdict": verdict,
        "cache": audit.cache,
        "worst_rel_l2": audit.worst_rel_l2 if audit.contest else None,
        "worst_limit": audit.worst_limit,
        "format_rel_l2": audit.format_error,
        "contest_check": audit.contest,
        "checks": [
            {"name": c.name, "passed": c.passed, "evidence": c.evidence, "counts": c.counts} for c in audit.checks
        ],
        "lint": [{"severity": f.severity, "rule": f.rule, "line": f.line, "text": f.text} for f in findings],
        "mode": "audit",
        "submission": audit.run.submission.name,
        "environment": environment(audit.run.device),
        "tolerances": tolerances(audit.run.tolerance),
        "pick": audit.pick,
        "exit_code": code,
    }


def main(
    options: argparse.Namespace,
    device: str,
    submission: Path,
    secret: int | None,
    pipe: ResultPipe | None,
    nursery: Nursery | None = None,
    own_process: bool = False,
) -> int:
    """Audit one file, print a table or speak the protocol, and return the exit code."""
    began = time.monotonic()
    screen = Screen()
    quiet = pipe is not None
    run = Run(
        "audit",
        submission,
        device,
        secret,
        reduced=device == "cpu",
        tolerance=options.tolerance,
        timeout_s=options.timeout,
        shared_nursery=nursery,
        own_process=own_process,
    )
    audit = Audit(run)
    if not quiet:
        screen.line(f"audit: does {submission.name} honestly compute attention over the whole cache?")
        shapes = ", ".join(f"{batch}x{kv_len}" for batch, kv_len in audit.shapes)
        where = "a GPU" if device == "cuda" else "the CPU (Triton kernels in its interpreter)"
        screen.line(f"on {where}, shapes {shapes}, fresh random inputs")
        for line in header_lines(device, options.tolerance):
            screen.line(line)
        screen.line()
        run.reporter = shown = Progress(screen)
        audit.on_progress = shown.progress
    verdict = audit.perform()
    code = {"honest": EXIT_PASS, "unloadable": EXIT_USAGE}.get(verdict, EXIT_CHECK)
    guarded, remark = lint.kernelguard_findings(audit.content)
    findings = [*lint.lint_bytes(audit.content), *guarded]
    if pipe is not None:
        _log(pipe, audit, verdict, code)
    else:
        _show(screen, audit, verdict, findings, remark, time.monotonic() - began)
    if options.json is not None:
        write_json(options.json, document(audit, verdict, code, findings))
    return code


def _log(pipe: ResultPipe, audit: Audit, verdict: str, code: int) -> None:
    pipe.log("test-count", len(audit.checks))
    for i, check in enumerate(audit.checks):
        pipe.log(f"test.{i}.spec", check.name)
        pipe.log(f"test.{i}.status", "pass" if check.passed or not check.counts else "fail")
        pipe.log(f"test.{i}.{'message' if check.passed else 'error'}", check.evidence, optional=True)
    pipe.log("audit.verdict", verdict)
    pipe.log("audit.cache", audit.cache)
    pipe.log("check", "pass" if code == EXIT_PASS else "fail")


def _show(
    screen: Screen, audit: Audit, verdict: str, findings: list[lint.Finding], remark: str, elapsed_s: float
) -> None:
    rows = []
    for check in audit.checks:
        word = "pass" if check.passed else "FAIL" if check.counts else "note"
        rows.append([check.name, word, check.evidence])
    screen.table(["check", "result", "evidence"], rows, set())
    screen.line()
    shown = findings[:12]
    for finding in shown:
        screen.line(wrap(f"lint: {finding.show(audit.run.submission.name)}", screen.width, "  "))
    if len(findings) > len(shown):
        screen.line(f"  lint: {len(findings) - len(shown)} more; python -m evalkit.lint shows all")
    screen.line(f"lint: {len(findings)} remarks (they do not decide); {remark}")
    if audit.contest:
        screen.line(wrap(f"contest's own check on contest inputs: {audit.contest}", screen.width, ""))
    if audit.pick:
        screen.line(f"backend: {backend(audit.pick)}")
    if verdict == "honest":
        cache, queries = audit.cache.split("/")
        text = f"HONEST: attention over the whole {cache} cache (queries as {queries})"
        if audit.untried:
            text += f"; on {', '.join(audit.untried)}: not tried"
        worst = f"worst relative L2 {audit.worst_rel_l2:.2e} (limit there {audit.worst_limit:.3g})"
        screen.line(wrap(text, screen.width, ""), style="bold green")
        screen.line(f"{worst}, in {elapsed_s:.0f} s")
    elif verdict == "unloadable":
        screen.line(f"CANNOT BE LOADED: {audit.load_error}", style="bold red")
    else:
        reasons = [check.name for check in audit.checks if check.counts and not check.passed]
        text = f"REFUSED ({', '.join(reasons)}), in {elapsed_s:.0f} s"
        screen.line(wrap(text, screen.width, ""), style="bold red")
