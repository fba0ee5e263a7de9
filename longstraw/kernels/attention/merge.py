"""What is summed over a prefix's blocks, in torch's operations: outputs by their log-sum-exp, and gradients."""

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


def merge_parts(
    out_BHSD: Tensor, lse_BHS: Tensor, part_BHSD: Tensor, part_lse_BHS: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Two partial results over disjoint keys as one (the rule of online softmax, arXiv 1805.02867, section 3).

    (o1, l1), (o2, l2) of the same queries combine to l = log(e^l1 + e^l2) and o = o1 e^(l1 - l) + o2 e^(l2 - l), in the
    merge dtype of the part.

    Returns:
        the output [B, H, S, D] in `dtype`, and its log-sum-exp [B, H, S] in the merge dtype.
    """
    wide = merge_dtype(part_BHSD.dtype)
    lse_BHS, part_lse_BHS = lse_BHS.to(wide), part_lse_BHS.to(wide)
    lse = torch.logaddexp(lse_BHS, part_lse_BHS)
    # lerp(old, new, w) = old + w (new - old), with w = e^(l_new - l): one pass over the wide tensors.
    weight = (part_lse_BHS - lse).exp_().unsqueeze(-1)
    return torch.lerp(out_BHSD.to(wide), part_BHSD.to(wide), weight).to(dtype), lse


def add_parts(total_BHSD: Tensor, part_BHSD: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum in `dtype` of two tensors, added in the merge dtype of the part; a total in that dtype is overwritten."""
    return total_BHSD.to(merge_dtype(part_BHSD.dtype)).add_(part_BHSD).to(dtype)


def add_pair(k_into: Tensor, v_into: Tensor, dk_BKTD: Tensor, dv_BKTD: Tensor, *, overwrite: bool) -> None:
    """Add two gradients to two tensors in place, or write them there."""
    for into, gradient in ((k_into, dk_BKTD), (v_into, dv_BKTD)):
        if overwrite:
            into.copy_(gradient)
        else:
            into.add_(gradient)
