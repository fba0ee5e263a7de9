"""A model as the planner sees it: bytes of its weights, its layers' states, and operations a token."""

from __future__ import annotations

from dataclasses import dataclass

from longstraw.runtime.adapter import ModelProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWork:
    """Operations of one layer's mixing of tokens, beside its matrices.

    Attributes:
        kind: "attention", "window", "latent", "sparse latent", "recurrent" or "fused recurrent".
        head_dim: which attention rate counts.
        pair: operations of a query and a key that it sees, forward.
        sees: the most keys that a query sees; None for all before it.
        scan: operations of a query and each key before it, forward only: an index that selects.
        token: operations a token, forward: a recurrence.
    """

    kind: str
    head_dim: int = 0
    pair: float = 0.0
    sees: int | None = None
    scan: float = 0.0
    token: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Blueprint:
    """A model that need not exist.

    Attributes:
        name: for people.
        profile: as the runtime's own short run tells it.
        work: by layer, in the order of `profile.layers`.
        parameters: values of all weights, adapters included.
        weight_bytes: of all weights.
        trained: values of the weights that are trained.
        gradient_bytes: of the sums that hold their gradients (`gradient.accumulate: float32`), and in the model's type.
        layer_bytes, outside_bytes: weights of the largest decoder layer, and of all that is in none.
        layer_gradient, outside_gradient: the same of gradients, in the model's type.
        tensors, trained_tensors: how many weights there are, and how many are trained.
        tied: whether the LM head's weights are the embedding's.
        largest_gradient: bytes of the largest single gradient in the model's type.
        matrices: multiplied values a token in all layers (of experts those that a token meets), without the LM head.
        trained_matrices: those of them that are trained.
        head: values of the LM head.
        head_trained: whether it is trained.
        element: bytes of an activation.
        looped_experts: why the model's experts run in a loop instead of grouped products, or None if they do not.
    """

    name: str
    profile: ModelProfile
    work: tuple[LayerWork, ...]
    parameters: int
    weight_bytes: int
    trained: int
    gradient_bytes: int
    model_gradient_bytes: int
    largest_gradient: int
    layer_bytes: int
    outside_bytes: int
    layer_gradient: int
    outside_gradient: int
    tensors: int
    trained_tensors: int
    tied: bool
    matrices: int
    trained_matrices: int
    head: int
    head_trained: bool
    element: int
    looped_experts: str | None = None
