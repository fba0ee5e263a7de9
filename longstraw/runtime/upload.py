"""Token ids on their way to the device without the host waiting for what the device still has to do."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(ids_T: Tensor, device: torch.device) -> Tensor:
    """A copy of CPU ids on `device`, with a storage of its own.

    From pageable memory CUDA's copy would wait for all earlier work of the stream. torch keeps the page-locked block
    from being used again before the copy is over.
    """
    if device.type != "cuda":
        return ids_T.to(device, copy=True)
    return ids_T.pin_memory().to(device, non_blocking=True)
