"""The gradient of a layer's queries over the blocks of its prefix, and what computes it where it is all that is wanted.

Where nobody wants a block's own gradient (the prompt is detached, or its keys and values are frozen), three of a
backward's five matrix products are enough. No op of torch's has them alone: ours is used where `dq_tiles` says that it
was measured faster than all five are in cuDNN, and the ops' whole backward everywhere else.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from longstraw.kernels.attention.dq_tiles import FASTER_ON_HOPPER, LEAST_QUERIES
from longstraw.kernels.attention.ops import AttentionOps
from longstraw.kernels.attention.running import RunningSum


class QueryGradient:
    """The sum over blocks of the queries' gradient.

    Args:
        grad_BHSD, q_BHSD, out_BHSD: [1, num_heads, S, head_dim] of the layer.
        lse_BHS: of the softmax over all keys.
        ops: what computes the backward where nothing better is known.
    """

    def __init__(
        self, grad_BHSD: Tensor, q_BHSD: Tensor, out_BHSD: Tensor, lse_BHS: Tensor, ops: AttentionOps, scale: float
    ) -> None:
        self._inputs = grad_BHSD, q_BHSD, out_BHSD, lse_BHS
        self._ops, self._scale = ops, scale
        self._sum = RunningSum()
        self._delta: Tensor | None = None

    def add(self, part_BHSD: Tensor) -> None:
        """Take in, and own from now on, what some keys give."""
        self._sum.add(part_BHSD)

    def add_block(self, k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        """Compute, and take in, what a block of keys gives that every query sees."""
        grad, q, out, lse = self._inputs
        fused = _fused(q, self._ops)
        if fused is None:
            self.add(self._ops.backward(grad, q, k_BKTD, v_BKTD, out, lse, causal=False, scale=self._scale)[0])
            return
        grad = grad if grad.stride(3) == 1 else grad.contiguous()
        if self._delta is None:
            self._delta = fused.softmax_delta(grad, out)
        fused.add_dq(
            self._sum.in_place(q), grad, q, k_BKTD, v_BKTD, lse, self._delta,
            scale=self._scale, tiles=FASTER_ON_HOPPER[q.shape[3]],
        )  # fmt: skip

    def result(self, dtype: torch.dtype) -> Tensor:
        """The sum in `dtype`."""
        return self._sum.result(dtype)


def _fused(q_BHSD: Tensor, ops: AttentionOps) -> ModuleType | None:
    """The kernel of three products, if it is for these queries."""
    if ops.name != "cudnn" or q_BHSD.shape[2] < LEAST_QUERIES or q_BHSD.shape[3] not in FASTER_ON_HOPPER:
        return None
    if torch.cuda.get_device_capability(q_BHSD.device)[0] != 9:
        return None
    return _checked(q_BHSD.device, q_BHSD.dtype, q_BHSD.shape[3])


@functools.cache
def _checked(device: torch.device, dtype: torch.dtype, head_dim: int) -> ModuleType:
    from longstraw.kernels.attention import fused_dq
    from longstraw.kernels.attention.check import check_dq

    check_dq(fused_dq.add_dq, device, dtype, head_dim, FASTER_ON_HOPPER[head_dim])
    return fused_dq
