"""Gradients averaged over ranks, few large reductions for many tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 64 << 20
"""Bytes that are reduced at once; a larger tensor is reduced alone."""


def all_reduce_mean(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Replace each tensor by its mean over the ranks of `group`, in its own dtype. All ranks pass the same shapes."""
    replicas = dist.get_world_size(group)
    for bucket in _buckets(tensors):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0], group=group)
            bucket[0].div_(replicas)
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, group=group)
        flat.div_(replicas)
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of tensors of one dtype and device, in order, none above `BUCKET_BYTES` unless it is a single tensor."""
    bucket: list[Tensor] = []
    held = 0
    for tensor in tensors:
        other_kind = bucket and (bucket[0].dtype != tensor.dtype or bucket[0].device != tensor.device)
        if bucket and (other_kind or held + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.nbytes
    if bucket:
        yield bucket
