"""Calls out of order, lanes left behind, transactions that meet: each raises and says what to do, or adds up."""

# ruff: noqa: PT012, SIM117
# What raises is a transaction, and a transaction is a block.

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch

from longstraw import Runtime
from longstraw.errors import TransactionStateError
from longstraw.objectives import dpo_loss
from tests.parity.models import (
    SMALL,
    assert_idle,
    assert_parity,
    build,
    check_parity,
    lane_loss,
    make_group,
    paged_step,
    plain_step,
    replay_group,
)

GROUP = make_group(61, (7, 1, 12, 5))
OTHER = make_group(30, (3, 1, 6), 4)


def test_before_entering_and_after_leaving() -> None:
    txn = Runtime(build("llama"), SMALL).transaction(GROUP.prompt)
    for call in (txn.score, txn.replay):
        with pytest.raises(TransactionStateError, match="OPEN"):
            call(GROUP.responses)
    with txn:
        replay_group(txn, GROUP)
    for call in (txn.score, txn.replay):
        with pytest.raises(TransactionStateError, match="CLOSED"):
            call(GROUP.responses)
    with pytest.raises(TransactionStateError, match="CLOSED"):
        txn.sweep()


def test_lanes_asked_for_after_the_end() -> None:
    model = build("llama")
    with Runtime(model, SMALL).transaction(GROUP.prompt) as txn:
        lanes = txn.replay(GROUP.responses)
        lane = next(lanes)
        lane.backward(lane.logprobs[0].sum())
    before = model.lm_head.weight.grad.clone()
    with pytest.raises(TransactionStateError):
        next(lanes)
    with pytest.raises(TransactionStateError):
        lane.backward(lane.logprobs[0].sum())
    assert torch.equal(model.lm_head.weight.grad, before)


def test_a_second_backward_on_a_lane() -> None:
    runtime = Runtime(build("llama"), SMALL)
    with pytest.raises(TransactionStateError, match="over"), runtime.transaction(GROUP.prompt) as txn:
        for lane in txn.replay(GROUP.responses):
            lane.backward(lane.logprobs[0].sum())
            lane.backward(lane.logprobs[0].sum())
    assert_idle(runtime)


def test_backward_by_hand() -> None:
    runtime = Runtime(build("llama"), SMALL)
    with pytest.raises(TransactionStateError, match="by hand"), runtime.transaction(GROUP.prompt) as txn:
        for lane in txn.replay(GROUP.responses):
            lane.logprobs[0].sum().backward()


def test_backward_by_hand_and_then_properly() -> None:
    runtime = Runtime(build("llama"), SMALL)
    with pytest.raises(TransactionStateError, match="by hand"), runtime.transaction(GROUP.prompt) as txn:
        for lane in txn.replay(GROUP.responses):
            lane.logprobs[0].sum().backward()
            lane.backward(lane.logprobs[0].sum())


def test_a_lane_left_without_backward() -> None:
    runtime = Runtime(build("llama"), SMALL)
    with pytest.raises(TransactionStateError, match="left without a gradient"):
        with runtime.transaction(GROUP.prompt) as txn:
            for _ in txn.replay(GROUP.responses):
                pass
    assert_idle(runtime)


def test_leaving_a_loop_with_a_lane_open() -> None:
    runtime = Runtime(build("llama"), SMALL)
    with pytest.raises(TransactionStateError, match="left without a gradient"):
        with runtime.transaction(GROUP.prompt) as txn:
            for _ in txn.replay(GROUP.responses):
                break
    assert_idle(runtime)


def test_leaving_a_loop_after_backward_trains_what_was_replayed() -> None:
    model = build("llama")
    reference = copy.deepcopy(model)
    with Runtime(model, SMALL).transaction(GROUP.prompt) as txn:
        for lane in txn.replay(GROUP.responses):
            lane.backward(lane_loss(GROUP, lane))
            break
    seen = set(lane.indices)
    assert (txn.report.branches, txn.report.left_out) == (len(seen), len(GROUP.responses) - len(seen))
    plain_step(reference, [dataclasses.replace(GROUP, loss=lambda i, x, h: GROUP.loss(i, x, h) * (i in seen))])
    assert 0 < len(seen) < len(GROUP.responses)
    assert_parity(model, reference)


