"""Latent attention and selections on a CUDA device: fused kernels and torch's products against the naive versions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longstraw.kernels.latent import latent_attention
from longstraw.kernels.latent.naive import naive_latent_attention
from longstraw.kernels.selection import NOT_SELECTED, RunningTopK, index_scores
from longstraw.kernels.selection.naive import naive_index_scores, naive_topk
from tests.kernels.test_paged_attention import DensePages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PREFIX, LENGTHS, BLOCK = 700, [130, 1, 69], 256
SCALE = 0.05


def make(heads: int, value_dim: int, rope_dim: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(heads)
    tokens = sum(LENGTHS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to("cuda", dtype)

    return {
        "q": normal(tokens, heads, value_dim + rope_dim).requires_grad_(),
        "own": normal(tokens, value_dim + rope_dim).requires_grad_(),
        "rows": normal(PREFIX, value_dim + rope_dim),
        "grad": normal(tokens, heads, value_dim),
    }


def select(k: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in LENGTHS:
        for i in range(length):
            chosen = torch.randperm(PREFIX + i + 1, generator=generator)[:k].sort().values.to(torch.int32)
            rows.append(torch.cat([chosen, torch.full((k - len(chosen),), NOT_SELECTED, dtype=torch.int32)]))
    return torch.stack(rows).cuda()


@pytest.mark.parametrize("k", [None, 64, 333], ids=["dense", "even", "odd"])
@pytest.mark.parametrize(
    ("heads", "value_dim", "rope_dim", "dtype", "tolerance"),
    [
        (64, 512, 64, torch.bfloat16, 6e-3),
        (20, 128, 32, torch.bfloat16, 6e-3),
        (5, 96, 32, torch.float16, 2e-3),  # no power of two: torch's products
        (16, 128, 64, torch.float32, 1e-5),
        (3, 32, 16, torch.float64, 1e-12),
    ],
)
def test_output_and_every_gradient(
    heads: int, value_dim: int, rope_dim: int, dtype: torch.dtype, tolerance: float, k: int | None
) -> None:
    x = make(heads, value_dim, rope_dim, dtype)
    selection = None if k is None else select(k)
    pages = DensePages(x["rows"], BLOCK)
    pages.gradient = pages.gradient.to(torch.promote_types(dtype, torch.float32))
    out = latent_attention(
        x["q"], x["own"], lengths=LENGTHS, pages=pages, value_dim=value_dim, scale=SCALE, selection_SK=selection
    )
    found = [out, *torch.autograd.grad(out, [x["q"], x["own"]], x["grad"]), pages.gradient]
    wide = {name: value.detach().double().requires_grad_() for name, value in x.items()}
    expected, _ = naive_latent_attention(
        wide["q"], wide["own"], wide["rows"], LENGTHS, value_dim=value_dim, scale=SCALE, selection_SK=selection
    )
    wanted = torch.autograd.grad(expected, [wide["q"], wide["own"], wide["rows"]], wide["grad"])
    for got, want in zip(found, [expected, *wanted], strict=True):
        assert (got.double() - want).norm() <= tolerance * want.norm()


def test_deterministic_sums_when_they_are_asked_for() -> None:
    x, selection = make(64, 512, 64, torch.bfloat16), select(64)
    found = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(2):
            pages = DensePages(x["rows"], BLOCK)
            pages.gradient = pages.gradient.float()
            out = latent_attention(
                x["q"], x["own"], lengths=LENGTHS, pages=pages, value_dim=512, scale=SCALE, selection_SK=selection
            )
            torch.autograd.grad(out, [x["q"], x["own"]], x["grad"])
            found.append(pages.gradient)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_and_their_independence_of_tiles(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    q, keys, weights = (
        torch.randn(*shape, generator=generator).to("cuda") for shape in ((300, 32, 128), (9000, 128), (300, 32))
    )
    q, keys = q.to(dtype), keys.to(dtype)

    def cut(queries: slice, tokens: slice) -> Tensor:
        return torch.cat([scores for _, scores in index_scores(q, keys[tokens], weights, queries, 0.09)])

    whole = cut(slice(0, 300), slice(0, 9000))
    want = naive_index_scores(q.double(), keys.double(), weights, 0.09)
    torch.testing.assert_close(whole, want, rtol=2e-4, atol=2e-4)
    for start, stop, first, last in ((0, 1, 17, 5000), (130, 290, 8000, 8001)):
        assert torch.equal(cut(slice(start, stop), slice(first, last)), whole[start:stop, first:last])


@pytest.mark.parametrize("block", [300, 4096])
def test_ties_go_to_the_lower_token(block: int) -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randint(-2, 3, (40, 5000), generator=generator).float().clamp_min(-0.5).cuda()
    scores[torch.rand(scores.shape, generator=generator).cuda() < 0.3] = -0.0
    top = RunningTopK(40, 2048, scores.device)
    for at in range(0, 5000, block):
        top.add(slice(0, 40), scores[:, at : at + block], at)
    # The oracle's stable sort is a CPU's: -0.0 and 0.0 are equal there.
    assert torch.equal(top.result().cpu(), naive_topk(scores.cpu(), 2048))
