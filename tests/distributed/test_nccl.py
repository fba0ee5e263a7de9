"""The suite of gloo on two GPUs over NCCL, in float32: parity, unequal ranks, failures, and what is reduced."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.distributed.steps import compare_training
from tests.distributed.test_failures import fail_then_step, fail_within_a_pass
from tests.distributed.test_lockstep import count, reductions
from tests.distributed.test_parity import EACH_PASS, check, check_kind
from tests.distributed.wraps import ddp, fsdp2, zero
from tests.parity.models import add_lora

pytestmark = pytest.mark.multi_gpu

KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_5_text": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}
FSDP2: dict[str, dict[str, Any]] = {
    "reshard-deferred": {},
    "reshard-each_pass": {"config": EACH_PASS},
    "kept-deferred": {"reshard": False},
    "kept-each_pass": {"reshard": False, "config": EACH_PASS},
}
_GROUP = (60, (40, 1, 9))
_FIVE = [(700, (33, 2)), _GROUP, _GROUP, (60, (5,)), (2, (3, 4))]
UNEVEN: dict[str, Any] = {"5-1": (_FIVE, [(60, (1, 17))]), "5-0": (_FIVE, [])}
LONG_CHUNKS = {"capture": {"chunk_tokens": 100}}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *[("qwen3", mode) for mode in FSDP2],
        *[(kind, mode) for kind in ("qwen3_moe", "qwen3_5_text") for mode in ("reshard-deferred", "kept-each_pass")],
    ],
)
def test_fsdp2(gpus: Pool, kind: str, mode: str) -> None:
    check_kind(gpus, fsdp2, kind, model_options=KINDS[kind], **FSDP2[mode])


@pytest.mark.parametrize("kind", KINDS)
def test_zero_3(gpus: Pool, kind: str) -> None:
    check_kind(gpus, zero, kind, model_options=KINDS[kind], stage=3)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2(gpus: Pool, stage: int) -> None:
    check_kind(gpus, zero, "qwen3", stage=stage)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_ddp(gpus: Pool, kind: str) -> None:
    check_kind(gpus, ddp, kind, model_options=KINDS[kind])


@pytest.mark.parametrize(("wrap", "options"), [(fsdp2, {}), (zero, {"stage": 3})], ids=["fsdp2", "zero-3"])
def test_lora_on_a_frozen_base(gpus: Pool, wrap: Any, options: dict[str, Any]) -> None:
    check(gpus.run(compare_training, wrap, prepare=add_lora, **options))


@pytest.mark.parametrize("groups", UNEVEN)
@pytest.mark.parametrize(
    ("wrap", "options", "config"),
    [(fsdp2, {}, {}), (fsdp2, {}, EACH_PASS), (zero, {"stage": 3}, {})],
    ids=["fsdp2", "fsdp2-each_pass", "zero-3"],
)
def test_uneven_ranks(gpus: Pool, wrap: Any, options: dict[str, Any], config: dict[str, Any], groups: str) -> None:
    """Five groups on one rank and one or none on the other; prompts of 700 down to 2 tokens."""
    settings = config | LONG_CHUNKS
    check(gpus.run(compare_training, wrap, shapes=UNEVEN[groups], config=settings, steps=2, timeout=120, **options))


@pytest.mark.parametrize(
    ("wrap", "where"),
    [
        *[(wrap, "loss") for wrap in ("ddp", "fsdp2", "each_pass", "zero-3")],
        *[("fsdp2", where) for where in ("between transactions", "last line")],
    ],
)
def test_a_rank_fails(gpus: Pool, wrap: str, where: str) -> None:
    first, second = gpus.run(fail_then_step, wrap, where)
    assert second["raised"] == "Mistake: of rank 1"
    assert first["raised"].startswith("RankFailedError: rank 1 failed")
    assert "Mistake: of rank 1" in first["raised"]
    for one in (first, second):
        assert one["seconds"] < 5
        assert one["unchanged"], "a gradient was touched"
        assert one["pages"] == 0
        assert one["error"] <= 1e-5


def test_a_rank_that_fails_within_a_pass_shows_its_error_everywhere(tmp_path: Path) -> None:
    pool = Pool(2, "cuda")
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"no answer from ranks \[0\](?s:.*)Mistake: within a pass"):
        pool.run(fail_within_a_pass, str(tmp_path / "log"), timeout=60)
    assert time.monotonic() - start < 90
    text = (tmp_path / "log.0").read_text()
    assert "rank 1 failed within a pass or a reduction, and rank 0 waits for it" in text
    assert "Mistake: within a pass" in text


def test_deferred_reduces_once_however_many_passes(gpus: Pool) -> None:
    few, trained, passes = gpus.run(count, fsdp2, {}, 1000)[0]
    many, _, more_passes = gpus.run(count, fsdp2, {}, 1)[0]
    assert more_passes > passes
    assert reductions(few) == reductions(many) == trained
    each, _, passes = gpus.run(count, fsdp2, EACH_PASS, 1000)[0]
    # Two layers and the root, in every lane and every chunk.
    assert reductions(each) == 3 * passes
