"""One face for torch's attention ops that return the log-sum-exp and take it back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from longstraw.errors import UnsupportedModelError
from longstraw.kernels.attention.branches import BranchByBranch
from longstraw.kernels.attention.tiled import TiledOps
from longstraw.kernels.indices import branch_edges

aten = torch.ops.aten


class AttentionOps(Protocol):
    """Attention of one set of queries over one set of keys, forward and backward.

    q and out are [B, num_heads, S, head_dim], k and v [B, num_kv_heads, T, head_dim], the log-sum-exp is
    [B, num_heads, S] in float32 (float64 for float64 inputs). `causal` needs S = T. Backward takes an output and a
    log-sum-exp that may be those of a softmax over more keys than these.
    """

    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Causal attention within each of the branches that follow one another along S (B = 1)."""
        ...

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
        """Backward of `forward_packed`."""
        ...


class CpuFlashOps(BranchByBranch):
    """torch's blocked CPU attention; every floating dtype, grouped heads without expansion."""

    name = "cpu-flash"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )


class CudaFlashOps:
    """torch's FlashAttention-2; half precision, head dims up to 256. Packed branches are one call."""

    name = "flash"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._flash_attention_forward(
            *_token_major(q, k, v), None, None, q.shape[2], k.shape[2], 0.0, causal, False, scale=scale
        )
        return out.transpose(1, 2), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = aten._flash_attention_backward(
            *_token_major(grad, q, k, v, out), lse, None, None, q.shape[2], k.shape[2], 0.0, causal,
            _no_seed(q), _no_seed(q), scale=scale,
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, scale: float
    ) -> tuple[Tensor, Tensor]:
        starts, longest = branch_edges(tuple(lengths), q.device), max(lengths)
        rows = (x[0] for x in _token_major(q, k, v))
        out, lse, *_ = aten._flash_attention_forward(
            *rows, starts, starts, longest, longest, 0.0, True, False, scale=scale
        )
        return out.transpose(0, 1)[None], lse.view(1, q.shape[1], q.shape[2])

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
        starts, longest = branch_edges(tuple(lengths), q.device), max(lengths)
        rows = (x[0] for x in _token_major(grad, q, k, v, out))
        dq, dk, dv = aten._flash_attention_backward(
            *rows, lse[0].contiguous(), starts, starts, longest, longest, 0.0, True,
            _no_seed(q), _no_seed(q), scale=scale,
        )  # fmt: skip
        return dq.transpose(0, 1)[None], dk.transpose(0, 1)[None], dv.transpose(0, 1)[None]


class CudnnOps(CudaFlashOps):
    """cuDNN's fused attention through torch: the fastest on Hopper at head dims up to 256, half precision only.

    cuDNN plans anew for each shape, and refuses a single token: several branches in one row, and branches of one
    token, go to FlashAttention.
    """

    name = "cudnn"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        if q.shape[2] == 1:
            return super().forward(q, k, v, causal=causal, scale=scale)
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out, lse.view(q.shape[:3])

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if q.shape[2] == 1:
            return super().backward(grad, q, k, v, out, lse, causal=causal, scale=scale)
        # Without dropout the seed and offset are never read, but the op wants tensors.
        nothing = torch.zeros((), dtype=torch.int64, device=q.device)
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.unsqueeze(-1), nothing, nothing, None, None, None,
            q.shape[2], k.shape[2], 0.0, causal, scale=scale,
        )  # fmt: skip

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, scale: float
    ) -> tuple[Tensor, Tensor]:
        if len(lengths) == 1:
            return self.forward(q, k, v, causal=True, scale=scale)
        return super().forward_packed(q, k, v, lengths, scale=scale)

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
        if len(lengths) == 1:
            return self.backward(grad, q, k, v, out, lse, causal=True, scale=scale)
        return super().backward_packed(grad, q, k, v, out, lse, lengths, scale=scale)


def _token_major(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


def _no_seed(like: Tensor) -> Tensor:
    return torch.zeros(2, dtype=torch.uint64, device=like.device)


def choose_ops(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None = None) -> AttentionOps:
    """The attention ops for tensors of `dtype` on `device`; with soft-capped scores our own tiled version everywhere.

    CPU: torch's flash op. CUDA in half precision: cuDNN where torch says it may run (compute capability 8.0 and
    above), else flash. CUDA in float32 and float64: our own tiled version, which is exact and slow.

    Raises:
        UnsupportedModelError: no op here gives exact gradients for this head dim.
    """
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedModelError(f"no attention over pages for device {device.type!r}: use a cpu or cuda model")
    if softcap is not None:
        return TiledOps(softcap)
    if device.type == "cpu":
        return CpuFlashOps()
    if dtype not in (torch.float16, torch.bfloat16):
        return TiledOps()
    if head_dim % 8 or head_dim > 256:
        raise UnsupportedModelError(
            f"head_dim {head_dim} in {dtype} on CUDA: the fused ops take multiples of 8 up to 256; "
            "run the model in float32 to use the tiled version"
        )
    if torch.cuda.get_device_capability(device) >= (9, 0) and torch.backends.cudnn.is_available():
        return CudnnOps()
    return CudaFlashOps()
