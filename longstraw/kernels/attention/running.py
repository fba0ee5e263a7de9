"""Running sums over a prefix's blocks: the merged output, and the gradient of the queries.

A part waits until the next one comes or the result is asked for: the first is never widened on its own, and the last is
added straight into the result's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longstraw.kernels.attention.merge import merge_dtype
from longstraw.kernels.attention.sums import sums_for


class PartialMerge:
    """A running softmax over disjoint sets of keys, by `merge.merge_parts`.

    The order of `add` decides the rounding, so callers add in token order.
    """

    def __init__(self) -> None:
        self._merged: tuple[Tensor, Tensor] | None = None
        self._waiting: tuple[Tensor, Tensor] | None = None

    def add(self, out_BHSD: Tensor, lse_BHS: Tensor) -> None:
        """Take in, and own from now on, one partial output [B, H, S, D] with its log-sum-exp [B, H, S]."""
        if self._waiting is not None:
            self._merged = self._with_waiting(merge_dtype(out_BHSD.dtype))
        self._waiting = out_BHSD, lse_BHS

    def add_sink(self, sinks_H: Tensor) -> None:
        """Take in a key without a value, of score `sinks_H` [H] for every query (gpt-oss's attention sinks).

        It belongs to the whole softmax, so it is added once, after all keys.
        """
        assert self._waiting is not None, "nothing was added"
        wide = merge_dtype(self._waiting[0].dtype)
        out, before = self._with_waiting(wide)
        lse = torch.logaddexp(before.to(wide), sinks_H.to(wide)[None, :, None])
        self._merged, self._waiting = (out * (before - lse).exp_().unsqueeze(-1), lse), None

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The merged output in `dtype`, and its log-sum-exp in the merge dtype, contiguous."""
        out, lse = self._with_waiting(dtype)
        return out, lse.to(merge_dtype(dtype)).contiguous()

    def _with_waiting(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All parts, the output in `dtype`."""
        if self._merged is None:
            assert self._waiting is not None, "nothing was added"
            return self._waiting[0].to(dtype), self._waiting[1]
        if self._waiting is None:
            return self._merged[0].to(dtype), self._merged[1]
        return sums_for(self._waiting[0]).merge_parts(*self._merged, *self._waiting, dtype)


class RunningSum:
    """A sum of tensors of one shape, in the merge dtype of its parts."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._waiting: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Take in, and own from now on, one part."""
        if self._waiting is not None:
            self._total = self._with_waiting(merge_dtype(part.dtype))
        self._waiting = part

    def in_place(self, like: Tensor) -> Tensor:
        """The sum so far in the merge dtype, for a kernel that adds to it; zeros in the shape of `like` at first."""
        wide = merge_dtype(like.dtype)
        if self._total is None and self._waiting is None:
            self._total = torch.zeros_like(like, dtype=wide)
        self._total, self._waiting = self._with_waiting(wide), None
        return self._total

    def result(self, dtype: torch.dtype) -> Tensor:
        """The sum in `dtype`."""
        return self._with_waiting(dtype)

    def _with_waiting(self, dtype: torch.dtype) -> Tensor:
        if self._total is None:
            assert self._waiting is not None, "nothing was added"
            return self._waiting.to(dtype)
        if self._waiting is None:
            return self._total.to(dtype)
        return sums_for(self._waiting).add_parts(self._total, self._waiting, dtype)
