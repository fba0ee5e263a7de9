"""What every tier offers: extents of bytes, and copies between them and the compute device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from longstraw.pagers.transfer import Transfer


@dataclass(frozen=True, slots=True)
class Extent:
    """`nbytes` contiguous bytes of the tier named `tier`, from `offset` in its arena on."""

    tier: str
    offset: int
    nbytes: int


def check_rows(tensor: torch.Tensor) -> None:
    """Raise ValueError unless the tensor is what copies are made of: uint8 [n], contiguous.

    A transposed or strided view would be cut, or handed to an engine, as if its bytes lay in order.
    """
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"a copy takes contiguous uint8 [n], not {tensor.dtype} {list(tensor.shape)} with strides "
            f"{list(tensor.stride())}; pass a contiguous tensor's .view(torch.uint8).view(-1)"
        )


class Pager(Protocol):
    """One tier's memory, and the copies from and to it.

    `budget`, `used` and `peak` are in bytes; `device` is the compute device, whose tensors `read` fills and
    `write` takes (uint8 [n], contiguous). Offsets are in bytes from the start of the extent. A copy starts
    after the transfers in `after`: writes of the same bytes, and whatever still uses the tensor.
    """

    name: str
    device: torch.device
    budget: int

    @property
    def kind(self) -> Literal["device", "host", "nvme"]:
        """What the tier is."""

    @property
    def used(self) -> int:
        """Bytes allocated now."""

    @property
    def peak(self) -> int:
        """The most bytes that were allocated."""

    def grow_to(self, nbytes: int) -> None:
        """Have memory for `nbytes` in all (used and free). Raises `CapacityError` if the machine has it
        not."""

    def largest_free(self) -> int:
        """Bytes of the largest extent that `allocate` gives without growing."""

    def allocate(self, nbytes: int) -> Extent:
        """A contiguous extent. Raises `CapacityError` if the budget or the machine does not have it."""

    def free(self, extent: Extent) -> None:
        """Give an extent back. No copy from or to it may be on its way."""

    def view(self, extent: Extent, offset: int, nbytes: int) -> torch.Tensor | None:
        """The bytes where they lie (uint8 [nbytes]), or None if the compute device cannot address them."""

    def read(self, extent: Extent, offset: int, target: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        """Copy bytes of the extent into `target`, as many as it has. ValueError if that is no row of bytes."""

    def write(self, extent: Extent, offset: int, source: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        """Copy `source` into the extent. `source` must stay as it is until the transfer has ended."""

    def describe(self) -> str:
        """One line for people: what the tier is and how it does its copies."""

    def close(self) -> None:
        """End the copies on their way and give all memory back. Idempotent."""
