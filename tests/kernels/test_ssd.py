"""Mamba-2's chunked recurrence against its oracle, values and every gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from longstraw.kernels.ssd import chunked as chunked_module
from longstraw.kernels.ssd import ssd
from longstraw.kernels.ssd.naive import naive_ssd

HEADS, HEAD_DIM, GROUPS, STATE = 6, 4, 2, 5


def inputs(tokens: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """x, dt, A, B, C, D and an initial state, all with gradients."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    made = [
        noise(tokens, HEADS, HEAD_DIM),
        noise(tokens, HEADS).abs() * 0.5,
        -noise(HEADS).abs(),
        noise(tokens, GROUPS, STATE),
        noise(tokens, GROUPS, STATE),
        noise(HEADS),
        noise(HEADS, HEAD_DIM, STATE),
    ]
    return [x.to(dtype).requires_grad_() for x in made]


def run(
    rule: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor], lengths: tuple[int, ...], use_initial: bool
) -> list[Tensor]:
    """Outputs, final states and the gradients of every input under fixed weights."""
    *rows, initial = tensors
    out, final = rule(*rows, lengths=lengths, initial_HPN=initial if use_initial else None)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (out, final)]
    wanted = tensors if use_initial else rows
    loss = (out * weights[0]).sum() + (final * weights[1]).sum()
    return [out, final, *torch.autograd.grad(loss, wanted)]


@pytest.mark.parametrize("use_initial", [True, False])
@pytest.mark.parametrize("lengths", [(1,), (2, 1, 3), (64,), (65, 1, 128, 63, 130), (7, 200, 64)])
def test_chunked_is_the_oracle(lengths: tuple[int, ...], use_initial: bool) -> None:
    tensors = inputs(sum(lengths))
    for ours, theirs in zip(
        run(ssd, tensors, lengths, use_initial), run(naive_ssd, tensors, lengths, use_initial), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


def test_half_precision_is_computed_and_carried_in_float32() -> None:
    lengths = (70, 3)
    tensors = inputs(73, torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    ours, theirs = (run(rule, x, lengths, True) for rule, x in ((ssd, tensors), (naive_ssd, wide)))
    assert ours[0].dtype == torch.bfloat16
    assert ours[1].dtype == torch.float32
    torch.testing.assert_close(ours[1].double(), theirs[1], rtol=1e-5, atol=1e-5)
    for mine, other in zip(ours[2:], theirs[2:], strict=True):
        assert mine.dtype == torch.bfloat16
        # A bfloat16 has 8 significant bits; sums are not narrowed before the end.
        assert float((mine.double() - other).norm() / other.norm()) < 6e-3


def test_what_follows_a_large_decay_is_exact() -> None:
    """A prefix sum of 5,000 in float32 has steps of 5e-4: a difference of two would lose the decays behind it."""
    tensors = [x.detach().float() for x in inputs(64)]
    tensors[1] *= 1e-3
    tensors[1][5] = 5_000.0
    tensors[2].fill_(-1.0)
    wide = [x.double() for x in tensors]
    (*rows, initial), (*wide_rows, wide_initial) = tensors, wide
    ours = ssd(*rows, lengths=(64,), initial_HPN=initial)
    theirs = naive_ssd(*wide_rows, lengths=(64,), initial_HPN=wide_initial)
    for mine, other in zip(ours, theirs, strict=True):
        assert float((mine.double() - other).norm() / other.norm()) < 1e-6


def test_packed_branches_are_what_each_is_alone() -> None:
    lengths = (65, 1, 128, 2)
    x, dt, A, B, C, D, initial = (each.detach() for each in inputs(sum(lengths)))
    out, final = ssd(x, dt, A, B, C, D, lengths=lengths, initial_HPN=initial)
    for i, (xi, dti, Bi, Ci) in enumerate(zip(*(each.split(lengths) for each in (x, dt, B, C)), strict=True)):
        alone, last = ssd(xi, dti, A, Bi, Ci, D, lengths=(lengths[i],), initial_HPN=initial)
        torch.testing.assert_close(out.split(lengths)[i], alone, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(final[i], last[0], rtol=1e-12, atol=1e-12)


def test_state_goes_on_over_a_cut() -> None:
    x, dt, A, B, C, D, initial = (each.detach() for each in inputs(150))
    whole, end = ssd(x, dt, A, B, C, D, lengths=(150,), initial_HPN=initial)
    first, middle = ssd(x[:37], dt[:37], A, B[:37], C[:37], D, lengths=(37,), initial_HPN=initial)
    second, last = ssd(x[37:], dt[37:], A, B[37:], C[37:], D, lengths=(113,), initial_HPN=middle[0])
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(last, end, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("trained", range(7))
def test_gradients_of_one_input_alone(trained: int) -> None:
    lengths = (70, 3)
    tensors = [x.detach().requires_grad_(i == trained) for i, x in enumerate(inputs(73))]
    *rows, initial = tensors
    found = []
    for rule in (ssd, naive_ssd):
        out, final = rule(*rows, lengths=lengths, initial_HPN=initial)
        found += torch.autograd.grad(out.square().sum() + final.sum(), [tensors[trained]])
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-11)


def test_autograd_keeps_the_inputs_only() -> None:
    tensors = inputs(256, torch.float32)
    *rows, initial = tensors
    kept: list[int] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        ssd(*rows, lengths=(256,), initial_HPN=initial)
    assert sum(kept) == sum(x.untyped_storage().nbytes() for x in tensors)


def test_autocast_does_not_narrow() -> None:
    *rows, initial = [x.detach() for x in inputs(70, torch.float32)]
    expected, _ = ssd(*rows, lengths=(70,), initial_HPN=initial)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = ssd(*rows, lengths=(70,), initial_HPN=initial)
        assert torch.equal(out, expected)
        narrowed, _ = chunked_module._chunked(*rows, initial, lengths=(70,))
    assert not torch.equal(narrowed, expected), "without the guard, autocast reaches the recurrence"
