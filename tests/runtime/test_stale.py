"""Weights, adapters and dtypes that change between capture and use raise, or are allowed and measured."""

# ruff: noqa: PT012, SIM117
# What raises is a transaction, and a transaction is a block.

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from longstraw import Runtime
from longstraw.errors import StaleWeightsError
from tests.parity.models import (
    SMALL,
    add_lora,
    assert_idle,
    build,
    make_group,
    replay_group,
    settings,
)

GROUP = make_group(61, (7, 1, 12, 5))


def optimizer_step(model: Any) -> None:
    """One step of SGD on gradients of one, `.grad` left empty."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()


def load(model: Any) -> None:
    state = io.BytesIO()
    torch.save(model.state_dict(), state)
    state.seek(0)
    model.load_state_dict(torch.load(state))


@torch.no_grad()
def copy_into(model: Any) -> None:
    model.model.norm.weight.copy_(model.model.norm.weight * 2)


def assign(model: Any) -> None:
    model.model.norm.weight.data = model.model.norm.weight.data.clone()


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "optimizer step": (optimizer_step, r"1 optimizer step.*staleness allows 0"),
    "load_state_dict": (load, r"not by an optimizer step"),
    "copy_": (copy_into, r"model\.norm\.weight changed"),
    "data assigned": (assign, r"model\.norm\.weight changed"),
    "cast": (lambda model: model.float(), r"float64 to torch\.float32"),
}


@pytest.mark.parametrize("change", sorted(CHANGES))
@pytest.mark.parametrize("call", ["score", "replay"])
def test_changed_weights_between_capture_and_use(change: str, call: str) -> None:
    model = build("llama")
    runtime = Runtime(model, SMALL)
    with pytest.raises(StaleWeightsError, match=CHANGES[change][1]), runtime.transaction(GROUP.prompt) as txn:
        CHANGES[change][0](model)
        getattr(txn, call)(GROUP.responses)
    assert_idle(runtime)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("change", ["optimizer step", "copy_"])
@pytest.mark.parametrize("call", ["backward", "next lane", "sweep", "exit"])
def test_changed_weights_later_in_the_transaction(change: str, call: str) -> None:
    model = build("llama")
    runtime = Runtime(model, SMALL)
    with pytest.raises(StaleWeightsError), runtime.transaction(GROUP.prompt) as txn:
        lanes = txn.replay(GROUP.responses)
        lane = next(lanes)
        if call == "backward":
            CHANGES[change][0](model)
        lane.backward(lane.logprobs[0].sum())
        kept = {p: p.grad for p in model.parameters()}
        CHANGES[change][0](model)
        for p, gradient in kept.items():
            p.grad = gradient
        if call == "next lane":
            next(lanes)
        elif call == "sweep":
            txn.sweep()
    assert_idle(runtime)


@pytest.mark.parametrize("change", ["optimizer step", "copy_"])
def test_changed_weights_behind_the_sweep(change: str) -> None:
    """`.grad` is as it was on entry until the exit: a step before it was one without this gradient."""
    model = build("llama")
    runtime = Runtime(model, SMALL)
    with pytest.raises(StaleWeightsError, match="leaving the transaction"):
        with runtime.transaction(GROUP.prompt) as txn:
            replay_group(txn, GROUP)
            txn.sweep()
            CHANGES[change][0](model)
            model.zero_grad()
    assert_idle(runtime)
    assert all(p.grad is None for p in model.parameters())


def test_an_optimizer_of_another_model_is_nobodys_business() -> None:
    model, other = build("llama"), build("llama", seed=3)
    with Runtime(model, SMALL).transaction(GROUP.prompt) as txn:
        optimizer_step(other)
        replay_group(txn, GROUP)


def test_staleness_allows_so_many_steps_and_the_report_says_how_far() -> None:
    model = build("llama")
    runtime = Runtime(model, settings(staleness=1))
    with runtime.transaction(GROUP.prompt) as txn:
        txn.score(GROUP.responses)
        optimizer_step(model)
        replay_group(txn, GROUP)
    assert txn.report.stale_steps == 1
    drift_mean, drift_max = txn.report.drift_mean, txn.report.drift_max
    assert drift_mean is not None
    assert drift_max is not None
    assert 0 < drift_mean < drift_max
    with pytest.raises(StaleWeightsError, match=r"2 optimizer step.*staleness allows 1"):
        with runtime.transaction(GROUP.prompt) as txn:
            optimizer_step(model)
            optimizer_step(model)
            txn.replay(GROUP.responses)


def test_staleness_does_not_allow_other_changes() -> None:
    model = build("llama")
    with pytest.raises(StaleWeightsError), Runtime(model, settings(staleness=5)).transaction(GROUP.prompt) as txn:
        copy_into(model)
        txn.replay(GROUP.responses)


@torch.no_grad()
def change_lora(model: Any) -> None:
    model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.mul_(1.5)


def scale_lora(model: Any) -> None:
    model.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] *= 2


ADAPTER_CHANGES: dict[str, Callable[[Any], Any]] = {
    "weights": change_lora,
    "scaling": scale_lora,
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "another": lambda model: (model.add_adapter("second", model.peft_config["default"]), model.set_adapter("second")),
    "merged": lambda model: model.merge_adapter(),
    "optimizer": optimizer_step,
}


@pytest.mark.parametrize("change", sorted(ADAPTER_CHANGES))
@pytest.mark.parametrize("call", ["score", "replay"])
def test_a_changed_adapter(change: str, call: str) -> None:
    model = add_lora(build("llama"))
    runtime = Runtime(model, SMALL)
    with pytest.raises(StaleWeightsError), runtime.transaction(GROUP.prompt) as txn:
        ADAPTER_CHANGES[change](model)
        getattr(txn, call)(GROUP.responses)
    assert_idle(runtime)
