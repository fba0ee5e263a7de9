"""Whatever fails, `.grad` is as on entry, nothing is held, and the same transaction then succeeds."""

# ruff: noqa: PT012, SIM117
# What raises is a transaction, and a transaction is a block.

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from longstraw import Runtime
from longstraw.errors import CapacityError, TransactionStateError
from longstraw.runtime.ledger import GradientLedger
from tests.parity.models import (
    SMALL,
    Group,
    add_lora,
    assert_idle,
    assert_parity,
    build,
    make_group,
    paged_step,
    plain_step,
    replay_group,
    settings,
)
from tests.runtime.faults import (
    Entry,
    Fuse,
    Injection,
    assert_undone,
    out_of_memory_in_backward,
    out_of_memory_in_forward,
    watched_streams,
)


@pytest.fixture(autouse=True)
def _no_stream_stays_open() -> Iterator[None]:
    with watched_streams() as streams:
        yield
    assert streams
    assert all(stream._closed for stream in streams)


GROUP = make_group(61, (7, 1, 6, 5, 4))
"""In lanes of 14 tokens: two lanes of several branches each."""

MODELS = {
    "float64": lambda: build("qwen3", tie_word_embeddings=True),
    "bfloat16": lambda: build("llama", dtype=torch.bfloat16),
    "lora": lambda: add_lora(build("llama")),
}


class Mistake(Exception):
    """The user's own."""


class Bench:
    """A model with gradients from before, its runtime and a transaction on GROUP."""

    def __init__(self, kind: str = "float64", config: Mapping[str, Any] = SMALL) -> None:
        self.model = MODELS[kind]()
        self.entry = Entry(self.model)
        self.reference = copy.deepcopy(self.model)
        for ours, theirs in zip(self.model.parameters(), self.reference.parameters(), strict=True):
            theirs.grad = None if ours.grad is None else ours.grad.clone()
        self.runtime = Runtime(self.model, config)
        self.txn = self.runtime.transaction(GROUP.prompt)
        self.tolerance = 0.1 if kind == "bfloat16" else 1e-6

    def assert_undone(self) -> None:
        assert_undone(self.runtime, self.model, self.entry)

    def assert_succeeds(self) -> None:
        """The same transaction again, now without a failure."""
        with self.txn:
            replay_group(self.txn, GROUP)
        self.assert_right(GROUP)

    def assert_right(self, *groups: Group) -> None:
        plain_step(self.reference, groups)
        assert_parity(self.model, self.reference, self.tolerance)
        assert_idle(self.runtime)


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


# Out of memory

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
        assert bench.runtime._engine.narrowing.chunk_tokens == (tokens + 1) // 2
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
            monkeypatch.setattr(txn._repetition, "run", spare(txn._repetition.run))
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
