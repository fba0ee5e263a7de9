"""Who owns the prompt's state: kinds of state, pages and their moves, placement over tiers, leases."""

from longstraw.resident.footprint import Footprint, footprint_of
from longstraw.resident.lease import Access, Lease, LeasePhase
from longstraw.resident.page import MOVES, Page, PageState
from longstraw.resident.placement import PlacedRun, Reservation, TierBudget, place
from longstraw.resident.segment import Run, Segment
from longstraw.resident.state import Field, State, StateKind
from longstraw.resident.store import PageStore

__all__ = [
    "MOVES",
    "Access",
    "Field",
    "Footprint",
    "Lease",
    "LeasePhase",
    "Page",
    "PageState",
    "PageStore",
    "PlacedRun",
    "Reservation",
    "Run",
    "Segment",
    "State",
    "StateKind",
    "TierBudget",
    "footprint_of",
    "place",
]
