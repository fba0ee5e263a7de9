"""How gradients are put together for a reduction: few of them, each of one kind, none too large."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longstraw.collectives import average
from tests.distributed.pool import Pool


def lengths(tensors: list[Tensor]) -> list[list[int]]:
    return [[tensor.numel() for tensor in bucket] for bucket in average._buckets(tensors)]


def test_neighbours_of_one_kind_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(average, "BUCKET_BYTES", 40)
    assert lengths([torch.zeros(n) for n in (4, 6, 1, 30, 2, 3)]) == [[4, 6], [1], [30], [2, 3]]
    assert lengths([]) == []


@pytest.mark.parametrize(
    "other", [torch.zeros(3, dtype=torch.float64), torch.zeros(3, device="meta")], ids=["dtype", "device"]
)
def test_another_kind_goes_alone(other: Tensor) -> None:
    """Together they would be reduced in the wider type, or not at all."""
    assert lengths([torch.zeros(1), torch.zeros(2), other, torch.zeros(4)]) == [[1, 2], [3], [4]]


def means(rank: int, world: int) -> list[Tensor]:
    """Runs on each rank. Several tensors in one bucket, one alone in its own, and one that is not contiguous."""
    limit, average.BUCKET_BYTES = average.BUCKET_BYTES, 40
    try:
        tensors = [torch.full((n,), float(n + 2 * rank)) for n in (3, 4, 30)]
        tensors.append(((rank + 1) * torch.arange(20.0).view(4, 5)).t())
        average.all_reduce_mean(tensors, None)
        return tensors
    finally:
        average.BUCKET_BYTES = limit


def test_every_tensor_becomes_its_mean() -> None:
    pool = Pool(2)
    try:
        for found in pool.run(means, timeout=60):
            for n, tensor in zip((3, 4, 30), found, strict=False):
                assert torch.equal(tensor, torch.full((n,), n + 1.0))
            assert torch.equal(found[3], (1.5 * torch.arange(20.0).view(4, 5)).t())
    finally:
        pool.stop()
