"""What a prompt's pages on the device leave for live graphs: they are there beside every one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from longstraw.pagers.protocol import Pager
from longstraw.resident.placement import round_up
from longstraw.runtime.layer_spec import LayerSpec
from longstraw.runtime.reservations import placed_specs, wishes
from longstraw.runtime.sizing import USABLE, GraphSize, plan_chunks

_WHOLE = 0.95
"""Share of the free memory that pages and graphs may plan to take together."""


def beside(free: int, pages: int) -> int:
    """Bytes that graphs plan with as if they were free, where so many of `free` are for pages.

    Graphs leave a share of what is free to workspaces and fragments (`USABLE`). Pages may lie there, up to a rest.
    """
    return max(min(free, int((_WHOLE * free - pages) / USABLE)), 0)


def size_beside_pages(
    size_chunk: Callable[[int], GraphSize], free: int, held: Callable[[Sequence[tuple[int, int]]], int], rows: int
) -> tuple[GraphSize, int]:
    """The size of a prompt's chunks, and the bytes that are free beside its pages.

    Shorter chunks have more boundaries, whose carried states take pages in turn: the size is looked for again until
    its pages are no more than were taken off.

    Args:
        size_chunk: the size where so many bytes are free.
        free: bytes on the device before the pages are reserved.
        held: bytes of pages on the device for a prompt in these chunks, as `device_page_bytes`.
        rows: of the prompt.
    """
    taken = 0
    while True:
        left = beside(free, taken)
        size = size_chunk(left)
        pages = held(plan_chunks(rows, size.tokens))
        if pages <= taken:
            return size, left
        taken = pages


def device_page_bytes(
    pagers: Sequence[Pager],
    layers: Sequence[LayerSpec],
    chunks: Sequence[tuple[int, int]],
    *,
    exact: bool,
    wide: bool,
    keep_outputs: Literal["auto", "always", "never"],
) -> int:
    """Bytes that a prompt cut into `chunks` will hold on the device tier: all its pages, or what is unused of the
    budget. Kept outputs count wherever they may be kept, so it is at most a layer's more than will be placed."""
    # The fastest tier is filled first, so nothing else of the placement needs to be known.
    unused = sum(max(pager.budget - pager.used, 0) for pager in pagers if pager.kind == "device")
    if not unused or not chunks:
        return 0
    placed = [pair for layer in layers for pair in placed_specs(layer, outputs=False)]
    if exact and keep_outputs != "never":
        placed += [pair for layer in layers[:-1] for pair in placed_specs(layer, outputs=True)]
    wanted = [wish.reservation for wish in wishes(placed, chunks, exact=exact, wide=wide)]
    return min(unused, sum(round_up(one.rows * one.state.row_bytes) for one in wanted))
