"""Stand-ins for the libraries of disk engines, by plain calls; fixtures of theirs are in `conftest.py`."""

from __future__ import annotations

import os
from typing import Any

import torch

from longstraw.pagers.engines import EngineSettings

CPU = torch.device("cpu")
SMALL = EngineSettings(threads=3, block=256 << 10)


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class FakeHandle:
    """What DeepSpeed's handle does, by plain calls; it never says that something went wrong."""

    def __init__(self, block: int, depth: int, *rest: Any) -> None:
        self.block, self.depth = block, depth

    def new_cpu_locked_tensor(self, n: int, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(n + 4096, dtype=like.dtype)[:n]

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        return True

    def sync_pread(self, tensor: torch.Tensor, path: str, offset: int) -> int:
        fd = os.open(path, os.O_RDONLY)
        os.preadv(fd, [memoryview(tensor.numpy())], offset)
        os.close(fd)
        return 1

    def sync_pwrite(self, tensor: torch.Tensor, path: str, offset: int) -> int:
        fd = os.open(path, os.O_WRONLY)
        os.pwritev(fd, [memoryview(tensor.numpy())], offset)
        os.close(fd)
        return 1


class FakeFuture:
    def __init__(self, done: int) -> None:
        self.done = done

    def get(self) -> int:
        return self.done


class FakeCuFile:
    short = 0

    def __init__(self, path: str, flags: str) -> None:
        self.fd = os.open(path, os.O_RDWR)

    def pread(self, data: Any, size: int, offset: int, task: int) -> FakeFuture:
        if os.fstat(self.fd).st_size < offset + size:
            raise RuntimeError("KvikIO failure at: posix_io.hpp: EOF")
        return FakeFuture(os.preadv(self.fd, [memoryview(data)[:size]], offset) - self.short)

    def pwrite(self, data: Any, size: int, offset: int, task: int) -> FakeFuture:
        return FakeFuture(os.pwritev(self.fd, [memoryview(data)[:size]], offset) - self.short)

    def close(self) -> None:
        os.close(self.fd)
