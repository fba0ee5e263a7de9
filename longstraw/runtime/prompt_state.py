"""A prompt's state on pages: which segments there are, and which rows a pass asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longstraw.pagers.staging import StagingPool
from longstraw.pagers.stream import PageStream, Request
from longstraw.resident.lease import Access
from longstraw.resident.placement import Reservation
from longstraw.resident.state import Field, State, StateKind
from longstraw.resident.store import PageStore, Segment
from longstraw.runtime.adapter import LayerProfile

# A gradient page is read and written in every pass, in float32: it takes the fastest tier first.
GRADIENT_PRIORITY, KV_PRIORITY = 0, 1


class PromptState:
    """The pages of one captured prompt, and of its gradient in exact mode.

    Args:
        store: where the pages live.
        owner: the transaction's name in the store.
        layers: the model's layers, in the order in which they run.
        rows: captured tokens.
        exact: whether to hold gradient pages.
        accumulate_wide: keep gradient pages in float32 even where the state is narrower.
        block_tokens: rows streamed at once.
        lookahead: requests that are brought ahead of the one in use.
        staging: slots that rows pass through, shared by all passes.

    Raises:
        CapacityError: the tiers cannot hold the pages; nothing is held then.
    """

    def __init__(
        self,
        store: PageStore,
        owner: str,
        layers: Sequence[LayerProfile],
        *,
        rows: int,
        exact: bool,
        accumulate_wide: bool,
        block_tokens: int,
        lookahead: int,
        staging: StagingPool,
    ) -> None:
        self.layers = tuple(layers)
        self.rows = rows
        self.gradients_started = False
        self._store, self._owner = store, owner
        self._block_tokens, self._lookahead, self._staging = block_tokens, lookahead, staging
        self._kv: dict[int, Segment] = {}
        self._gradient: dict[int, Segment] = {}
        if rows == 0:
            return
        reservations, places = [], []
        for layer in self.layers:
            reservations.append(Reservation(state=_kv_state(layer), rows=rows, priority=KV_PRIORITY))
            places.append((self._kv, layer.index))
            if exact and layer.needs_gradient:
                state = _gradient_state(layer, accumulate_wide)
                reservations.append(Reservation(state=state, rows=rows, priority=GRADIENT_PRIORITY))
                places.append((self._gradient, layer.index))
        for (table, index), segment in zip(places, store.reserve(owner, reservations), strict=True):
            table[index] = segment

    @property
    def needs_sweep(self) -> bool:
        """Whether some gradient that reached the state has yet to go back through the prompt."""
        return self.gradients_started and bool(self._gradient)

    def stream(self, schedule: Sequence[Request]) -> PageStream:
        """A look-ahead stream over the announced requests."""
        return PageStream(
            self._store, schedule, lookahead=self._lookahead, device=self._staging.device, staging=self._staging
        )

    def blocks(self, rows: int) -> list[tuple[int, int]]:
        """The first `rows` rows in runs of `block_tokens`. They start at the same rows whatever tier holds them."""
        return [(at, min(at + self._block_tokens, rows)) for at in range(0, rows, self._block_tokens)]

    def kv_requests(self, layer: int, rows: int) -> list[Request]:
        """Reads of the first `rows` rows of a layer."""
        return [Request(self._kv[layer], start, stop, Access.READ) for start, stop in self.blocks(rows)]

    def kv_fill(self, layer: int, start: int, stop: int) -> Request:
        """The write of rows that were just computed."""
        return Request(self._kv[layer], start, stop, Access.FILL)

    def gradient_updates(self, layer: int, start: int, stop: int) -> list[Request]:
        """The request that adds to a block's gradient (the first pass over all blocks overwrites), or none."""
        if layer not in self._gradient:
            return []
        access = Access.UPDATE if self.gradients_started else Access.FILL
        return [Request(self._gradient[layer], start, stop, access)]

    def gradient_reads(self, layer: int, start: int, stop: int) -> list[Request]:
        """The read of the gradient that reached rows start..stop, or none."""
        if layer not in self._gradient:
            return []
        return [Request(self._gradient[layer], start, stop, Access.READ)]

    def discard_gradients(self) -> None:
        """Forget all gradient that has reached the state; the pages stay reserved."""
        for segment in self._gradient.values():
            self._store.void(segment)
        self.gradients_started = False

    def release(self, *, force: bool = False) -> None:
        """Give every page back. `force` after a failure, when leases may still be open."""
        self._store.release(self._owner, force=force)
        self._kv.clear()
        self._gradient.clear()

    def tier_bytes(self) -> dict[str, int]:
        """Bytes reserved on each tier."""
        totals: dict[str, int] = {}
        for segment in (*self._kv.values(), *self._gradient.values()):
            for tier, count in segment.tier_bytes().items():
                totals[tier] = totals.get(tier, 0) + count
        return totals


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kv_fields(layer: LayerProfile) -> tuple[Field, ...]:
    return tuple(Field(name=name, shape=(layer.num_kv_heads, layer.head_dim)) for name in ("k", "v"))


def _kv_state(layer: LayerProfile) -> State:
    return State(
        kind=StateKind.TOKEN, layer=layer.index, name="kv", fields=_kv_fields(layer), dtype=_dtype_name(layer.dtype)
    )


def _gradient_state(layer: LayerProfile, wide: bool) -> State:
    dtype = torch.float32 if wide and layer.dtype.itemsize < 4 else layer.dtype
    return State(
        kind=StateKind.TOKEN, layer=layer.index, name="kv_grad", fields=_kv_fields(layer), dtype=_dtype_name(dtype)
    )
