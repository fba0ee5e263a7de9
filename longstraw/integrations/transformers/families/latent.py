"""Multi-head latent attention: DeepSeek-V3 and models built alike, over latent rows instead of expanded heads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longstraw.errors import UnsupportedModelError
from longstraw.integrations.transformers.families.family import Family
from longstraw.integrations.transformers.linear import matrix_parts
from longstraw.runtime.latent import attend, latent_spec
from longstraw.runtime.layer_spec import LayerSpec
from longstraw.runtime.passes import ForwardPass
from longstraw.runtime.selection import Index


@dataclass(frozen=True, kw_only=True, slots=True)
class Latents:
    """What latent attention works with, from an attention module's own projections.

    Attributes:
        q_SHC: queries in latent coordinates, position encoded; C = kv_lora_rank + qk_rope_head_dim.
        rows_SC: latent rows, the normalized c_kv and the position encoded k_rope side by side.
        values: matrices [num_heads, v_head_dim, kv_lora_rank], whose sum turns latent outputs into values.
        q_resid_1SR: the normalized low-rank queries, [1, S, q_lora_rank], or None if queries are not low-rank.
    """

    q_SHC: Tensor
    rows_SC: Tensor
    values: list[Tensor]
    q_resid_1SR: Tensor | None


def latents(attention: Any, hidden_1SE: Tensor, position_embeddings: tuple[Tensor, ...], rotate: Any) -> Latents:
    """Run the projections and absorb the key half of `kv_b_proj` into the queries (arXiv 2405.04434, section 2.1).

    q . (W_k c) = (W_k^T q) . c, so a query meets the latent c itself and no token is expanded to heads.
    """
    tokens = hidden_1SE.shape[1]
    nope, rank = attention.qk_nope_head_dim, attention.kv_lora_rank
    q_resid = None
    if getattr(attention, "q_proj", None) is not None:
        q = attention.q_proj(hidden_1SE)
    else:
        q_resid = attention.q_a_layernorm(attention.q_a_proj(hidden_1SE))
        q = attention.q_b_proj(q_resid)
    q_BHSD = q.view(1, tokens, -1, attention.qk_head_dim).transpose(1, 2)
    q_nope, q_rope = q_BHSD.split([nope, attention.qk_rope_head_dim], dim=-1)

    c_kv, k_rope = attention.kv_a_proj_with_mqa(hidden_1SE).split([rank, attention.qk_rope_head_dim], dim=-1)
    c_kv = attention.kv_a_layernorm(c_kv)
    q_rope, k_rope = rotate(q_rope, k_rope.unsqueeze(1), *position_embeddings)

    matrices = [part.view(-1, nope + attention.v_head_dim, rank) for part in matrix_parts(attention.kv_b_proj, rank)]
    dtype = _compute_dtype(hidden_1SE)
    q_HSD = q_nope[0].to(dtype)
    absorbed = [q_HSD @ matrix[:, :nope].to(dtype) for matrix in matrices]
    q_HSC = torch.cat([sum(absorbed[1:], absorbed[0]), q_rope[0].to(dtype)], dim=-1)
    return Latents(
        q_SHC=q_HSC.transpose(0, 1).contiguous(),
        rows_SC=torch.cat([c_kv[0].to(dtype), k_rope[0, 0].to(dtype)], dim=-1),
        values=[matrix[:, nope:].to(dtype) for matrix in matrices],
        q_resid_1SR=q_resid,
    )


def project_out(attention: Any, out_SHV: Tensor, found: Latents) -> Tensor:
    """The module's output [1, S, hidden_size] from latent outputs [S, num_heads, kv_lora_rank]."""
    out_HSV = out_SHV.transpose(0, 1)
    parts = [out_HSV @ matrix.transpose(1, 2) for matrix in found.values]
    out_HSD = sum(parts[1:], parts[0])
    return attention.o_proj(out_HSD.transpose(0, 1).reshape(1, len(out_SHV), -1))


def rotation(attention: nn.Module, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """A rotary function of the module's own model file."""
    return getattr(sys.modules[type(attention).__module__], name)


def refuse_mask(attention: nn.Module, mask: Tensor | None) -> None:
    """Raises UnsupportedModelError if a mask would be ignored."""
    if mask is not None:
        raise UnsupportedModelError(
            f"{type(attention).__name__} is given an attention mask of its own, which would be ignored"
        )


def refuse_latent(attention: Any, config: Any) -> str | None:
    """Why a module of latent attention cannot be carried, or None."""
    if getattr(attention.kv_b_proj, "bias", None) is not None:
        return f"kv_b_proj of layer {attention.layer_idx} has a bias, which cannot be absorbed"
    return None


def latent_layer(attention: Any, dtype: torch.dtype, index: Index | None = None) -> LayerSpec:
    """What a layer of latent attention keeps; with an `index`, its keys too."""
    width = attention.kv_lora_rank + attention.qk_rope_head_dim
    q_SHC = torch.empty(1, attention.num_heads, width, dtype=dtype, device="meta")
    return latent_spec(attention.layer_idx, q_SHC, q_SHC[:, 0], attention.kv_lora_rank, index)


def _spec(attention: nn.Module, config: Any, dtype: torch.dtype) -> LayerSpec:
    return latent_layer(attention, dtype)


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _exchange(attention: nn.Module, forward: ForwardPass) -> Callable[..., Any]:
    module: Any = attention
    interleaved = getattr(module.config, "rope_interleave", False)
    rotate = rotation(module, "apply_rotary_pos_emb_interleave" if interleaved else "apply_rotary_pos_emb")

    def run(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        refuse_mask(module, attention_mask)
        found = latents(module, hidden_states, position_embeddings, rotate)
        out = attend(
            forward, module.layer_idx, found.q_SHC, found.rows_SC, value_dim=module.kv_lora_rank, scale=module.scaling
        )
        return project_out(module, out, found), None

    return run


FAMILY = Family(
    name="latent",
    attention_classes=frozenset(
        {"AXK1Attention", "DeepseekV3Attention", "Glm4MoeLiteAttention", "YoutuAttention"},
    ),
    refuse=refuse_latent,
    spec=_spec,
    exchange=_exchange,
)
