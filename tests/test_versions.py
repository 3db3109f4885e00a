"""What the files may use of Python and its libraries; other releases are run by `sh do.sh versions`."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(
    path
    for path in ROOT.rglob("*.py")
    if not any(part.startswith(".") or part == "tests" for part in path.relative_to(ROOT).parts)
)
OLDEST = (3, 10)

# What the standard library got after 3.10, as far as code of this kind could want it.
NEWER = {
    "asyncio": {"TaskGroup", "timeout", "Runner"},
    "contextlib": {"chdir"},
    "copy": {"replace"},
    "datetime": {"UTC"},
    "enum": {"StrEnum", "ReprEnum", "verify", "member", "nonmember"},
    "hashlib": {"file_digest"},
    "inspect": {"getasyncgenstate", "BufferFlags", "markcoroutinefunction"},
    "itertools": {"batched"},
    "logging": {"getLevelNamesMapping", "getHandlerByName"},
    "math": {"cbrt", "exp2", "sumprod", "fma"},
    "operator": {"call"},
    "os": {"process_cpu_count"},
    "pathlib": {"UnsupportedOperation"},
    "re": {"NOFLAG"},
    "sys": {"exception", "monitoring", "activate_stack_trampoline"},
    "threading": {"setprofile_all_threads", "settrace_all_threads"},
    "types": {"get_original_bases", "CapsuleType"},
    "typing": {
        "Self", "Never", "LiteralString", "NotRequired", "Required", "TypeVarTuple", "Unpack", "assert_never",
        "assert_type", "reveal_type", "override", "TypeAliasType", "ReadOnly", "TypeIs", "NoDefault",
        "dataclass_transform",
    },
    "warnings": {"deprecated"},
}  # fmt: skip
NEWER_MODULES = {"tomllib", "wsgiref.types", "compression", "annotationlib", "concurrent.interpreters"}
NEWER_BUILTINS = {"ExceptionGroup", "BaseExceptionGroup", "EncodingWarning", "PythonFinalizationError"}


def too_new(text: str) -> list[str]:
    """Uses of what only Pythons after 3.10 have, syntax apart."""
    found, modules = [], {}
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.asname or alias.name] = alias.name
                found += [alias.name] * (alias.name in NEWER_MODULES)
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] * (node.module in NEWER_MODULES)
            names = NEWER.get(node.module or "", set())
            found += [f"{node.module}.{alias.name}" for alias in node.names if alias.name in names]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            found += [f"{module}.{node.attr}"] * (module in NEWER and node.attr in NEWER[module])
        elif isinstance(node, ast.Name):
            found += [node.id] * (node.id in NEWER_BUILTINS)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_syntax_is_that_of_the_oldest_python(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=OLDEST)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_library_is_that_of_the_oldest_python(path: Path) -> None:
    assert too_new(path.read_text()) == []


def test_the_checks_see_what_is_newer() -> None:
    with pytest.raises(SyntaxError):
        ast.parse("try:\n    pass\nexcept* OSError:\n    pass\n", feature_version=OLDEST)
    text = (
        "import math, typing as t, tomllib\nfrom enum import StrEnum\nmath.exp2(t.Self)\nmath.exp(1)\nExceptionGroup\n"
    )
    assert sorted(too_new(text)) == ["ExceptionGroup", "enum.StrEnum", "math.exp2", "tomllib", "typing.Self"]


def test_linter_and_metadata_name_the_same_oldest_python() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^requires-python = ">=3.10"$', project, re.M)
    assert re.search(r'^target-version = "py310"$', project, re.M)
    assert "Python 3.10 or newer" in (ROOT / "README.md").read_text()


def test_documented_releases_are_those_that_are_run() -> None:
    """The README's table names every release that `sh do.sh versions` installs."""
    spec = importlib.util.spec_from_file_location("versions", ROOT / "tests" / "versions.py")
    assert spec is not None and spec.loader is not None
    versions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(versions)
    table = (ROOT / "README.md").read_text().partition("## What is tested how")[2]
    assert [release for release in versions.RELEASES if release.partition("==")[2] not in table] == []
    assert all((ROOT / "tests" / name).is_file() for names in versions.TESTS.values() for name in names)