@pytest.mark.parametrize("looped_before", [False, True])
def test_a_replay_that_nobody_loops_over(looped_before: bool) -> None:
    runtime = Runtime(build("llama"), SMALL)
    with pytest.raises(TransactionStateError, match="none of its lanes was asked for"):
        with runtime.transaction(GROUP.prompt) as txn:
            if looped_before:
                for lane in txn.replay(GROUP.responses):
                    lane.backward(lane_loss(GROUP, lane))
            txn.replay(GROUP.responses)
    assert_idle(runtime)


def test_a_skipped_lane_is_left_out() -> None:
    model = build("llama")
    reference, skipped = copy.deepcopy(model), set()
    with Runtime(model, SMALL).transaction(GROUP.prompt) as txn:
        for number, lane in enumerate(txn.replay(GROUP.responses)):
            if number == 0:
                lane.skip()
                skipped |= set(lane.indices)
                continue
            lane.backward(torch.stack([x.sum() for x in lane.logprobs]).sum())
    plain_step(reference, [dataclasses.replace(GROUP, loss=lambda i, x, h: x.sum() * (i not in skipped))])
    assert_parity(model, reference)


def test_all_lanes_skipped_gives_no_gradient() -> None:
    model = build("llama")
    with Runtime(model, SMALL).transaction(GROUP.prompt) as txn:
        for lane in txn.replay(GROUP.responses):
            lane.skip()
    assert all(p.grad is None for p in model.parameters())


def test_a_transaction_that_only_scores() -> None:
    model = build("llama")
    with Runtime(model, SMALL).transaction(GROUP.prompt) as txn:
        txn.score(GROUP.responses)
    assert all(p.grad is None for p in model.parameters())


def test_two_replays_in_one_transaction_add_up() -> None:
    model = build("llama")
    reference = copy.deepcopy(model)
    with Runtime(model, SMALL).transaction(GROUP.prompt) as txn:
        replay_group(txn, GROUP)
        txn.score(GROUP.responses)
        replay_group(txn, GROUP)
    plain_step(reference, [GROUP, GROUP])
    assert_parity(model, reference)


def test_losses_without_a_way_to_the_lane() -> None:
    runtime = Runtime(build("llama"), SMALL)
    for loss, text in (
        (torch.zeros(()), "no graph"),
        (torch.zeros((), requires_grad=True) * 2, "does not depend"),
        (torch.zeros(2, requires_grad=True) * 2, "scalar"),
    ):
        with pytest.raises(TransactionStateError, match=text), runtime.transaction(GROUP.prompt) as txn:
            for lane in txn.replay(GROUP.responses):
                lane.backward(loss)
    assert_idle(runtime)


@pytest.mark.parametrize("loss", [1.0, None, dpo_loss])
def test_a_loss_that_is_no_tensor(loss: Any) -> None:
    runtime = Runtime(build(), SMALL)
    with pytest.raises(TypeError, match=rf"lane\.backward: loss is a {type(loss).__name__}; .* have it as \.loss"):
        with runtime.transaction(GROUP.prompt) as txn:
            for lane in txn.replay(GROUP.responses):
                lane.backward(loss)
    assert_idle(runtime)


def test_a_loop_under_no_grad() -> None:
    with torch.no_grad(), pytest.raises(TransactionStateError, match=r"outside torch\.no_grad\(\)"):
        with Runtime(build(), SMALL).transaction(GROUP.prompt) as txn:
            replay_group(txn, GROUP)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_runtime_is_not_copied(copied: Any) -> None:
    with pytest.raises(TypeError, match="a Runtime cannot be copied or pickled"):
        copied(Runtime(build(), SMALL))


def test_accumulate_is_not_nested() -> None:
    runtime = Runtime(build("llama"), SMALL)
    with runtime.accumulate(), pytest.raises(TransactionStateError, match="already inside"), runtime.accumulate():
        pass
    with runtime.accumulate():
        pass


