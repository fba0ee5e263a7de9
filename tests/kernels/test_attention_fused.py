"""The Triton kernels of attention over pages, in Triton's interpreter where there is no device."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longstraw.errors import KernelMismatchError
from longstraw.kernels.attention import merge
from longstraw.kernels.attention.check import check_sums
from tests.kernels.fused_sums import check_gradient_rows, check_merge, check_sum, part

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton (its CPU interpreter will do)"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = (torch.float16, torch.bfloat16)
LAYOUTS = ("token-major", "head-major", "window")


@pytest.fixture
def fused() -> Any:
    from longstraw.kernels.attention import fused

    return fused


@needs_triton
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize(("count", "sink"), [(1, False), (1, True), (2, False), (4, False), (4, True)])
def test_merged_outputs(
    fused: Any, monkeypatch: pytest.MonkeyPatch, count: int, sink: bool, head_dim: int, dtype: torch.dtype
) -> None:
    parts = [part(i, LAYOUTS[i % 3], 37, head_dim, dtype, DEVICE) for i in range(count)]
    check_merge(fused, monkeypatch, parts, sink=sink)


@needs_triton
def test_a_part_of_weight_nothing_changes_nothing(fused: Any) -> None:
    out, other = (part(i, "token-major", 5, 64, torch.float16, DEVICE) for i in range(2))
    lse = torch.zeros(1, 3, 5, device=DEVICE)
    for far in (-200.0, float("-inf")):
        for first in (True, False):
            pairs = [(out, lse), (other, torch.full_like(lse, far))]
            (a, a_lse), (b, b_lse) = pairs if first else reversed(pairs)
            got, got_lse = fused.merge_parts(a, a_lse, b, b_lse, torch.float32)
            assert torch.equal(got, out.float())
            assert torch.equal(got_lse, lse)


@needs_triton
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("tokens", [1, 37])
def test_sums(fused: Any, monkeypatch: pytest.MonkeyPatch, tokens: int, dtype: torch.dtype) -> None:
    for count in (1, 2, 4):
        check_sum(fused, monkeypatch, [part(i, LAYOUTS[i % 3], tokens, 128, dtype, DEVICE) for i in range(count)])


@needs_triton
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_gradient_rows(fused: Any, monkeypatch: pytest.MonkeyPatch, head_dim: int, wide: torch.dtype) -> None:
    for layout in LAYOUTS:
        dk, dv = (
            part(1, layout, 35, head_dim, torch.bfloat16, DEVICE),
            part(2, "window", 35, head_dim, torch.bfloat16, DEVICE),
        )
        check_gradient_rows(fused, monkeypatch, dk, dv, wide)


@needs_triton
@pytest.mark.parametrize("dtype", HALF)
def test_the_check_before_first_use_passes(fused: Any, dtype: torch.dtype) -> None:
    check_sums(fused, torch.device(DEVICE), dtype, 64)


@pytest.mark.parametrize("broken", ["merge_parts", "add_parts", "add_pair"])
def test_the_check_before_first_use_finds_a_wrong_kernel(broken: str) -> None:
    def merge_parts(out: Any, lse: Any, part: Any, part_lse: Any, dtype: torch.dtype) -> Any:
        merged, lse = merge.merge_parts(out, lse, part, part_lse, dtype)
        merged[..., -1, -1] *= 1.5  # one value of the last row's tile
        return merged, lse

    def add_parts(total: Any, part: Any, dtype: torch.dtype) -> Any:
        return merge.add_parts(total.to(part.dtype), part, dtype)  # a sum that was rounded on the way

    def add_pair(k_into: Any, v_into: Any, dk: Any, dv: Any, *, overwrite: bool) -> None:
        merge.add_pair(k_into, v_into, dk, dv, overwrite=False)  # what lay there before is kept

    sums = {name: getattr(merge, name) for name in ("merge_parts", "add_parts", "add_pair")}
    check_sums(SimpleNamespace(**sums), torch.device("cpu"), torch.bfloat16, 64)
    sums[broken] = {"merge_parts": merge_parts, "add_parts": add_parts, "add_pair": add_pair}[broken]
    with pytest.raises(KernelMismatchError, match="Install another release of triton"):
        check_sums(SimpleNamespace(**sums), torch.device("cpu"), torch.bfloat16, 64)
