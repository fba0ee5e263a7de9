"""How lanes are cut anew when memory runs out, what is remembered of it, and for how long."""

# ruff: noqa: PT012, SIM117
# What raises is a transaction, and a transaction is a block.

from __future__ import annotations

from typing import Any

import pytest
import torch

from longstraw import Runtime
from longstraw.errors import CapacityError, PageLostError
from longstraw.kernels.attention.ops import CpuFlashOps
from longstraw.runtime.captured import CapturedPrompt
from longstraw.runtime.repetition import Repetition
from longstraw.runtime.report import DriftMeter
from tests.families.mamba2_models import build as build_mamba2
from tests.parity.models import build, make_group, replay_group, settings
from tests.runtime.bench import GROUP, Bench, Mistake
from tests.runtime.faults import Fuse, out_of_memory_in_forward

pytestmark = pytest.mark.usefixtures("no_stream_stays_open")

MANY = make_group(61, (7,) * 24)
"""In lanes of 14 tokens: twelve of two branches."""


class OutOfMemoryThenMistake(Fuse):
    """Memory runs out at the first call, and the user's own error ends the next."""

    def __init__(self) -> None:
        super().__init__(at_call=0)

    def __call__(self, tokens: int) -> None:
        super().__call__(tokens)
        raise Mistake


@pytest.mark.parametrize("way", ["score", "replay"])
def test_lanes_to_come_are_cut_to_the_width_too(way: str) -> None:
    bench = Bench(config=settings(replay={"lane_tokens": 14}))
    with bench.runtime.transaction(MANY.prompt) as txn, out_of_memory_in_forward(bench.model, Fuse(above=8)) as fuse:
        if way == "score":
            txn.score(MANY.responses)
        else:
            replay_group(txn, MANY)
    assert fuse.blown == txn.report.retries == 1
    if way == "replay":
        bench.assert_right(MANY)


