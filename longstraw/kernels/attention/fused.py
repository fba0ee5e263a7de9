"""Running sums of attention in Triton: each is one kernel that reads and writes every value once.

Half-precision parts, as cuDNN and FlashAttention return them, meet float32 sums. Tensors are [B, H, S, D] of any
strides whose last is 1; a program takes some rows of one head, heads first, so that neighbours share memory pages
where tensors are token-major. Triton launches on the current device, which need not be the tensors' own: each launch is
guarded.
"""

# Kernels are in a language of their own: their arguments have no types that mypy knows.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, ignore-missing-imports
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MERGE = {"elements": 4096, "num_warps": 4}
ADD = {"elements": 4096, "num_warps": 4}


@triton.jit
def _merge(
    a, a_lse, b, b_lse, into, into_lse, H, S,
    a_b, a_h, a_s, a_lse_b, a_lse_h, a_lse_s, b_b, b_h, b_s, b_lse_b, b_lse_h, b_lse_s,
    into_b, into_h, into_s, into_lse_b, into_lse_h, into_lse_s,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    h = (tl.program_id(0) % H).to(tl.int64)
    s = (tl.program_id(0) // H * BS + tl.arange(0, BS)).to(tl.int64)
    n = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BD)
    rows = s < S
    seen = rows[:, None] & (d < D)[None, :]
    old = tl.load(a + n * a_b + h * a_h + s[:, None] * a_s + d[None, :], mask=seen, other=0.0).to(tl.float32)
    new = tl.load(b + n * b_b + h * b_h + s[:, None] * b_s + d[None, :], mask=seen, other=0.0).to(tl.float32)
    old_lse = tl.load(a_lse + n * a_lse_b + h * a_lse_h + s * a_lse_s, mask=rows, other=0.0)
    new_lse = tl.load(b_lse + n * b_lse_b + h * b_lse_h + s * b_lse_s, mask=rows, other=0.0)
    lse = tl.maximum(old_lse, new_lse) + tl.log(1.0 + tl.exp(-tl.abs(old_lse - new_lse)))
    weight = tl.exp(new_lse - lse)[:, None]
    # As torch.lerp does, from the nearer end.
    step = new - old
    out = tl.where(weight < 0.5, old + weight * step, new - step * (1.0 - weight))
    out_at = into + n * into_b + h * into_h + s[:, None] * into_s + d[None, :]
    tl.store(out_at, out.to(into.dtype.element_ty), mask=seen)
    tl.store(into_lse + n * into_lse_b + h * into_lse_h + s * into_lse_s, lse, mask=rows)


@triton.jit
def _add_rows(
    a, b, into, n, h, s, S, a_b, a_h, a_s, b_b, b_h, b_s,
    D: tl.constexpr, BD: tl.constexpr, OVERWRITE: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    seen = (s < S)[:, None] & (d < D)[None, :]
    at = n * a_b + h * a_h + s[:, None] * a_s + d[None, :]
    total = tl.load(b + n * b_b + h * b_h + s[:, None] * b_s + d[None, :], mask=seen, other=0.0).to(tl.float32)
    if not OVERWRITE:
        total += tl.load(a + at, mask=seen, other=0.0).to(tl.float32)
    tl.store(into + at, total.to(into.dtype.element_ty), mask=seen)


@triton.jit
def _add(
    a, b, into, H, S, a_b, a_h, a_s, b_b, b_h, b_s,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    h = (tl.program_id(0) % H).to(tl.int64)
    s = (tl.program_id(0) // H * BS + tl.arange(0, BS)).to(tl.int64)
    _add_rows(a, b, into, tl.program_id(1).to(tl.int64), h, s, S, a_b, a_h, a_s, b_b, b_h, b_s, D, BD, False)


@triton.jit
def _add_pair(
    k_into, v_into, dk, dv, H, S, into_b, into_h, into_s, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, OVERWRITE: tl.constexpr,
):  # fmt: skip
    h = (tl.program_id(0) % H).to(tl.int64)
    s = (tl.program_id(0) // H * BS + tl.arange(0, BS)).to(tl.int64)
    n = tl.program_id(1).to(tl.int64)
    # Each branch names its own pointers: one picked by a condition would lose what is known of its alignment.
    if tl.program_id(2) == 0:
        _add_rows(k_into, dk, k_into, n, h, s, S, into_b, into_h, into_s, dk_b, dk_h, dk_s, D, BD, OVERWRITE)
    else:
        _add_rows(v_into, dv, v_into, n, h, s, S, into_b, into_h, into_s, dv_b, dv_h, dv_s, D, BD, OVERWRITE)


def merge_parts(
    out_BHSD: Tensor, lse_BHS: Tensor, part_BHSD: Tensor, part_lse_BHS: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Two partial outputs and log-sum-exps as one, as `merge.merge_parts` has them.

    Args:
        out_BHSD, lse_BHS: what was merged so far. A float32 output is a running one: with `dtype` float32 it and its
            log-sum-exp are overwritten. A half-precision one is a first part, and is left as it is.
        part_BHSD, part_lse_BHS: the next part; log-sum-exps are float32.
        dtype: of the output that is returned.
    """
    running = out_BHSD.dtype == torch.float32
    into = out_BHSD if running and dtype == torch.float32 else torch.empty_like(out_BHSD, dtype=dtype)
    into_lse = lse_BHS if running else torch.empty_like(lse_BHS)
    grid, tile = _launch(out_BHSD, MERGE)
    with torch.cuda.device_of(out_BHSD):
        _merge[grid](
            out_BHSD, lse_BHS, part_BHSD, part_lse_BHS, into, into_lse, out_BHSD.shape[1], out_BHSD.shape[2],
            *_row_strides(out_BHSD), *lse_BHS.stride(), *_row_strides(part_BHSD), *part_lse_BHS.stride(),
            *_row_strides(into), *into_lse.stride(), **tile,
        )  # fmt: skip
    return into, into_lse


def add_parts(total_BHSD: Tensor, part_BHSD: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum in `dtype` of two tensors, added in float32; a float32 total is overwritten if `dtype` is float32."""
    into = total_BHSD
    if not total_BHSD.dtype == dtype == torch.float32:
        # One set of strides serves the total and the result.
        into = torch.empty_strided(total_BHSD.shape, total_BHSD.stride(), dtype=dtype, device=total_BHSD.device)
    grid, tile = _launch(total_BHSD, ADD)
    with torch.cuda.device_of(total_BHSD):
        _add[grid](
            total_BHSD, part_BHSD, into, total_BHSD.shape[1], total_BHSD.shape[2],
            *_row_strides(total_BHSD), *_row_strides(part_BHSD), **tile,
        )  # fmt: skip
    return into


def add_pair(k_into: Tensor, v_into: Tensor, dk_BKTD: Tensor, dv_BKTD: Tensor, *, overwrite: bool) -> None:
    """Add `dk_BKTD` to `k_into` and `dv_BKTD` to `v_into`, in place and in float32; `overwrite` writes them only."""
    assert k_into.stride() == v_into.stride(), "one set of strides serves both"
    (x, y), tile = _launch(k_into, ADD)
    with torch.cuda.device_of(k_into):
        _add_pair[(x, y, 2)](
            k_into, v_into, dk_BKTD, dv_BKTD, k_into.shape[1], k_into.shape[2],
            *_row_strides(k_into), *_row_strides(dk_BKTD), *_row_strides(dv_BKTD), OVERWRITE=overwrite, **tile,
        )  # fmt: skip


def _row_strides(x_BHSD: Tensor) -> tuple[int, int, int]:
    assert x_BHSD.stride(3) == 1, x_BHSD.stride()
    batch, heads, rows, _ = x_BHSD.stride()
    return batch, heads, rows


def _launch(x_BHSD: Tensor, meta: dict[str, int]) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid over rows, and a program's share of them."""
    batch, heads, rows, head_dim = x_BHSD.shape
    width = triton.next_power_of_2(head_dim)
    # Of few rows none is worth a large tile; a tile has at least one.
    share = min(max(meta["elements"] // width, 1), triton.next_power_of_2(rows))
    grid = (heads * triton.cdiv(rows, share), batch)
    return grid, {"D": head_dim, "BD": width, "BS": share, "num_warps": meta["num_warps"]}
