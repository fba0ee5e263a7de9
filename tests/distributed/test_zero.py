"""DeepSpeed ZeRO 1, 2 and 3 train as one process does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw import Runtime
from longstraw.errors import (
    ConfigError,
    RankFailedError,
    StaleWeightsError,
    TransactionStateError,
    UnsupportedModelError,
)
from longstraw.pagers.engines.deepspeed import is_built
from tests.distributed.pool import Pool
from tests.distributed.steps import (
    KINDS,
    UNEQUAL,
    build_kind,
    compare_training,
    groups_of,
    paged_groups,
    plain_training,
    relative,
)
from tests.distributed.test_lockstep import ONE_IDLE, reference_scores
from tests.distributed.test_parameters import MARK, marked_groups, marked_model
from tests.distributed.test_parity import CHECKPOINTED, check, check_kind
from tests.distributed.wraps import zero
from tests.parity.models import SMALL, add_lora, make_group

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


@STAGES
@pytest.mark.parametrize("kind", KINDS)
def test_zero(two: Pool, kind: str, stage: int) -> None:
    check_kind(two, zero, kind, stage=stage)


@STAGES
def test_a_rank_without_any_group_with_checkpointing(two: Pool, stage: int) -> None:
    check(two.run(compare_training, zero, shapes=ONE_IDLE, config=CHECKPOINTED, stage=stage))


@STAGES
def test_lora_on_a_frozen_base(two: Pool, stage: int) -> None:
    check(two.run(compare_training, zero, prepare=add_lora, stage=stage))


@STAGES
def test_tied_embeddings(two: Pool, stage: int) -> None:
    check(two.run(compare_training, zero, model_options={"tie_word_embeddings": True}, stage=stage))


@pytest.mark.parametrize(("stage", "offload"), [(2, ("optimizer",)), (3, ("optimizer",)), (3, ("optimizer", "param"))])
def test_offloaded_to_the_host(two: Pool, stage: int, offload: tuple[str, ...]) -> None:
    check(two.run(compare_training, zero, stage=stage, offload=offload))


@pytest.mark.skipif(
    not is_built(),
    reason="needs DeepSpeed's async_io: apt install libaio-dev and g++, then "
    "python -c 'from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()'",
)
@pytest.mark.parametrize("offload", [("optimizer",), ("param",), ("optimizer", "param")], ids="-".join)
def test_offloaded_to_a_disk(two: Pool, tmp_path: Path, offload: tuple[str, ...]) -> None:
    """Loosely: DeepSpeed 0.19.8's own loop, without Longstraw, is as far off with weights of this size on a disk."""
    # DeepSpeed leaves parts of less than 1 MiB on the host, so embedding and head are made larger than that.
    options = {"offload": offload, "disk": str(tmp_path), "model_options": {"vocab_size": 40_000}}
    for errors in two.run(compare_training, zero, stage=3, steps=2, timeout=200, **options):
        assert errors["weights"] < 5e-3, errors
        # What DeepSpeed's safe_get_full_grad reads of gradients on the disk is not what it steps with.
        assert "optimizer" in offload or errors["gradient"] < 3e-2, errors
    assert any(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()), "nothing reached the disk"


def test_four_ranks(four: Pool) -> None:
    group = (60, (40, 1, 9))
    shapes = ([(700, (33, 2)), group, group, (60, (5,)), (2, (3, 4))], [(60, (1, 17))], [], [group, (1, (6,))])
    check(four.run(compare_training, zero, shapes=shapes, steps=2, stage=3, timeout=200))


def test_reference_policy_of_adapters(two: Pool) -> None:
    assert two.run(reference_scores, zero, stage=3) == [True, True]


def step_without_stepping(rank: int, world: int, stage: int) -> list[str]:
    held = zero(build_kind("qwen3"), stage=stage)
    runtime = Runtime(held.model, SMALL)
    found = []
    mine = groups_of(ONE_IDLE, 0)[rank]
    group = make_group(20, (3,))
    paged_groups(runtime, mine)
    try:
        paged_groups(runtime, mine or [group])
    except (TransactionStateError, RankFailedError) as error:
        found.append(str(error))
    try:
        with runtime.transaction(group.prompt) as txn:
            held.step()
            txn.score(group.responses)
    except (StaleWeightsError, RankFailedError) as error:
        found.append(str(error))
    return found


