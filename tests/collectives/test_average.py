"""How gradients are put together for a reduction: few of them, each of one kind, none too large."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longstraw.collectives import average


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
