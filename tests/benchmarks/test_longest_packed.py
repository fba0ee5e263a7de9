"""The search for the longest prompt that fits."""

from __future__ import annotations

import pytest

from benchmarks.longest_packed import LastLayerDone, longest, stop_behind


@pytest.mark.parametrize("guess", [0, 5, 8, 40, 47, 48, 200])
@pytest.mark.parametrize("limit", [0, 7, 8, 41, 100])
def test_the_longest_that_fits_is_found_from_any_guess(guess: int, limit: int) -> None:
    tried: list[int] = []

    def fits(length: int) -> bool:
        tried.append(length)
        return length <= limit

    assert longest(fits, guess, 8) == limit // 8 * 8
    assert len(tried) == len(set(tried))


def test_backward_ends_behind_the_last_layer() -> None:
    import torch

    first, last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    handle = stop_behind(last)
    loss = last(first(torch.ones(2, 3))).sum()
    with pytest.raises(LastLayerDone):
        loss.backward()
    assert last.weight.grad is not None and first.weight.grad is None
    handle.remove()
