"""How a page's rows hold keys and values."""

from __future__ import annotations

from torch import Tensor

from longstraw.kernels.attention.sums import sums_for
from longstraw.kernels.rows import RowGradient


def kv_views(rows_TC: Tensor, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """The keys and the values of token-major rows as two [1, num_kv_heads, T, head_dim] views; nothing is copied."""
    width = num_kv_heads * head_dim
    assert rows_TC.shape[1] == 2 * width, (rows_TC.shape, num_kv_heads, head_dim)
    k, v = (rows_TC[:, at : at + width].unflatten(1, (num_kv_heads, head_dim)) for at in (0, width))
    return k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)


def add_kv_gradient(into: RowGradient, dk_BKTD: Tensor, dv_BKTD: Tensor) -> None:
    """Add the gradients of a block's keys and values, [1, num_kv_heads, T, head_dim] each, in any floating dtype."""
    k_into, v_into = kv_views(into.rows_TC, dk_BKTD.shape[1], dk_BKTD.shape[3])
    sums_for(dk_BKTD).add_pair(k_into, v_into, dk_BKTD, dv_BKTD, overwrite=into.overwrite)