@STAGES
def test_steps_are_watched(two: Pool, stage: int) -> None:
    for found in two.run(step_without_stepping, stage):
        assert "call engine.step() first" in found[0]
        assert "optimizer step(s) since the prompt was captured" in found[1]


def bf16_sums(rank: int, world: int, stage: int) -> float:
    """Weights in bfloat16: distance of the reduced gradient from float32's, beside that of one lane at a time."""
    exact = build_kind("qwen3")
    narrow = build_kind("qwen3").bfloat16()
    with torch.no_grad():
        for ours, theirs in zip(exact.parameters(), narrow.parameters(), strict=True):
            ours.copy_(theirs)
    held = zero(narrow, stage=stage, bf16=True)
    paged_groups(Runtime(held.model, SMALL), groups_of(ONE_IDLE, 0)[rank])
    got = held.gradients()
    single = Runtime(exact, SMALL)
    for mine in groups_of(ONE_IDLE, 0):
        paged_groups(single, mine)
    want = {n: p.grad / 2 for n, p in exact.named_parameters()}  # type: ignore[operator]
    whole = sum(float(w.square().sum()) for w in want.values()) ** 0.5
    return sum(float((got[n].float() - want[n]).square().sum()) for n in want) ** 0.5 / whole  # type: ignore[union-attr]


@STAGES
def test_bfloat16_weights(two: Pool, stage: int) -> None:
    assert max(two.run(bf16_sums, stage)) < 0.05


SCALE = 64


def float16_losses(rank: int, world: int, stage: int) -> dict[str, float]:
    """Relative errors of a step in float16: of the scaled gradient, and of what the optimizer added to its weights."""
    narrow = build_kind("qwen3").half()
    exact = copy.deepcopy(narrow).float()
    before = {n: p.detach().clone() for n, p in exact.named_parameters()}
    held = zero(narrow, stage=stage, loss_scale=SCALE)
    paged_groups(Runtime(held.model, SMALL), groups_of(UNEQUAL, 0)[rank])
    scaled = held.gradients()
    held.step()
    weights = held.weights()
    gradient, want = plain_training(exact, UNEQUAL, 1)
    added = relative({n: w - before[n] for n, w in weights.items()}, {n: w - before[n] for n, w in want.items()})
    scaled_errors = relative(scaled, {n: SCALE * g for n, g in gradient.items()})
    return {"gradient": max(scaled_errors.values()), "step": max(added.values())}


@STAGES
def test_float16_losses_are_scaled(two: Pool, stage: int) -> None:
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().is_fp16_supported():
        pytest.skip("needs a device that DeepSpeed takes float16 on: a GPU, or a CPU with avx512_fp16")
    for errors in two.run(float16_losses, stage):
        assert max(errors.values()) < 0.02, errors


def refusals(rank: int, world: int) -> list[str]:
    found = []
    cases: list[tuple[dict[str, Any], str]] = [
        ({"stage": 0}, "deferred"),
        ({"stage": 2, "accumulated": 2}, "deferred"),
        ({"stage": 3}, "each_pass"),
    ]
    for options, reduce in cases:
        held = zero(build_kind("qwen3"), **options)
        try:
            Runtime(held.model, SMALL | {"gradient": {"reduce": reduce}})
        except (UnsupportedModelError, ConfigError) as error:
            found.append(str(error))
    return found


def test_refused(two: Pool) -> None:
    for found in two.run(refusals):
        assert "zero_optimization.stage to 1, 2 or 3" in found[0]
        assert "gradient_accumulation_steps: 2" in found[1]
        assert "each_pass would be ignored" in found[2]


def used_once(rank: int, world: int, stage: int) -> list[float]:
    """Norms of the gradient, by step, of a parameter that the first step's tokens meet and the others' do not."""
    held = zero(marked_model(), stage=stage)
    runtime = Runtime(held.model, SMALL)
    found = []
    for step in range(3):
        groups = marked_groups(step)[rank]
        for group in groups if step else []:
            group.prompt.clamp_(max=MARK - 1)
        paged_groups(runtime, groups)
        gradient = held.gradients()["model.layers.0.mlp.late"]
        assert gradient is not None
        found.append(float(gradient.norm()))
        held.step()
    return found


@STAGES
def test_a_step_that_uses_a_parameter_no_more_does_not_repeat_its_last_gradient(two: Pool, stage: int) -> None:
    for first, *later in two.run(used_once, stage):
        assert first > 0
        assert later == [0.0, 0.0]
