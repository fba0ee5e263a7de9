"""Latent attention over pages against the naive version: output and every gradient, dense and selected."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longstraw.kernels.latent import dense, latent_attention, latent_state_only
from longstraw.kernels.latent import products as tiles
from longstraw.kernels.latent.merge import RunningOutput
from longstraw.kernels.latent.naive import naive_latent_attention
from longstraw.kernels.selection import NOT_SELECTED
from tests.kernels.test_paged_attention import DensePages

HEADS, VALUE_DIM, WIDTH = 3, 10, 14
SCALE = 0.3


def make(prefix: int, tokens: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(prefix * 1000 + tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "q": normal(tokens, HEADS, WIDTH).requires_grad_(),
        "own": normal(tokens, WIDTH).requires_grad_(),
        "rows": normal(prefix, WIDTH),
        "grad": normal(tokens, HEADS, VALUE_DIM),
    }


def select(prefix: int, lengths: list[int], k: int, seed: int = 0) -> Tensor:
    """Random visible tokens of each query, ascending; the first query of each branch takes the prefix only."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        for i in range(length):
            visible = prefix if i == 0 and prefix else prefix + i + 1
            chosen = torch.randperm(visible, generator=generator)[:k].sort().values.to(torch.int32)
            rows.append(torch.cat([chosen, torch.full((k - len(chosen),), NOT_SELECTED, dtype=torch.int32)]))
    return torch.stack(rows)


def oracle(x: dict[str, Tensor], lengths: list[int], selection: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    rows = x["rows"].clone().requires_grad_()
    out, lse = naive_latent_attention(
        x["q"], x["own"], rows, lengths, value_dim=VALUE_DIM, scale=SCALE, selection_SK=selection
    )
    return out, lse, list(torch.autograd.grad(out, [x["q"], x["own"], rows], x["grad"], allow_unused=True))


def attend(x: dict[str, Tensor], pages: DensePages, lengths: list[int], selection: Tensor | None) -> Tensor:
    return latent_attention(
        x["q"], x["own"], lengths=lengths, pages=pages, value_dim=VALUE_DIM, scale=SCALE, selection_SK=selection
    )


@pytest.mark.parametrize("k", [None, 1, 5, 40], ids=["dense", "one", "five", "all"])
@pytest.mark.parametrize("lengths", [[7], [1], [3, 1, 9]])
@pytest.mark.parametrize(("prefix", "block"), [(0, 8), (1, 8), (24, 8), (29, 8), (29, 100)])
def test_output_and_every_gradient(prefix: int, block: int, lengths: list[int], k: int | None) -> None:
    x = make(prefix, sum(lengths))
    selection = None if k is None else select(prefix, lengths, k)
    pages = DensePages(x["rows"], block)
    out = attend(x, pages, lengths, selection)
    grads = torch.autograd.grad(out, [x["q"], x["own"]], x["grad"])
    want_out, want_lse, want = oracle(x, lengths, selection)
    torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pages.last[1], want_lse, rtol=1e-12, atol=1e-12)
    for got, expected in zip([*grads, pages.gradient], want, strict=True):
        torch.testing.assert_close(got, expected if expected is not None else got, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("k", [None, 6], ids=["dense", "selected"])
@pytest.mark.parametrize("elements", [1, 200, 3000])
def test_tiles_of_every_size(elements: int, k: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiles._TILE_ELEMENTS, "cpu", elements)
    monkeypatch.setitem(dense._KEYS, "cpu", 4)
    lengths = [5, 2, 6]
    x = make(19, 13)
    selection = None if k is None else select(19, lengths, k)
    pages = DensePages(x["rows"], 7)
    out = attend(x, pages, lengths, selection)
    grads = torch.autograd.grad(out, [x["q"], x["own"]], x["grad"])
    want_out, _, want = oracle(x, lengths, selection)
    torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-12)
    for got, expected in zip([*grads, pages.gradient], want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)


def test_gradients_add_up_over_passes_and_what_later_tokens_left_comes_in() -> None:
    x = make(12, 5)
    left = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pages = DensePages(x["rows"], 5, own=left)
    twice = [torch.autograd.grad(attend(x, pages, [5], None), [x["own"]], x["grad"])[0] for _ in range(2)]
    _, _, (_, own, rows) = oracle(x, [5], None)
    torch.testing.assert_close(pages.gradient, 2 * rows)
    for got in twice:
        torch.testing.assert_close(got, own + left)


def test_a_kept_output_is_not_computed_again() -> None:
    x, lengths = make(12, 5), [2, 3]
    first = DensePages(x["rows"], 5)
    out = attend(x, first, lengths, None)
    again = DensePages(x["rows"], 5)
    again.kept = first.last
    again.forward_blocks = lambda: pytest.fail("streamed the prefix again")  # type: ignore[method-assign]
    repeated = attend(x, again, lengths, None)
    assert torch.equal(out, repeated)
    for pages, result in ((first, out), (again, repeated)):
        torch.autograd.grad(result, [x["q"], x["own"]], x["grad"])
        assert not pages.gradient.isnan().any()
    assert torch.equal(first.gradient, again.gradient)


def test_state_only_gives_zeros_and_passes_on_what_later_tokens_left() -> None:
    x = make(4, 5)
    left = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out = latent_state_only(x["q"], x["own"], DensePages(x["rows"], 5, own=left), value_dim=VALUE_DIM)
    assert out.shape == (5, HEADS, VALUE_DIM)
    assert not out.any()
    (down,) = torch.autograd.grad(out, [x["own"]], torch.zeros_like(out))
    assert torch.equal(down, left)


def test_a_part_without_keys_changes_nothing() -> None:
    q = torch.randn(2, HEADS, WIDTH, dtype=torch.float64)
    running = RunningOutput(q, VALUE_DIM)
    values = torch.randn(3, VALUE_DIM, dtype=torch.float64)
    unseen = torch.full((2, HEADS, 3), float("-inf"), dtype=torch.float64)
    running.add(slice(0, 2), unseen.clone(), values)
    assert not running.out_SHV.any()
    scores = torch.randn(2, HEADS, 3, dtype=torch.float64)
    running.add(slice(0, 2), scores.clone(), values)
    before = running.out_SHV.clone(), running.lse_SH.clone()
    torch.testing.assert_close(before[0], scores.softmax(-1) @ values)
    running.add(slice(0, 2), unseen.clone(), values)
    assert torch.equal(running.out_SHV, before[0])
    assert torch.equal(running.lse_SH, before[1])


@pytest.mark.parametrize("k", [None, 12], ids=["dense", "selected"])
def test_bfloat16_scores_are_not_rounded(k: int | None) -> None:
    """Half-precision inputs, float32 inside: as near as one rounding of probabilities and output allows."""
    lengths = [9, 4]
    x = make(60, 13, torch.bfloat16)
    selection = None if k is None else select(60, lengths, k)
    pages = DensePages(x["rows"], 16)
    pages.gradient = pages.gradient.float()
    out = attend(x, pages, lengths, selection)
    grads = torch.autograd.grad(out, [x["q"], x["own"]], x["grad"])
    wide = {name: value.detach().double().requires_grad_(value.requires_grad) for name, value in x.items()}
    want_out, _, want = oracle(wide, lengths, selection)
    assert out.dtype == torch.bfloat16
    for got, expected in zip([out, *grads, pages.gradient], [want_out, *want], strict=True):
        assert (got.double() - expected).norm() <= 5e-3 * expected.norm()
