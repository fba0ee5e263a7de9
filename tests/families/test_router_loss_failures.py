"""The routers' auxiliary loss where passes fail or weights change, and where a term of it is left out."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from longstraw import Runtime
from longstraw.runtime.branches import PackedBranches
from longstraw.runtime.passes import ForwardPass
from longstraw.runtime.router_loss import RouterLoss
from tests.families.router_loss import (
    GROUP,
    asked_for,
    check,
    plain_aux_step,
    replay_aux,
)
from tests.families.test_gated_delta import exact_oracle, rechunked  # noqa: F401
from tests.families.windowed_models import windowed_model
from tests.parity.models import (
    assert_parity,
    make_group,
    settings,
)
from tests.runtime.faults import Fuse, out_of_memory_in_forward


@pytest.mark.parametrize("lane_tokens", [20, 100], ids=["two lanes", "one lane"])
def test_lanes_that_run_out_of_memory_are_counted_and_run_narrower(lane_tokens: int) -> None:
    model = asked_for(windowed_model("qwen3_moe"))
    reference = copy.deepcopy(model)
    expected = plain_aux_step(reference, GROUP)
    config = settings(replay={"lane_tokens": lane_tokens})
    with Runtime(model, config).transaction(GROUP.prompt) as txn:
        # The longest branch has 12 tokens, and the one behind them. However two lanes are cut, one is wider.
        with out_of_memory_in_forward(model, Fuse(above=13)):
            found = replay_aux(txn, GROUP)
        assert txn.report.retries > 0
        assert "count" in txn.report.seconds
    assert found == pytest.approx(expected, rel=1e-6)
    assert_parity(model, reference)


@pytest.mark.parametrize("fails", [1, 2])
def test_a_backward_that_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
    """The lanes are run again, with what each was told, in lanes that mix two groups."""
    model = asked_for(windowed_model("qwen3_moe"))
    reference = copy.deepcopy(model)
    other = dataclasses.replace(make_group(61, (4, 9), 3), prompt=GROUP.prompt)
    plain_aux_step(reference, GROUP)
    plain_aux_step(reference, other, 0.5)
    runtime = Runtime(model, settings(replay={"lane_tokens": 60}))
    backward, calls = type(runtime._engine.sharding).backward, []

    def fused(self: Any, out: Tensor, gradient: Tensor) -> None:
        backward(self, out, gradient)
        calls.append(1)
        if len(calls) == fails:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(type(runtime._engine.sharding), "backward", fused)
    with runtime.transaction(GROUP.prompt) as txn:
        replay_aux(txn, GROUP)
        replay_aux(txn, other, 0.5)
    assert txn.report.retries > 0
    assert_parity(model, reference)


def test_a_sweep_that_runs_out_of_memory() -> None:
    model = asked_for(windowed_model("mixtral"))
    reference = copy.deepcopy(model)
    plain_aux_step(reference, GROUP)
    with Runtime(model, settings()).transaction(GROUP.prompt) as txn:
        replay_aux(txn, GROUP)
        with out_of_memory_in_forward(model, Fuse(at_call=1)):
            txn.sweep()
        assert txn.report.retries == 1
    assert_parity(model, reference)


def test_weights_that_changed_since_the_score_are_counted_anew() -> None:
    model = asked_for(windowed_model("qwen3_moe"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Runtime(model, settings(), staleness=1).transaction(GROUP.prompt) as txn:
        txn.score(GROUP.responses)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        replay_aux(txn, GROUP)
    assert "count" in txn.report.seconds


def test_a_failed_transaction_starts_afresh() -> None:
    model = asked_for(windowed_model("qwen3_moe"))
    reference = copy.deepcopy(model)
    plain_aux_step(reference, GROUP)
    txn = Runtime(model, settings()).transaction(GROUP.prompt)
    with pytest.raises(KeyError), txn:  # noqa: PT012
        replay_aux(txn, GROUP)
        raise KeyError
    assert not any(module._forward_hooks for module in model.modules() if type(module).__name__.endswith("Router"))
    with txn:
        replay_aux(txn, GROUP)
    assert_parity(model, reference)


def test_a_prompt_whose_last_layer_is_not_finished_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the prompt's state is wanted of the last layer otherwise, and its attention is left out."""
    unused = ForwardPass.output_unused

    def forgetful(self: Any, index: int) -> bool:
        routers, self.routers = self.routers, None
        try:
            return unused(self, index)
        finally:
            self.routers = routers

    monkeypatch.setattr(ForwardPass, "output_unused", forgetful)
    with pytest.raises(AssertionError):
        check(asked_for(windowed_model("qwen3_moe")))


def test_responses_whose_last_token_is_not_routed_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PackedBranches.__init__
    monkeypatch.setattr(PackedBranches, "__init__", lambda self, *args, whole: original(self, *args, whole=False))
    with pytest.raises(AssertionError):
        check(asked_for(windowed_model("qwen3_moe")))


def test_prompt_tokens_that_count_once_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RouterLoss.add_prompt_share
    monkeypatch.setattr(RouterLoss, "add_prompt_share", lambda self, worth_N, rows: original(self, worth_N, 1))
    with pytest.raises(AssertionError):
        check(asked_for(windowed_model("qwen3_moe")))
