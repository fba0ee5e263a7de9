"""How far bfloat16 training on several ranks ends from float32, beside the ordinary bfloat16 steps of one process."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from longstraw import Runtime
from tests.distributed.steps import CLIP, Held, Shapes, build_kind, groups_of, here, make_optimizer, paged_groups
from tests.parity.models import SMALL, plain_step

SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 32},
    "qwen3_5_text": {
        "head_dim": 32, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
}  # fmt: skip
"""Beyond `KINDS`: head dims that the fused attention of CUDA takes in half precision."""
SETTINGS = SMALL | {"kernels": {"gated_delta": "torch"}}

Tensors = Mapping[str, Tensor]


def build_exact(kind: str, seed: int) -> Any:
    """A model in float32 whose weights bfloat16 holds exactly."""
    return build_kind(kind, hidden_size=64, intermediate_size=96, seed=seed, **SIZES[kind]).bfloat16().float()


@functools.lru_cache(maxsize=64)
def ordinary_training(kind: str, shapes: Shapes, seed: int, steps: int, narrow: bool) -> tuple[Tensors, Tensors]:
    """The first step's gradients and the weights after all steps, by plain autograd in one process.

    With `narrow` forward, backward and the sums of gradients are bfloat16, and the optimizer has float32 weights.
    Cached: the frameworks under test share it.
    """
    model = build_exact(kind, seed).to(here())
    working = build_exact(kind, seed).bfloat16().to(here()) if narrow else model
    optimizer = make_optimizer(model)
    first: Tensors = {}
    for step in range(steps):
        with torch.no_grad():
            for ours, theirs in zip(working.parameters(), model.parameters(), strict=True):
                ours.copy_(theirs)
        working.zero_grad()
        for mine in groups_of(shapes, seed + step):
            plain_step(working, mine)
        for ours, theirs in zip(working.parameters(), model.parameters(), strict=True):
            assert ours.grad is not None
            theirs.grad = ours.grad.to(theirs.dtype) / len(shapes)
        if step == 0:
            first = {n: _wide(p.grad) for n, p in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return first, {n: _wide(p) for n, p in model.named_parameters()}


def _wide(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach().double().cpu()


def distances(found: Tensors, truth: Tensors) -> dict[str, float]:
    """|found - truth| by name, and under "" that of all parameters together."""
    squares = {name: float((_wide(found[name]) - want).square().sum()) for name, want in truth.items()}
    return {name: square**0.5 for name, square in (squares | {"": sum(squares.values())}).items()}


def compare_precision(
    rank: int,
    world: int,
    wrap: Callable[..., Held],
    kind: str,
    shapes: Shapes,
    *,
    seeds: Sequence[int],
    steps: int = 3,
    narrow_weights: bool = False,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, dict[str, float]]:
    """Distance from float32 here, as a multiple of the ordinary bfloat16 run's; the median over seeds.

    The median, because a token that rounding sends to another expert moves either side far off.

    Args:
        narrow_weights: whether the model is wrapped in bfloat16; otherwise the framework narrows float32 weights.

    Returns:
        For "gradient" (of the first step) and "weights" (after all) the multiple by parameter, and under "" that of
        all parameters together.
    """
    ratios: dict[str, dict[str, list[float]]] = {"gradient": {}, "weights": {}}
    for seed in seeds:
        truth, plain = (ordinary_training(kind, shapes, seed, steps, narrow) for narrow in (False, True))
        model = build_exact(kind, seed)
        held = wrap(model.bfloat16() if narrow_weights else model, **options)
        ours = _paged_training(rank, held, shapes, seed, steps, SETTINGS | dict(config or {}))
        for what, mine, theirs, want in zip(ratios, ours, plain, truth, strict=True):
            there = distances(theirs, want)
            for name, distance in distances(mine, want).items():
                ratios[what].setdefault(name, []).append(distance / there[name])
    return {what: {n: statistics.median(found) for n, found in named.items()} for what, named in ratios.items()}


def _paged_training(
    rank: int, held: Held, shapes: Shapes, seed: int, steps: int, settings: Mapping[str, Any]
) -> tuple[Tensors, Tensors]:
    first: Any = {}
    with Runtime(held.model, settings) as runtime:
        for step in range(steps):
            paged_groups(runtime, groups_of(shapes, seed + step)[rank])
            if step == 0:
                first = {name: _wide(gradient) for name, gradient in held.gradients().items()}
            held.step()
    return first, held.weights()
