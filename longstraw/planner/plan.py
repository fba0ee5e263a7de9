"""The plan of one step: cut as the runtime would cut it, then memory by tier and seconds by phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from longstraw.config import Config
from longstraw.errors import CapacityError, ConfigError
from longstraw.planner.blueprint import Blueprint
from longstraw.planner.machine import Machine
from longstraw.planner.memory import DeviceMemory, device_memory
from longstraw.planner.pages import DEVICE, CountingPager, budgets, prompt_state
from longstraw.planner.phases import is_routed, phase_costs
from longstraw.planner.seconds import PhaseCost
from longstraw.planner.sharding import ShardingChoice, rank_memory
from longstraw.resident.placement import format_bytes
from longstraw.runtime.beside_pages import device_page_bytes, size_beside_pages
from longstraw.runtime.prompt_state import PromptState
from longstraw.runtime.reservations import Wish, placed_specs, wishes
from longstraw.runtime.sizing import (
    GraphSize,
    hiding_tokens,
    keep_outputs,
    logits_bytes,
    plan_chunks,
    plan_lanes,
    size_chunk,
    size_lane,
)

_LONGEST, _LARGEST = 1 << 27, 1 << 16
"""Tokens of a row and responses of a group up to which a plan takes seconds or minutes: it counts chunk by chunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What a step trains on: one prompt of `prompt` tokens with `group` responses of `response` tokens each.

    Raises ConfigError for a size that is none, or that no plan can be made for.
    """

    prompt: int
    group: int
    response: int

    def __post_init__(self) -> None:
        bounds = {"prompt": (2, _LONGEST), "group": (1, _LARGEST), "response": (1, _LONGEST)}
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"--{name} {value} is too small; use at least {least}")
            if value > most:
                raise ConfigError(f"--{name} {value} is too large to plan; use at most {most}")


@dataclass(kw_only=True)
class Plan:
    """What a step will take.

    Attributes:
        lane, chunk: tokens and checkpointing of lanes and chunks.
        lanes, chunks: how many there are, as even as they come.
        widest_lane, longest_chunk: their tokens that run: with the routers' auxiliary loss one more a response.
        kept_output_layers: layers whose attention outputs are kept; of `outputs_possible`.
        memory: of the device.
        pages: bytes of prompt state, of its gradient, and of kept attention outputs.
        tiers: by name: kind, budget and bytes used.
        sharding: what holds the model, on how many ranks; all figures are one rank's.
        phases: capture, replay, backward, sweep, and finalize where ranks reduce; count, where the routers' auxiliary
            loss asks how all lanes are routed before the first backward. Empty for a plan that does not fit, or was
            not asked to count.
        problem: why it cannot run, or None.
    """

    workload: Workload
    blueprint: Blueprint
    machine: Machine
    config: Config
    sharding: ShardingChoice
    lane: GraphSize
    chunk: GraphSize
    lanes: int
    chunks: int
    widest_lane: int
    longest_chunk: int
    kept_output_layers: int
    outputs_possible: int
    memory: DeviceMemory
    pages: dict[str, int]
    tiers: dict[str, dict[str, Any]]
    phases: dict[str, PhaseCost] = field(default_factory=dict)
    problem: str | None = None

    @property
    def seconds(self) -> float:
        """Of all phases."""
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def room(self) -> int:
        """Bytes of the device that a step may take."""
        return self.machine.device_bytes - self.machine.context_bytes

    @property
    def pin_seconds(self) -> float:
        """What the first step takes beside that: host pages are locked once."""
        host = sum(tier["used"] for tier in self.tiers.values() if tier["kind"] == "host")
        return host / self.machine.pin

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "model": self.blueprint.name,
            "machine": self.machine.name,
            "workload": asdict(self.workload),
            "sharding": asdict(self.sharding) | {"framework": self.sharding.framework.value},
            "reduce": self.config.gradient.reduce,
            "fits": self.problem is None,
            "problem": self.problem,
            "lane": asdict(self.lane) | {"count": self.lanes, "widest": self.widest_lane},
            "chunk": asdict(self.chunk) | {"count": self.chunks, "longest": self.longest_chunk},
            "kept_output_layers": self.kept_output_layers,
            "device_memory": self.memory.to_dict(),
            "device_bytes": self.machine.device_bytes,
            "pages": self.pages,
            "tiers": self.tiers,
            "phases": {name: asdict(cost) | {"binds": cost.binds} for name, cost in self.phases.items()},
            "seconds": self.seconds,
            "pin_seconds": self.pin_seconds,
        }


def make_plan(
    blueprint: Blueprint,
    workload: Workload,
    config: Config,
    machine: Machine,
    *,
    sharding: ShardingChoice | None = None,
    timed: bool = True,
) -> Plan:
    """The plan of one process with one GPU.

    Args:
        sharding: what holds the model; None for one process alone.
        timed: whether to count operations and traffic as well.
    """
    profile, rows = blueprint.profile, workload.prompt - 1
    # The auxiliary loss wants a response's last token too, which predicts nothing.
    lengths = [workload.response + is_routed(blueprint)] * workload.group
    exact = config.gradient.prompt == "exact"
    sharding = sharding or ShardingChoice()
    sharding.check(config)
    rank = rank_memory(blueprint, config, sharding)
    free = max(machine.device_bytes - machine.context_bytes - rank.weights - rank.gradients, 0)
    hidden_from = hiding_tokens(sharding.link_bytes_a_parameter(blueprint))
    pagers = budgets(config, machine)

    def chunk_size(free: int) -> GraphSize:
        return size_chunk(
            profile,
            rows,
            free=free,
            device=DEVICE,
            chunk_tokens=config.capture.chunk_tokens,
            checkpoint=config.replay.checkpoint,
            hidden_from=hidden_from,
        )

    def held(chunks: Sequence[tuple[int, int]]) -> int:
        return device_page_bytes(
            pagers,
            profile.layers,
            chunks,
            exact=exact,
            wide=config.gradient.accumulate == "float32",
            keep_outputs=keep_outputs(config.capture.keep_attention, rows, DEVICE),
        )

    chunk, free = size_beside_pages(chunk_size, free, held, rows)
    lane = size_lane(
        profile,
        lengths,
        free=free,
        device=DEVICE,
        lane_tokens=config.replay.lane_tokens,
        checkpoint=config.replay.checkpoint,
        logits=logits_bytes(profile, config.replay.logit_block_tokens, config.replay.entropy),
        hidden_from=hidden_from,
    )
    lanes = [[lengths[i] for i in indices] for indices in plan_lanes(lengths, lane.tokens)]
    chunks = plan_chunks(rows, chunk.tokens)
    problem = None
    try:
        state = prompt_state(pagers, profile, chunks, config)
    except CapacityError as error:
        problem = str(error)
        state = prompt_state(_boundless(pagers), profile, chunks, config, spare=False)
    widest, longest = max(map(sum, lanes)), max((stop - start for start, stop in chunks), default=0)
    memory = device_memory(
        blueprint,
        config,
        rank=rank,
        lane=lane,
        lane_tokens=[sum(lengths) for lengths in lanes],
        chunk=chunk,
        chunk_tokens=longest,
        state=state,
        rows=rows,
        device_pages=sum(pager.used for pager in pagers if pager.kind == "device"),
    )
    plan = Plan(
        workload=workload,
        blueprint=blueprint,
        machine=machine,
        config=config,
        sharding=sharding,
        lane=lane,
        chunk=chunk,
        lanes=len(lanes),
        chunks=len(chunks),
        widest_lane=widest,
        longest_chunk=longest,
        kept_output_layers=state.kept_output_layers,
        outputs_possible=sum(any(spec.output for spec in layer.states) for layer in profile.layers[:-1]),
        memory=memory,
        pages=_page_bytes(blueprint, chunks, config, state),
        tiers={pager.name: {"kind": pager.kind, "budget": pager.budget, "used": pager.used} for pager in pagers},
        problem=problem,
    )
    if memory.total > plan.room and problem is None:
        plan.problem = (
            f"the device cannot hold the step: {format_bytes(memory.total)} needed, {format_bytes(plan.room)} of "
            f"{machine.name} usable"
        )
    if timed and plan.problem is None:
        plan.phases = phase_costs(plan, state, lanes, chunks)
    return plan


def _boundless(pagers: Sequence[CountingPager]) -> list[CountingPager]:
    return [CountingPager(pagers[-1].kind, 1 << 62, pagers[-1].name)]


def _page_bytes(
    blueprint: Blueprint, chunks: Sequence[tuple[int, int]], config: Config, state: PromptState
) -> dict[str, int]:
    exact, wide = config.gradient.prompt == "exact", config.gradient.accumulate == "float32"

    def total(found: list[Wish], *, gradient: bool) -> int:
        chosen = [wish.reservation for wish in found if wish.gradient is gradient]
        return sum(reservation.rows * reservation.state.row_bytes for reservation in chosen)

    layers = blueprint.profile.layers
    held = wishes([p for layer in layers for p in placed_specs(layer, outputs=False)], chunks, exact=exact, wide=wide)
    kept = [layer for layer in layers if state.keeps_output(layer.index)]
    outputs = wishes([p for layer in kept for p in placed_specs(layer, outputs=True)], chunks, exact=exact, wide=wide)
    return {
        "prompt state": total(held, gradient=False),
        "its gradient": total(held, gradient=True),
        "attention outputs": total(outputs, gradient=False),
    }
