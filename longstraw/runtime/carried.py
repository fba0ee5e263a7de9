"""Carried states in the autograd graph: a leaf that comes from pages, and the gradient that a later chunk left."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longstraw.runtime.layer_io import LayerIO


def carried_in(io: LayerIO, name: str, shape: tuple[int, ...]) -> Tensor | None:
    """The state before this pass's rows, [shape]; None before the first row.

    With autograd, the gradient that reaches it goes to its gradient page.
    """
    value = io.kept(name) if io.recomputing else io.read_carried(name)
    if value is None:
        return None
    io.keep(name, value)
    if not (torch.is_grad_enabled() and io.spec.spec(name).trained):
        return value.view(shape)
    # An input that requires a gradient, so that the node exists even where nothing before the layer is trained.
    anchor = torch.empty(0, device=value.device, requires_grad=True)
    return _CarriedIn.apply(anchor, value, io, name).view(shape)


def carried_out(io: LayerIO, name: str, value: Tensor, output: Tensor) -> Tensor:
    """Hand on the state after this pass's rows; use what is returned as the layer's output.

    In a capture the value goes to its page. In a sweep the gradient that the next chunk left for it enters the graph
    beside the output's, whichever of the two depends on a trained parameter.
    """
    if io.is_capture:
        io.write_carried(name, value.detach())
    if torch.is_grad_enabled() and io.is_sweep and value.requires_grad:
        return _CarriedOut.apply(output, value, io, name)
    return output


class _CarriedIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, io: LayerIO, name: str) -> Tensor:
        ctx.io, ctx.name, ctx.anchor_shape = io, name, anchor.shape
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.io.add_carried_gradient(ctx.name, grad)
        return grad.new_zeros(ctx.anchor_shape), None, None, None


class _CarriedOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, value: Tensor, io: LayerIO, name: str) -> Tensor:
        ctx.io, ctx.name, ctx.shape, ctx.dtype = io, name, value.shape, value.dtype
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        carried = ctx.io.carried_gradient(ctx.name)
        if carried is not None:
            carried = carried.to(ctx.dtype).view(ctx.shape)
        return grad, carried, None, None
