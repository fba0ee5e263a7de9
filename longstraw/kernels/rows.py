"""Rows as kernels are handed them: a block of resident state and where its gradient goes, and packed branches."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGradient:
    """Where the gradient of a block's rows goes.

    Attributes:
        rows_TC: [T, C] in the accumulation dtype: the storage of the gradient pages, or a staging copy that is written
            back when the block is left.
        overwrite: True if the rows hold nothing yet: they are written, not read.
    """

    rows_TC: Tensor
    overwrite: bool

    def add(self, gradient_TC: Tensor) -> None:
        """Add one pass's gradient [T, C], in any floating dtype."""
        if self.overwrite:
            self.rows_TC.copy_(gradient_TC)
        else:
            self.rows_TC.add_(gradient_TC)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBlock:
    """Consecutive rows of one state on the compute device, valid until the next block is asked for.

    Attributes:
        rows_TC: [T, C], the state's fields side by side.
        gradient: where the block's gradient is added, or None when nobody wants it.
    """

    rows_TC: Tensor
    gradient: RowGradient | None = None


class KeptOutput(Protocol):
    """Where a layer's output is held from its first run to its recomputation."""

    def kept_output(self) -> tuple[Tensor, Tensor] | None:
        """The layer's output and log-sum-exp if they are already known (a recomputation), else None."""
        ...

    def keep_output(self, out: Tensor, lse: Tensor) -> None:
        """Told of the output that was just computed, in the shape of the layer's kernel, and its log-sum-exp."""
        ...


class PrefixPages(KeptOutput, Protocol):
    """A layer's view of the pages of a token state for one pass. Blocks come in token order, each valid until the next
    is asked for."""

    def forward_blocks(self) -> Generator[RowBlock]:
        """The prefix's blocks, without gradients."""
        ...

    def backward_blocks(self) -> Generator[RowBlock]:
        """The prefix's blocks again, with where their gradients go (or None)."""
        ...

    def own_gradient(self) -> Generator[Tensor]:
        """The gradient [S, C] that later tokens sent to this pass's own rows: one or none."""
        ...


def branch_rows(lengths: Sequence[int]) -> list[slice]:
    """The rows of each of the branches that follow one another, given how many each has."""
    slices, start = [], 0
    for length in lengths:
        slices.append(slice(start, start + length))
        start += length
    return slices
