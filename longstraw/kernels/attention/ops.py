"""One face for torch's attention ops that return the log-sum-exp and take it back."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from longstraw.errors import UnsupportedModelError
from longstraw.kernels.attention.tiled import TiledOps

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


class CpuFlashOps:
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


class CudnnOps:
    """cuDNN's fused attention through torch: the fastest on Hopper at head dims up to 256, half precision only."""

    name = "cudnn"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out, lse.view(q.shape[:3])

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout the seed and offset are never read, but the op wants tensors.
        nothing = torch.zeros((), dtype=torch.int64, device=q.device)
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.unsqueeze(-1), nothing, nothing, None, None, None,
            q.shape[2], k.shape[2], 0.0, causal, scale=scale,
        )  # fmt: skip


class CudaFlashOps:
    """torch's FlashAttention-2; half precision, head dims up to 256."""

    name = "flash"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._flash_attention_forward(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, None, q.shape[2], k.shape[2],
            0.0, causal, False, scale=scale,
        )  # fmt: skip
        return out.transpose(1, 2), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        nothing = torch.zeros(2, dtype=torch.uint64, device=q.device)
        q, k, v, out, grad = (x.transpose(1, 2) for x in (q, k, v, out, grad))
        grads = aten._flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, nothing, nothing, scale=scale
        )
        return tuple(x.transpose(1, 2) for x in grads)


def choose_ops(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionOps:
    """The attention ops for tensors of `dtype` on `device`.

    CPU: torch's flash op. CUDA in half precision: cuDNN where torch says it may run (compute capability 8.0 and
    above), else flash. CUDA in float32 and float64: our own tiled version, which is exact and slow.

    Raises:
        UnsupportedModelError: no op here gives exact gradients for this head dim.
    """
    if device.type == "cpu":
        return CpuFlashOps()
    if device.type != "cuda":
        raise UnsupportedModelError(f"no attention over pages for device {device.type!r}: use a cpu or cuda model")
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
