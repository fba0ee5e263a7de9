"""What the fused sums over blocks must equal: the same inputs through their kernels and through torch's operations."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from longstraw.kernels.attention import add_kv_gradient, merge, rows, running
from longstraw.kernels.attention.running import PartialMerge, RunningSum
from longstraw.kernels.rows import RowGradient

HEADS = 3


def part(seed: int, layout: str, tokens: int, head_dim: int, dtype: torch.dtype, device: str) -> Tensor:
    """A part [1, HEADS, tokens, head_dim] as ops return it: token-major, head-major, or a window into more rows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, tokens + 5, HEADS, head_dim + 8, generator=generator).to(device, dtype)
    if layout == "window":
        return x[:, 2 : tokens + 2, :, :head_dim].transpose(1, 2)
    x = x[:, :tokens, :, :head_dim].transpose(1, 2)
    return x.contiguous() if layout == "head-major" else x.transpose(1, 2).contiguous().transpose(1, 2)


def merged(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, parts: list[Tensor], lses: list[Tensor], sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The merged output in the parts' dtype, in float32, and its log-sum-exp, by the sums of `module`."""
    monkeypatch.setattr(running, "sums_for", lambda part: module)
    results = []
    for dtype in (parts[0].dtype, torch.float32):
        merge = PartialMerge()
        for out, lse in zip(parts, lses, strict=True):
            merge.add(out.clone(), lse.clone())
        if sinks is not None:
            merge.add_sink(sinks)
        results.append(merge.result(dtype))
    assert torch.equal(results[0][1], results[1][1])
    return results[0][0], *results[1]


def summed(module: ModuleType, monkeypatch: pytest.MonkeyPatch, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of the parts, by the sums of `module`."""
    monkeypatch.setattr(running, "sums_for", lambda part: module)
    total = RunningSum()
    for x in parts:
        total.add(x.clone())
    return total.result(dtype)


def gradient_rows(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, dk: Tensor, dv: Tensor, wide: torch.dtype, *, overwrite: bool
) -> Tensor:
    """Gradient rows [T + 4, C] with `dk` and `dv` added to all but the first and last two."""
    monkeypatch.setattr(rows, "sums_for", lambda part: module)
    generator = torch.Generator().manual_seed(9)
    tokens, width = dk.shape[2], 2 * dk.shape[1] * dk.shape[3]
    held = torch.randn(tokens + 4, width, generator=generator).to(dk.device, wide)
    if overwrite:
        held[2:-2] = float("nan")
    add_kv_gradient(RowGradient(rows_TC=held[2:-2], overwrite=overwrite), dk, dv)
    return held


def check_merge(fused: ModuleType, monkeypatch: pytest.MonkeyPatch, parts: list[Tensor], *, sink: bool) -> None:
    device = parts[0].device
    generator = torch.Generator().manual_seed(8)
    lses = [4 * torch.randn(parts[0].shape[:3], generator=generator).to(device) for _ in parts]
    sinks = torch.linspace(-1, 2, HEADS, device=device) if sink else None
    narrow, wide, lse = merged(fused, monkeypatch, parts, lses, sinks)
    want_narrow, want_wide, want_lse = merged(merge, monkeypatch, parts, lses, sinks)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(wide, want_wide, rtol=1e-5, atol=1e-5)
    # Triton's interpreter cuts bfloat16 off where the device rounds it: one unit in the last place, either way.
    eps = torch.finfo(narrow.dtype).eps
    torch.testing.assert_close(narrow, want_narrow, rtol=eps, atol=1e-5)
    if narrow.shape[2] > 1:  # the stride of one row means nothing
        assert narrow.stride() == want_narrow.stride()


def check_sum(fused: ModuleType, monkeypatch: pytest.MonkeyPatch, parts: list[Tensor]) -> None:
    assert torch.equal(*(summed(module, monkeypatch, parts, torch.float32) for module in (fused, merge)))
    narrow = parts[0].dtype
    got, want = (summed(module, monkeypatch, parts, narrow) for module in (fused, merge))
    torch.testing.assert_close(got, want, rtol=torch.finfo(narrow).eps, atol=0)


def check_gradient_rows(
    fused: ModuleType, monkeypatch: pytest.MonkeyPatch, dk: Tensor, dv: Tensor, wide: torch.dtype
) -> None:
    for overwrite in (False, True):
        got, want = (gradient_rows(module, monkeypatch, dk, dv, wide, overwrite=overwrite) for module in (fused, merge))
        torch.testing.assert_close(got, want, rtol=0 if wide == torch.float32 else torch.finfo(wide).eps, atol=0)
