"""Refuses a parameter that some passes use and others do not, where FSDP2 reduces in each of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from longstraw.errors import UnsupportedModelError
from longstraw.integrations.fsdp2_traffic import Unit


class _Handle(Protocol):
    def remove(self) -> None: ...


class PassParameters:
    """Watches which parameters get a gradient in the backward passes of a step, until this object is gone.

    FSDP2 reduces together what has a gradient in a unit. Ranks' passes differ, so a parameter that only some tokens use
    would be reduced by one rank and not by another, in one collective of two sizes: a crash over gloo, and over NCCL
    perhaps a wrong gradient. What the first pass of a step used is taken for what every pass uses; more than that is an
    error, raised before its unit is reduced. FSDP2 can be told to fill gaps with zeros; then every pass is alike.
    """

    def __init__(self, units: Sequence[Unit], gathered: Mapping[str, nn.Parameter]) -> None:
        self._used: set[str] = set()
        self._first = True
        handles: list[_Handle] = []
        weakref.finalize(self, _remove_all, handles)
        for unit in units:
            for name in unit.names:
                if gathered[name].requires_grad:
                    hook = _hook(weakref.ref(self), unit, name)
                    handles.append(gathered[name].register_post_accumulate_grad_hook(hook))

    def begin_step(self) -> None:
        self._used.clear()
        self._first = True

    def end_pass(self) -> None:
        self._first = False

    def see(self, unit: Unit, name: str) -> None:
        """A gradient of this parameter has come.

        Raises UnsupportedModelError if there was none in the step's earlier passes.
        """
        if self._first:
            self._used.add(name)
        elif name not in self._used and not _fills_gaps(unit):
            raise UnsupportedModelError(
                f"{name} has a gradient in this pass and had none in the step's first: passes of other ranks may not "
                "use it either, and gradient.reduce: each_pass would reduce what does not match. Set gradient.reduce "
                "to deferred, or call model.set_reduce_scatter_unused_params(True), where torch has it (2.13 does)"
            )


def _hook(watching: weakref.ref[PassParameters], unit: Unit, name: str) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        watch = watching()
        if watch is not None and parameter.grad is not None:
            watch.see(unit, name)

    return hook


def _fills_gaps(unit: Unit) -> bool:
    """Whether FSDP2 reduces zeros for what has no gradient; it has a public setter, and no public word on it."""
    groups = [group for module in unit.modules for group in getattr(module._get_fsdp_state(), "_fsdp_param_groups", ())]
    return any(getattr(group, "reduce_scatter_unused_params", False) for group in groups)


def _remove_all(handles: list[_Handle]) -> None:
    while handles:
        handles.pop().remove()
