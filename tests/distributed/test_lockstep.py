"""Ranks with unequal work make the same passes: what they agree on, and what empty passes leave untouched."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longstraw import Runtime
from longstraw.errors import (
    ConfigError,
    RankFailedError,
    StaleWeightsError,
    TransactionStateError,
    UnsupportedModelError,
)
from tests.distributed.pool import Pool
from tests.distributed.steps import build_kind, compare_training, groups_of, paged_groups, relative
from tests.distributed.wraps import ddp, fsdp2
from tests.parity.models import SMALL, add_lora, make_group, plain_logprobs, plain_step, replay_group

EACH_PASS = {"gradient": {"reduce": "each_pass"}}
ONE_IDLE = ([(61, (7, 1, 12, 5)), (30, (3, 9))], [])


@pytest.mark.parametrize(("wrap", "config"), [(ddp, {}), (fsdp2, {}), (fsdp2, EACH_PASS)])
def test_a_rank_without_any_group(two: Pool, wrap: Any, config: dict[str, Any]) -> None:
    for errors in two.run(compare_training, wrap, shapes=ONE_IDLE, config=config):
        assert errors["gradient"] <= 1e-5, errors
        assert errors["weights"] <= 1e-5, errors


def odd_loop(rank: int, world: int, config: dict[str, Any]) -> float:
    """One rank scores late and twice, skips a lane, and leaves the loop early; the other does not."""
    model = build_kind("qwen3")
    reference = copy.deepcopy(model)
    held = fsdp2(model)
    runtime = Runtime(held.model, SMALL | config)
    group, other = make_group(61, (7, 1, 12, 5), seed=3), make_group(20, (3, 3), seed=4)
    with runtime.accumulate():
        if rank == 0:
            with runtime.transaction(group.prompt) as txn:
                for number, lane in enumerate(txn.replay(group.responses)):
                    if number == 0:
                        lane.skip()
                        first = lane.indices
                        txn.score(group.responses[:1])
                    else:
                        losses = [group.loss(i, x, None) for i, x in zip(lane.indices, lane.logprobs, strict=True)]
                        lane.backward(torch.stack(losses).sum())
                        break
                second = lane.indices
                txn.score(group.responses)
        else:
            with runtime.transaction(other.prompt) as txn:
                replay_group(txn, other)
            with runtime.transaction(other.prompt) as txn:
                txn.score(other.responses)
    mine = held.gradients()
    lanes = [None, None]
    torch.distributed.all_gather_object(lanes, (first, second) if rank == 0 else None)
    assert lanes[0] is not None
    for i in lanes[0][1]:
        logprobs, _ = plain_logprobs(reference, group.prompt, group.responses[i])
        group.loss(i, logprobs, None).backward()
    plain_step(reference, [other])
    want = {n: p.grad / 2 for n, p in reference.named_parameters() if p.grad is not None}
    return max(relative(mine, want).values())


@pytest.mark.parametrize("config", [{}, EACH_PASS])
def test_loops_of_different_shape(two: Pool, config: dict[str, Any]) -> None:
    assert max(two.run(odd_loop, config)) <= 1e-5


class Collectives(TorchDispatchMode):
    """Counts the collectives that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def count(
    rank: int, world: int, wrap: Any, config: dict[str, Any], lane_tokens: int
) -> tuple[dict[str, int], int, int]:
    model = build_kind("qwen3")
    trained = sum(1 for _ in model.parameters())
    held = wrap(model)
    settings = SMALL | config | {"replay": {"lane_tokens": lane_tokens}}
    runtime = Runtime(held.model, settings)
    paged_groups(runtime, groups_of(ONE_IDLE, 1)[rank])  # the model's probe, and what torch sets up at first use
    held.optimizer.zero_grad()
    groups = groups_of(ONE_IDLE, 0)[rank]
    passes = 0
    with Collectives() as mode, runtime.accumulate():
        for group in groups:
            with runtime.transaction(group.prompt) as txn:
                replay_group(txn, group)
            passes += txn.report.lanes + txn.report.chunks
    return mode.counts, trained, passes


