"""Which tier each page gets: fastest tier first, in order of priority, all of it or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longstraw.errors import CapacityError
from longstraw.resident.state import State

EXTENT_ALIGNMENT = 4096
"""Bytes that an extent is rounded up to: a disk sector and a memory page."""


class HolesError(CapacityError):
    """A tier does not have the bytes in one piece, though it may have them in holes between those of other owners."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A wish for `rows` rows of a state. A lower `priority` number takes the fastest tier first."""

    state: State
    rows: int
    priority: int = 0

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise ValueError(f"reservation of {self.state}: rows must be at least 0, not {self.rows}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TierBudget:
    """What one tier can still take. `budget_bytes` is its whole budget, for the message when it is too
    small."""

    name: str
    free_bytes: int
    budget_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedRun:
    """Consecutive pages of one reservation that go to one tier: `rows` rows in `pages` pages."""

    tier: int
    first_page: int
    pages: int
    rows: int


def round_up(nbytes: int) -> int:
    """`nbytes` rounded up to whole `EXTENT_ALIGNMENT` units."""
    return -(-nbytes // EXTENT_ALIGNMENT) * EXTENT_ALIGNMENT


def place(
    reservations: Sequence[Reservation], tiers: Sequence[TierBudget], page_rows: int
) -> list[tuple[PlacedRun, ...]]:
    """Split each reservation's pages, in order, into runs over the tiers.

    The result has one tuple of runs for each reservation, in the order given. The last page takes only the
    rows that are left. Each run counts against its tier's `free_bytes` rounded up to `EXTENT_ALIGNMENT`.

    Raises `CapacityError`, with a figure for each tier and each state, if the tiers together cannot hold them
    all.
    """
    if page_rows < 1:
        raise ValueError(f"page_rows must be at least 1, not {page_rows}")
    free = [tier.free_bytes for tier in tiers]
    placed: list[tuple[PlacedRun, ...]] = [()] * len(reservations)
    # The sort is stable: equal priorities keep the order of the caller, layer by layer.
    for index in sorted(range(len(reservations)), key=lambda i: reservations[i].priority):
        runs = _place_one(reservations[index], free, page_rows)
        if runs is None:
            raise CapacityError(_shortage(reservations, tiers))
        placed[index] = runs
    return placed


def _place_one(reservation: Reservation, free: list[int], page_rows: int) -> tuple[PlacedRun, ...] | None:
    row_bytes = reservation.state.row_bytes
    runs: list[PlacedRun] = []
    page, left = 0, reservation.rows
    for tier in range(len(free)):
        fitting = max(free[tier], 0) // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT // row_bytes
        rows = left if fitting >= left else fitting // page_rows * page_rows
        if rows == 0:
            continue
        pages = -(-rows // page_rows)
        runs.append(PlacedRun(tier=tier, first_page=page, pages=pages, rows=rows))
        free[tier] -= round_up(rows * row_bytes)
        page, left = page + pages, left - rows
        if left == 0:
            break
    return tuple(runs) if left == 0 else None


def _shortage(reservations: Sequence[Reservation], tiers: Sequence[TierBudget]) -> str:
    asked: dict[str, tuple[int, int, int]] = {}
    for reservation in reservations:
        count, rows, nbytes = asked.get(reservation.state.name, (0, 0, 0))
        size = reservation.rows * reservation.state.row_bytes
        asked[reservation.state.name] = (count + 1, rows + reservation.rows, nbytes + size)
    total = sum(nbytes for _, _, nbytes in asked.values())
    free = sum(max(tier.free_bytes, 0) for tier in tiers)
    lines = [f"the tiers cannot hold the pages: {format_bytes(total)} asked for, {format_bytes(free)} free"]
    for name, (count, rows, nbytes) in asked.items():
        lines.append(f"  asked: {name}: {format_bytes(nbytes)} ({count} layers' states, {rows} rows)")
    for index, tier in enumerate(tiers):
        used = tier.budget_bytes - tier.free_bytes
        lines.append(
            f"  tiers[{index}] {tier.name}: budget {format_bytes(tier.budget_bytes)}, "
            f"used {format_bytes(used)}, free {format_bytes(tier.free_bytes)}"
        )
    last = len(tiers) - 1
    lines.append(
        f"raise tiers[{max(last, 0)}].budget by {format_bytes(max(total - free, EXTENT_ALIGNMENT))} or more "
        "(a tier takes whole pages only), add a slower tier, or use a shorter prompt"
    )
    return "\n".join(lines)


def format_bytes(nbytes: int) -> str:
    """A size for people: binary units, three digits, and the exact number when it is small."""
    if abs(nbytes) < 1 << 20:
        return f"{nbytes} bytes"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    raise AssertionError(nbytes)
