"""Merging partial attention outputs by their log-sum-exp, in float32 or better."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial outputs of `dtype` are merged: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sink_gradient(grad_BHSD: Tensor, out_BHSD: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """The gradient [H] of the sinks' scores, from the merged output and log-sum-exp, summed over all queries.

    A sink has no value, so of the softmax's gradient p (dp - delta) only -p delta is left, delta = sum of grad * out.
    """
    wide = lse_BHS.dtype
    delta = (grad_BHSD.to(wide) * out_BHSD.to(wide)).sum(-1)
    p = (sinks_H.to(wide)[None, :, None] - lse_BHS).exp_()
    return -(p * delta).sum((0, 2)).to(sinks_H.dtype)


class PartialMerge:
    """A running softmax over disjoint sets of keys (the rule of online softmax, arXiv 1805.02867, section 3).

    Two partial results (o1, l1), (o2, l2) of the same queries combine to l = log(e^l1 + e^l2) and
    o = o1 e^(l1 - l) + o2 e^(l2 - l). The order of `add` decides the rounding, so callers add in token order.
    """

    def __init__(self) -> None:
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, out_BHSD: Tensor, lse_BHS: Tensor) -> None:
        """Take in one partial output [B, H, S, D] with its log-sum-exp [B, H, S]."""
        wide = merge_dtype(out_BHSD.dtype)
        out_BHSD, lse_BHS = out_BHSD.to(wide), lse_BHS.to(wide)
        if self._out is None or self._lse is None:
            self._out, self._lse = out_BHSD, lse_BHS
            return
        lse = torch.logaddexp(self._lse, lse_BHS)
        # lerp(old, new, w) = old + w (new - old), with w = e^(l_new - l): one pass over the wide tensors.
        weight = (lse_BHS - lse).exp_().unsqueeze(-1)
        self._out = torch.lerp(self._out, out_BHSD, weight)
        self._lse = lse

    def add_sink(self, sinks_H: Tensor) -> None:
        """Take in a key without a value, of score `sinks_H` [H] for every query (gpt-oss's attention sinks).

        It belongs to the whole softmax, so it is added once, after all keys.
        """
        assert self._out is not None, "nothing was added"
        assert self._lse is not None
        lse = torch.logaddexp(self._lse, sinks_H.to(self._lse.dtype)[None, :, None])
        self._out = self._out * (self._lse - lse).exp_().unsqueeze(-1)
        self._lse = lse

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The merged output in `dtype`, and its log-sum-exp in the merge dtype, contiguous."""
        assert self._out is not None and self._lse is not None, "nothing was added"
        return self._out.to(dtype), self._lse.contiguous()
