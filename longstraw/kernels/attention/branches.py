"""Packed branches, one call each: for attention ops that know no row of several branches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longstraw.kernels.rows import branch_rows


class BranchByBranch:
    """`forward_packed` and `backward_packed` of `AttentionOps`, from its `forward` and `backward`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, scale: float
    ) -> tuple[Tensor, Tensor]:
        parts = [
            self.forward(q[:, :, rows], k[:, :, rows], v[:, :, rows], causal=True, scale=scale)
            for rows in branch_rows(lengths)
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out for out, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=2)

    def backward_packed(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        lengths: Sequence[int],
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = [
            self.backward(
                grad[:, :, rows], q[:, :, rows], k[:, :, rows], v[:, :, rows], out[:, :, rows], lse[:, :, rows],
                causal=True, scale=scale,
            )
            for rows in branch_rows(lengths)
        ]  # fmt: skip
        if len(parts) == 1:
            return parts[0]
        dq, dk, dv = (torch.cat(gradients, dim=2) for gradients in zip(*parts, strict=True))
        return dq, dk, dv
