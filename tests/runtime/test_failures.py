"""Whatever fails, `.grad` is as on entry, nothing is held, and the same transaction then succeeds."""

# ruff: noqa: PT012
# What raises is a transaction, and a transaction is a block.

from __future__ import annotations

from typing import Any

import pytest
import torch

from longstraw.errors import CapacityError, TransactionStateError
from longstraw.runtime.engine import Engine
from longstraw.runtime.ledger import GradientLedger
from longstraw.runtime.report import DriftMeter, Report
from longstraw.runtime.transaction_state import TransactionState
from tests.parity.models import assert_idle, make_group, paged_step, replay_group, settings
from tests.runtime.bench import GROUP, MODELS, Bench, Mistake

pytestmark = pytest.mark.usefixtures("no_stream_stays_open")


@pytest.mark.parametrize(
    ("kind", "error"),
    [("float64", Mistake), ("bfloat16", Mistake), ("lora", Mistake), ("float64", KeyboardInterrupt)],
)
@pytest.mark.parametrize("when", ["captured", "scored", "lane 0", "lane 0 done", "lane 1", "lanes done"])
def test_an_exception_of_the_users(kind: str, when: str, error: type[BaseException]) -> None:
    bench = Bench(kind)

    def fail(point: str) -> None:
        if point == when:
            raise error

    with pytest.raises(error), bench.txn as txn:
        fail("captured")
        txn.score(GROUP.responses)
        fail("scored")
        for number, lane in enumerate(txn.replay(GROUP.responses)):
            fail(f"lane {number}")
            lane.backward(torch.stack([x.sum() for x in lane.logprobs]).sum())
            fail(f"lane {number} done")
        fail("lanes done")
    bench.assert_undone()
    bench.assert_succeeds()


def test_an_exception_in_the_backward_of_the_users_loss() -> None:
    bench = Bench()

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise Mistake

    with pytest.raises(Mistake), bench.txn as txn:
        for lane in txn.replay(GROUP.responses):
            lane.backward(Broken.apply(lane.logprobs[0]))
    bench.assert_undone()
    bench.assert_succeeds()


def test_an_exception_after_a_parameter_got_a_gradient_directly() -> None:
    bench = Bench()
    with pytest.raises(Mistake), bench.txn as txn:
        for lane in txn.replay(GROUP.responses):
            lane.backward(lane.logprobs[0].sum() + bench.model.model.norm.weight.sum())
            raise Mistake
    bench.assert_undone()
    bench.assert_succeeds()


@pytest.mark.parametrize("kind", sorted(MODELS))
@pytest.mark.parametrize("inside", [True, False], ids=["in the second group", "between groups"])
def test_an_exception_inside_accumulate(kind: str, inside: bool) -> None:
    bench = Bench(kind)
    other = make_group(20, (3, 1, 4), 5)
    with pytest.raises(Mistake), bench.runtime.accumulate():
        paged_step(bench.runtime, [other])
        if not inside:
            raise Mistake
        with bench.txn as txn:
            for lane in txn.replay(GROUP.responses):
                lane.backward(lane.logprobs[0].sum())
                raise Mistake
    bench.assert_undone()
    with bench.runtime.accumulate():
        paged_step(bench.runtime, [other])
        with bench.txn:
            replay_group(bench.txn, GROUP)
    bench.assert_right(other, GROUP)


def test_a_group_that_failed_is_left_out_if_the_user_catches_it_inside_accumulate() -> None:
    bench = Bench()
    other = make_group(20, (3, 1, 4), 5)
    with bench.runtime.accumulate():
        paged_step(bench.runtime, [other])
        with pytest.raises(Mistake), bench.txn as txn:
            for lane in txn.replay(GROUP.responses):
                lane.backward(lane.logprobs[0].sum())
                raise Mistake
        assert_idle(bench.runtime)
    bench.assert_right(other)


def test_without_the_ledgers_rollback_a_failure_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(GradientLedger, "rollback", lambda self: None)
    with pytest.raises(Mistake), bench.txn as txn:
        for lane in txn.replay(GROUP.responses):
            lane.backward(lane.logprobs[0].sum())
            raise Mistake
    with pytest.raises(AssertionError):
        bench.entry.assert_untouched()


# The end


def test_what_fails_before_the_gradient_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def fail(meter: DriftMeter) -> None:
        raise Mistake

    with monkeypatch.context() as patch, pytest.raises(Mistake):
        patch.setattr(DriftMeter, "result", fail)
        with bench.txn as txn:
            txn.score(GROUP.responses)
            replay_group(txn, GROUP)
    assert bench.txn.state is TransactionState.FAILED
    bench.assert_undone()
    bench.assert_succeeds()


def test_what_fails_behind_it_leaves_the_gradient_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def fail(engine: Engine, report: Report) -> None:
        raise Mistake

    monkeypatch.setattr(Engine, "end_report", fail)
    with pytest.raises(Mistake), bench.txn as txn:
        replay_group(txn, GROUP)
    assert bench.txn.state is TransactionState.CLOSED
    assert bench.runtime._engine.lockstep.depth == 0
    bench.assert_right(GROUP)


def test_a_group_that_failed_at_its_end_counts_once_inside_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    other = make_group(20, (3, 1, 4), 5)

    def fail(meter: DriftMeter) -> None:
        raise Mistake

    with bench.runtime.accumulate():
        paged_step(bench.runtime, [other])
        with monkeypatch.context() as patch, pytest.raises(Mistake):
            patch.setattr(DriftMeter, "result", fail)
            with bench.txn:
                replay_group(bench.txn, GROUP)
        with bench.txn:
            replay_group(bench.txn, GROUP)
    bench.assert_right(other, GROUP)


# Full tiers


def test_tiers_too_small_for_the_prompt() -> None:
    config = settings(tiers=[{"kind": "device", "budget": "2KiB"}, {"kind": "host", "budget": "30KiB"}])
    bench = Bench(config=config)
    with pytest.raises(CapacityError, match=r"61440 bytes asked for, 32768 bytes free") as caught, bench.txn:
        pass
    assert "device" in str(caught.value)
    assert "host" in str(caught.value)
    bench.assert_undone()
    # Exact mode of this group needs 60 rows of K, V and their gradients, in float64, on two layers: 60 KiB and more.
    paged_step(bench.runtime, [make_group(9, (3, 1))])
    assert_idle(bench.runtime)


def test_a_tier_that_another_transaction_has_filled() -> None:
    bench = Bench(config=settings(tiers=[{"kind": "host", "budget": "100KiB"}]))
    with bench.runtime.transaction(make_group(60, (1,)).prompt):
        with pytest.raises(CapacityError), bench.txn:
            pass
        bench.entry.assert_untouched()
    bench.assert_undone()
    bench.assert_succeeds()


def test_another_error_in_a_lane_is_not_retried() -> None:
    bench = Bench()
    hook = bench.model.model.layers[1].register_forward_pre_hook(
        lambda module, args: (_ for _ in ()).throw(RuntimeError("shape")) if torch.is_grad_enabled() else None
    )
    with pytest.raises(RuntimeError, match="shape"), bench.txn as txn:
        replay_group(txn, GROUP)
    hook.remove()
    bench.assert_undone()
    bench.assert_succeeds()


def test_a_closed_transaction_is_not_entered_again() -> None:
    bench = Bench()
    bench.assert_succeeds()
    with pytest.raises(TransactionStateError, match="CLOSED"), bench.txn:
        pass
