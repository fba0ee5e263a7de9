"""DistributedDataParallel: whole gradients on every rank, averaged once a step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from longstraw.collectives import CollectiveMeter, Ranks, all_reduce_mean
from longstraw.integrations.plain import LossScale, PlainSharding
from longstraw.runtime.ledger import add_to_gradients, sum_dtype


class DdpSharding(PlainSharding):
    """`Sharding` of a model in DDP.

    The module inside is called: DDP's own forward broadcasts buffers and arms a reduction of each backward pass, and
    ranks with unequal work would wait for each other there. Gradients are averaged by one run of all-reduces at the
    end of the step instead, in the type in which they were summed.
    """

    name = "DDP"

    def __init__(self, model: DistributedDataParallel, *, wide: bool, scale: LossScale | None = None) -> None:
        super().__init__(model, wide=wide, scale=scale)
        self._group = model.process_group
        self.ranks = Ranks(dist.get_process_group_ranks(self._group))

    @property
    def called(self) -> nn.Module:
        return self.inner

    @property
    def inner(self) -> nn.Module:
        return self._model.module  # type: ignore[return-value]

    def finalize(self, sums: Mapping[nn.Parameter, Tensor]) -> None:
        assert self.ranks is not None
        leaves = self.leaves()
        used = self.ranks.any_of([leaf in sums for leaf in leaves])
        whole = {
            leaf: sums[leaf] if leaf in sums else torch.zeros_like(leaf, dtype=sum_dtype(leaf, wide=self._wide))
            for leaf, anywhere in zip(leaves, used, strict=True)
            if anywhere
        }
        with CollectiveMeter(self.tally):
            all_reduce_mean(list(whole.values()), self._group)
        add_to_gradients(whole)

    def describe(self) -> str:
        assert self.ranks is not None
        return (
            f"gradients: DDP over {self.ranks.size} ranks, reduced once a step; each rank holds "
            f"{self.gradient_bytes()} bytes of them until then"
        )
