"""Tiny models with windows, sinks, soft caps and experts, and a float64 oracle for their attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Gemma3Config, Gemma3ForConditionalGeneration
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from tests.parity.models import build, randomize

WINDOW = 7
"""Tokens that a windowed layer sees in these models, the own one included."""

_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_experts_per_tok": 2, "norm_topk_prob": True}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "gemma2",
        {
            "head_dim": 8,
            "layer_types": _MIXED,
            "query_pre_attn_scalar": 11,
            # Low enough to bend most scores and logits.
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 8,
            "layer_types": _MIXED,
            "query_pre_attn_scalar": 11,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": ("gpt_oss", {"head_dim": 8, "layer_types": _MIXED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mistral": ("mistral", {}),
    "phi3": ("phi3", {}),
    "starcoder2": ("starcoder2", {}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 8, "use_sliding_window": True, "max_window_layers": 2}),
    "smollm3": ("smollm3", {"use_sliding_window": True, "layer_types": _MIXED}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral-windowed": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "use_sliding_window": False} | _EXPERTS,
    ),
    "qwen3_moe-windowed": (
        "qwen3_moe",
        {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "use_sliding_window": True} | _EXPERTS,
    ),
}
"""Model type, and what a tiny one needs beyond the common sizes."""


def windowed_model(kind: str, *, window: int = WINDOW, oracle: bool = True, **config: Any) -> Any:
    """A random model of that kind with three layers in float64; outside transactions it runs the oracle's attention."""
    name, options = KINDS[kind]
    options = {"sliding_window": window, "num_hidden_layers": 3} | options | config
    model = build(name, **options)
    if hasattr(model.config, "num_experts_per_tok"):
        # The grouped product takes no float64.
        model.set_experts_implementation("eager")
    if oracle:
        model.set_attn_implementation(ORACLE)
    return model


def multimodal_gemma3() -> Any:
    """The class that Gemma 3's checkpoints from 4B on load as, its vision part frozen; its head knows no soft cap."""
    text = windowed_model("gemma3").config.to_dict() | {"final_logit_softcapping": 3.0}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 95, "boi_token_index": 94, "eoi_token_index": 93}
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, **tokens))
    randomize(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("language_model" in name or "lm_head" in name)
    model.set_attn_implementation(ORACLE)
    return model.double().train()


ORACLE = "windowed_oracle"


def _oracle(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' eager attention, mask included, without its detour through float32."""
    assert not dropout
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, dim=1).transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + attention_mask
    sinks = getattr(module, "sinks", None)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(1, -1, query.shape[2], 1)], dim=-1)
    p = scores.softmax(-1)[..., : key.shape[2]]
    return (p @ value.repeat_interleave(groups, dim=1)).transpose(1, 2), None


AttentionInterface.register(ORACLE, _oracle)
AttentionMaskInterface.register(ORACLE, eager_mask)
