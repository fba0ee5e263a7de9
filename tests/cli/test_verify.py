"""`longstraw verify` on a tiny model: what passes, what fails, and what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longstraw.errors import ConfigError


@pytest.mark.parametrize("mode", ["exact", "detached"])
def test_passes(invoke: Callable[..., Any], tiny_llama: Path, tmp_path: Path, mode: str) -> None:
    out = tmp_path / "out.json"
    result = invoke("verify", tiny_llama, "--dtype", "float64", "--mode", mode, "--json", out)
    assert result.exit_code == 0, result.output
    assert "passed" in result.stdout
    found = json.loads(out.read_text())
    assert found["passed"] is True
    # Tied embeddings are one parameter.
    assert len(found["differences"]) == 2 * 9 + 2
    assert found["config"]["gradient"]["prompt"] == mode
    assert max(d["relative"] for d in found["differences"]) < 1e-6


@pytest.mark.parametrize(("dtype", "why"), [("float64", "take no float64"), ("float32", "has one of 42 in float32")])
def test_experts_that_grouped_products_do_not_take(
    invoke: Callable[..., Any], tiny_mixture: Path, dtype: str, why: str
) -> None:
    result = invoke("verify", tiny_mixture, "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert "experts ran in a loop (experts_implementation='eager'), on both sides" in result.stdout
    assert why in result.stdout


def test_fails_with_status_1(invoke: Callable[..., Any], tiny_llama: Path) -> None:
    result = invoke("verify", tiny_llama, "--tolerance", "1e-30")
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert "as asked" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mode", "approximate"], "--mode approximate: use exact or detached"),
        (["--dtype", "int8"], "--dtype int8: use one of float64"),
        (["--device", "tpu:0"], "--device tpu:0"),
        (["--device", "cuda:99"], "--device cuda:99: torch sees"),
        (["--prompt-tokens", "1"], "--prompt-tokens 1 is too small; use at least 2"),
        (["--tolerance", "0"], "--tolerance 0.0 must be above 0"),
        (["--gguf-file", "none.gguf"], "--gguf-file none.gguf: no such file"),
    ],
)
def test_mistakes(invoke: Callable[..., Any], tiny_llama: Path, arguments: list[str], words: str) -> None:
    result = invoke("verify", tiny_llama, *arguments)
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)
