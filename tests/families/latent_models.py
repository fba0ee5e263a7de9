"""Tiny models with latent attention, and their step by plain autograd, with ties of its top-k to the lower index."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from longstraw import Runtime
from tests.parity.models import SMALL, Group, assert_idle, build, paged_step, plain_step, worst

_LATENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    # Grouped expert products know no float64.
    "experts_implementation": "eager",
}
_SPARSE: dict[str, Any] = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
_DENSE_MLP = {"n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group"} | {
    "moe_intermediate_size",
    "first_k_dense_replace",
    "experts_implementation",
}

KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": _LATENT | {"rope_interleave": True},
    "glm4_moe_lite": _LATENT | {"rope_interleave": False},
    "youtu": {key: value for key, value in _LATENT.items() if key not in _DENSE_MLP},
    "axk1": _LATENT | {"rope_interleave": True},
    "deepseek_v32": _LATENT | _SPARSE,
    "glm_moe_dsa": _LATENT
    | _SPARSE
    | {"num_hidden_layers": 4, "n_group": 1, "indexer_types": ["full", "shared", "full", "shared"]},
}
"""Model types, and the configs of tiny ones: one dense layer, then mixtures; half of GLM's layers share a selection."""

SPARSE = ("deepseek_v32", "glm_moe_dsa")


def tiny(kind: str, **changes: Any) -> Any:
    """A random model in training mode, float64; its routers' correction biases are not zero."""
    model = build(kind, **(KINDS[kind] | changes))
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    return model


@contextmanager
def ties(*, to_lower: bool = True) -> Iterator[None]:
    """Within it `Tensor.topk` takes the lowest (or the highest) of equal elements; torch leaves it open."""
    original = Tensor.topk

    def topk(self: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        if to_lower:
            values, indices = self.sort(dim=dim, descending=largest, stable=True)
        else:
            values, indices = self.flip(dim).sort(dim=dim, descending=largest, stable=True)
            indices = self.shape[dim] - 1 - indices
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))  # type: ignore[attr-defined]

    Tensor.topk = topk  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Tensor.topk = original  # type: ignore[method-assign]


def reference_step(model: Any, groups: Sequence[Group], *, to_lower: bool = True) -> tuple[Any, list[list[Tensor]]]:
    """A copy of `model` with its gradient by plain autograd, and the log-probs."""
    reference = copy.deepcopy(model)
    with ties(to_lower=to_lower):
        return reference, plain_step(reference, groups)


def check(model: Any, groups: Sequence[Group], config: Mapping[str, Any] | None = None) -> float:
    """One step by the runtime against plain autograd: log-probs, and every parameter's gradient by name.

    Returns the worst relative error.
    """
    reference, expected = reference_step(model, groups)
    runtime = Runtime(model, SMALL if config is None else config)
    found = paged_step(runtime, groups)
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
    errors = worst(model, reference)
    assert errors[0][0] <= 1e-6, "\n".join(f"{error:.2e} {name}" for error, name in errors[:8])
    trained = {name for name, p in reference.named_parameters() if p.requires_grad}
    # No gradient flows through a selection, in the model's own code either.
    untouched = trained - {name for _, name in errors}
    assert all(".indexer." in name for name in untouched), untouched
    assert_idle(runtime)
    return errors[0][0]
