"""Gradients and trained weights on several ranks are those of the ordinary step in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.distributed.steps import KINDS, compare_training
from tests.distributed.wraps import ddp, fsdp2, fsdp2_hybrid, fsdp2_offloaded, fsdp2_whole
from tests.parity.models import add_lora

TOLERANCE = 1e-5
EACH_PASS = {"gradient": {"reduce": "each_pass"}}
MODES = pytest.mark.parametrize("config", [{}, EACH_PASS], ids=["deferred", "each_pass"])
CHECKPOINTED = {"replay": {"checkpoint": True, "lane_tokens": 14}}


def check(found: list[dict[str, Any]], tolerance: float = TOLERANCE) -> None:
    for rank, errors in enumerate(found):
        assert errors["gradient"] <= tolerance, (rank, errors)
        assert errors["weights"] <= tolerance, (rank, errors)


def check_kind(pool: Pool, wrap: Any, kind: str, **options: Any) -> None:
    """Against plain autograd. The hybrid's recurrence is computed in float32 and cut into other chunks there, which
    is worth 1e-4 in one process too: beside the runtime in one process it has to be as close as the others."""
    hybrid = kind == "qwen3_5_text"
    check(pool.run(compare_training, wrap, kind, **options), 2e-4 if hybrid else TOLERANCE)
    if hybrid:
        check(pool.run(compare_training, wrap, kind, beside_one_process=True, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_ddp(two: Pool, kind: str) -> None:
    check_kind(two, ddp, kind)


@MODES
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "kept"])
@pytest.mark.parametrize("kind", KINDS)
def test_fsdp2(two: Pool, kind: str, reshard: bool, config: dict[str, Any]) -> None:
    check_kind(two, fsdp2, kind, config=config, reshard=reshard)


@MODES
def test_a_unit_inside_a_unit_and_the_head_alone_with_checkpointing(two: Pool, config: dict[str, Any]) -> None:
    check(two.run(compare_training, fsdp2, config=config | CHECKPOINTED, head=True, nested=True))


@MODES
def test_the_whole_model_as_one_unit(two: Pool, config: dict[str, Any]) -> None:
    check(two.run(compare_training, fsdp2_whole, config=config))


@MODES
def test_tied_embeddings(two: Pool, config: dict[str, Any]) -> None:
    tied = {"tie_word_embeddings": True}
    check(two.run(compare_training, fsdp2, config=config, model_options=tied))


def test_tied_embeddings_under_ddp(two: Pool) -> None:
    check(two.run(compare_training, ddp, model_options={"tie_word_embeddings": True}))


@pytest.mark.parametrize("wrap", [ddp, fsdp2])
def test_lora_on_a_frozen_base(two: Pool, wrap: Any) -> None:
    check(two.run(compare_training, wrap, prepare=add_lora))


def test_lora_reduced_in_each_pass(two: Pool) -> None:
    check(two.run(compare_training, fsdp2, config=EACH_PASS, prepare=add_lora))


@MODES
def test_offloaded_parameters(two: Pool, config: dict[str, Any]) -> None:
    check(two.run(compare_training, fsdp2_offloaded, config=config))


def test_detached_prompt_under_fsdp2_runs_fewer_passes(two: Pool) -> None:
    found = two.run(compare_training, fsdp2, steps=1, config={"gradient": {"prompt": "detached"}})
    assert all(errors["gradient"] > TOLERANCE for errors in found), "detached should differ from the exact gradient"


@MODES
def test_sharded_replicas(four: Pool, config: dict[str, Any]) -> None:
    """Two replicas of two shards each; ranks with five, one, no and two groups."""
    group = (60, (40, 1, 9))
    shapes = ([(700, (33, 2)), group, group, (60, (5,)), (2, (3, 4))], [(60, (1, 17))], [], [group, (1, (6,))])
    check(four.run(compare_training, fsdp2_hybrid, shapes=shapes, config=config, steps=2, timeout=200))
