"""Registers host memory with CUDA, so that it is page-locked: through cupy where that is installed, else torch."""

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch


class Locker(Protocol):
    """Both calls return CUDA's error code, 0 for success, and do not hold Python's lock meanwhile."""

    @property
    def name(self) -> str:
        """What it goes through, for people."""

    def register(self, address: int, nbytes: int) -> int: ...

    def unregister(self, address: int) -> int: ...


class CupyLocker:
    """Through `cupy.cuda.runtime`, on whatever thread: the device is made current for each call."""

    name = "cupy"

    def __init__(self, device: torch.device) -> None:
        from cupy.cuda import runtime

        self._runtime = runtime
        self._device = torch.cuda.current_device() if device.index is None else device.index

    def register(self, address: int, nbytes: int) -> int:
        try:
            self._runtime.setDevice(self._device)
            self._runtime.hostRegister(address, nbytes, 0)
        except self._runtime.CUDARuntimeError as refusal:
            return int(refusal.status)
        return 0

    def unregister(self, address: int) -> int:
        try:
            self._runtime.hostUnregister(address)
        except self._runtime.CUDARuntimeError as refusal:
            return int(refusal.status)
        return 0


class TorchLocker:
    """Through torch's binding of the CUDA runtime."""

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._device = device

    def register(self, address: int, nbytes: int) -> int:
        with torch.cuda.device(self._device):
            return int(self._runtime.cudaHostRegister(address, nbytes, 0))

    def unregister(self, address: int) -> int:
        return int(self._runtime.cudaHostUnregister(address))


def make_locker(device: torch.device) -> Locker:
    """cupy's if the extra `cuda` is installed, else torch's. `describe()` of the host tier says which."""
    return CupyLocker(device) if importlib.util.find_spec("cupy") is not None else TorchLocker(device)
