"""Fused kernels against their plain versions, on a small input, before their first use on a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from longstraw.errors import KernelMismatchError
from longstraw.kernels.attention import merge
from longstraw.kernels.attention.dq_tiles import DqTiles
from longstraw.kernels.attention.rows import kv_views
from longstraw.kernels.attention.tile import softmax_delta, tile_backward, tile_forward

HEADS, ROWS = 3, 37
"""More heads than one, and rows that no tile divides."""


def check_sums(fused: ModuleType, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Compare the sums over blocks that the module `fused` has with those of `merge`, for parts of `dtype`.

    Raises:
        KernelMismatchError: a sum differs by more than its rounding.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(device)

    parts = [normal(1, ROWS, HEADS, head_dim).to(dtype).transpose(1, 2) for _ in range(4)]
    lses = [3 * normal(1, HEADS, ROWS) for _ in range(3)]
    pages = normal(ROWS, 2 * HEADS, head_dim).transpose(0, 1).unsqueeze(0)
    found: list[dict[str, Tensor]] = []
    for module in (fused, merge):
        first = module.merge_parts(parts[0], lses[0], parts[1], lses[1], torch.float32)
        out, lse = module.merge_parts(*(x.clone() for x in first), parts[2], lses[2], torch.float32)
        last, _ = module.merge_parts(*(x.clone() for x in first), parts[2], lses[2], dtype)
        total = module.add_parts(parts[0], parts[1], torch.float32).clone()
        narrow = module.add_parts(total.clone(), parts[2], dtype)
        total = module.add_parts(total, parts[2], torch.float32)
        into = pages.clone()
        module.add_pair(into[:, :HEADS], into[:, HEADS:], parts[2], parts[3], overwrite=False)
        over = torch.full_like(pages, float("nan"))
        module.add_pair(over[:, :HEADS], over[:, HEADS:], parts[2], parts[3], overwrite=True)
        found.append({
            "merged output": out, "log-sum-exp": lse, "narrow output": last, "sum": total, "narrow sum": narrow,
            "gradient rows": into, "first gradient rows": over,
        })  # fmt: skip
    for name, want in found[1].items():
        agrees(f"attention over pages, {name}", found[0][name], want, 1e-5 if want.dtype == torch.float32 else None)


def check_dq(
    add_dq: Callable[..., None], device: torch.device, dtype: torch.dtype, head_dim: int, tiles: DqTiles
) -> None:
    """Compare `fused_dq.add_dq` in tiles as they will be used with plain matrix products in float64.

    Raises:
        KernelMismatchError: the gradient differs by more than products of `dtype` explain.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(device)

    # Tiles of keys enough to fill the pipeline and to come round, and a rest; of queries a whole one and a rest.
    tokens, rows, heads, kv_heads = tiles.keys * (2 * tiles.num_stages + 1) + 5, tiles.queries + 5, 4, 2
    q, grad, out = (normal(1, rows, heads, head_dim).to(dtype).transpose(1, 2) for _ in range(3))
    k, v = kv_views(normal(tokens, 2 * kv_heads * head_dim).to(dtype), kv_heads, head_dim)
    scale = head_dim**-0.5
    # As if as many keys again had been seen elsewhere.
    wide_q, wide_k, wide_v, wide_grad = (x.double() for x in (q, k, v, grad))
    lse = tile_forward(wide_q, wide_k, wide_v, None, scale=scale, softcap=None)[1] + math.log(2)
    delta = softmax_delta(wide_grad, out.double())
    want = tile_backward(wide_grad, wide_q, wide_k, wide_v, delta, lse, None, scale=scale, softcap=None)[0]
    got = torch.ones_like(want, dtype=torch.float32)
    add_dq(got, grad, q, k, v, lse.float(), delta.float().squeeze(-1), scale=scale, tiles=tiles)
    agrees("the queries' gradient alone", got - 1, want, torch.finfo(dtype).eps)


def agrees(what: str, got: Tensor, want: Tensor, tolerance: float | None) -> None:
    """Raise `KernelMismatchError` unless two results are alike.

    Args:
        tolerance: of their distance over the norm of `want`; None stands for one rounding to their dtype.
    """
    limit = torch.finfo(want.dtype).eps if tolerance is None else tolerance
    distance = float((got.double() - want.double()).norm() / want.double().norm())
    # A comparison that nan fails.
    if not distance <= limit:
        raise KernelMismatchError(
            f"the Triton kernel for {what} is wrong on {want.device}: its first result differs from "
            f"torch's by {distance:.1e} of its norm, where {limit:.1e} is rounding. Install another release of triton."
        )
