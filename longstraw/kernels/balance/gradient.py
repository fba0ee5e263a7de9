"""The gradient that a weighted sum of a router's probabilities sends into its logits, entering beside the backward."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class GradientSource(Protocol):
    """Who knows, by the time of the backward, what a router's probabilities are worth."""

    def logits_gradient(self, logits_SN: Tensor) -> Tensor | None:
        """The gradient [S, N] at a router's logits, in their dtype; None if there is none."""
        ...


def with_gradient(weights_Sk: Tensor, logits_SN: Tensor, source: GradientSource) -> Tensor:
    """`weights_Sk` unchanged. In the backward `logits_SN` also gets the gradient that `source` knows by then.

    A backward pass that comes by the weights, be it with a gradient of zero, thus delivers it: the pass keeps its one
    entry at the model's output, from which wrappers like FSDP2 gather weights layer by layer.
    """
    out: Tensor = _WithGradient.apply(weights_Sk, logits_SN, source)
    return out


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights_Sk: Tensor, logits_SN: Tensor, source: GradientSource) -> Tensor:
        ctx.save_for_backward(logits_SN)
        ctx.source = source
        # A copy: models may change the weights in place, which a view out of a Function forbids.
        return weights_Sk.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_Sk: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (logits_SN,) = ctx.saved_tensors
        return gradient_Sk, ctx.source.logits_gradient(logits_SN), None


def probability_gradient(logits_SN: Tensor, coefficient_SN: Tensor) -> Tensor:
    """The gradient at the logits of sum(softmax(logits) * coefficient), in the logits' dtype.

    Args:
        logits_SN: [S, N].
        coefficient_SN: [S, N], or one row for all.
    """
    # Half precision would lose most of it: probabilities of one token times differences of coefficients.
    wide = torch.promote_types(logits_SN.dtype, torch.float32)
    p_SN = logits_SN.softmax(-1, dtype=wide)
    c_SN = coefficient_SN.to(wide)
    return (p_SN * (c_SN - (p_SN * c_SN).sum(-1, keepdim=True))).to(logits_SN.dtype)
