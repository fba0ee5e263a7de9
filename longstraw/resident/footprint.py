"""How many bytes a model's resident state takes, before any of it exists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from longstraw.resident.state import State, StateKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes of resident state over all layers, without gradients.

    Attributes:
        token: by state name, bytes of one token.
        carried: by state name, bytes of one snapshot.
    """

    token: dict[str, int]
    carried: dict[str, int]

    @property
    def token_bytes(self) -> int:
        """Bytes that each prompt token adds."""
        return sum(self.token.values())

    @property
    def carried_bytes(self) -> int:
        """Bytes of what is carried along: once, or in exact mode once for each chunk of the prompt."""
        return sum(self.carried.values())

    def prompt_bytes(self, tokens: int, snapshots: int = 1) -> int:
        """Bytes of a prompt's whole state; exact mode keeps a snapshot for each chunk."""
        return tokens * self.token_bytes + snapshots * self.carried_bytes


def footprint_of(states: Iterable[State]) -> Footprint:
    """The footprint of all layers' states."""
    totals: dict[StateKind, dict[str, int]] = {kind: {} for kind in StateKind}
    for state in states:
        by_name = totals[state.kind]
        by_name[state.name] = by_name.get(state.name, 0) + state.row_bytes
    return Footprint(token=totals[StateKind.TOKEN], carried=totals[StateKind.CARRIED])
