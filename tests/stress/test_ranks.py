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


def flip_on_one(rank: int, world: int, path: str, parity_tokens: int) -> dict[str, Any]:
    """Runs on each rank: rank 1's bytes are flipped, and no checksum says so."""
    from longstraw.pagers.checksums import Checksums
    from longstraw.stress import Fault, StressOptions, loop, run_stress

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checksums, "first_wrong", lambda self, data, offset: None)
        patch.setattr(loop, "Fault", [Fault.FLIPPED_BYTE if rank == 1 else Fault.SLOW_DISK])
        options = StressOptions(
            scratch=Path(path), prompt_tokens=64, response_tokens=8, group=3, layers=2, seed=5, seconds=100, steps=12,
            fault_rate=1.0, parity_rate=1e-9, parity_tokens=parity_tokens,
        )  # fmt: skip
        return run_stress(options, torch.device("cpu")).to_dict()


@pytest.mark.stress
@pytest.mark.parametrize("parity_tokens", [64, 16], ids=["plain autograd", "too long for it"])
def test_one_rank_s_flipped_byte_is_looked_for_on_both(two: Pool, tmp_path: Path, parity_tokens: int) -> None:
    results = two.run(flip_on_one, str(tmp_path), timeout=120, parity_tokens=parity_tokens)
    counter = "compared" if parity_tokens == 64 else "repeated"
    assert results[0][counter] == results[1][counter] > 0
    assert any("is off by" in problem for result in results for problem in result["problems"]), results
