"""Windowed attention, soft caps and sinks against the naive version: output and every gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from longstraw.kernels.attention import paged_attention
from longstraw.kernels.attention.ops import CpuFlashOps
from longstraw.kernels.attention.tiled import TiledOps
from longstraw.kernels.windowed import Slide, choose_window_ops, keep_window_only, ops, windowed_attention
from longstraw.kernels.windowed.naive import naive_windowed_attention
from tests.kernels.test_paged_attention import DensePages

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
SCALE = HEAD_DIM**-0.5
CPU = torch.device("cpu")


class HeldWindow:
    """A window whose gradients stay in memory: what arrives from later tokens, and what goes to earlier ones."""

    def __init__(self, slide: Slide, arriving: tuple[Tensor, Tensor] | None = None) -> None:
        self.slide, self.arriving = slide, arriving
        self.leaving: tuple[Tensor, Tensor] | None = None
        self.kept: tuple[Tensor, Tensor] | None = None

    def next_gradient(self) -> tuple[Tensor, Tensor] | None:
        assert self.leaving is None, "asked too late"
        return self.arriving

    def add_gradient(self, dk_BKTD: Tensor, dv_BKTD: Tensor) -> None:
        assert self.leaving is None, "given twice"
        self.leaving = (dk_BKTD, dv_BKTD)

    def kept_output(self) -> tuple[Tensor, Tensor] | None:
        return self.kept

    def keep_output(self, out_BHSD: Tensor, lse_BHS: Tensor) -> None:
        self.last = (out_BHSD, lse_BHS)


def make(prefix: int, tokens: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(prefix * 1000 + tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "q": normal(1, tokens, HEADS, HEAD_DIM).transpose(1, 2).requires_grad_(),
        "k": normal(1, tokens, KV_HEADS, HEAD_DIM).transpose(1, 2).requires_grad_(),
        "v": normal(1, tokens, KV_HEADS, HEAD_DIM).transpose(1, 2).requires_grad_(),
        "prefix_k": normal(1, KV_HEADS, prefix, HEAD_DIM).requires_grad_(),
        "prefix_v": normal(1, KV_HEADS, prefix, HEAD_DIM).requires_grad_(),
        "sinks": normal(HEADS).requires_grad_(),
        "grad": normal(1, tokens, HEADS, HEAD_DIM).transpose(1, 2),
    }


def oracle(
    x: dict[str, Tensor], lengths: list[int], window: int, sinks: bool, softcap: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    out = naive_windowed_attention(
        x["q"], x["k"], x["v"], x["prefix_k"], x["prefix_v"], x["sinks"] if sinks else None,
        lengths=lengths, window=window, scale=SCALE, softcap=softcap,
    )  # fmt: skip
    names = ["q", "k", "v", "prefix_k", "prefix_v"] + ["sinks"] * sinks
    grads = torch.autograd.grad(out, [x[n] for n in names], x["grad"], allow_unused=True)
    return out, {n: torch.zeros_like(x[n]) if g is None else g for n, g in zip(names, grads, strict=True)}


def window_of(x: dict[str, Tensor], slide: Slide) -> list[Tensor]:
    first = slide.prefix - slide.before
    return [x[name].detach()[:, :, first:] for name in ("prefix_k", "prefix_v")]


@pytest.mark.parametrize(("sinks", "softcap"), [(False, None), (True, None), (False, 0.7), (True, 0.7)])
@pytest.mark.parametrize("lengths", [[1], [17], [3, 1, 9]])
@pytest.mark.parametrize(
    ("prefix", "window"), [(0, 5), (1, 5), (3, 5), (4, 5), (5, 5), (6, 5), (29, 5), (29, 2), (8, 40)]
)
def test_output_and_every_gradient(
    prefix: int, window: int, lengths: list[int], sinks: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several tiles, and a band that starts inside one.
    monkeypatch.setattr(ops, "TILE", 4)
    x = make(prefix, sum(lengths))
    slide = Slide(window=window, prefix=prefix, own=sum(lengths))
    state = HeldWindow(slide)
    chosen = choose_window_ops(CPU, torch.float64, HEAD_DIM, softcap)
    out = windowed_attention(
        x["q"], x["k"], x["v"], *window_of(x, slide), x["sinks"] if sinks else None,
        lengths=lengths, state=state, ops=chosen, scale=SCALE,
    )  # fmt: skip
    names = ["q", "k", "v"] + ["sinks"] * sinks
    got = dict(zip(names, torch.autograd.grad(out, [x[n] for n in names], x["grad"]), strict=True))
    want_out, want = oracle(x, lengths, window, sinks, softcap)
    torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-12)
    assert state.leaving is not None
    for name, gradient in zip(("prefix_k", "prefix_v"), state.leaving, strict=True):
        assert not want[name][:, :, : prefix - slide.before].any(), "the oracle saw rows behind the window"
        got[name], want[name] = gradient, want[name][:, :, prefix - slide.before :]
    for name, expected in want.items():
        torch.testing.assert_close(got[name], expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("chunks", [[20], [3, 3, 3, 3, 3, 3, 2], [1] * 20, [7, 2, 11]])
@pytest.mark.parametrize("window", [2, 6, 30])
def test_chunks_swept_backwards_give_the_gradient_of_the_whole(chunks: list[int], window: int) -> None:
    x = make(0, 20)
    _, want = oracle(x, [20], window, True, None)
    chosen = choose_window_ops(CPU, torch.float64, HEAD_DIM)
    got = {n: torch.zeros_like(x[n]) for n in ("q", "k", "v", "sinks")}
    arriving = None
    for stop, own in reversed(list(zip(itertools.accumulate(chunks), chunks, strict=True))):
        start = stop - own
        slide = Slide(window=window, prefix=start, own=own)
        leaves = {n: x[n].detach()[:, :, start:stop].clone().requires_grad_() for n in ("q", "k", "v")}
        leaves["sinks"] = x["sinks"].detach().clone().requires_grad_()
        held = [x[n].detach()[:, :, start - slide.before : start] for n in ("k", "v")]
        state = HeldWindow(slide, arriving)
        out = windowed_attention(
            leaves["q"], leaves["k"], leaves["v"], *held, leaves["sinks"],
            lengths=[own], state=state, ops=chosen, scale=SCALE,
        )  # fmt: skip
        out.backward(x["grad"][:, :, start:stop])
        for name in ("q", "k", "v"):
            got[name][:, :, start:stop] = leaves[name].grad
        got["sinks"] += leaves["sinks"].grad
        arriving = state.leaving
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-10, atol=1e-11)


def test_a_window_without_attention_hands_its_gradient_on() -> None:
    x = make(0, 3)
    slide = Slide(window=6, prefix=9, own=3)
    assert (slide.before, slide.after, slide.entering, slide.staying) == (5, 5, 3, 2)
    arriving = tuple(torch.randn(1, KV_HEADS, 5, HEAD_DIM, dtype=torch.float64) for _ in range(2))
    state = HeldWindow(slide, arriving)
    out = keep_window_only(x["q"], x["k"], x["v"], state)
    assert not out.any()
    dq, *own = torch.autograd.grad(out, [x["q"], x["k"], x["v"]], x["grad"], allow_unused=True)
    assert dq is None
    assert state.leaving is not None
    for mine, before, later in zip(own, state.leaving, arriving, strict=True):
        assert torch.equal(mine, later[:, :, 2:])
        assert torch.equal(before[:, :, 3:], later[:, :, :2])
        assert not before[:, :, :3].any()


def test_a_kept_output_is_used_and_not_computed_again() -> None:
    x = make(9, 4)
    slide = Slide(window=5, prefix=9, own=4)
    state = HeldWindow(slide)
    chosen = choose_window_ops(CPU, torch.float64, HEAD_DIM)
    arguments = (x["q"], x["k"], x["v"], *window_of(x, slide), x["sinks"])
    first = windowed_attention(*arguments, lengths=[4], state=state, ops=chosen, scale=SCALE)
    state.kept = state.last
    chosen.forward = None  # type: ignore[assignment, method-assign]
    second = windowed_attention(*arguments, lengths=[4], state=state, ops=chosen, scale=SCALE)
    assert torch.equal(first, second)
    got = torch.autograd.grad(second, [x["q"], x["k"], x["v"]], x["grad"])
    for name, gradient in zip(("q", "k", "v"), got, strict=True):
        torch.testing.assert_close(gradient, oracle(x, [4], 5, True, None)[1][name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_stay_near_the_float64_oracle(dtype: torch.dtype) -> None:
    x, wide = make(300, 9, dtype), make(300, 9)
    slide = Slide(window=128, prefix=300, own=9)
    state = HeldWindow(slide)
    out = windowed_attention(
        x["q"], x["k"], x["v"], *window_of(x, slide), x["sinks"],
        lengths=[4, 5], state=state, ops=choose_window_ops(CPU, dtype, HEAD_DIM, 0.7), scale=SCALE,
    )  # fmt: skip
    out.backward(x["grad"])
    want_out, want = oracle(wide, [4, 5], 128, True, 0.7)
    assert state.leaving is not None
    assert state.leaving[0].dtype == torch.float32, "the window's gradient must not pass through the narrow dtype"
    got = {n: x[n].grad for n in ("q", "k", "v", "sinks")}
    got |= dict(zip(("prefix_k", "prefix_v"), state.leaving, strict=True))
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    assert (out.double() - want_out).norm() / want_out.norm() < limit
    for name, gradient in got.items():
        expected = want[name][:, :, 300 - slide.before :] if name.startswith("prefix") else want[name]
        assert (gradient.double() - expected).norm() / expected.norm() < limit, name


@pytest.mark.parametrize(("sinks", "softcap"), [(True, None), (False, 0.7), (True, 0.7)])
@pytest.mark.parametrize("lengths", [[7], [3, 1, 9]])
@pytest.mark.parametrize(("prefix", "block"), [(0, 8), (29, 8), (29, 100)])
def test_sinks_and_soft_caps_over_pages(
    prefix: int, block: int, lengths: list[int], sinks: bool, softcap: float | None
) -> None:
    x = make(prefix, sum(lengths))
    rows = torch.cat([x[n].detach()[0].transpose(0, 1).flatten(1) for n in ("prefix_k", "prefix_v")], dim=1)
    pages = DensePages(rows, block)
    chosen = CpuFlashOps() if softcap is None else TiledOps(softcap)
    out = paged_attention(
        x["q"], x["k"], x["v"], lengths=lengths, pages=pages, ops=chosen, scale=SCALE,
        sinks_H=x["sinks"] if sinks else None,
    )  # fmt: skip
    names = ["q", "k", "v"] + ["sinks"] * sinks
    got = dict(zip(names, torch.autograd.grad(out, [x[n] for n in names], x["grad"]), strict=True))
    got["prefix_k"], got["prefix_v"] = (
        part.unflatten(1, (KV_HEADS, HEAD_DIM)).transpose(0, 1)[None]
        for part in pages.gradient.split(KV_HEADS * HEAD_DIM, dim=1)
    )
    want_out, want = oracle(x, lengths, 10_000, sinks, softcap)
    torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-12)
    for name, expected in want.items():
        torch.testing.assert_close(got[name], expected, rtol=1e-10, atol=1e-11)
