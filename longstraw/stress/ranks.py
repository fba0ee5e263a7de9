"""One process or many: joins the group that torchrun describes, and lets the ranks decide together."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Together:
    """The ranks of a stress run. Without torchrun there is one."""

    def __init__(self, device: torch.device) -> None:
        self.several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        self._mine = self.several and not dist.is_initialized()
        if self._mine:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        self.rank = dist.get_rank() if self.several else 0
        self.world = dist.get_world_size() if self.several else 1
        self._group = dist.new_group(backend="gloo") if self.several else None

    def wrap(self, model: Any) -> Any:
        """The model as it is trained: in DDP if there are several ranks."""
        return DistributedDataParallel(model) if self.several else model

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. All ranks call it."""
        if not self.several:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self._group)
        return found

    def first(self, value: Any) -> Any:
        """Rank 0's value. All ranks call it."""
        return self.gather(value)[0]

    def close(self) -> None:
        if self._mine:
            dist.destroy_process_group()
