"""Attention over pages against the naive version: output and every gradient, for every split into blocks."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from torch import Tensor

from longstraw.kernels.attention import choose_ops, keep_state_only, kv_views, paged_attention
from longstraw.kernels.attention.naive import naive_attention
from longstraw.kernels.attention.tiled import TiledOps
from longstraw.kernels.rows import RowBlock, RowGradient

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
SCALE = HEAD_DIM**-0.5


class DensePages:
    """A prefix held in one tensor and handed out in blocks, as a stream would."""

    def __init__(self, rows: Tensor, block: int, own: Tensor | None = None) -> None:
        self.rows, self.block, self.own = rows, block, own
        self.gradient = torch.full_like(rows, float("nan"))
        self.written = False
        self.kept: tuple[Tensor, Tensor] | None = None

    def forward_blocks(self) -> Generator[RowBlock]:
        for at in range(0, len(self.rows), self.block):
            yield RowBlock(rows_TC=self.rows[at : at + self.block])

    def backward_blocks(self) -> Generator[RowBlock]:
        for at in range(0, len(self.rows), self.block):
            rows = slice(at, at + self.block)
            gradient = RowGradient(rows_TC=self.gradient[rows], overwrite=not self.written)
            yield RowBlock(rows_TC=self.rows[rows], gradient=gradient)
        self.written = True

    def own_gradient(self) -> Generator[Tensor]:
        if self.own is not None:
            yield self.own

    def kept_output(self) -> tuple[Tensor, Tensor] | None:
        return self.kept

    def keep_output(self, out_BHSD: Tensor, lse_BHS: Tensor) -> None:
        self.last = (out_BHSD, lse_BHS)


def make(prefix: int, tokens: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(prefix * 1000 + tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)

    # The model hands over transposed, non-contiguous heads; so does this.
    return {
        "q": normal(1, tokens, HEADS, HEAD_DIM).transpose(1, 2).requires_grad_(),
        "k": normal(1, tokens, KV_HEADS, HEAD_DIM).transpose(1, 2).requires_grad_(),
        "v": normal(1, tokens, KV_HEADS, HEAD_DIM).transpose(1, 2).requires_grad_(),
        "rows": normal(prefix, 2 * KV_HEADS * HEAD_DIM),
        "grad": normal(1, tokens, HEADS, HEAD_DIM).transpose(1, 2),
    }


def oracle(x: dict[str, Tensor], lengths: list[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
    rows = x["rows"].clone().requires_grad_()
    k_TKD, v_TKD = (view[0].transpose(0, 1) for view in kv_views(rows, KV_HEADS, HEAD_DIM))
    out, lse = naive_attention(x["q"], x["k"], x["v"], k_TKD, v_TKD, lengths, SCALE)
    return out, lse, list(torch.autograd.grad(out, [x["q"], x["k"], x["v"], rows], x["grad"], allow_unused=True))


@pytest.mark.parametrize(
    "ops", [choose_ops(torch.device("cpu"), torch.float64, HEAD_DIM), TiledOps()], ids=["flash", "tiled"]
)
@pytest.mark.parametrize("lengths", [[7], [1], [3, 1, 9]])
@pytest.mark.parametrize(("prefix", "block"), [(0, 8), (1, 8), (24, 8), (29, 8), (29, 100)])
def test_output_and_every_gradient(prefix: int, block: int, lengths: list[int], ops: object) -> None:
    x = make(prefix, sum(lengths))
    pages = DensePages(x["rows"], block)
    out = paged_attention(x["q"], x["k"], x["v"], lengths=lengths, pages=pages, ops=ops, scale=SCALE)  # type: ignore[arg-type]
    grads = torch.autograd.grad(out, [x["q"], x["k"], x["v"]], x["grad"])
    want_out, want_lse, want = oracle(x, lengths)
    torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pages.last[1], want_lse, rtol=1e-12, atol=1e-12)
    for got, expected in zip([*grads, pages.gradient], want, strict=True):
        torch.testing.assert_close(got, expected if expected is not None else got, rtol=1e-10, atol=1e-11)


def test_gradients_of_two_passes_add_up_in_the_pages() -> None:
    x = make(20, 5)
    pages = DensePages(x["rows"], 8)
    ops = choose_ops(torch.device("cpu"), torch.float64, HEAD_DIM)
    for _ in range(2):
        out = paged_attention(x["q"], x["k"], x["v"], lengths=[5], pages=pages, ops=ops, scale=SCALE)
        out.backward(x["grad"])
    torch.testing.assert_close(pages.gradient, 2 * oracle(x, [5])[2][3])


def test_own_rows_receive_what_later_tokens_left_for_them() -> None:
    x, later = make(12, 6), torch.randn(6, 2 * KV_HEADS * HEAD_DIM, dtype=torch.float64)
    pages = DensePages(x["rows"], 8, own=later)
    ops = choose_ops(torch.device("cpu"), torch.float64, HEAD_DIM)
    out = paged_attention(x["q"], x["k"], x["v"], lengths=[6], pages=pages, ops=ops, scale=SCALE)
    _, dk, dv = torch.autograd.grad(out, [x["q"], x["k"], x["v"]], x["grad"])
    _, _, (_, want_k, want_v, _) = oracle(x, [6])
    later_k, later_v = kv_views(later, KV_HEADS, HEAD_DIM)
    torch.testing.assert_close(dk, want_k + later_k)
    torch.testing.assert_close(dv, want_v + later_v)


def test_state_only_passes_nothing_but_the_later_gradient() -> None:
    x, later = make(0, 6), torch.randn(6, 2 * KV_HEADS * HEAD_DIM, dtype=torch.float64)
    out = keep_state_only(x["q"], x["k"], x["v"], DensePages(x["rows"], 8, own=later))
    assert not out.any()
    dq, dk, dv = torch.autograd.grad(out, [x["q"], x["k"], x["v"]], x["grad"], allow_unused=True)
    later_k, later_v = kv_views(later, KV_HEADS, HEAD_DIM)
    assert dq is None
    assert torch.equal(dk, later_k)
    assert torch.equal(dv, later_v)


def test_a_kept_output_is_used_and_not_computed_again() -> None:
    x = make(12, 6)
    pages = DensePages(x["rows"], 8)
    ops = choose_ops(torch.device("cpu"), torch.float64, HEAD_DIM)
    first = paged_attention(x["q"], x["k"], x["v"], lengths=[6], pages=pages, ops=ops, scale=SCALE)
    pages.kept = pages.last
    pages.forward_blocks = None  # type: ignore[assignment, method-assign]
    second = paged_attention(x["q"], x["k"], x["v"], lengths=[6], pages=pages, ops=ops, scale=SCALE)
    assert torch.equal(first, second)
    got = torch.autograd.grad(second, [x["q"], x["k"], x["v"]], x["grad"])
    for g, want in zip(got, oracle(x, [6])[2], strict=False):
        torch.testing.assert_close(g, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_stay_near_the_float64_oracle(dtype: torch.dtype) -> None:
    x, wide = make(300, 9, dtype), make(300, 9)
    pages = DensePages(x["rows"], 64)
    out = paged_attention(
        x["q"],
        x["k"],
        x["v"],
        lengths=[4, 5],
        pages=pages,
        ops=choose_ops(torch.device("cpu"), dtype, HEAD_DIM),
        scale=SCALE,
    )
    out.backward(x["grad"])
    want_out, _, want = oracle(wide, [4, 5])
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    for got, expected in zip(
        [out, x["q"].grad, x["k"].grad, x["v"].grad, pages.gradient], [want_out, *want], strict=True
    ):
        assert got is not None
        error = (got.double() - expected).norm() / expected.norm()
        assert error < limit, error
