"""Layers with two mixers or none, and logits that a model casts itself, under FSDP2: as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.pool import Pool
from tests.distributed.steps import compare_training
from tests.distributed.wraps import fsdp2
from tests.families.mamba2_models import build


def falcon(_: Any) -> Any:
    return build("falcon_h1", "HH", dtype=torch.float32)


def nemotron(_: Any) -> Any:
    return build("nemotron_h", "LEAML", dtype=torch.float32)


@pytest.mark.parametrize("reduce", ["deferred", "each_pass"])
@pytest.mark.parametrize("make", [falcon, nemotron])
def test_fsdp2(two: Pool, make: Any, reduce: str) -> None:
    config = {"gradient": {"reduce": reduce}, "replay": {"checkpoint": reduce == "each_pass", "lane_tokens": 14}}
    for errors in two.run(compare_training, fsdp2, prepare=make, config=config, beside_one_process=True):
        assert errors["gradient"] <= 1e-5, errors
        assert errors["weights"] <= 1e-5, errors
