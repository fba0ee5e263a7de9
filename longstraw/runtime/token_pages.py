"""The pages of a layer's token state, as the attention kernels ask for them."""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor

from longstraw.kernels.rows import RowBlock
from longstraw.runtime.layer_io import LayerIO

_ATTENTION = "attention"


class TokenPages:
    """`PrefixPages` over the state `name` of a layer."""

    def __init__(self, io: LayerIO, name: str) -> None:
        self._io, self._name = io, name

    def forward_blocks(self) -> Generator[RowBlock]:
        return self._io.blocks(self._name)

    def backward_blocks(self) -> Generator[RowBlock]:
        return self._io.blocks_with_gradient(self._name)

    def own_gradient(self) -> Generator[Tensor]:
        return self._io.own_gradient(self._name)

    def kept_output(self) -> tuple[Tensor, Tensor] | None:
        return self._io.kept(_ATTENTION)

    def keep_output(self, out: Tensor, lse: Tensor) -> None:
        self._io.keep(_ATTENTION, (out, lse))
