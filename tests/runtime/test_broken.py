"""An error that left part of the gradient, caught within the transaction: it can only fail then."""

# ruff: noqa: PT012, SIM117
# What raises is a transaction, and a transaction is a block.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

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
