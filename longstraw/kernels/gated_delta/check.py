"""A rule against the oracle, on a small input of the model's own shapes, before its first use on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longstraw.errors import KernelMismatchError
from longstraw.kernels.gated_delta.naive import naive_delta_rule

LENGTHS = (65, 1, 58)
"""Branches longer than a chunk of 64, of one token, and shorter than a chunk."""
TOLERANCE = 2e-2
"""Of the norm: half precision in products and outputs costs a few thousandths, a wrong kernel a tenth or more."""
_NAMES = ("output", "final state", "gradient of q", "gradient of k", "gradient of v", "gradient of g",
          "gradient of beta", "gradient of the initial state")  # fmt: skip


def check_rule(
    rule: Callable[..., tuple[Tensor, Tensor]],
    name: str,
    q_SHK: Tensor,
    v_SVD: Tensor,
    *,
    per_channel: bool,
) -> None:
    """Compare outputs, final states and the gradient of every input with `naive_delta_rule` in float64.

    Args:
        rule: what is checked; its arguments are those of `naive_delta_rule`.
        name: for the error.
        q_SHK, v_SVD: whose heads, dims, dtype and device are taken.
        per_channel: whether each channel of the keys has a decay of its own.

    Raises:
        KernelMismatchError: some result differs by more than `TOLERANCE` of its norm.
    """
    generator = torch.Generator().manual_seed(0)
    (k_heads, k_dim), (v_heads, v_dim), tokens = q_SHK.shape[1:], v_SVD.shape[1:], sum(LENGTHS)
    device, dtype = v_SVD.device, v_SVD.dtype

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    decays = (tokens, v_heads, k_dim) if per_channel else (tokens, v_heads)
    given = [
        normal(tokens, k_heads, k_dim).to(dtype), normal(tokens, k_heads, k_dim).to(dtype),
        normal(tokens, v_heads, v_dim).to(dtype), -0.1 * normal(*decays).abs(),
        normal(tokens, v_heads).sigmoid().to(dtype), normal(v_heads, k_dim, v_dim),
    ]  # fmt: skip
    upstream = [normal(tokens, v_heads, v_dim), normal(len(LENGTHS), v_heads, k_dim, v_dim)]
    # The call that is checked may be under hooks: a checkpoint's, or those that measure a graph. They are not to see
    # what the comparison keeps.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
        got = _results(rule, [x.to(device) for x in given], upstream)
        want = _results(naive_delta_rule, [x.to(device, torch.float64) for x in given], upstream)
    for what, ours, theirs in zip(_NAMES, got, want, strict=True):
        distance = float((ours.double() - theirs).norm() / theirs.norm())
        # A comparison that nan fails.
        if not distance <= TOLERANCE:
            raise KernelMismatchError(
                f"the gated delta rule of {name} is wrong on {device} in {dtype}: its {what} differs from the naive "
                f"version's by {distance:.1e} of its norm, where {TOLERANCE:.0e} is allowed. Install other releases "
                "of triton and flash-linear-attention, or set kernels.gated_delta to torch, which is slower."
            )


def _results(rule: Callable[..., Any], given: list[Tensor], upstream: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in given]
    *rows, initial = leaves
    out, final = rule(*rows, lengths=LENGTHS, initial_VKD=initial)
    gradients = torch.autograd.grad(
        [out, final], leaves, [g.to(x) for g, x in zip(upstream, (out, final), strict=True)]
    )
    return [out.detach(), final.detach(), *gradients]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
