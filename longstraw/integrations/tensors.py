"""The tensors in what a module puts out, whatever holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(found: Any) -> Iterator[Tensor]:
    """Every tensor in nested mappings, lists and tuples, in order."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Mapping):
        for one in found.values():
            yield from tensors_in(one)
    elif isinstance(found, list | tuple):
        for one in found:
            yield from tensors_in(one)
