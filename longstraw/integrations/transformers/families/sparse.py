"""Latent attention over selected tokens: DeepSeek-V3.2 and GLM-5, whose layers may share a selection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longstraw.integrations.transformers.families.family import Family
from longstraw.integrations.transformers.families.latent import (
    latent_layer,
    latents,
    project_out,
    refuse_latent,
    refuse_mask,
    rotation,
)
from longstraw.runtime.latent import attend
from longstraw.runtime.layer_spec import LayerSpec
from longstraw.runtime.passes import ForwardPass
from longstraw.runtime.selection import Index

# The rotation of the indexer's queries and keys: transformers' DeepSeek-V3.2 rotates halves, GLM-5 interleaved pairs.
_INDEX_ROTATION = {
    "DeepseekV32Attention": "apply_rotary_pos_emb",
    "GlmMoeDsaAttention": "apply_rotary_pos_emb_interleave",
}


@torch.no_grad()
def _index(
    indexer: Any, hidden_1SE: Tensor, q_resid_1SR: Tensor, positions: tuple[Tensor, Tensor], rotate: Any
) -> Index:
    """The indexer's queries, keys and head weights, as its own forward computes them. They are not trained."""
    tokens = hidden_1SE.shape[1]
    parts = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]
    q_rope, q_pass = indexer.wq_b(q_resid_1SR).view(1, tokens, indexer.n_heads, indexer.head_dim).split(parts, dim=-1)
    k_rope, k_pass = indexer.k_norm(indexer.wk(hidden_1SE)).unsqueeze(2).split(parts, dim=-1)
    q_rope, k_rope = rotate(q_rope, k_rope, *positions, unsqueeze_dim=2)
    weights = indexer.weights_proj(hidden_1SE.to(indexer.weights_proj.weight.dtype)).float()
    return Index(
        q_SHD=torch.cat([q_rope, q_pass], dim=-1)[0],
        keys_SD=torch.cat([k_rope, k_pass], dim=-1)[0, :, 0],
        weights_SH=weights[0] * indexer.n_heads**-0.5,
        scale=indexer.softmax_scale,
        top_k=indexer.index_topk,
    )


def _exchange(attention: nn.Module, forward: ForwardPass) -> Callable[..., Any]:
    module: Any = attention
    rotate = rotation(module, "apply_rotary_pos_emb_interleave")
    rotate_index = rotation(module, _INDEX_ROTATION[type(module).__name__])

    def run(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        refuse_mask(module, attention_mask)
        found = latents(module, hidden_states, position_embeddings, rotate)
        index = None
        if module.indexer is not None:
            assert found.q_resid_1SR is not None, "an indexer reads low-rank queries"
            index = _index(module.indexer, hidden_states, found.q_resid_1SR, position_embeddings, rotate_index)
        out = attend(
            forward,
            module.layer_idx,
            found.q_SHC,
            found.rows_SC,
            value_dim=module.kv_lora_rank,
            scale=module.scaling,
            index=index,
            sparse=True,
        )
        out = project_out(module, out, found)
        # Layers that share a selection get it from the pass: what the model hands from layer to layer stays empty.
        return (out, None, None) if hasattr(module, "skip_topk") else (out, None)

    return run


def _refuse(attention: Any, config: Any) -> str | None:
    if attention.indexer is not None and getattr(attention, "q_proj", None) is not None:
        return f"layer {attention.layer_idx} has an indexer but no low-rank queries, which the indexer reads"
    if attention.indexer is None and "full" not in config.indexer_types[: attention.layer_idx]:
        return f"layer {attention.layer_idx} shares the selection of an earlier layer, but none before it computes one"
    return refuse_latent(attention, config)


def _spec(attention: Any, config: Any, dtype: torch.dtype) -> LayerSpec:
    indexer = attention.indexer
    if indexer is None:
        return latent_layer(attention, dtype)
    q_SHD = torch.empty(1, indexer.n_heads, indexer.head_dim, dtype=dtype, device="meta")
    index = Index(
        q_SHD=q_SHD,
        keys_SD=q_SHD[:, 0],
        weights_SH=torch.empty(1, indexer.n_heads, device="meta"),
        scale=indexer.softmax_scale,
        top_k=indexer.index_topk,
    )
    return latent_layer(attention, dtype, index)


FAMILY = Family(
    name="sparse latent",
    attention_classes=frozenset(_INDEX_ROTATION),
    refuse=_refuse,
    spec=_spec,
    exchange=_exchange,
)
