"""Memory that runs out: passes run again narrower, what that taught is kept, and what has no way out is an error."""

# ruff: noqa: PT012, SIM117
# What raises is a transaction, and a transaction is a block.

from __future__ import annotations

from typing import Any

import pytest
import torch

from longstraw.errors import CapacityError
from tests.parity.models import replay_group, settings
from tests.runtime.bench import GROUP, MODELS, Bench, Mistake
from tests.runtime.faults import Fuse, Injection, out_of_memory_in_backward, out_of_memory_in_forward

pytestmark = pytest.mark.usefixtures("no_stream_stays_open")

PLACES = [out_of_memory_in_forward, out_of_memory_in_backward]
PLACE_NAMES = ["forward", "backward"]


@pytest.mark.parametrize("kind", sorted(MODELS))
@pytest.mark.parametrize("call", [0, 2], ids=["first chunk", "last chunk"])
def test_out_of_memory_in_capture_is_retried_in_shorter_chunks(kind: str, call: int) -> None:
    bench = Bench(kind)
    with out_of_memory_in_forward(bench.model, Fuse(at_call=call)) as fuse, bench.txn as txn:
        assert fuse.blown == 1
        assert txn.report.retries == 1
        assert txn.report.chunks > 3
        replay_group(txn, GROUP)
    bench.assert_right(GROUP)
    # What memory has taught is kept: the next prompt begins with the shorter chunks.
    with bench.runtime.transaction(GROUP.prompt) as after:
        assert (after.report.retries, after.report.chunk_tokens) == (0, txn.report.chunk_tokens)


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_out_of_memory_in_the_capture_of_one_token_is_a_capacity_error(kind: str) -> None:
    bench = Bench(kind)
    with out_of_memory_in_forward(bench.model, Fuse(above=0)) as fuse:
        with pytest.raises(CapacityError, match="single prompt token"), bench.txn:
            pass
        assert fuse.blown > 1
        bench.assert_undone()
        fuse._above = None
        bench.assert_succeeds()


def test_widths_that_did_not_help_are_forgotten() -> None:
    bench = Bench()
    with out_of_memory_in_forward(bench.model, Fuse(above=0)):
        with pytest.raises(CapacityError, match="single prompt token"), bench.txn:
            pass
    with pytest.raises(CapacityError, match="one branch with"), bench.runtime.transaction(GROUP.prompt) as txn:
        with out_of_memory_in_forward(bench.model, Fuse(above=5)):
            txn.score(GROUP.responses)
    with bench.runtime.transaction(GROUP.prompt) as after:
        replay_group(after, GROUP)
    assert (after.report.retries, after.report.chunks, after.report.lanes) == (0, 3, 2)


def test_widths_that_helped_are_kept_though_the_transaction_failed() -> None:
    bench = Bench()
    with pytest.raises(Mistake), bench.runtime.transaction(GROUP.prompt) as txn:
        with out_of_memory_in_forward(bench.model, Fuse(above=8)) as fuse:
            txn.score(GROUP.responses)
        raise Mistake
    with bench.runtime.transaction(GROUP.prompt) as after:
        with out_of_memory_in_forward(bench.model, Fuse(above=8)) as fuse:
            replay_group(after, GROUP)
        assert not fuse.blown
    assert (after.report.retries, after.report.lanes) == (0, 4)


def test_a_loop_over_a_sweep_that_cannot_be_repeated_ends() -> None:
    """A loss that reaches parameters directly: what the sweep's first failure taught is there at the next try."""
    bench = Bench()
    weight = next(iter(bench.model.parameters()))

    def attempt() -> None:
        with bench.txn as txn:
            for lane in txn.replay(GROUP.responses):
                lane.backward(torch.stack([x.sum() for x in lane.logprobs]).sum() + 0 * weight.sum())
            with out_of_memory_in_backward(bench.model, Fuse(above=6)):
                txn.sweep()

    for tokens in (23, 12):
        with pytest.raises(CapacityError, match="cannot be run again because a loss reached parameters directly"):
            attempt()
        assert bench.runtime._engine.narrowing.trial.chunk_tokens == (tokens + 1) // 2
    attempt()
    assert bench.txn.report.chunk_tokens == 6


def test_a_long_prompt_is_not_cut_into_too_many_chunks() -> None:
    bench = Bench(config=settings(capture={"chunk_tokens": 256}))
    prompt = torch.randint(40, (2500,), generator=torch.Generator().manual_seed(0))
    with out_of_memory_in_forward(bench.model, Fuse(above=2)) as fuse:
        with pytest.raises(CapacityError, match="3 prompt tokens; shorter chunks would read this prompt's pages too"):
            bench.runtime.score(prompt, GROUP.responses)
    assert fuse.blown == 8
    bench.assert_undone()
    bench.assert_succeeds()


