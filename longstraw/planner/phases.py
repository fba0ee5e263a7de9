"""What the phases of a planned step cost: every pass that the runtime would make, counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from longstraw.planner.blueprint import Blueprint
from longstraw.planner.pages import Traffic
from longstraw.planner.seconds import Costs, PhaseCost
from longstraw.planner.sharding import RankTraffic, Sent
from longstraw.runtime.passes import ForwardPass, Purpose
from longstraw.runtime.prompt_state import PromptState
from longstraw.runtime.routers import RouterTally

if TYPE_CHECKING:
    from longstraw.planner.plan import Plan


def is_routed(blueprint: Blueprint) -> bool:
    """Whether the routers' auxiliary loss is asked for."""
    return blueprint.profile.no_aux_loss is None


def phase_costs(
    plan: Plan, state: PromptState, lanes: Sequence[Sequence[int]], chunks: Sequence[tuple[int, int]]
) -> dict[str, PhaseCost]:
    """What each phase computes and moves, from the schedules that the runtime's own passes would announce.

    Args:
        state: the prompt's pages on the planned tiers. Its gradient counts as begun afterwards.
        lanes: tokens of each branch, lane by lane.
        chunks: the prompt's rows, first to last.
    """
    exact = plan.config.gradient.prompt == "exact"
    costs, machine = Costs(plan.blueprint, plan.machine, detached=not exact), plan.machine
    layers = plan.blueprint.profile.layers
    # Its routers read the last layer's attention, also of prompt tokens.
    routed = is_routed(plan.blueprint)
    last = [len(layers) - 1] if layers[-1].skips_unused_output and not routed else []
    known = [number for number, layer in enumerate(layers) if state.keeps_output(layer.index)]
    # Of one lane its own replay tells the routing.
    counted = ["count"] if routed and len(lanes) > 1 else []
    phases = {name: PhaseCost() for name in ("capture", *counted, "replay", "backward", *(["sweep"] if exact else []))}
    ranks = RankTraffic(plan.blueprint, plan.config, plan.sharding, machine)

    def add(phase: str, forward: ForwardPass, parts: Sequence[tuple[float, float]], *ways: bool) -> None:
        sent = Sent()
        traffic = Traffic()
        for backward in ways:
            traffic.add(forward.schedule(backward=backward))
            sent.add(ranks.backward(head=phase == "backward") if backward else ranks.forward())
        phases[phase].add(sum(count for count, _ in parts), sum(time for _, time in parts), traffic, sent, machine)

    for start, stop in chunks:
        routers = RouterTally([stop - start], counting=True) if routed else None
        forward = ForwardPass(Purpose.CAPTURE, [stop - start], state=state, prefix_rows=start, routers=routers)
        parts = [
            costs.linear(stop - start, backward=False),
            costs.mixing([stop - start], start, backward=False, skip=last),
        ]
        add("capture", forward, parts, False)
    rows = chunks[-1][1]
    for lengths in lanes if counted else ():
        forward = ForwardPass(Purpose.COUNT, lengths, state=state, prefix_rows=rows)
        parts = [costs.linear(sum(lengths), backward=False), costs.mixing(lengths, rows, backward=False, skip=[])]
        add("count", forward, parts, False)
    for lengths in lanes:
        tokens = sum(lengths)
        forward = ForwardPass(Purpose.REPLAY, lengths, state=state, prefix_rows=rows)
        parts = [costs.linear(tokens, backward=False), costs.head(tokens, backward=False)]
        add("replay", forward, [*parts, costs.mixing(lengths, rows, backward=False, skip=[])], False)
        parts = [costs.linear(tokens, backward=True), costs.head(tokens, backward=True)]
        parts.append(costs.mixing(lengths, rows, backward=True, skip=[]))
        if plan.lane.checkpoint:
            parts.append(costs.linear(tokens, backward=False))
        add("backward", forward, parts, True)
        state.gradients_started = True
    for start, stop in reversed(chunks) if exact else ():
        tokens = stop - start
        routers = RouterTally([tokens], counting=False) if routed else None
        forward = ForwardPass(Purpose.SWEEP, [tokens], state=state, prefix_rows=start, routers=routers)
        parts = [costs.linear(tokens, backward=False), costs.linear(tokens, backward=True)]
        parts.append(costs.mixing([tokens], start, backward=False, skip=[*last, *known]))
        parts.append(costs.mixing([tokens], start, backward=True, skip=last))
        if plan.chunk.checkpoint:
            parts.append(costs.linear(tokens, backward=False))
        add("sweep", forward, parts, False, True)
    if plan.sharding.replicas > 1 or plan.sharding.offload:
        phases["finalize"] = PhaseCost()
        phases["finalize"].add(0.0, 0.0, Traffic(), ranks.finalize(), machine)
    return phases
