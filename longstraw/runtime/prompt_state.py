"""A prompt's state on pages: which segments there are, and which rows a pass asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from longstraw.errors import CapacityError
from longstraw.pagers.staging import StagingPool
from longstraw.pagers.stream import PageStream, Request
from longstraw.pagers.trace import Tracer
from longstraw.resident.lease import Access
from longstraw.resident.state import StateKind
from longstraw.resident.store import PageStore, Segment
from longstraw.runtime.layer_spec import LayerSpec, StateSpec
from longstraw.runtime.reservations import GRADIENT_ROWS, placed_specs, wishes

KeepOutputs = Literal["auto", "always", "never"]


class PromptState:
    """The pages of one captured prompt, and of its gradient in exact mode.

    Token states have a row a token. Carried states have a row a chunk boundary in exact mode (the sweep starts each
    chunk from its own), else one row that is overwritten. Their gradients have two rows, taken in turn from the last
    boundary backwards.

    Args:
        store: where the pages live.
        owner: the transaction's name in the store.
        layers: the model's layers, in the order in which they run.
        chunks: the prompt's rows, cut as they will be captured.
        exact: whether to hold gradient pages.
        accumulate_wide: keep gradient pages in float32 even where the state is narrower.
        keep_outputs: whether layers' outputs over the prompt are kept for the sweep; "auto" keeps those of as many
            layers, last ones first, as the tiers still have room for.
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
        layers: Sequence[LayerSpec],
        *,
        chunks: Sequence[tuple[int, int]],
        exact: bool,
        accumulate_wide: bool,
        keep_outputs: KeepOutputs,
        block_tokens: int,
        lookahead: int,
        staging: StagingPool,
    ) -> None:
        self.layers = tuple(layers)
        self.gradients_started = False
        self._exact = exact
        self._boundaries = {stop: number for number, (_, stop) in enumerate(chunks)}
        self._store, self._owner, self._staging = store, owner, staging
        self._block_tokens, self._lookahead = block_tokens, lookahead
        self._segments: dict[tuple[int, str], Segment] = {}
        self._gradients: dict[tuple[int, str], Segment] = {}
        self._wide = accumulate_wide
        self._outputs = {layer.index: output_specs(layer) for layer in self.layers}
        if chunks:
            self._reserve(chunks, [pair for layer in self.layers for pair in placed_specs(layer, outputs=False)])
            if exact and keep_outputs != "never":
                self._reserve_outputs(chunks, must=keep_outputs == "always")

    def _reserve(self, chunks: Sequence[tuple[int, int]], placed: Sequence[tuple[int, StateSpec]]) -> None:
        wanted = wishes(placed, chunks, exact=self._exact, wide=self._wide)
        segments = self._store.reserve(self._owner, [wish.reservation for wish in wanted])
        for wish, segment in zip(wanted, segments, strict=True):
            table = self._gradients if wish.gradient else self._segments
            table[wish.layer, wish.name] = segment

    def _reserve_outputs(self, chunks: Sequence[tuple[int, int]], *, must: bool) -> None:
        # Of the last layer only the state is wanted in capture and sweep.
        for layer in reversed(self.layers[:-1]):
            try:
                self._reserve(chunks, placed_specs(layer, outputs=True))
            except CapacityError:
                if must:
                    raise
                return

    def keeps_output(self, layer: int) -> bool:
        """Whether the layer's outputs over the prompt are on pages."""
        return any((layer, spec.name) in self._segments for spec in self._outputs[layer])

    @property
    def kept_output_layers(self) -> int:
        """Layers whose outputs over the prompt are kept."""
        return sum(self.keeps_output(layer.index) for layer in self.layers)

    @property
    def needs_sweep(self) -> bool:
        """Whether some gradient that reached the state has yet to go back through the prompt."""
        return self.gradients_started and bool(self._gradients)

    @property
    def device(self) -> torch.device:
        """Where rows are brought to."""
        return self._staging.device

    def stream(self, schedule: Sequence[Request], tracer: Tracer | None = None) -> PageStream:
        """A look-ahead stream over the announced requests."""
        return PageStream(
            self._store,
            schedule,
            lookahead=self._lookahead,
            device=self.device,
            staging=self._staging,
            tracer=tracer,
        )

    # Token states

    def reads(self, layer: int, name: str, rows: int) -> list[Request]:
        """Reads of the first `rows` rows, in blocks. Blocks start at the same rows whatever tier holds them."""
        return [
            Request(self._segments[layer, name], at, min(at + self._block_tokens, rows), Access.READ)
            for at in range(0, rows, self._block_tokens)
        ]

    def fill(self, layer: int, name: str, start: int, stop: int) -> Request:
        """The write of rows that were just computed."""
        return Request(self._segments[layer, name], start, stop, Access.FILL)

    def read(self, layer: int, name: str, start: int, stop: int) -> Request:
        """The read of rows start..stop."""
        return Request(self._segments[layer, name], start, stop, Access.READ)

    def gradient_update(self, layer: int, name: str, start: int, stop: int) -> Request | None:
        """The request that adds to a block's gradient (the first pass over all blocks overwrites), or None."""
        segment = self._gradients.get((layer, name))
        access = Access.UPDATE if self.gradients_started else Access.FILL
        return None if segment is None else Request(segment, start, stop, access)

    def gradient_read(self, layer: int, name: str, start: int, stop: int) -> Request | None:
        """The read of the gradient that reached rows start..stop, or None."""
        segment = self._gradients.get((layer, name))
        return None if segment is None else Request(segment, start, stop, Access.READ)

    # Carried states, by the token at which a chunk ends

    def carried_read(self, layer: int, name: str, boundary: int) -> Request:
        """The state after the first `boundary` tokens."""
        row = self._row(boundary)
        return Request(self._segments[layer, name], row, row + 1, Access.READ)

    def carried_fill(self, layer: int, name: str, boundary: int) -> Request:
        """The write of the state after the first `boundary` tokens."""
        row = self._row(boundary)
        return Request(self._segments[layer, name], row, row + 1, Access.FILL)

    def carried_gradient_read(self, layer: int, name: str, boundary: int) -> Request | None:
        """The gradient that reached the state after `boundary` tokens, or None."""
        segment = self._gradients.get((layer, name))
        if segment is None:
            return None
        row = self._gradient_row(boundary)
        return Request(segment, row, row + 1, Access.READ)

    def carried_gradient_update(self, layer: int, name: str, boundary: int) -> Request | None:
        """The request that adds to it: branches share the last boundary, a chunk is alone at any other."""
        segment = self._gradients.get((layer, name))
        if segment is None:
            return None
        row = self._gradient_row(boundary)
        shared = self._boundaries[boundary] == len(self._boundaries) - 1
        access = Access.UPDATE if shared and self.gradients_started else Access.FILL
        return Request(segment, row, row + 1, access)

    def _row(self, boundary: int) -> int:
        return self._boundaries[boundary] if self._exact else 0

    def _gradient_row(self, boundary: int) -> int:
        return (len(self._boundaries) - 1 - self._boundaries[boundary]) % GRADIENT_ROWS

    # The whole

    def discard_gradients(self) -> None:
        """Forget all gradient that has reached the state; the pages stay reserved."""
        for segment in self._gradients.values():
            self._store.void(segment)
        self.gradients_started = False

    def release(self, *, force: bool = False) -> None:
        """Give every page back. `force` after a failure, when leases may still be open."""
        self._store.release(self._owner, force=force)
        self._segments.clear()
        self._gradients.clear()

    def tier_bytes(self) -> dict[str, int]:
        """Bytes reserved on each tier."""
        totals: dict[str, int] = {}
        for segment in (*self._segments.values(), *self._gradients.values()):
            for tier, count in segment.tier_bytes().items():
                totals[tier] = totals.get(tier, 0) + count
        return totals


def carried_specs(layer: LayerSpec) -> list[StateSpec]:
    """The carried states of a layer, in order."""
    return [spec for spec in layer.states if spec.kind is StateKind.CARRIED]


def token_specs(layer: LayerSpec) -> list[StateSpec]:
    """The token states of a layer, in order."""
    return [spec for spec in layer.states if spec.kind is StateKind.TOKEN and not spec.output]


def output_specs(layer: LayerSpec) -> list[StateSpec]:
    """What a layer can keep of its outputs, in order."""
    return [spec for spec in layer.states if spec.output]
