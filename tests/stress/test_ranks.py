"""Several ranks: each with faults and delays of its own, one model, one gradient."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.pool import Pool


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.stop()


def stress(rank: int, world: int, path: str, debug: bool, **changes: Any) -> dict[str, Any]:
    """Runs on each rank."""
    from longstraw.stress import StressOptions, run_stress

    os.environ["LONGSTRAW_DEBUG"] = "1" if debug else "0"
    options = StressOptions(
        scratch=Path(path), prompt_tokens=64, response_tokens=8, group=3, layers=2, seed=5, **changes
    )
    return run_stress(options, torch.device("cpu")).to_dict()


@pytest.mark.stress
@pytest.mark.parametrize("debug", [False, True], ids=["faults", "delays"])
def test_two_ranks(two: Pool, tmp_path: Path, debug: bool) -> None:
    """With debug mode each rank's copies are delayed otherwise: no fault, and every step is right."""
    changes = {"fault_rate": 0.0 if debug else 0.6, "parity_rate": 0.5, "steps": 8, "seconds": 100}
    results = two.run(stress, str(tmp_path), debug, timeout=120, **changes)
    for result in results:
        assert result["problems"] == []
        assert result["compared"] > 0
    assert results[0]["steps"] == results[1]["steps"] > 3
    if not debug:
        assert sum(results[0]["failed_cleanly"].values()) > 0
    assert list(tmp_path.iterdir()) == []
