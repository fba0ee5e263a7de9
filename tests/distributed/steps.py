"""Training steps of a tiny model on several ranks, beside the same steps in one process by plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from longstraw import Runtime
from tests.parity.models import SMALL, Group, build, make_group, plain_step, replay_group

CLIP = 1.0
UNEQUAL = (((61, (7, 1, 12, 5)), (30, (3, 9))), ((83, (20, 4, 2)),))
"""Groups of two ranks: prompts and responses of unequal length, and unequally many."""

Shapes = Sequence[Sequence[tuple[int, Sequence[int]]]]


HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]
    },
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_5_text": HYBRID,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
}
"""A dense model, a hybrid and a mixture of experts."""


def here() -> torch.device:
    """Where this process computes: its GPU in a group over NCCL, else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def build_kind(kind: str, **options: Any) -> Any:
    """A tiny model of `KINDS` in float32, on the CPU."""
    return build(kind, dtype=torch.float32, **(KINDS[kind] | options))


def groups_of(shapes: Shapes, step: int) -> list[list[Group]]:
    """Each rank's groups in a step."""
    return [
        [make_group(prompt, lengths, seed=100 * step + 10 * rank + i) for i, (prompt, lengths) in enumerate(mine)]
        for rank, mine in enumerate(shapes)
    ]


@dataclass
class Held:
    """A wrapped model with the calls by which its framework's users step it."""

    model: nn.Module
    optimizer: Any
    step: Callable[[], None]
    gradients: Callable[[], dict[str, Tensor | None]]
    weights: Callable[[], dict[str, Tensor]]


def _full(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def hold(model: nn.Module, wrapped: nn.Module) -> Held:
    """For frameworks whose optimizer is torch's own."""
    inner = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
    optimizer = make_optimizer(wrapped)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return Held(
        wrapped,
        optimizer,
        step,
        lambda: {n: _full(p.grad) for n, p in inner.named_parameters()},
        lambda: {n: _full(p) for n, p in inner.named_parameters()},  # type: ignore[misc]
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD: Adam divides by the gradient's size, and shows rounding where a gradient is nearly zero."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def relative(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Relative error by name, against the norm of the whole where a tensor is small."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    whole = sum(float(e.double().square().sum()) for e in expected.values() if e is not None) ** 0.5
    errors = {}
    for name, want in expected.items():
        got = found[name]
        if want is None or got is None:
            zero = [t for t in (got, want) if t is not None]
            errors[name] = 0.0 if not zero or not zero[0].any() else float("inf")
            continue
        scale = max(float(want.double().norm()), 1e-3 * whole)
        errors[name] = float((got.double().cpu() - want.double().cpu()).norm()) / scale
    return errors


def plain_training(
    model: nn.Module, shapes: Shapes, steps: int, settings: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ordinary steps in one process: the first step's gradients, and the weights after all of them.

    With `settings`, the same by the runtime in one process.
    """
    if settings is not None:
        # What is compared is the runtime with itself, so let it be on the same device.
        model.to(here())
    optimizer = make_optimizer(model)
    first: dict[str, Any] = {}
    runtime = None if settings is None else Runtime(model, settings)
    for step in range(steps):
        for mine in groups_of(shapes, step):
            if runtime is None:
                plain_step(model, mine)
            else:
                paged_groups(runtime, mine)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(shapes)
        if step == 0:
            first = {n: _full(p.grad) for n, p in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return first, {n: _full(p) for n, p in model.named_parameters()}


def paged_groups(runtime: Runtime, groups: Sequence[Group], *, score: bool = True) -> None:
    """One rank's groups of one step."""
    with runtime.accumulate():
        for group in groups:
            with runtime.transaction(group.prompt) as txn:
                old = txn.score(group.responses) if score else None
                found = replay_group(txn, group)
                if old is not None:
                    for mine, before in zip(found, old, strict=True):
                        assert torch.equal(mine, before)


def compare_training(
    rank: int,
    world: int,
    wrap: Callable[..., Held],
    kind: str = "qwen3",
    shapes: Shapes = UNEQUAL,
    steps: int = 3,
    config: Mapping[str, Any] | None = None,
    prepare: Callable[[Any], Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
    beside_one_process: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Relative errors of the first step's gradients and of the weights after all steps, worst of each.

    The reference is plain autograd, or (`beside_one_process`) the runtime in one process.
    """
    model = build_kind(kind, **(model_options or {}))
    if prepare is not None:
        model = prepare(model)
    reference = copy.deepcopy(model)
    held = wrap(model, **options)
    settings = dict(SMALL) | dict(config or {})
    runtime = Runtime(held.model, settings)
    first: dict[str, Any] = {}
    for step in range(steps):
        paged_groups(runtime, groups_of(shapes, step)[rank])
        if step == 0:
            first = held.gradients()
        held.step()
    weights = held.weights()
    assert runtime._engine.store.pages_in_use() == 0
    runtime.close()
    settings = settings | {"gradient": {}}
    want_first, want_weights = plain_training(reference, shapes, steps, settings if beside_one_process else None)
    gradient_errors, weight_errors = relative(first, want_first), relative(weights, want_weights)
    return {
        "gradient": max(gradient_errors.values()),
        "weights": max(weight_errors.values()),
        "worst": sorted(gradient_errors.items(), key=lambda item: -item[1])[:5],
    }
