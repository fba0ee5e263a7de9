"""Attention of packed branches over a shared, paged prefix and over each branch's own causal rows."""

from longstraw.kernels.attention.ops import AttentionOps, choose_ops
from longstraw.kernels.attention.paged import keep_state_only, paged_attention
from longstraw.kernels.attention.rows import add_kv_gradient, kv_views

__all__ = [
    "AttentionOps",
    "add_kv_gradient",
    "choose_ops",
    "keep_state_only",
    "kv_views",
    "paged_attention",
]
