"""How packed branches are cut into the chunks that the chunked delta rule works on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from longstraw.kernels.indices import index_tensor


class ChunkLayout:
    """Branches cut into chunks of equal size, padded at their ends, and the order in which the chunks are scanned.

    Chunks lie step by step: chunk 0 of every branch, then chunk 1 of those that have one, and so on. The branch with
    the most chunks comes first in each step, so that the branches of a step are the first ones of the step before.

    Args:
        lengths: tokens of each branch.
        size: tokens of a chunk.

    Attributes:
        steps: how many branches each step has.
    """

    def __init__(self, lengths: Sequence[int], size: int) -> None:
        self.size = size
        self._lengths = tuple(lengths)
        counts = [-(-length // size) for length in lengths]
        self._branches = sorted(range(len(lengths)), key=lambda branch: (-counts[branch], branch))
        self.steps = [sum(count > step for count in counts) for step in range(max(counts))]
        first = [sum(counts[:branch]) for branch in range(len(lengths))]
        self._order = [
            first[branch] + step for step, width in enumerate(self.steps) for branch in self._branches[:width]
        ]

    def cut(self, x: Tensor) -> Tensor:
        """[S, ...] packed rows to [N, size, ...] chunks in scan order; padding is 0."""
        parts = [F.pad(part, (*(0, 0) * (x.dim() - 1), 0, -len(part) % self.size)) for part in x.split(self._lengths)]
        return self._reorder(_joined(parts).unflatten(0, (-1, self.size)), self._order)

    def join(self, chunks: Tensor) -> Tensor:
        """The way back: [N, size, ...] chunks in scan order to [S, ...] packed rows."""
        rows = self._reorder(chunks, _inverse(self._order)).flatten(0, 1)
        padded = [-(-length // self.size) * self.size for length in self._lengths]
        return _joined([part[:length] for part, length in zip(rows.split(padded), self._lengths, strict=True)])

    def by_branch(self, states: Tensor) -> Tensor:
        """[B, ...] in the branches' scan order, as given to the layout."""
        return self._reorder(states, _inverse(self._branches))

    @staticmethod
    def _reorder(x: Tensor, order: list[int]) -> Tensor:
        if order == list(range(len(order))):
            return x
        return x.index_select(0, index_tensor(tuple(order), x.device))


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
