"""A function of packed branches of which autograd keeps the inputs only: its backward computes the rest again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def recomputed(
    function: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor | None, lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """`function(*inputs, lengths=lengths)`: outputs of rows, and final states. Autocast is off in both passes.

    Args:
        function: differentiable by autograd; the first input is never None.
        lengths: tokens of each branch.
    """
    out, final = _Recomputed.apply(function, tuple(lengths), *inputs)
    return out, final


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., tuple[Tensor, Tensor]], lengths: tuple[int, ...], *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        ctx.function, ctx.lengths = function, lengths
        assert inputs[0] is not None
        # Autocast would narrow the products, and not in the backward.
        with torch.autocast(inputs[0].device.type, enabled=False):
            return function(*inputs, lengths=lengths)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs: list[Any] = [
            None if x is None else x.detach().requires_grad_(needed)
            for x, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        with torch.enable_grad(), torch.autocast(grad_out.device.type, enabled=False):
            results = ctx.function(*inputs, lengths=ctx.lengths)
        wanted = [x for x in inputs if x is not None and x.requires_grad]
        # The final state does not depend on all inputs: not on what only reads it.
        reached = [(x, grad) for x, grad in zip(results, (grad_out, grad_final), strict=True) if x.requires_grad]
        found = iter(torch.autograd.grad([x for x, _ in reached], wanted, [grad for _, grad in reached]))
        return None, None, *(next(found) if x is not None and x.requires_grad else None for x in inputs)