def test_the_lane_that_failed_is_cut_not_the_widest(monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group(61, (20, 5, 5))
    bench = Bench(config=settings(replay={"lane_tokens": 14}))
    original = CapturedPrompt.backward_lane

    def backward_lane(self: CapturedPrompt, forward: Any, packed: Any, upstream: Any) -> Any:
        if len(forward.lengths) > 1:
            return torch.OutOfMemoryError("CUDA out of memory.")
        return original(self, forward, packed, upstream)

    monkeypatch.setattr(CapturedPrompt, "backward_lane", backward_lane)
    with bench.runtime.transaction(group.prompt) as txn:
        replay_group(txn, group)
    assert txn.report.retries == 1
    bench.assert_right(group)


def test_the_first_repetition_is_narrower_however_many_lanes_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the last lane on, two branches are too much together."""
    bench = Bench(config=settings(replay={"lane_tokens": 14}))
    calls, original, run_lanes = 0, CapturedPrompt.backward_lane, Repetition._run_lanes
    widest: list[int] = []

    def backward_lane(self: CapturedPrompt, forward: Any, packed: Any, upstream: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= 12 and len(forward.lengths) > 1:
            return torch.OutOfMemoryError("CUDA out of memory.")
        return original(self, forward, packed, upstream)

    def noted(self: Repetition, lanes: list[tuple[int, ...]], checkpoint: bool) -> Any:
        widest.append(max(map(len, lanes)))
        return run_lanes(self, lanes, checkpoint)

    monkeypatch.setattr(CapturedPrompt, "backward_lane", backward_lane)
    monkeypatch.setattr(Repetition, "_run_lanes", noted)
    with bench.runtime.transaction(MANY.prompt) as txn:
        replay_group(txn, MANY)
    assert widest == [1]
    bench.assert_right(MANY)


def test_an_error_in_a_repetition_leaves_no_stream_open(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    calls, original = 0, CpuFlashOps.backward

    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if calls == 9:
            raise PageLostError("a page that did not come back")
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(PageLostError), bench.txn as txn:
        patch.setattr(CpuFlashOps, "backward", backward)
        replay_group(txn, GROUP)
    bench.assert_undone()
    bench.assert_succeeds()


def test_a_lane_that_is_opened_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out behind the model, in the drift's small tensors."""
    bench = Bench()
    calls, original = 0, DriftMeter.replayed

    def replayed(self: DriftMeter, branch: torch.Tensor, logprobs: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        original(self, branch, logprobs)

    monkeypatch.setattr(DriftMeter, "replayed", replayed)
    with bench.txn as txn:
        txn.score(GROUP.responses)
        replay_group(txn, GROUP)
    report = txn.report
    assert (report.branches, report.left_out) == (5, 0)
    assert report.response_tokens == sum(map(len, GROUP.responses))
    bench.assert_right(GROUP)


def test_shorter_chunks_that_need_too_many_pages_are_told_and_forgotten() -> None:
    """Each chunk boundary has carried state: the budget has room for two boundaries only."""
    model, group = build_mamba2("falcon_h1", "HH"), make_group(121, (5, 4))
    cut = {"chunk_tokens": 60, "keep_attention": "never"}
    with Runtime(model, settings(capture=cut)) as runtime, runtime.transaction(group.prompt) as txn:
        need = sum(txn.report.tier_bytes.values())
    runtime = Runtime(model, settings(capture=cut, tiers=[{"kind": "host", "budget": need}]))
    with runtime.transaction(group.prompt):
        pass
    fuse = Fuse(at_call=0)
    hook = model.model.layers[1].register_forward_pre_hook(lambda module, args: fuse(60))
    with pytest.raises(
        CapacityError, match=r"out of memory in the capture .* chunks of 30 tokens, .* more pages"
    ) as told:
        with runtime.transaction(group.prompt):
            pass
    hook.remove()
    assert isinstance(told.value.__cause__, torch.OutOfMemoryError)
    with runtime.transaction(group.prompt) as txn:
        replay_group(txn, group)
    assert txn.report.chunks == 2


def test_a_width_is_remembered_once_it_was_seen_to_fit() -> None:
    bench = Bench()
    with out_of_memory_in_forward(bench.model, OutOfMemoryThenMistake()), pytest.raises(Mistake), bench.txn:
        pass
    assert bench.runtime._engine.narrowing.widths.chunk_tokens is None
    with pytest.raises(CapacityError), bench.runtime.transaction(GROUP.prompt) as txn:
        with out_of_memory_in_forward(bench.model, Fuse(above=8)):
            txn.score(GROUP.responses)
        helped = txn._captured.widths.kept.lane_tokens
        with out_of_memory_in_forward(bench.model, Fuse(above=2)):
            txn.score(GROUP.responses)
    assert helped == bench.runtime._engine.narrowing.widths.lane_tokens is not None


def test_wider_passes_are_tried_again_after_a_while() -> None:
    bench = Bench(config=settings(replay={"lane_tokens": 4096}))
    short, long = make_group(61, (2, 1)), make_group(61, (30,) * 4)

    def step(group: Any) -> Any:
        with bench.runtime.transaction(group.prompt) as txn:
            replay_group(txn, group)
        return txn.report

    with out_of_memory_in_forward(bench.model, Fuse(above=2)), bench.runtime.transaction(short.prompt[:2]) as txn:
        replay_group(txn, short)
    assert step(long).lane_tokens == 2
    widths = [step(long).lane_tokens for _ in range(60)]
    assert widths == sorted(widths)
    assert widths[-1] >= 120


def test_what_a_reference_model_was_taught() -> None:
    """Its engine is made anew for each call, and holds nothing in between."""
    bench, reference = Bench(), build("qwen3", seed=5, tie_word_embeddings=True)
    blown = []
    for _ in range(2):
        fuse = Fuse()
        with out_of_memory_in_forward(reference, fuse), pytest.MonkeyPatch.context() as patch:
            original = CapturedPrompt.capture

            def capture(self: CapturedPrompt, fuse: Fuse = fuse, original: Any = original) -> None:
                # Not in the short run that makes the model's profile.
                fuse._above = 8
                original(self)

            patch.setattr(CapturedPrompt, "capture", capture)
            bench.runtime.score(GROUP.prompt, GROUP.responses, model=reference)
        blown.append(fuse.blown)
    assert blown[0] > 0 == blown[1]


@pytest.mark.parametrize("checkpoint", [True, False])
def test_checkpointing_is_advised_where_it_would_help(checkpoint: bool) -> None:
    bench = Bench(config=settings(replay={"checkpoint": checkpoint}))
    with pytest.raises(CapacityError) as scoring, bench.txn as txn:
        with out_of_memory_in_forward(bench.model, Fuse(above=4)):
            txn.score(GROUP.responses)
    with pytest.raises(CapacityError) as replaying, bench.runtime.transaction(GROUP.prompt) as txn:
        with out_of_memory_in_forward(bench.model, Fuse(above=4)):
            replay_group(txn, GROUP)
    assert "checkpoint" not in str(scoring.value)
    assert ("replay.checkpoint: true" in str(replaying.value)) is not checkpoint


def test_no_memory_for_the_first_short_run() -> None:
    bench = Bench()
    with out_of_memory_in_forward(bench.model, Fuse(above=17)):
        with pytest.raises(CapacityError, match="short first run"):
            Runtime(bench.model, settings()).transaction(GROUP.prompt)
    bench.assert_succeeds()
