"""The contest's rules for the uploaded file, and habits worth a second look; each finding with its line.

    python -m evalkit.lint submission.py      exit 0: nothing the contest refuses; 1: something it does

A lint never decides whether a submission is honest: behaviour does.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 1_000_000
DIRECTIVES = ("#!POPCORN leaderboard amd-mixed-mla", "#!POPCORN gpu MI355X")
# Spelt in two halves so that this file could itself be uploaded.
BANNED_WORD = "str" + "eam"
HARNESS_MODULES = ("eval", "evalkit", "reference", "utils")

REFUSED, LOOK = "refused", "look"

# Names whose use tells a submission which run it is in, or lets it reach into the evaluator.
SNIFFING = {
    "sys.argv": "mode sniffing: reads the command line",
    "os.getppid": "mode sniffing: looks for its parent process",
    "sys._getframe": "reaches into the caller's frames",
    "inspect.stack": "reaches into the caller's frames",
    "inspect.currentframe": "reaches into the caller's frames",
    "gc.get_objects": "searches the process for objects",
    "gc.get_referrers": "searches the process for objects",
}
PATCHABLE = ("time", "torch", "builtins", "sys", "os")
LAUNCHERS = ("threading", "multiprocessing", "subprocess", "concurrent", "ctypes", "socket")


@dataclass(frozen=True)
class Finding:
    """One remark about a file."""

    severity: str  # "refused" by the contest, or "look"
    rule: str
    line: int  # 0: the whole file
    text: str

    def show(self, name: str) -> str:
        return f"{name}:{self.line}: {self.severity}: {self.rule}: {self.text}"


def lint_bytes(content: bytes) -> list[Finding]:
    """All findings for a file's content, refusals first."""
    if not content.strip():
        return [Finding(REFUSED, "empty", 0, "the file is empty")]
    findings: list[Finding] = []
    if len(content) > MAX_BYTES:
        # Nothing else is worth the time that a file of any size may take.
        return [Finding(REFUSED, "size", 0, f"{len(content)} bytes, the contest takes {MAX_BYTES} at most")]
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        return [*findings, Finding(REFUSED, "encoding", line, f"not UTF-8: {error.reason} at byte {error.start}")]
    findings += _text_rules(text)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", 0) or 0
        findings.append(Finding(REFUSED, "syntax", line, str(error) or "nested too deeply"))
    else:
        findings += _tree_rules(tree)
    return sorted(findings, key=lambda f: (f.severity != REFUSED, f.line, f.rule))


def _text_rules(text: str) -> Iterator[Finding]:
    lines = text.split("\n")
    for number, expected in enumerate(DIRECTIVES, 1):
        got = lines[number - 1].rstrip("\r") if len(lines) >= number else ""
        if got != expected:
            yield Finding(REFUSED, "directive", number, f"expected `{expected}`")
    for number, line in enumerate(lines, 1):
        if BANNED_WORD in line.lower():
            yield Finding(REFUSED, "banned word", number, f'the server refuses any file with "{BANNED_WORD}" in it')
        if re.search(r"POPCORN_(FD|SEED)", line):
            yield Finding(LOOK, "mode sniffing", number, "names a variable of the contest's runner")
        if re.search(r"/proc/(self|\d|\{|%|\")", line):
            yield Finding(LOOK, "mode sniffing", number, "reads /proc")


def _dotted(node: ast.AST) -> str:
    """`a.b.c` for an attribute chain, else an empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _tree_rules(tree: ast.Module) -> Iterator[Finding]:
    defines = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assigned = {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    imported = {a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    if "custom_kernel" not in defines | assigned | imported:
        yield Finding(REFUSED, "entry point", 0, "no function `custom_kernel` at the top level")
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                if top in HARNESS_MODULES:
                    yield Finding(LOOK, "harness import", line, f"imports `{name}`, a module of the evaluator")
                elif top in LAUNCHERS:
                    yield Finding(LOOK, "side work", line, f"imports `{name}`: work outside the timed call?")
                elif top == "importlib":
                    yield Finding(LOOK, "dynamic code", line, "imports `importlib`")
        elif isinstance(node, ast.Attribute) and _dotted(node) in SNIFFING:
            yield Finding(LOOK, "sniffing", line, SNIFFING[_dotted(node)])
        elif isinstance(node, ast.Attribute) and node.attr == "_version":
            yield Finding(LOOK, "replay", line, "reads a tensor's version counter: does it reuse results?")
        elif isinstance(node, ast.Attribute) and node.attr in ("CUDAGraph", "graph") and "cuda" in _dotted(node):
            yield Finding(LOOK, "replay", line, "captures a graph: do its inputs follow the call's?")
        elif isinstance(node, ast.Call):
            yield from _call_rules(node, line)
        elif isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                name = _dotted(target)
                if isinstance(target, ast.Attribute) and name.split(".")[0] in PATCHABLE and "backends" not in name:
                    yield Finding(LOOK, "patching", line, f"assigns to `{name}`")


def _call_rules(node: ast.Call, line: int) -> Iterator[Finding]:
    name = _dotted(node.func)
    if name in ("exec", "eval", "compile", "__import__"):
        yield Finding(LOOK, "dynamic code", line, f"calls `{name}`")
    elif name == "id":
        yield Finding(LOOK, "replay", line, "calls `id`: an object's identity says nothing about its content")
    elif name == "setattr" and node.args and _dotted(node.args[0]).split(".")[0] in PATCHABLE:
        yield Finding(LOOK, "patching", line, f"sets an attribute of `{_dotted(node.args[0])}`")
    elif isinstance(node.func, ast.Attribute) and node.func.attr == "data_ptr":
        yield Finding(LOOK, "replay", line, "calls `data_ptr`: an address says nothing about the content")


def kernelguard_findings(content: bytes) -> tuple[list[Finding], str]:
    """What the contest's own scanner says: (findings, one line about it); nothing where it is not installed."""
    if len(content) > MAX_BYTES:
        return [], "kernelguard was not asked: the file is too large"
    beside = Path(sys.executable).with_name("kernelguard")
    tool = str(beside) if beside.exists() else shutil.which("kernelguard")
    if tool is None:
        return [], "kernelguard is not installed (pip install kernelguard)"
    try:
        done = subprocess.run([tool, "--api-mode"], input=content, capture_output=True, timeout=60, check=True)
        answer = json.loads(done.stdout)
        verdict = str(answer["classification"])
        patterns = answer.get("matched_patterns") or []
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        return [], f"kernelguard did not answer: {type(error).__name__}"
    severity = LOOK if verdict == "valid" else REFUSED
    found = [Finding(severity, "kernelguard", 0, f"{p.get('pattern')}: {p.get('evidence')}") for p in patterns]
    if verdict != "valid" and not found:
        found = [Finding(REFUSED, "kernelguard", 0, f"classified as {verdict}")]
    return found, f"kernelguard: {verdict}"


def main(argv: list[str]) -> int:
    """Lint files; 1 when the contest would refuse one of them."""
    if not argv:
        print("usage: python -m evalkit.lint FILE...", file=sys.stderr)
        return 2
    refused = False
    for name in argv:
        try:
            content = Path(name).read_bytes()
        except OSError as error:
            print(f"{name}: {error.strerror}", file=sys.stderr)
            return 2
        guarded, remark = kernelguard_findings(content)
        findings = [*lint_bytes(content), *guarded]
        for finding in findings:
            print(finding.show(name))
        bad = any(f.severity == REFUSED for f in findings)
        print(f"{name}: {'the contest would refuse it' if bad else 'nothing the contest refuses'}; {remark}")
        refused = refused or bad
    return int(refused)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
