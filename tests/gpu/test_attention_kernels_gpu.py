"""The kernels of attention over pages on a CUDA device, against torch's operations and the naive version."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longstraw.kernels.attention import choose_ops, kv_views, paged_attention, queries
from longstraw.kernels.attention.dq_tiles import DqTiles
from longstraw.kernels.attention.merge import add_pair
from longstraw.kernels.attention.naive import naive_attention
from longstraw.kernels.attention.sums import sums_for
from longstraw.kernels.rows import RowBlock
from tests.kernels.fused_sums import check_gradient_rows, check_merge, check_sum, part
from tests.kernels.test_paged_attention import DensePages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HALF = (torch.float16, torch.bfloat16)
LAYOUTS = ("token-major", "head-major", "window")


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("tokens", [1, 37, 1000])
def test_sums_over_blocks(monkeypatch: pytest.MonkeyPatch, tokens: int, head_dim: int, dtype: torch.dtype) -> None:
    for first in range(3):
        layouts = [LAYOUTS[(first + i) % 3] for i in range(4)]
        parts = [part(i, layout, tokens, head_dim, dtype, "cuda") for i, layout in enumerate(layouts)]
        fused = sums_for(parts[0])
        assert fused.__name__.endswith(".fused")
        for count in (1, 2, 4):
            check_merge(fused, monkeypatch, parts[:count], sink=count == 2)
            check_sum(fused, monkeypatch, parts[:count])
        for wide in (torch.float32, dtype):
            check_gradient_rows(fused, monkeypatch, parts[0], parts[1], wide)


def test_rows_beyond_a_32_bit_offset() -> None:
    """Gradient rows of more than 2^31 values, and parts of more than 2^31 bytes."""
    tokens, kv_heads, head_dim = (1 << 20) + 3, 8, 128
    into = torch.zeros(tokens, 2 * kv_heads * head_dim, device="cuda")
    dk, dv = (torch.randn(1, tokens, kv_heads, head_dim, device="cuda").bfloat16().transpose(1, 2) for _ in range(2))
    sums_for(dk).add_pair(*kv_views(into, kv_heads, head_dim), dk, dv, overwrite=False)
    want = torch.empty_like(into)
    add_pair(*kv_views(want, kv_heads, head_dim), dk, dv, overwrite=True)
    assert torch.equal(into, want)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 64), (8, 2, 128), (6, 1, 256), (4, 4, 80)])
@pytest.mark.parametrize("lengths", [[300], [130, 1, 69]])
def test_attention_over_pages(lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    tokens, prefix, scale = sum(lengths), 1000, head_dim**-0.5

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to("cuda", dtype)

    q, grad = (normal(1, tokens, heads, head_dim).transpose(1, 2) for _ in range(2))
    k, v = (normal(1, tokens, kv_heads, head_dim).transpose(1, 2) for _ in range(2))
    rows = normal(prefix, 2 * kv_heads * head_dim)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def run() -> list[Tensor]:
        pages = DensePages(rows, 384)
        pages.gradient = pages.gradient.float()
        ops = choose_ops(q.device, dtype, head_dim)
        found = []
        for _ in range(2):  # the second pass adds to the gradient rows that the first wrote
            out = paged_attention(q, k, v, lengths=lengths, pages=pages, ops=ops, scale=scale)
            found = [out, pages.last[1], *torch.autograd.grad(out, inputs, grad), pages.gradient]
        return found

    found = run()
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, rows)]
    prefix_k, prefix_v = (view[0].transpose(0, 1) for view in kv_views(wide[3], kv_heads, head_dim))
    out, lse = naive_attention(*wide[:3], prefix_k, prefix_v, lengths, scale)
    gradients = torch.autograd.grad(out, wide, grad.double())
    wanted = [out, lse, *gradients[:3], 2 * gradients[3]]
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv", "pages"), found, wanted, strict=True):
        assert (got.double() - want).norm() <= 1e-2 * want.norm(), name
    for name, got, again in zip(("out", "lse"), found, run(), strict=False):
        assert torch.equal(got, again), name


ALL_TILES = [
    DqTiles(queries=128, keys=64, num_warps=8, num_stages=2, copy_engine=True),
    DqTiles(queries=64, keys=32, num_warps=4, num_stages=3, copy_engine=True),
    DqTiles(queries=64, keys=64, num_warps=4, num_stages=2, copy_engine=False),
]


@pytest.mark.parametrize("tiles", ALL_TILES, ids=str)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "tokens", "prefix"),
    [(8, 2, 64, 300, 1000), (8, 2, 128, 1, 1), (8, 8, 128, 257, 4099), (6, 1, 256, 300, 1000), (4, 2, 256, 128, 4096)],
)
def test_dq_alone(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    kv_heads: int,
    head_dim: int,
    tokens: int,
    prefix: int,
    dtype: torch.dtype,
    tiles: DqTiles,
) -> None:
    """Attention over a detached prefix through the kernel of three products, against the naive version; twice alike."""
    from longstraw.kernels.attention import fused_dq

    if tiles.queries == 128 and head_dim == 256:
        tiles = replace(tiles, keys=32)  # what fits in shared memory
    generator = torch.Generator().manual_seed(tokens)
    scale = head_dim**-0.5

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to("cuda", dtype)

    q, grad = (normal(1, tokens, heads, head_dim).transpose(1, 2) for _ in range(2))
    k, v = (normal(1, tokens, kv_heads, head_dim).transpose(1, 2) for _ in range(2))
    rows = normal(prefix, 2 * kv_heads * head_dim)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    monkeypatch.setattr(queries, "FASTER_ON_HOPPER", {head_dim: tiles})
    monkeypatch.setattr(queries, "LEAST_QUERIES", 1)
    monkeypatch.setattr(queries, "_checked", queries._checked.__wrapped__)
    used = []
    add_dq = fused_dq.add_dq
    monkeypatch.setattr(fused_dq, "add_dq", lambda *args, **options: (used.append(1), add_dq(*args, **options)))

    class Detached(DensePages):
        def backward_blocks(self) -> Generator[RowBlock]:
            yield from self.forward_blocks()

    found = []
    for _ in range(2):
        ops = choose_ops(q.device, dtype, head_dim)
        pages = Detached(rows, 1024)
        out = paged_attention(q, k, v, lengths=[tokens], pages=pages, ops=ops, scale=scale)
        found.append(torch.autograd.grad(out, inputs, grad))
    assert len(used) >= 2 * -(-prefix // 1024)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    prefix_k, prefix_v = (view[0].transpose(0, 1).double() for view in kv_views(rows, kv_heads, head_dim))
    naive, _ = naive_attention(*wide, prefix_k, prefix_v, [tokens], scale)
    for got, want in zip(found[0], torch.autograd.grad(naive, wide, grad.double()), strict=True):
        assert (got.double() - want).norm() <= 1e-2 * want.norm()
    alone = []
    x = [y.detach() for y in (grad, q)]
    block_k, block_v = kv_views(rows, kv_heads, head_dim)
    lse = pages.last[1]
    delta = fused_dq.softmax_delta(grad, pages.last[0])
    for engine in (tiles.copy_engine, tiles.copy_engine, not tiles.copy_engine):
        dq = torch.zeros(1, heads, tokens, head_dim, device="cuda")
        add_dq(dq, *x, block_k, block_v, lse, delta, scale=scale, tiles=replace(tiles, copy_engine=engine))
        alone.append(dq)
    assert torch.equal(alone[0], alone[1]), "the same bits every time"
    assert torch.equal(alone[0], alone[2]), "and whoever fetches the tiles"


@pytest.mark.multi_gpu
def test_on_another_device_than_the_current_one() -> None:
    total, x = torch.zeros(1, 3, 9, 64, device="cuda:1"), part(0, "token-major", 9, 64, torch.bfloat16, "cuda:1")
    assert torch.cuda.current_device() == 0
    assert torch.equal(sums_for(x).add_parts(total, x, torch.float32), x.float())
