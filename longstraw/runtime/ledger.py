"""Parameter gradients of one transaction, kept apart until they are known to be whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn


class _Handle(Protocol):
    def remove(self) -> None: ...


class GradientSums:
    """Gradient sums of finished transactions, waiting for the end of an optimizer step's groups."""

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, Tensor] = {}

    def add(self, sums: dict[nn.Parameter, Tensor]) -> None:
        """Take over `sums`; the tensors are not copied."""
        for parameter, gradient in sums.items():
            if parameter in self._sums:
                self._sums[parameter].add_(gradient)
            else:
                self._sums[parameter] = gradient

    def finalize(self) -> None:
        """Add the sums to `.grad`, rounding to the parameter's dtype once."""
        with torch.no_grad():
            for parameter, gradient in self._sums.items():
                if parameter.grad is None:
                    parameter.grad = gradient.to(parameter.dtype)
                elif parameter.grad.dtype == gradient.dtype:
                    parameter.grad.add_(gradient)
                else:
                    parameter.grad.copy_(gradient.add_(parameter.grad))
        self._sums.clear()


class GradientLedger:
    """Sets `.grad` aside while a transaction's backward passes run, and can put it back untouched.

    Between `begin` and `take` or `rollback`, autograd finds every `.grad` empty. Parameters narrower than float32
    are summed in float32 when `wide`, so that dozens of passes lose no bits; the others accumulate in `.grad`.
    """

    def __init__(self, *, wide: bool) -> None:
        self._wide = wide
        self._entry: dict[nn.Parameter, Tensor | None] = {}
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._hooks: list[_Handle] = []

    @property
    def begun(self) -> bool:
        return bool(self._entry)

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set the gradients of `parameters` aside."""
        assert not self._entry, "the ledger is open"
        for parameter in parameters:
            self._entry[parameter] = parameter.grad
            parameter.grad = None
            if self._wide and parameter.dtype.itemsize < 4:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._sum_wide))

    def _sum_wide(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is None:
            # Autograd calls the hook also where no gradient came: the last layer's queries in the sweep.
            return
        total = self._sums.get(parameter)
        if total is None:
            self._sums[parameter] = parameter.grad.float()
        else:
            total.add_(parameter.grad)
        parameter.grad = None

    def discard(self) -> None:
        """Forget what was summed since `begin`; the ledger stays open."""
        self._sums.clear()
        for parameter in self._entry:
            parameter.grad = None

    def take(self) -> dict[nn.Parameter, Tensor]:
        """Close the ledger: what was summed since `begin`, with every `.grad` back as it was then."""
        sums = dict(self._sums)
        for parameter in self._entry:
            if parameter.grad is not None:
                assert parameter not in sums
                sums[parameter] = parameter.grad
        self.rollback()
        return sums

    def rollback(self) -> None:
        """Close the ledger and forget the sums: every `.grad` is the tensor that it was at `begin`."""
        for hook in self._hooks:
            hook.remove()
        for parameter, gradient in self._entry.items():
            parameter.grad = gradient
        self._hooks.clear()
        self._sums.clear()
        self._entry.clear()
