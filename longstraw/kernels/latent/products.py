"""Matrix products whose sums are kept in float32 or better, and how large their tiles may be."""

from __future__ import annotations

import torch
from torch import Tensor

from longstraw.kernels.attention.merge import merge_dtype

_TILE_ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 21}


def tile_elements(device: torch.device) -> int:
    """Elements that one tile of scores, or of gathered rows, may have on `device`."""
    return _TILE_ELEMENTS.get(device.type, 1 << 21)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of two matrices, or of two batches of them, in float32 (float64 for float64).

    Half-precision inputs are multiplied as they are and summed in float32; the result is never rounded to half
    precision, as `a @ b` would be: scores of tens would lose what tells two keys apart.
    """
    wide = merge_dtype(a.dtype)
    if a.dtype == wide:
        return a @ b
    if a.device.type != "cuda":
        return a.to(wide) @ b.to(wide)
    return torch.mm(a, b, out_dtype=wide) if a.dim() == 2 else torch.bmm(a, b, out_dtype=wide)