def reductions(counts: dict[str, int], kind: str = "reduce_scatter") -> int:
    return sum(n for name, n in counts.items() if kind in name)


def test_deferred_reduces_once_however_many_passes(two: Pool) -> None:
    few, trained, passes = two.run(count, fsdp2, {}, 1000)[0]
    many, _, more_passes = two.run(count, fsdp2, {}, 1)[0]
    assert more_passes > passes
    assert reductions(few) == reductions(many) == trained
    each, _, passes = two.run(count, fsdp2, EACH_PASS, 1000)[0]
    # Two layers and the root, in every lane and every chunk.
    assert reductions(each) == 3 * passes


def test_ddp_reduces_once(two: Pool) -> None:
    counts, _, _ = two.run(count, ddp, {}, 1)[0]
    # The tiny model fits one bucket; the other is the ranks' word on who has a gradient.
    assert reductions(counts, "allreduce") <= 2, counts


def reference_scores(rank: int, world: int, wrap: Any = fsdp2, **options: Any) -> bool:
    """Rank 0 scores under the adapters' base within a step in which rank 1 has nothing to do."""
    model = add_lora(build_kind("qwen3"))
    plain = build_kind("qwen3")
    held = wrap(model, **options)
    runtime = Runtime(held.model, SMALL)
    group = make_group(61, (7, 1, 12, 5), seed=3)
    with runtime.accumulate():
        if rank == 0:
            found = runtime.score(group.prompt, group.responses, adapter=None)
            with runtime.transaction(group.prompt) as txn:
                replay_group(txn, group)
    if rank == 0:
        for response, logprobs in zip(group.responses, found, strict=True):
            torch.testing.assert_close(logprobs, plain_logprobs(plain, group.prompt, response)[0].detach())
    return True


def reported(rank: int, world: int) -> dict[str, Any]:
    held = fsdp2(build_kind("qwen3"))
    runtime = Runtime(held.model, SMALL)
    group = groups_of(ONE_IDLE, 0)[0][rank]
    with runtime.transaction(group.prompt) as txn:
        replay_group(txn, group)
    numel = sum(p.numel() for p in held.model.parameters())
    assert txn.report.gradient_bytes == 4 * numel
    assert f"{4 * numel} bytes" in runtime.describe()
    return txn.report.to_dict()


def test_the_report_says_what_it_costs(two: Pool) -> None:
    first, second = two.run(reported)
    assert (first["sharding"], first["reduce"]) == ("FSDP2", "deferred")
    # The second prompt is half as long: one chunk less in the capture and in the sweep, and one lane less.
    assert first["empty_passes"] == 0
    chunks, lanes = first["chunks"] - second["chunks"], first["lanes"] - second["lanes"]
    assert second["empty_passes"] == 2 * chunks + lanes > 0
    assert second["rank_wait_seconds"] > 0


def test_reference_policy_of_adapters(two: Pool) -> None:
    assert two.run(reference_scores) == [True, True]