def test_out_of_memory_in_score_is_retried_narrower() -> None:
    bench = Bench()
    with bench.txn as txn:
        expected = txn.score(GROUP.responses)
        with out_of_memory_in_forward(bench.model, Fuse(above=8)) as fuse:
            found = txn.score(GROUP.responses)
            assert fuse.blown
            assert txn.report.retries == fuse.blown
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        replay_group(txn, GROUP)
    bench.assert_right(GROUP)


@pytest.mark.parametrize("kind", sorted(MODELS))
@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("inject", PLACES, ids=PLACE_NAMES)
@pytest.mark.parametrize("fuse", [{"above": 8}, {"at_call": 0}, {"at_call": 2}], ids=["above 8", "first", "third"])
def test_out_of_memory_in_a_lane_is_retried_narrower(
    kind: str, checkpoint: bool, inject: Injection, fuse: dict[str, int]
) -> None:
    bench = Bench(kind, settings(replay={"checkpoint": checkpoint}))
    if inject is out_of_memory_in_forward and "at_call" in fuse:
        fuse = {"at_call": fuse["at_call"] // 2}
    with bench.txn as txn:
        with inject(bench.model, Fuse(**fuse)) as lit:
            replay_group(txn, GROUP)
        assert lit.blown
    assert txn.report.retries > 0
    bench.assert_right(GROUP)


@pytest.mark.parametrize("kind", sorted(MODELS))
@pytest.mark.parametrize("inject", PLACES, ids=PLACE_NAMES)
@pytest.mark.parametrize("keep", ["always", "never"])
@pytest.mark.parametrize("fuse", [{"above": 12}, {"at_call": 0}, {"at_call": 2}], ids=["above 12", "first", "third"])
def test_out_of_memory_in_the_sweep_is_retried_with_shorter_chunks(
    kind: str, inject: Injection, fuse: dict[str, int], keep: str
) -> None:
    bench = Bench(kind, settings(replay={"lane_tokens": 8}, capture={"keep_attention": keep}))
    with bench.txn as txn:
        replay_group(txn, GROUP)
        with inject(bench.model, Fuse(**fuse)) as lit:
            txn.sweep()
        assert lit.blown
    assert txn.report.retries > 0
    bench.assert_right(GROUP)


@pytest.mark.parametrize(
    ("phase", "inject"),
    [("score", PLACES[0]), ("replay", PLACES[0]), ("replay", PLACES[1])],
    ids=["score", "replay", "backward"],
)
def test_out_of_memory_on_a_single_branch_is_a_capacity_error(inject: Injection, phase: str) -> None:
    bench = Bench()
    with pytest.raises(CapacityError, match=r"one branch with \d tokens"), bench.txn as txn:
        with inject(bench.model, Fuse(above=4)):
            if phase == "score":
                txn.score(GROUP.responses)
            else:
                replay_group(txn, GROUP)
    bench.assert_undone()
    bench.assert_succeeds()


@pytest.mark.parametrize("inject", PLACES, ids=PLACE_NAMES)
def test_out_of_memory_in_the_sweep_of_one_token_is_a_capacity_error(
    inject: Injection, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    with pytest.raises(CapacityError, match="single prompt token"), bench.txn as txn:
        replay_group(txn, GROUP)
        with inject(bench.model, Fuse(above=0)) as fuse:

            def spare(original: Any) -> Any:
                def unharmed(*args: Any, **kwargs: Any) -> None:
                    fuse._above = None
                    original(*args, **kwargs)
                    fuse._above = 0

                return unharmed

            # What is captured and run again between two sweeps must not meet the fuse.
            monkeypatch.setattr(txn._replay.repetition, "run", spare(txn._replay.repetition.run))
            monkeypatch.setattr(txn._captured, "_capture_chunks", spare(txn._captured._capture_chunks))
            txn.sweep()
    bench.assert_undone()


def test_lanes_cannot_be_repeated_where_the_loss_reached_a_parameter_directly() -> None:
    bench = Bench()
    with pytest.raises(CapacityError, match="reached parameters directly"), bench.txn as txn:
        replay_group(txn, GROUP, extra=lambda: bench.model.model.norm.weight.sum())
        with out_of_memory_in_forward(bench.model, Fuse(at_call=0)):
            txn.sweep()
    bench.assert_undone()
    bench.assert_succeeds()


def test_a_width_that_memory_has_taught_is_kept() -> None:
    bench = Bench()
    with out_of_memory_in_forward(bench.model, Fuse(above=8)) as fuse, bench.runtime.accumulate():
        # Capture's chunks are wider than a lane: only lanes may meet the fuse.
        fuse._above = None
        with bench.txn as txn:
            fuse._above = 8
            replay_group(txn, GROUP)
            assert txn.report.retries > 0
            fuse._above = None
        with bench.runtime.transaction(GROUP.prompt) as txn:
            fuse._above = 8
            replay_group(txn, GROUP)
            assert txn.report.retries == 0
            fuse._above = None
