"""Floating-point operations of a training step, counted from the shape: what speed is compared to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A dense decoder: parameters of its linear layers (without embeddings), attention width, layers, head."""

    linear_parameters: int
    attention_width: int
    layers: int
    head_parameters: int
    lora: bool

    @property
    def backward_factor(self) -> float:
        """Matrix products of a linear layer's backward for one of its forward: no weight gradient if frozen."""
        return 1.0 if self.lora else 2.0


def qwen3_8b(layers: int, lora: bool) -> Shape:
    """Qwen3-8B's layers: q, k, v, o projections and a gated MLP."""
    per_layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 12_288
    return Shape(
        linear_parameters=per_layer * layers,
        attention_width=4096,
        layers=layers,
        head_parameters=4096 * 151_936,
        lora=lora,
    )


def _attention(shape: Shape, queries_by_keys: float) -> float:
    """One forward of attention over so many (query, key) pairs."""
    return 4.0 * queries_by_keys * shape.attention_width * shape.layers


def ordinary_row(shape: Shape, prompt: int, response: int) -> float:
    """One row of prompt and response with checkpointing: forward, forward again, backward (attention 1 + 1 + 2.5)."""
    row = prompt + response
    linear = 2.0 * shape.linear_parameters * row * (2 + shape.backward_factor)
    head = 2.0 * shape.head_parameters * response * (2 + shape.backward_factor)
    return linear + head + 4.5 * _attention(shape, row * row / 2)


def replay_lanes(
    shape: Shape, prompt: int, responses: int, response: int, *, recompute: bool, detached: bool = False
) -> float:
    """Forward and backward of all lanes. Attention is computed once forward, recomputation or not.

    Its backward is five matrix products, or three over a detached prompt, for the forward's two.
    """
    tokens = responses * response
    linear = 2.0 * shape.linear_parameters * tokens * (1 + recompute + shape.backward_factor)
    head = 2.0 * shape.head_parameters * tokens * (2 + shape.backward_factor)
    over_prompt = (2.5 if detached else 3.5) * _attention(shape, tokens * prompt)
    return linear + head + over_prompt + 3.5 * _attention(shape, responses * response * response / 2)


def exact_step(
    shape: Shape,
    prompt: int,
    responses: int,
    response: int,
    *,
    recompute_replay: bool,
    recompute_sweep: bool,
    kept: bool,
    detached: bool = False,
) -> float:
    """Capture, replay and sweep."""
    capture = 2.0 * shape.linear_parameters * prompt + _attention(shape, prompt * prompt / 2)
    replay = replay_lanes(shape, prompt, responses, response, recompute=recompute_replay, detached=detached)
    if detached:
        return capture + replay
    sweep = 2.0 * shape.linear_parameters * prompt * (1 + recompute_sweep + shape.backward_factor)
    sweep += (2.5 if kept else 3.5) * _attention(shape, prompt * prompt / 2)
    return capture + replay + sweep
