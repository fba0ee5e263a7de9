"""Compares two sets of gradients, parameter by parameter, by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_TOLERANCE = {
    # The runtime's own bound: what is left of float64 after sums in another order.
    torch.float64: (1e-6, "float64 leaves only the order of the sums, so 1e-6 already means a wrong term"),
    torch.float32: (1e-3, "float32 sums in another order agree to about 1e-5; a wrong term shows above 1e-3"),
    torch.float16: (3e-2, "float16 has 11 bits, and every layer rounds to them in both computations"),
    torch.bfloat16: (1e-1, "bfloat16 has 8 bits, and every layer rounds to them in both computations"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientDifference:
    """One parameter's gradients, compared.

    Attributes:
        name: the parameter's name in the model.
        relative: the Euclidean norm of the difference over that of the reference, or infinity where only one
            of the two gives the parameter a gradient, or one is not finite.
        norm: the Euclidean norm of the reference gradient, 0 where there is none.
        note: what is wrong besides the size of the difference, or an empty string.
    """

    name: str
    relative: float
    norm: float
    note: str = ""


def default_tolerance(dtype: torch.dtype) -> tuple[float, str]:
    """The relative error that `dtype` may show, and why."""
    return _TOLERANCE[dtype]


def clone_gradients(model: nn.Module, *, device: torch.device | str | None = None) -> dict[str, Tensor | None]:
    """A copy of every parameter's `.grad` (None if it has none), on `device` if given; tied ones once."""
    return {
        name: None if p.grad is None else p.grad.detach().to(device or p.device, copy=True)
        for name, p in model.named_parameters()
    }


def compare_gradients(
    ours: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None]
) -> list[GradientDifference]:
    """Every parameter's difference, the worst first.

    A parameter without a gradient has to have none on both sides: an optimizer decays the weight of one whose
    gradient is zero and leaves alone one whose gradient is None. The relative error of a parameter whose
    reference is tiny is taken against the rounding of the whole gradient (its norm times the dtype's
    epsilon): below that, a gradient is rounding noise on both sides.
    """
    if ours.keys() != reference.keys():
        raise ValueError(f"parameters differ: {sorted(ours.keys() ^ reference.keys())}")
    total = _norm(reference.values())
    found = [_difference(name, ours[name], reference[name], total) for name in reference]
    return sorted(found, key=lambda difference: -difference.relative)


def _difference(name: str, ours: Tensor | None, reference: Tensor | None, total: float) -> GradientDifference:
    norm = _norm([reference])
    if ours is None and reference is None:
        return GradientDifference(name=name, relative=0.0, norm=0.0, note="no gradient on either side")
    if ours is None or reference is None:
        side, other = ("ours", ours) if reference is None else ("plain autograd's", reference)
        kind = "zero" if _norm([other]) == 0 else "non-zero"
        return GradientDifference(name=name, relative=math.inf, norm=norm, note=f"only {side} has a gradient ({kind})")
    if not math.isfinite(norm) or not math.isfinite(_norm([ours])):
        return GradientDifference(name=name, relative=math.inf, norm=norm, note="not finite")
    difference = _norm([ours.to(reference.device).double() - reference.double()])
    scale = max(norm, total * torch.finfo(reference.dtype).eps)
    relative = difference / scale if scale else (math.inf if difference else 0.0)
    return GradientDifference(name=name, relative=relative, norm=norm)


def _norm(gradients: Iterable[Tensor | None]) -> float:
    squares = [float(g.double().square().sum()) for g in gradients if g is not None]
    return math.sqrt(sum(squares)) if all(math.isfinite(s) for s in squares) else math.inf