def stale(rank: int, world: int, wrap: Any) -> str:
    held = wrap(build_kind("qwen3"))
    runtime = Runtime(held.model, SMALL)
    group = make_group(20, (3,))
    paged_groups(runtime, [group])
    try:
        with runtime.transaction(group.prompt) as txn:
            held.step()
            replay_group(txn, group)
    except (StaleWeightsError, RankFailedError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("wrap", [ddp, fsdp2])
def test_a_step_between_capture_and_replay(two: Pool, wrap: Any) -> None:
    assert all("1 optimizer step(s) since the prompt was captured" in text for text in two.run(stale, wrap))


def one_checkpoints(rank: int, world: int) -> tuple[float, bool, bool]:
    """Rank 0 wants its passes checkpointed. The largest error of a gradient, and what the report says."""
    model = build_kind("qwen3")
    reference = copy.deepcopy(model)
    held = fsdp2(model)
    runtime = Runtime(held.model, SMALL | {"replay": {"lane_tokens": 14, "checkpoint": rank == 0}})
    groups = [make_group(61, (7, 1, 12, 5), seed=3), make_group(20, (3, 3), seed=4)]
    with runtime.transaction(groups[rank].prompt) as txn:
        replay_group(txn, groups[rank])
    plain_step(reference, groups)
    expected = {name: p.grad / world for name, p in reference.named_parameters()}
    errors = relative(held.gradients(), expected)
    return max(errors.values()), txn.report.checkpoint_replay, txn.report.checkpoint_sweep


def test_one_rank_that_checkpoints_makes_all_do_so(two: Pool) -> None:
    for error, replay, sweep in two.run(one_checkpoints):
        assert error <= 1e-5
        assert (replay, sweep) == (True, True)


def all_skipped(rank: int, world: int, mode: str) -> set[str]:
    """Names of the parameters with a gradient, zero or not, of a step in which every lane of every rank was skipped."""
    held = fsdp2(build_kind("qwen3"))
    runtime = Runtime(held.model, SMALL | {"gradient": {"prompt": mode}})
    group = make_group((61, 20)[rank], (7, 1, 12, 5), seed=3)
    with runtime.transaction(group.prompt) as txn:
        for lane in txn.replay(group.responses):
            lane.skip()
    return {name for name, p in held.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["exact", "detached"])
def test_a_step_of_skipped_lanes_has_no_gradient(two: Pool, mode: str) -> None:
    """An optimizer would decay weights whose gradient is zero, and leaves alone those that have none."""
    assert two.run(all_skipped, mode) == [set(), set()]


def sharded_reference(rank: int, world: int) -> bool:
    """A reference policy that is a sharded model of its own, scored by every rank, twice."""
    plain = build_kind("qwen3", seed=5)
    reference = fsdp2(copy.deepcopy(plain)).model
    held = fsdp2(build_kind("qwen3"))
    runtime = Runtime(held.model, SMALL)
    group = make_group((61, 20)[rank], (7, 1, 12, 5), seed=3)
    with runtime.accumulate():
        for _ in range(2):
            found = runtime.score(group.prompt, group.responses, model=reference)
        with runtime.transaction(group.prompt) as txn:
            replay_group(txn, group)
    for response, logprobs in zip(group.responses, found, strict=True):
        torch.testing.assert_close(logprobs, plain_logprobs(plain, group.prompt, response)[0].detach())
    return True


def test_a_sharded_reference_policy(two: Pool) -> None:
    assert two.run(sharded_reference) == [True, True]


def torn(rank: int, world: int) -> str:
    model = build_kind("qwen3", tie_word_embeddings=True)
    held = fsdp2(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    try:
        Runtime(held.model, SMALL)
    except UnsupportedModelError as error:
        return str(error)
    return ""


def test_tied_embeddings_in_two_units_are_refused(two: Pool) -> None:
    assert all("tie_word_embeddings" in text for text in two.run(torn))


def refusals(rank: int, world: int) -> list[str]:
    found = []
    for wrap in (ddp, None):
        model = build_kind("qwen3") if wrap is None else wrap(build_kind("qwen3")).model
        try:
            Runtime(model, EACH_PASS)
        except ConfigError as error:
            found.append(str(error))
    held = fsdp2(build_kind("qwen3"))
    runtime = Runtime(held.model, SMALL)
    group = make_group(20, (3,))
    parameter = next(iter(held.model.parameters()))
    try:
        with runtime.transaction(group.prompt) as txn:
            for lane in txn.replay(group.responses):
                lane.backward(lane.logprobs[0].sum() + parameter.full_tensor().sum())
    except (TransactionStateError, RankFailedError) as error:
        found.append(str(error))
    return found


def test_refused(two: Pool) -> None:
    for found in two.run(refusals):
        assert len(found) == 3
        assert all("each_pass would be ignored" in text for text in found[:2])
        assert "reaches parameters directly" in found[2]
