"""Parameter gradients of one transaction, or of one step, kept apart until they are known to be whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from longstraw.errors import TransactionStateError


class _Handle(Protocol):
    def remove(self) -> None: ...


class GradientSums:
    """Gradient sums of finished transactions, waiting for the end of an optimizer step's groups."""

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._adding = False

    def add(self, sums: Mapping[nn.Parameter, Tensor]) -> None:
        """Take over `sums`; the tensors are not copied."""
        self._adding = True
        for parameter, gradient in sums.items():
            if parameter in self._sums:
                self._sums[parameter].add_(gradient)
            else:
                self._sums[parameter] = gradient
        self._adding = False

    @property
    def any(self) -> bool:
        """Whether there is a sum."""
        return bool(self._sums)

    def take(self) -> dict[nn.Parameter, Tensor]:
        """All sums; none are left here.

        Raises TransactionStateError if an `add` was interrupted: the sums are no whole transactions' then.
        """
        if self._adding:
            raise TransactionStateError(
                "accumulate: an error interrupted the end of a transaction, whose gradient was added in part; leave "
                "the block with that error, and run the step again"
            )
        sums, self._sums = self._sums, {}
        return sums

    def finalize(self) -> None:
        """Add the sums to `.grad`, rounding to the parameter's dtype once."""
        add_to_gradients(self.take())


def sum_dtype(leaf: Tensor, *, wide: bool) -> torch.dtype:
    """The type in which gradients of `leaf` are summed: float32 for a narrower one if `wide`."""
    return torch.float32 if wide and leaf.dtype.itemsize < 4 else leaf.dtype


@torch.no_grad()
def add_to_gradients(sums: Mapping[nn.Parameter, Tensor]) -> None:
    """Add each sum to its parameter's `.grad`, rounding to the parameter's dtype once. Uses up the sums.

    All that can run out of memory comes first: then no `.grad` is changed.
    """
    first = {p: gradient.to(p.dtype) for p, gradient in sums.items() if p.grad is None}
    for parameter, gradient in sums.items():
        if parameter.grad is not None:
            gradient.add_(parameter.grad)
    for parameter, gradient in sums.items():
        if parameter.grad is None:
            parameter.grad = first[parameter]
        else:
            parameter.grad.copy_(gradient)


class GradientLedger:
    """Sets `.grad` aside while backward passes run, and can put it back untouched.

    Between `begin` and `take` or `rollback`, autograd finds every `.grad` empty, and so does a framework that would
    take away what it finds there: a hook moves each gradient to a sum as soon as it has come. Dozens of passes lose no
    bits when sums are `wide`.

    Args:
        wide: sum in float32 at least.
        hooked: whether a framework has hooks of its own on the parameters; any hook is the user's else.

    Attributes:
        arrived: gradients that were summed so far.
    """

    def __init__(self, *, wide: bool, hooked: bool = False) -> None:
        self._wide, self._hooked = wide, hooked
        self._entry: dict[nn.Parameter, Tensor | None] = {}
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._hooks: list[_Handle] = []
        weakref.finalize(self, _remove_all, self._hooks)
        self._discarding = False
        self.arrived = 0

    @property
    def begun(self) -> bool:
        return bool(self._entry)

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set the gradients of `parameters` aside.

        Raises TransactionStateError if another ledger has set one of them aside: autograd adds to `.grad`, whoever
        runs it, and one transaction's failure could no longer be told from the other's gradient. Or if a parameter has
        a hook of the user's that waits for its gradient.
        """
        assert not self._entry, "the ledger is open"
        parameters = list(parameters)
        if any(parameter in ledger._entry for ledger in _OPEN for parameter in parameters):
            raise TransactionStateError(
                "lane.backward: another transaction is collecting gradients of the same parameters; leave that one "
                "first (captures and scores of several transactions may overlap, their backward passes may not)"
            )
        if not self._hooked and any(parameter._post_accumulate_grad_hooks for parameter in parameters):
            raise TransactionStateError(
                "lane.backward: a parameter has a post-accumulate-grad hook, such as an optimizer fused into the "
                "backward; it would be handed the gradient of one pass, which is a part of the step's. Remove it, and "
                "step after the transaction"
            )
        _OPEN.add(self)
        for parameter in parameters:
            self._entry[parameter] = parameter.grad
            parameter.grad = None
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_weakly(self)))

    def _sum_apart(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or self._discarding:
            # Autograd calls the hook also where no gradient came: the last layer's queries in the sweep.
            return
        self.arrived += 1
        total = self._sums.get(parameter)
        if total is None:
            self._sums[parameter] = gradient.to(sum_dtype(parameter, wide=self._wide))
        else:
            total.add_(gradient)

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Within it gradients are dropped as they come."""
        self._discarding = True
        try:
            yield
        finally:
            self._discarding = False

    def discard(self) -> None:
        """Forget what was summed since `begin`; the ledger stays open."""
        self._sums.clear()
        for parameter in self._entry:
            parameter.grad = None

    def take(self) -> dict[nn.Parameter, Tensor]:
        """Close the ledger: what was summed since `begin`, with every `.grad` back as it was then."""
        sums = dict(self._sums)
        for parameter in self._entry:
            if parameter.grad is None:
                continue
            if parameter in sums:
                # A framework may write a gradient itself, without a hook's knowing: zeros, where it misses one.
                sums[parameter].add_(parameter.grad)
            else:
                sums[parameter] = parameter.grad
        self.rollback()
        return sums

    def rollback(self) -> None:
        """Close the ledger and forget the sums: every `.grad` is the tensor that it was at `begin`."""
        _remove_all(self._hooks)
        for parameter, gradient in self._entry.items():
            parameter.grad = gradient
        self._sums.clear()
        self._entry.clear()
        _OPEN.discard(self)


def _weakly(ledger: GradientLedger) -> Callable[[Tensor], None]:
    """The hook of a ledger that may be dropped: parameters must not keep it, and the sums in it, alive."""
    reference = weakref.ref(ledger)

    def hook(parameter: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive._sum_apart(parameter)

    return hook


def _remove_all(hooks: list[_Handle]) -> None:
    while hooks:
        hooks.pop().remove()


_OPEN: WeakSet[GradientLedger] = WeakSet()
"""The ledgers that have gradients set aside, of all runtimes."""
