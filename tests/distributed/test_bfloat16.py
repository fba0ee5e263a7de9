"""bfloat16 on two ranks is no further from float32 than the ordinary bfloat16 steps: over gloo, and NCCL on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.distributed.pool import Pool
from tests.distributed.precision import compare_precision
from tests.distributed.steps import UNEQUAL
from tests.distributed.wraps import ddp, fsdp2, zero

EACH_PASS = {"gradient": {"reduce": "each_pass"}}
# As users of FSDP2 train: computed in bfloat16, kept and reduced in float32.
MIXED = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16
)  # fmt: skip
WRAPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fsdp2": (fsdp2, {"policy": MIXED}),
    "fsdp2-kept": (fsdp2, {"policy": MIXED, "reshard": False}),
    "fsdp2-each_pass": (fsdp2, {"policy": MIXED, "config": EACH_PASS}),
    "fsdp2-kept-each_pass": (fsdp2, {"policy": MIXED, "reshard": False, "config": EACH_PASS}),
    "zero-2": (zero, {"stage": 2, "bf16": True, "narrow_weights": True}),
    "zero-3": (zero, {"stage": 3, "bf16": True, "narrow_weights": True}),
}
FEW = ("fsdp2", "fsdp2-kept-each_pass", "zero-3")
NARROW: dict[str, tuple[Any, dict[str, Any]]] = {"ddp": (ddp, {}), "fsdp2": (fsdp2, {})}
WHOLE, EACH = 1.1, 1.6
"""Multiples of the ordinary run's distance: of all parameters together, and of one alone, which for some
dozens of values is a matter of chance."""


def check(found: list[dict[str, dict[str, float]]], *figures: str) -> None:
    for figure in figures:
        for ratios in found:
            worst = max(ratios[figure], key=ratios[figure].__getitem__)
            whole, one = ratios[figure][""], ratios[figure][worst]
            text = f"{figure}: {whole:.3f} times the ordinary run's distance, {one:.3f} for {worst}"
            print(text)
            assert whole <= WHOLE, text
            assert one <= EACH, text


@pytest.mark.parametrize("wrap", ["fsdp2", "zero-3"])
def test_over_gloo(two: Pool, wrap: str) -> None:
    function, options = WRAPS[wrap]
    found = two.run(compare_precision, function, "qwen3", UNEQUAL, seeds=(0, 10, 30), steps=1, timeout=120, **options)
    check(found, "gradient", "weights")


def test_a_detached_prompt_is_further_off(two: Pool) -> None:
    """What the comparison is for: it sees a gradient that lacks a part."""
    config = {"gradient": {"prompt": "detached"}}
    found = two.run(compare_precision, fsdp2, "qwen3", UNEQUAL, seeds=(10,), steps=1, policy=MIXED, config=config)
    assert found[0]["gradient"][""] > 2 * WHOLE


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    ("kind", "wrap"),
    [
        *[("qwen3", wrap) for wrap in WRAPS],
        *[
            (kind, wrap)
            for kind in ("qwen3_moe", "qwen3_5_text")
            for wrap in ("fsdp2", "fsdp2-kept-each_pass", "zero-3")
        ],
    ],
)
def test_over_nccl(gpus: Pool, kind: str, wrap: str) -> None:
    function, options = WRAPS[wrap]
    seeds = (0, 10, 20, 30, 40) if kind == "qwen3_moe" else (0, 10, 30)
    found = gpus.run(compare_precision, function, kind, UNEQUAL, seeds=seeds, timeout=120, **options)
    check(found, "gradient", "weights")


@pytest.mark.multi_gpu
@pytest.mark.parametrize("wrap", NARROW)
def test_weights_kept_in_bfloat16_over_nccl(gpus: Pool, wrap: str) -> None:
    """The gradient only: the ordinary run, with which it is compared, keeps float32 weights."""
    function, options = NARROW[wrap]
    found = gpus.run(
        compare_precision, function, "qwen3", UNEQUAL, seeds=(0, 10, 30), steps=1, narrow_weights=True, **options
    )  # fmt: skip
    check(found, "gradient")
