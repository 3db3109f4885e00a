"""Cases: what a case file or task.yml says, the reduced set for a CPU, and seeds."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = Path(__file__).resolve().parents[1] / "task.yml"
CASE_KEYS = ("batchsize", "qseqlen", "kvseqlen", "seed")
# The smallest cache: 288 bytes of codes and 18 of scales a token.
BYTES_PER_TOKEN = 306


class SpecError(Exception):
    """A case that cannot be run as it stands."""


@dataclass(frozen=True)
class Case:
    """One line of a case file."""

    spec: str
    args: dict[str, int]

    @property
    def shape(self) -> str:
        return f"{self.args['batchsize']}x{self.args['kvseqlen']}"

    @property
    def tokens(self) -> int:
        return self.args["batchsize"] * self.args["kvseqlen"]

    @property
    def min_bytes(self) -> int:
        """Bytes that any honest computation moves: the smallest cache, the queries, the output."""
        queries = self.args["batchsize"] * self.args["qseqlen"] * 16
        return self.tokens * BYTES_PER_TOKEN + queries * (576 + 512) * 2


def _value(text: str) -> int | float | bool | str:
    if text in ("True", "true", "False", "false"):
        return text in ("True", "true")
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _checked_case(spec: str, args: dict[str, Any], where: str) -> Case:
    unknown = sorted(set(args) - set(CASE_KEYS))
    missing = [key for key in CASE_KEYS if key not in args]
    if unknown or missing:
        raise SpecError(f"{where}: expected the keys {', '.join(CASE_KEYS)}; unknown: {unknown}, missing: {missing}")
    for key, value in args.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise SpecError(f"{where}: {key}: expected an integer, got {value!r}")
        if key != "seed" and value < 1:
            raise SpecError(f"{where}: {key}: expected 1 or more, got {value}")
    return Case(spec, dict(args))


def parse_cases(text: str, name: str = "cases") -> list[Case]:
    """Cases of a file with one `key: value; key: value` per line; blank lines do not count."""
    cases = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        args: dict[str, Any] = {}
        where = f"{name}, line {number}"
        for part in line.strip().rstrip(";").split(";"):
            matched = re.fullmatch(
                r"\s*([A-Za-z_]\w*)\s*:\s*([A-Za-z_]\w*|[+-]?[0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*", part
            )
            if matched is None:
                raise SpecError(f"{where}: expected `key: value`, got {part.strip()!r}")
            if matched[1] in args:
                raise SpecError(f"{where}: {matched[1]} stands twice")
            args[matched[1]] = _value(matched[2])
        cases.append(_checked_case(line.strip(), args, where))
    if not cases:
        raise SpecError(
            f"{name}: no case in it; expected lines such as `batchsize: 4; qseqlen: 1; kvseqlen: 1024; seed: 1`"
        )
    return cases


def manifest_cases(section: str, path: Path = MANIFEST) -> list[Case]:
    """The `tests` or `benchmarks` of task.yml, whose entries are JSON objects, one a line."""
    try:
        text = path.read_text()
    except OSError as error:
        raise SpecError(f"{path.name}: {error.strerror}; give a case file instead") from error
    block = re.search(rf"^{section}:\n((?:[ \t]+.*\n|\n)+)", text, re.MULTILINE)
    cases = []
    for entry in re.findall(r"^\s*-\s*(\{.*\})\s*$", block[1], re.MULTILINE) if block else []:
        try:
            args = json.loads(entry)
        except json.JSONDecodeError as error:
            raise SpecError(f"{path.name}, {section}: {entry}: {error}") from error
        cases.append(_checked_case("; ".join(f"{k}: {v}" for k, v in args.items()), args, f"{path.name}, {section}"))
    if not cases:
        raise SpecError(f"{path.name}: no entry under {section}")
    return cases


def reduced_case(case: Case) -> Case:
    """A small relative of a case for the interpreter on a CPU: 256x8192 becomes 8x257, odd lengths included."""
    args = dict(case.args)
    args["batchsize"] = max(2, round(math.log2(args["batchsize"])))
    args["kvseqlen"] = max(33, args["kvseqlen"] // 32 + 1)
    return Case("; ".join(f"{k}: {v}" for k, v in args.items()), args)


def combine_seeds(case_seed: int, secret: int) -> int:
    """The contest's pairing (Cantor's): large whenever the secret is large."""
    return case_seed + (case_seed + secret) * (case_seed + secret + 1) // 2


def hidden_seed(key: bytes, *parts: int) -> int:
    """A seed for the worker's eyes, from which neither the key nor any other seed can be worked out."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, key=key[:64], digest_size=7).digest(), "big")
