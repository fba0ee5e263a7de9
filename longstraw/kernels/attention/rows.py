"""How a page's rows hold keys and values, and the blocks that the attention kernels are handed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class KvGradient:
    """Where the gradient of a block's keys and values goes.

    Attributes:
        rows_TC: [T, 2 * num_kv_heads * head_dim] in the accumulation dtype; the storage of the gradient pages, or a
            staging copy that is written back when the block is left.
        overwrite: True if the rows hold nothing yet: they are written, not read.
    """

    rows_TC: Tensor
    overwrite: bool

    def add(self, dk_BKTD: Tensor, dv_BKTD: Tensor) -> None:
        """Add the gradient of one pass, [1, num_kv_heads, T, head_dim] each, in any floating dtype."""
        k_into, v_into = kv_views(self.rows_TC, dk_BKTD.shape[1], dk_BKTD.shape[3])
        if self.overwrite:
            k_into.copy_(dk_BKTD)
            v_into.copy_(dv_BKTD)
        else:
            k_into.add_(dk_BKTD)
            v_into.add_(dv_BKTD)


@dataclass(frozen=True, kw_only=True, slots=True)
class KvBlock:
    """Consecutive rows of a layer's keys and values on the compute device, valid until the next block is asked for.

    Attributes:
        rows_TC: [T, 2 * num_kv_heads * head_dim], keys first.
        gradient: where the block's gradient is added, or None when nobody wants it.
    """

    rows_TC: Tensor
    gradient: KvGradient | None = None


def kv_views(rows_TC: Tensor, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """The keys and the values of token-major rows as two [1, num_kv_heads, T, head_dim] views; nothing is copied."""
    width = num_kv_heads * head_dim
    assert rows_TC.shape[1] == 2 * width, (rows_TC.shape, num_kv_heads, head_dim)
    k, v = (rows_TC[:, at : at + width].unflatten(1, (num_kv_heads, head_dim)) for at in (0, width))
    return k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
