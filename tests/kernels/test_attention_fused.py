"""The Triton kernels of attention over pages, in Triton's interpreter where there is no device."""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from longstraw.errors import KernelMismatchError
from longstraw.kernels.attention import choose_ops, kv_views, merge, paged_attention, queries
from longstraw.kernels.attention.check import check_dq, check_sums
from longstraw.kernels.attention.dq_tiles import DqTiles
from longstraw.kernels.attention.queries import QueryGradient
from longstraw.kernels.attention.tile import softmax_delta, tile_backward, tile_forward
from longstraw.kernels.rows import RowBlock
from tests.kernels.fused_sums import check_gradient_rows, check_merge, check_sum, part
from tests.kernels.test_paged_attention import DensePages, make, oracle

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton (its CPU interpreter will do)"
)


def _loops_run() -> bool:
    """Whether this triton's interpreter can run a loop whose bound is an argument: before 3.7 not beside numpy 2.4."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    return not (interpreted and old and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4))


needs_loops = pytest.mark.skipif(
    not _loops_run(), reason="needs triton, and on a CPU triton 3.7 or newer or numpy before 2.4"
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
@pytest.mark.parametrize("head_dim", [64, 80])
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


# The interpreter multiplies no bfloat16 matrices: float16 stands for both where there is no device.
DOTS = HALF if DEVICE == "cuda" else (torch.float16,)


def backward_inputs(head_dim: int, rows: int, tokens: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Six heads over two, with a log-sum-exp of more keys than these."""
    generator = torch.Generator().manual_seed(head_dim + tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    q, grad, out = (normal(1, rows, 6, head_dim).transpose(1, 2) for _ in range(3))
    k, v = kv_views(normal(tokens, 4 * head_dim), 2, head_dim)
    lse = tile_forward(q, k, v, None, scale=head_dim**-0.5, softcap=None)[1] + 0.3
    return {"grad": grad, "q": q, "k": k, "v": v, "out": out, "lse": lse}


def wanted_dq(x: dict[str, Tensor]) -> Tensor:
    delta = softmax_delta(x["grad"], x["out"])
    scale = x["q"].shape[3] ** -0.5
    return tile_backward(x["grad"], x["q"], x["k"], x["v"], delta, x["lse"], None, scale=scale, softcap=None)[0]


@needs_loops
@pytest.mark.parametrize("copy_engine", [False, True])
@pytest.mark.parametrize("dtype", DOTS)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (16, 64), (37, 100), (37, 31)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_dq_alone(head_dim: int, rows: int, tokens: int, dtype: torch.dtype, copy_engine: bool) -> None:
    from longstraw.kernels.attention import fused_dq

    x = backward_inputs(head_dim, rows, tokens, dtype)
    tiles = DqTiles(queries=16 if DEVICE == "cpu" else 64, keys=32, num_warps=4, num_stages=2, copy_engine=copy_engine)
    delta = fused_dq.softmax_delta(x["grad"], x["out"])
    torch.testing.assert_close(delta, softmax_delta(x["grad"], x["out"])[..., 0], rtol=1e-5, atol=1e-4)
    dq = torch.randn(1, rows, 6, head_dim).to(DEVICE).transpose(1, 2)
    before = dq.clone()
    fused_dq.add_dq(dq, x["grad"], x["q"], x["k"], x["v"], x["lse"], delta, scale=head_dim**-0.5, tiles=tiles)
    want = wanted_dq(x)
    assert (dq - before - want).norm() <= torch.finfo(dtype).eps * want.norm()


@needs_loops
def test_blocks_whose_gradient_nobody_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three products and five give the same queries' gradient, before and after parts of other keys."""
    from longstraw.kernels.attention import fused_dq

    tiles = DqTiles(queries=16 if DEVICE == "cpu" else 64, keys=32, num_warps=4, num_stages=2, copy_engine=True)
    monkeypatch.setattr(queries, "FASTER_ON_HOPPER", {64: tiles})
    x = backward_inputs(64, 17, 40, torch.float16)
    ops, want = choose_ops(x["q"].device, torch.float16, 64), wanted_dq(x)
    for fused in (fused_dq, None):
        monkeypatch.setattr(queries, "_fused", lambda q, ops, fused=fused: fused)
        for others in ((), (0, 1), (2, 3)):
            total = QueryGradient(x["grad"], x["q"], x["out"], x["lse"], ops, 64**-0.5)
            for i in range(3):
                if i in others:
                    total.add(x["q"].clone())
                total.add_block(x["k"], x["v"])
            if 3 in others:
                total.add(x["q"].clone())
            expected = 3 * want + len(others) * x["q"].float()
            got = total.result(torch.float16)
            assert got.dtype == torch.float16
            assert (got.float() - expected).norm() <= 2e-3 * expected.norm(), (fused, others)


def test_five_products_exactly_where_a_block_wants_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Detached pages get the queries' gradient alone, and it is the same."""

    class Detached(DensePages):
        def backward_blocks(self) -> Any:
            yield from (RowBlock(rows_TC=block.rows_TC) for block in self.forward_blocks())

    x = make(20, 5)
    ops, alone = choose_ops(torch.device("cpu"), torch.float64, x["q"].shape[3]), []
    add_block = QueryGradient.add_block
    monkeypatch.setattr(QueryGradient, "add_block", lambda self, k, v: (alone.append(1), add_block(self, k, v)))
    scale = x["q"].shape[3] ** -0.5
    for kind, count in ((DensePages, 0), (Detached, 3)):
        alone.clear()
        pages = kind(x["rows"], 8)
        out = paged_attention(x["q"], x["k"], x["v"], lengths=[5], pages=pages, ops=ops, scale=scale)
        found = torch.autograd.grad(out, [x["q"], x["k"], x["v"]], x["grad"])
        assert len(alone) == count
        assert pages.gradient.isnan().all() == (kind is Detached)
        for got, want in zip(found, oracle(x, [5])[2], strict=False):
            torch.testing.assert_close(got, want)


def test_the_check_of_dq_finds_a_kernel_that_forgets_the_last_keys() -> None:
    tiles = DqTiles(queries=16, keys=16, num_warps=4, num_stages=2, copy_engine=False)

    def add_dq(
        dq: Tensor, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, **options: Any
    ) -> None:
        kept = k.shape[2] - forgotten
        dq += tile_backward(
            grad, q, k[:, :, :kept], v[:, :, :kept], delta[..., None], lse, None, scale=options["scale"], softcap=None
        )[0]

    forgotten = 0
    check_dq(add_dq, torch.device("cpu"), torch.bfloat16, 64, tiles)
    forgotten = 5
    with pytest.raises(KernelMismatchError, match="queries' gradient alone"):
        check_dq(add_dq, torch.device("cpu"), torch.bfloat16, 64, tiles)
