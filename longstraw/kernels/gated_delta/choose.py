"""Which implementation of the gated delta rule runs: chosen by device and dtype, or named by the user."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from longstraw.errors import UnsupportedModelError
from longstraw.kernels.gated_delta.chunked import ChunkedRule
from longstraw.kernels.gated_delta.fla import FlaRule

BACKENDS = ("auto", "fla", "torch")


class DeltaRule(Protocol):
    """The gated delta rule over packed branches, with gradients of every tensor. Shapes as in `naive_delta_rule`."""

    @property
    def name(self) -> str: ...

    def __call__(
        self,
        q_SHK: Tensor,
        k_SHK: Tensor,
        v_SVD: Tensor,
        g_SV: Tensor,
        beta_SV: Tensor,
        *,
        lengths: Sequence[int],
        initial_VKD: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Outputs in the dtype of `v_SVD`; final states [B, V, K, D] in float32, or float64 for float64 inputs."""
        ...

    def workspace_bytes(
        self, num_v_heads: int, k_dim: int, v_dim: int, element: int, *, per_channel: bool = False
    ) -> int:
        """Bytes a token that its backward needs for a moment; `element` is the bytes of a value of the inputs."""
        ...


@functools.cache
def choose_rule(
    device: torch.device, dtype: torch.dtype, backend: str = "auto", *, per_channel: bool = False
) -> DeltaRule:
    """The rule for inputs of this dtype on this device, with one decay a head or one for each channel of its keys.

    `auto` is torch on a CPU, flash-linear-attention for half precision on a GPU, and torch for float32 and float64
    there, which flash-linear-attention would narrow. Nothing else that happens to be installed is ever used.

    Raises:
        UnsupportedModelError: flash-linear-attention is wanted but missing, known to be wrong here, or not made for
            this device or dtype.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    if backend == "auto":
        backend = "fla" if device.type == "cuda" and half else "torch"
    if backend == "torch":
        return ChunkedRule()
    if device.type != "cuda" or not half:
        raise UnsupportedModelError(
            f"kernels.gated_delta is fla, which computes float16 and bfloat16 on a GPU, not {dtype} on {device.type}; "
            "set it to auto or torch"
        )
    return FlaRule(device, per_channel=per_channel)
