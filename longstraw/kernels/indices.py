"""Small tensors of host values that every layer of a pass needs, made once: a copy from the host makes it wait."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import torch
from torch import Tensor

_Key = tuple[tuple[int, ...], torch.device, torch.dtype]
_made: OrderedDict[_Key, Tensor] = OrderedDict()
_MOST = 64


def index_tensor(values: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """`values` on `device`. The tensor is shared by all who ask: it is not to be written to."""
    key = values, device, dtype
    found = _made.get(key)
    if found is not None:
        _made.move_to_end(key)
        return found
    made = torch.tensor(values, dtype=dtype, device=device)
    # A tensor without memory, or one that autograd must not see, is of no use to those who ask later.
    if type(made) is Tensor and not made.is_inference():
        _made[key] = made
        if len(_made) > _MOST:
            _made.popitem(last=False)
    return made


def branch_edges(lengths: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """Where packed branches of these lengths begin, and where the last one ends: [B + 1]. Shared likewise."""
    return index_tensor((0, *itertools.accumulate(lengths)), device, dtype)
