"""Imports point one way, frameworks stay in `integrations`, and `resident` knows no device: read from the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import longstraw

ROOT = Path(longstraw.__path__[0])

_BASE = {"config", "errors"}
_PARTS = {"resident", "pagers", "collectives", "kernels"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "objectives": {"errors"},
    "resident": {"errors"},
    "collectives": {"errors"},
    "kernels": {"errors"},
    "pagers": {*_BASE, "resident"},
    "runtime": {*_BASE, *_PARTS},
    "planner": {*_BASE, *_PARTS, "runtime"},
    # A model's blueprint is what the planner asks of it, as the adapter is what the runtime does.
    "integrations": {*_BASE, *_PARTS, "runtime", "planner"},
}
"""For each part, which others it may import. What is not here (the public face, the commands) may import all of these,
and is imported by none of them."""

FRAMEWORK = re.compile(r"transformers|deepspeed|fsdp|accelerat(e\b|or\b)|peft|\bddp\b|zero_?[123]\b", re.IGNORECASE)

ENGINES = "pagers/engines"
"""Where DeepSpeed may be named and imported: its operations on files, which need no model, are a disk engine."""

MODEL_MAKERS = {"cli", "demo", "stress", "verify"}
"""Commands that load, make or run a model of transformers themselves."""


def sources(*parts: str) -> list[Path]:
    """Files of these parts of the package; all without."""
    found = sorted(ROOT.rglob("*.py"))
    return [path for path in found if not parts or part_of(path) in parts]


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def is_engine(path: Path) -> bool:
    return str(path.parent.relative_to(ROOT)) == ENGINES


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules that are imported when the code runs, inside functions too; those for annotations alone are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they point"
            yield node.module or ""
        else:
            yield from imports(node)


def words(tree: ast.AST) -> Iterator[str]:
    """Names and texts in the code; docstrings are not code."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        for field in ("id", "attr", "arg", "name", "module"):
            if isinstance(found := getattr(node, field, None), str):
                yield found
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        yield from words(node)


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_imports_point_one_way(part: str) -> None:
    found = sources(part)
    assert found
    for path in found:
        for module in imports(ast.parse(path.read_text())):
            if module.split(".")[0] == "longstraw":
                (_, other, *_) = [*module.split("."), "the package itself"]
                assert other == part or other in MAY_IMPORT[part], f"{path} imports {module}"


def test_resident_knows_no_device() -> None:
    for path in sources("resident"):
        tops = {module.split(".")[0] for module in imports(ast.parse(path.read_text()))}
        assert not tops & {"torch", "numpy", "cupy"}, path


def test_only_integrations_and_commands_that_run_a_model_import_frameworks() -> None:
    for path in sources():
        tops = {module.split(".")[0] for module in imports(ast.parse(path.read_text()))}
        frameworks = tops & {"transformers", "deepspeed", "accelerate", "peft"}
        allowed = part_of(path) == "integrations"
        if part_of(path) in MODEL_MAKERS:
            frameworks -= {"transformers"}
        if is_engine(path):
            frameworks -= {"deepspeed"}
        assert allowed or not frameworks, f"{path} imports {sorted(frameworks)}"


def test_no_framework_has_a_name_in_the_runtime_and_below() -> None:
    for path in sources("runtime", *_PARTS):
        named = {word for word in words(ast.parse(path.read_text())) if FRAMEWORK.search(word)}
        if is_engine(path):
            named = {word for word in named if "deepspeed" not in word.lower()}
        assert not named, f"{path}: {named}"


def test_what_is_found() -> None:
    code = (
        '"""Of transformers."""\n'
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import longstraw.runtime\n"
        "def call():\n    import torch.cuda\n    if is_fsdp2(x): raise ValueError(f'use {y} of DeepSpeed')\n"
    )
    tree = ast.parse(code)
    assert list(imports(tree)) == ["typing", "torch.cuda"]
    assert [word for word in words(tree) if FRAMEWORK.search(word)] == ["is_fsdp2", " of DeepSpeed"]