# Several transactions and runtimes on one model


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_two_captures_at_once_replayed_one_after_another(dtype: torch.dtype) -> None:
    model = build("llama", dtype=dtype)
    reference = copy.deepcopy(model)
    runtime = Runtime(model, SMALL)
    with runtime.transaction(GROUP.prompt) as outer:
        outer.score(GROUP.responses)
        with runtime.transaction(OTHER.prompt) as inner:
            replay_group(inner, OTHER)
        replay_group(outer, GROUP)
    plain_step(reference, [OTHER, GROUP])
    assert_parity(model, reference, 1e-6 if dtype == torch.float64 else 0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("same_runtime", [True, False])
def test_gradients_of_two_transactions_are_not_mixed(dtype: torch.dtype, same_runtime: bool) -> None:
    # Their backward passes would land in each other's sums.
    model = build("llama", dtype=dtype)
    runtime = Runtime(model, SMALL)
    second = runtime if same_runtime else Runtime(model, SMALL)
    with pytest.raises(TransactionStateError, match="another transaction"):
        with runtime.transaction(GROUP.prompt) as outer:
            replay_group(outer, GROUP)
            with second.transaction(OTHER.prompt) as inner:
                replay_group(inner, OTHER)
    assert all(p.grad is None for p in model.parameters())
    assert_idle(runtime)
    assert_idle(second)
    check_parity(model, [GROUP], tolerance=1e-6 if dtype == torch.float64 else 0.1)


def test_scoring_inside_a_transaction_that_is_replaying() -> None:
    model = build("llama")
    reference = copy.deepcopy(model)
    runtime = Runtime(model, SMALL)
    with runtime.transaction(GROUP.prompt) as txn:
        lanes = txn.replay(GROUP.responses)
        for lane in lanes:
            runtime.score(OTHER.prompt, OTHER.responses)
            lane.backward(lane_loss(GROUP, lane))
    plain_step(reference, [GROUP])
    assert_parity(model, reference)


def test_two_runtimes_on_one_model_one_after_another() -> None:
    model = build("qwen3")
    reference = copy.deepcopy(model)
    for _ in range(2):
        with Runtime(model, SMALL) as runtime:
            paged_step(runtime, [GROUP])
        plain_step(reference, [GROUP])
    assert_parity(model, reference)


def test_plain_training_between_transactions() -> None:
    model = build("qwen3")
    reference = copy.deepcopy(model)
    runtime = Runtime(model, SMALL)
    paged_step(runtime, [GROUP])
    plain_step(model, [OTHER])
    plain_step(reference, [GROUP, OTHER])
    assert_parity(model, reference)


def test_several_optimizer_steps_with_one_runtime() -> None:
    model = build("qwen3")
    reference = copy.deepcopy(model)
    runtime = Runtime(model, SMALL)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=1e-3) for m in (model, reference))
    for _ in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        paged_step(runtime, [GROUP, OTHER])
        plain_step(reference, [GROUP, OTHER])
        assert_parity(model, reference)
        ours.step()
        theirs.step()


def test_tensors_that_the_user_overwrites_during_the_transaction() -> None:
    model = build("llama")
    reference = copy.deepcopy(model)
    prompt, responses = GROUP.prompt.clone(), [r.clone() for r in GROUP.responses]
    with Runtime(model, SMALL).transaction(prompt) as txn:
        prompt.zero_()
        lanes = txn.replay(responses)
        for response in responses:
            response.zero_()
        for lane in lanes:
            lane.backward(lane_loss(GROUP, lane))
    plain_step(reference, [GROUP])
    assert_parity(model, reference)


def test_freezing_between_transactions_is_seen() -> None:
    model = build("llama")
    runtime = Runtime(model, SMALL)
    paged_step(runtime, [GROUP])
    model.zero_grad()
    model.model.embed_tokens.weight.requires_grad_(False)
    reference = copy.deepcopy(model)
    paged_step(runtime, [GROUP])
    plain_step(reference, [GROUP])
    assert_parity(model, reference)
