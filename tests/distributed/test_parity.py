"""Gradients and trained weights on several ranks are those of the ordinary step in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.distributed.steps import compare_training
from tests.distributed.wraps import ddp, fsdp2

TOLERANCE = 1e-5


def check(found: list[dict[str, Any]]) -> None:
    for rank, errors in enumerate(found):
        assert errors["gradient"] <= TOLERANCE, (rank, errors)
        assert errors["weights"] <= TOLERANCE, (rank, errors)


def test_ddp(two: Pool) -> None:
    check(two.run(compare_training, ddp))


@pytest.mark.parametrize("reduce", ["deferred", "each_pass"])
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2(two: Pool, reduce: str, reshard: bool) -> None:
    config = {"gradient": {"reduce": reduce}}
    check(two.run(compare_training, fsdp2, config=config, reshard=reshard, head=not reshard))
