"""Which pages a prompt asks for: the rows and the priority of each state, of its gradient, and of kept outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from longstraw.resident.placement import Reservation
from longstraw.resident.state import StateKind
from longstraw.runtime.layer_spec import LayerSpec, StateSpec

# A gradient page is read and written in every pass, in float32: it takes the fastest tier first.
GRADIENT_PRIORITY, STATE_PRIORITY, OUTPUT_PRIORITY = 0, 1, 2
# A chunk of the sweep reads the gradient of the boundary behind it and writes that of the boundary before it.
GRADIENT_ROWS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What one state, or its gradient, needs: the segment that `reservation` becomes is for `name` of `layer`."""

    layer: int
    name: str
    gradient: bool
    reservation: Reservation


def placed_specs(layer: LayerSpec, *, outputs: bool) -> list[tuple[int, StateSpec]]:
    """The layer's states, or what it can keep of its outputs, each with the layer's number."""
    return [(layer.index, spec) for spec in layer.states if spec.output is outputs]


def wishes(
    placed: Iterable[tuple[int, StateSpec]], chunks: Sequence[tuple[int, int]], *, exact: bool, wide: bool
) -> list[Wish]:
    """What a prompt cut into `chunks` asks for, state by state, each with its gradient behind it.

    Args:
        placed: layer numbers with the states to place.
        chunks: the prompt's rows, cut as they will be captured; not empty.
        exact: whether gradient pages are held, and carried states at every boundary.
        wide: whether gradients are float32 where the state is narrower.
    """
    found = []
    for layer, spec in placed:
        boundaries = len(chunks) if exact else 1
        rows = boundaries if spec.kind is StateKind.CARRIED else chunks[-1][1]
        priority = OUTPUT_PRIORITY if spec.output else STATE_PRIORITY
        reservation = Reservation(state=spec.state(layer), rows=rows, priority=priority)
        found.append(Wish(layer=layer, name=spec.name, gradient=False, reservation=reservation))
        if exact and spec.trained and not spec.output:
            held = min(rows, GRADIENT_ROWS) if spec.kind is StateKind.CARRIED else rows
            reservation = Reservation(state=spec.gradient_state(layer, wide), rows=held, priority=GRADIENT_PRIORITY)
            found.append(Wish(layer=layer, name=spec.name, gradient=True, reservation=reservation))
    return found
