"""Merging a partial output into a running one, in place, where a part may see no keys at all."""

from __future__ import annotations

import torch
from torch import Tensor

from longstraw.kernels.attention.merge import merge_dtype
from longstraw.kernels.latent.products import wide_product


class RunningOutput:
    """Outputs and log-sum-exps of S queries over the keys seen so far (online softmax, arXiv 1805.02867, section 3).

    Attributes:
        out_SHV: in the merge dtype; zeros where no key was seen.
        lse_SH: in the merge dtype; -inf where no key was seen.
    """

    def __init__(self, q_SHC: Tensor, value_dim: int) -> None:
        wide = merge_dtype(q_SHC.dtype)
        shape = q_SHC.shape[:2]
        self.out_SHV = torch.zeros(*shape, value_dim, dtype=wide, device=q_SHC.device)
        self.lse_SH = torch.full(shape, float("-inf"), dtype=wide, device=q_SHC.device)

    def add(self, rows: slice, scores_NHT: Tensor, values: Tensor) -> None:
        """Take in more keys for the queries `rows`.

        Args:
            scores_NHT: wide, scaled, -inf where a query does not see a key. Overwritten.
            values: [T, V], the same for all of these queries, or [N, T, V].
        """
        top = scores_NHT.amax(-1, keepdim=True)
        # A query that sees none of these keys must not turn -inf minus -inf into nan.
        top = top.masked_fill(top == float("-inf"), 0.0)
        p = scores_NHT.sub_(top).exp_()
        total = p.sum(-1)
        p = p.to(values.dtype)
        if values.dim() == 2:
            part = wide_product(p.flatten(0, 1), values).view(*p.shape[:2], -1)
        else:
            part = wide_product(p, values)
        self._merge(rows, part.div_(total.clamp_min(1.0)[..., None]), top[..., 0] + total.log())

    def _merge(self, rows: slice, part_NHV: Tensor, part_lse_NH: Tensor) -> None:
        lse = self.lse_SH[rows]
        merged = torch.logaddexp(lse, part_lse_NH)
        weight = (part_lse_NH - merged).exp_().masked_fill_(merged == float("-inf"), 0.0)
        self.out_SHV[rows] = torch.lerp(self.out_SHV[rows], part_NHV, weight[..., None])
        self.lse_SH[rows] = merged
