"""The comparison itself: what counts as equal, and every way to differ."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from longstraw.verify import clone_gradients, compare_gradients, default_tolerance


def one(ours: Tensor | None, reference: Tensor | None, beside: float = 0.0) -> tuple[float, str]:
    """Relative error and note of one parameter; `beside` is another parameter's gradient, equal on both sides."""
    other = torch.tensor([beside], dtype=torch.float64)
    found = compare_gradients({"p": ours, "q": other}, {"p": reference, "q": other})
    difference = next(d for d in found if d.name == "p")
    return difference.relative, difference.note


def test_the_error_is_the_norm_of_the_difference_over_the_norm() -> None:
    relative, note = one(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    assert relative == pytest.approx(0.1)
    assert note == ""


def test_none_and_none_agree() -> None:
    assert one(None, None) == (0.0, "no gradient on either side")


@pytest.mark.parametrize("zero", [True, False])
def test_none_and_a_gradient_differ_even_if_it_is_zero(zero: bool) -> None:
    gradient = torch.zeros(2) if zero else torch.ones(2)
    kind = "zero" if zero else "non-zero"
    assert one(gradient, None) == (math.inf, f"only ours has a gradient ({kind})")
    assert one(None, gradient) == (math.inf, f"only plain autograd's has a gradient ({kind})")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_differs(bad: float) -> None:
    good, spoilt = torch.ones(2), torch.tensor([1.0, bad])
    assert one(spoilt, good) == (math.inf, "not finite")
    assert one(good, spoilt) == (math.inf, "not finite")
    assert one(spoilt, spoilt) == (math.inf, "not finite")


def test_below_the_rounding_of_the_whole_gradient_all_is_noise() -> None:
    tiny = torch.tensor([1e-18], dtype=torch.float64)
    assert one(2 * tiny, tiny)[0] == pytest.approx(1.0)
    assert one(2 * tiny, tiny, beside=1.0)[0] < 0.01
    assert one(torch.zeros(1), torch.zeros(1))[0] == 0
    assert one(torch.ones(1), torch.zeros(1))[0] == math.inf


def test_the_worst_comes_first() -> None:
    reference = {name: torch.ones(1) for name in "abc"}
    ours = {"a": torch.ones(1), "b": torch.ones(1) * 2, "c": torch.ones(1) * 1.5}
    assert [d.name for d in compare_gradients(ours, reference)] == ["b", "c", "a"]


def test_other_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['b'\]"):
        compare_gradients({"a": None, "b": None}, {"a": None})


def test_clones_do_not_follow_the_gradient() -> None:
    model = nn.Linear(2, 2, bias=False)
    assert clone_gradients(model) == {"weight": None}
    model(torch.ones(1, 2)).sum().backward()
    copied = clone_gradients(model, device="cpu")["weight"]
    assert model.weight.grad is not None
    model.weight.grad.zero_()
    assert copied is not None
    assert bool(copied.any())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_has_a_tolerance_with_a_reason(dtype: torch.dtype) -> None:
    tolerance, reason = default_tolerance(dtype)
    assert tolerance > torch.finfo(dtype).eps
    assert reason.startswith(str(dtype).removeprefix("torch."))
