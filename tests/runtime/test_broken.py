"""An error that left part of the gradient, caught within the transaction: it can only fail then."""

# ruff: noqa: PT012, SIM117
# What raises is a transaction, and a transaction is a block.

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from longstraw.errors import CapacityError, LongstrawError, TransactionStateError
from longstraw.runtime.transaction_state import TransactionState
from tests.parity.models import lane_loss, replay_group, settings
from tests.runtime.bench import GROUP, Bench, Mistake
from tests.runtime.faults import Fuse, out_of_memory_in_backward

pytestmark = pytest.mark.usefixtures("no_stream_stays_open")


@pytest.mark.parametrize("number", [0, 1])
def test_a_lane_that_found_no_memory(number: int) -> None:
    bench = Bench()
    with pytest.raises(
        TransactionStateError, match=r"lane\.backward failed \(CapacityError.*left part of its gradient"
    ):
        with bench.txn as txn:
            for at, lane in enumerate(txn.replay(GROUP.responses)):
                fuse = Fuse(above=4) if at == number else Fuse()
                with out_of_memory_in_backward(bench.model, fuse):
                    try:
                        lane.backward(lane_loss(GROUP, lane))
                    except CapacityError:
                        continue
    bench.assert_undone()
    bench.assert_succeeds()


def test_every_call_after_it_says_so() -> None:
    bench = Bench()
    with pytest.raises(CapacityError), bench.txn as txn:
        for lane in txn.replay(GROUP.responses):
            with out_of_memory_in_backward(bench.model, Fuse(above=4)):
                with pytest.raises(CapacityError) as caught:
                    lane.backward(lane_loss(GROUP, lane))
            break
        for call in (txn.sweep, lambda: txn.score(GROUP.responses), lambda: txn.replay(GROUP.responses)):
            with pytest.raises(TransactionStateError, match="leave the transaction with that error"):
                call()
        assert txn.state is TransactionState.BROKEN
        raise caught.value
    with pytest.raises(TransactionStateError, match="score: the transaction is FAILED"):
        txn.score(GROUP.responses)
    bench.assert_undone()
    bench.assert_succeeds()


def test_a_sweep_that_found_no_memory() -> None:
    bench = Bench(config=settings(capture={"chunk_tokens": 1}))
    with pytest.raises(TransactionStateError, match=r"sweep failed \(CapacityError"), bench.txn as txn:
        replay_group(txn, GROUP)
        with out_of_memory_in_backward(bench.model, Fuse(above=0)), pytest.raises(CapacityError):
            txn.sweep()
    bench.assert_undone()
    bench.assert_succeeds()


def test_a_sweep_that_was_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second sweep would add the first one's chunks once more."""
    bench = Bench()

    def progress(phase: str, chunks: list[Any]) -> Iterator[Any]:
        for number, chunk in enumerate(chunks):
            if phase == "sweep" and number == 2:
                raise Mistake
            yield chunk

    with monkeypatch.context() as patch, pytest.raises(TransactionStateError, match=r"sweep failed \(Mistake"):
        patch.setattr(bench.runtime._engine, "progress", progress)
        with bench.txn as txn:
            replay_group(txn, GROUP)
            with pytest.raises(Mistake):
                txn.sweep()
    bench.assert_undone()
    bench.assert_succeeds()


def test_a_loss_that_was_refused_breaks_nothing() -> None:
    bench = Bench()
    with bench.txn as txn:
        for lane in txn.replay(GROUP.responses):
            with pytest.raises(LongstrawError):
                lane.backward(lane.logprobs[0].sum().detach())
            lane.backward(lane_loss(GROUP, lane))
    bench.assert_right(GROUP)


@contextmanager
def mistake_in_forward(bench: Bench, at_call: int) -> Iterator[None]:
    """Within it the model's second layer raises at one forward pass of its, from 0."""
    calls = itertools.count()

    def fail(*args: Any) -> None:
        if next(calls) == at_call:
            raise Mistake

    hook = bench.model.model.layers[1].mlp.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_that_ends_the_loop_of_replay(number: int) -> None:
    bench = Bench()
    with pytest.raises(TransactionStateError, match=r"replay failed \(Mistake.*left part of its gradient"):
        with bench.txn as txn, mistake_in_forward(bench, number):
            with pytest.raises(Mistake):
                replay_group(txn, GROUP)
            assert txn.state is TransactionState.BROKEN
    bench.assert_undone()
    bench.assert_succeeds()


def test_another_replay_does_not_make_up_for_it() -> None:
    bench = Bench()
    with pytest.raises(Mistake), bench.txn as txn:
        with mistake_in_forward(bench, 1), pytest.raises(Mistake) as caught:
            replay_group(txn, GROUP)
        with pytest.raises(TransactionStateError, match=r"replay: replay failed \(Mistake"):
            replay_group(txn, GROUP)
        raise caught.value
    bench.assert_undone()
    bench.assert_succeeds()


class BreaksBackward(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise Mistake


def test_a_loss_that_failed_behind_a_parameters_own_term() -> None:
    """The term's gradient has arrived when the loss fails, and a second try would add it again."""
    bench = Bench()
    with pytest.raises(TransactionStateError, match=r"lane\.backward failed \(Mistake"), bench.txn as txn:
        for lane in txn.replay(GROUP.responses):
            # Of two branches of a graph, autograd runs the one that was made last first.
            failing = BreaksBackward.apply(lane.logprobs[0]).sum()
            with pytest.raises(Mistake):
                lane.backward(failing + 3 * bench.model.model.norm.weight.square().sum())
            assert txn.state is TransactionState.BROKEN
            break
    bench.assert_undone()
    bench.assert_succeeds()


def test_a_loss_that_failed_alone_can_be_replaced() -> None:
    bench = Bench()
    with bench.txn as txn:
        for lane in txn.replay(GROUP.responses):
            with pytest.raises(Mistake):
                lane.backward(BreaksBackward.apply(lane.logprobs[0]).sum())
            lane.backward(lane_loss(GROUP, lane))
    bench.assert_right(GROUP)


def test_a_loss_of_parameters_alone_leaves_no_gradient() -> None:
    bench = Bench()
    with bench.txn as txn:
        for lane in txn.replay(GROUP.responses):
            with pytest.raises(TransactionStateError, match="does not depend on this lane"):
                lane.backward(bench.model.model.norm.weight.square().sum())
            lane.backward(lane_loss(GROUP, lane))
    bench.assert_right(GROUP)


def test_lanes_of_an_attempt_that_failed() -> None:
    bench = Bench()
    with pytest.raises(Mistake), bench.txn as txn:
        lanes = txn.replay(GROUP.responses)
        first = next(lanes)
        raise Mistake
    with bench.txn as txn:
        with pytest.raises(TransactionStateError, match="of an attempt at the transaction that failed"):
            next(lanes)
        with pytest.raises(TransactionStateError, match="is over"):
            first.backward(first.logprobs[0].sum())
        replay_group(txn, GROUP)
    bench.assert_right(GROUP)
