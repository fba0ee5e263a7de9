"""What must hold between steps: nothing is held any more, and a failed step has touched no gradient."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from longstraw.api import Runtime


def still_held(runtime: Runtime, when: str) -> list[str]:
    """What a runtime without an open transaction has not been given back: pages, bytes, staging slots."""
    store, found = runtime._engine.store, []
    if store.pages_in_use():
        found.append(f"{when}: {store.pages_in_use()} pages are still reserved")
    found += [f"{when}: {p.used} bytes of tier {p.name} are still used" for p in store.pagers if p.used]
    if lent := runtime._engine.staging.lent_bytes:
        found.append(f"{when}: {lent} bytes of staging slots were not given back")
    return found


def touched(model: nn.Module, entry: Mapping[str, Tensor | None], when: str) -> list[str]:
    """The first parameter whose gradient is not bit by bit that of `entry`."""
    for name, parameter in model.named_parameters():
        before = entry[name]
        if parameter.grad is None or before is None:
            same = parameter.grad is before
        else:
            same = torch.equal(parameter.grad, before)
        if not same:
            return [f"{when}: the gradient of {name} is not what it was before the step"]
    return []


def restore(model: nn.Module, entry: Mapping[str, Tensor | None]) -> None:
    """Give parameters the gradients of `entry` again."""
    for name, parameter in model.named_parameters():
        before = entry[name]
        parameter.grad = None if before is None else before.clone()
