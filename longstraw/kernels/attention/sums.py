"""Which version of the sums over blocks runs: torch's operations, or one Triton kernel each."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from longstraw.kernels.attention import merge

HALF = (torch.float16, torch.bfloat16)


def sums_for(part: Tensor) -> ModuleType:
    """The module whose `merge_parts`, `add_parts` and `add_pair` take such parts.

    That is `fused` for half precision on CUDA, once it was checked against `merge` there, and `merge` for all others.

    Raises:
        KernelMismatchError: a kernel is wrong on this device.
    """
    if part.device.type == "cuda" and part.dtype in HALF:
        return _checked(part.device, part.dtype, part.shape[-1])
    return merge


@functools.cache
def _checked(device: torch.device, dtype: torch.dtype, head_dim: int) -> ModuleType:
    from longstraw.kernels.attention import fused
    from longstraw.kernels.attention.check import check_sums

    check_sums(fused, device, dtype, head_dim)
    return fused
