"""What to change so that a step fits: settings near the user's own, each tried before it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from longstraw.config import Config
from longstraw.planner.blueprint import Blueprint
from longstraw.planner.plan import Plan, Workload, make_plan
from longstraw.planner.sharding import Framework, ShardingChoice

_GIB = 1 << 30


def advise(plan: Plan, with_lora: Callable[[int], Blueprint] | None = None) -> list[str]:
    """Changes of which each alone makes the step fit, the one that costs least first; empty if none does.

    Args:
        plan: one that does not fit.
        with_lora: the same model with LoRA of a rank; None if the plan has LoRA already, or nothing can make it.
    """
    return [text for text, candidate in _candidates(plan, with_lora) if candidate.problem is None]


def _candidates(plan: Plan, with_lora: Callable[[int], Blueprint] | None) -> Iterator[tuple[str, Plan]]:
    config = plan.config
    if config.capture.keep_attention == "always":
        yield "capture.keep_attention: auto", _retry(plan, capture={"keep_attention": "auto"})
    if config.replay.checkpoint is False:
        yield "replay.checkpoint: auto", _retry(plan, replay={"checkpoint": "auto"})
    if config.replay.lane_tokens != "auto":
        yield "replay.lane_tokens: auto", _retry(plan, replay={"lane_tokens": "auto"})
    if config.capture.chunk_tokens != "auto":
        yield "capture.chunk_tokens: auto", _retry(plan, capture={"chunk_tokens": "auto"})
    if config.capture.chunk_tokens != "auto" and config.replay.checkpoint is False:
        both = _retry(plan, capture={"chunk_tokens": "auto"}, replay={"checkpoint": "auto", "lane_tokens": "auto"})
        yield "capture.chunk_tokens, replay.lane_tokens and replay.checkpoint: auto", both
    if plan.memory.total > plan.room:
        yield from _checkpointed(plan)
        yield from _smaller_device_tier(plan)
    yield from _larger_tiers(plan)
    if config.gradient.accumulate == "float32":
        text = "gradient.accumulate: model (sums lose bits in a narrow type)"
        yield text, _retry(plan, gradient={"accumulate": "model"})
    yield from _other_shardings(plan)
    if with_lora is not None:
        lora = _plan(plan, with_lora(16), plan.workload, config, plan.sharding)
        yield "--lora 16 (train adapters only)", lora
    if config.gradient.prompt == "exact":
        text = "--detached (no gradient through the prompt: an approximation)"
        yield text, _retry(plan, gradient={"prompt": "detached"})
    shorter = _longest(plan, "prompt", 1024)
    if shorter is not None:
        yield f"--prompt {shorter.workload.prompt} (the longest that fits)", shorter
    fewer = _longest(plan, "response", 128)
    if fewer is not None:
        yield f"--response {fewer.workload.response} (the longest that fits)", fewer


def _checkpointed(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """All graphs checkpointed, in the widest lanes that fit then: as they are, or half as wide, down to one branch."""
    if plan.config.replay.checkpoint is True:
        return
    alone = _retry(plan, replay={"checkpoint": True})
    yield "replay.checkpoint: true", alone
    width, branch = plan.widest_lane, plan.widest_lane // -(-plan.workload.group // plan.lanes)
    found = alone
    while found.problem is not None and width > branch:
        width = max(width // 2, branch)
        found = _retry(plan, replay={"checkpoint": True, "lane_tokens": width})
        yield f"replay.checkpoint: true and replay.lane_tokens: {width}", found


def _smaller_device_tier(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Fewer pages beside the graphs, as many as fit; the slower tiers take the rest."""
    tiers: list[dict[str, Any]] = plan.config.model_dump()["tiers"]
    if len(tiers) == 1 or tiers[0]["kind"] != "device":
        return

    def smaller(gib: int) -> Plan:
        return _retry(plan, tiers=[tiers[0] | {"budget": gib * _GIB}, *tiers[1:]])

    budget, found = _most(plan.tiers["device"]["used"] // _GIB, smaller)
    if found is not None:
        yield f"tiers[0].budget: {budget}GiB of device memory (slower tiers take the rest)", found


def _other_shardings(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Less of weights and gradients on each rank."""
    now = plan.sharding
    if now.replicas > 1 and not now.sharded:
        sharded = ShardingChoice(framework=Framework.FSDP2, replicas=now.replicas)
        yield "--sharding fsdp2", _plan(plan, plan.blueprint, plan.workload, plan.config, sharded)
    if not now.reshard:
        again = replace(now, reshard=True)
        yield "without --keep-gathered", _plan(plan, plan.blueprint, plan.workload, plan.config, again)
    if now.framework is Framework.FSDP2 and plan.config.gradient.reduce == "deferred":
        text = "gradient.reduce: each_pass (sums are sharded; a reduction in every backward pass)"
        yield text, _retry(plan, gradient={"reduce": "each_pass"})
    if now.sharded and not now.offload:
        offloaded = replace(now, offload=True)
        text = "--offload-weights (they cross the host's link in every pass)"
        yield text, _plan(plan, plan.blueprint, plan.workload, plan.config, offloaded)


def _larger_tiers(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """A larger host budget, or a disk behind all tiers."""
    tiers: list[dict[str, Any]] = plan.config.model_dump()["tiers"]
    # Outputs that may be kept are no need: what is left holds as many as it can.
    optional = plan.pages["attention outputs"] if plan.config.capture.keep_attention == "auto" else 0
    total = sum(plan.pages.values()) - optional
    missing = max(total - sum(tier["budget"] for tier in plan.tiers.values()), 0)
    # Tiers take whole pages of each state only.
    slack = _GIB + total // 200
    for number, (tier, state) in enumerate(zip(tiers, plan.tiers.values(), strict=True)):
        if tier["kind"] == "host":
            budget = -(-(state["budget"] + missing + slack) // _GIB) * _GIB
            larger = [*tiers[:number], tier | {"budget": budget}, *tiers[number + 1 :]]
            text = f"tiers[{number}].budget: {budget // _GIB}GiB of host memory"
            if budget > plan.machine.host_bytes:
                text += f" (the planned machine has {plan.machine.host_bytes // _GIB}GiB)"
            yield text, _retry(plan, tiers=larger)
    if not any(tier["kind"] == "nvme" for tier in tiers):
        budget = -(-(missing + slack) // _GIB) * _GIB
        text = f"another tier: {{kind: nvme, path: ..., budget: {budget // _GIB}GiB}}"
        yield text, _retry(plan, tiers=[*tiers, {"kind": "nvme", "path": ".", "budget": budget}])


def _retry(plan: Plan, **overrides: Any) -> Plan:
    config = Config.load(plan.config, **overrides)
    return _plan(plan, plan.blueprint, plan.workload, config, plan.sharding)


def _plan(plan: Plan, blueprint: Blueprint, workload: Workload, config: Config, sharding: ShardingChoice) -> Plan:
    return make_plan(blueprint, workload, config, plan.machine, sharding=sharding, timed=False)


def _longest(plan: Plan, what: str, step: int) -> Plan | None:
    """The plan with the largest multiple of `step` tokens that fits, below what was asked for."""

    def shorter(steps: int) -> Plan:
        workload: Workload = replace(plan.workload, **{what: steps * step})
        return _plan(plan, plan.blueprint, workload, plan.config, plan.sharding)

    return _most((getattr(plan.workload, what) - 1) // step, shorter, least=1)[1]


def _most(high: int, candidate: Callable[[int], Plan], *, least: int = 0) -> tuple[int, Plan | None]:
    """The largest number from `least` to `high` whose plan fits, and that plan; None if none does."""
    low, best = least - 1, None
    while low < high:
        middle = (low + high + 1) // 2
        found = candidate(middle)
        if found.problem is None:
            low, best = middle, found
        else:
            high = middle - 1
    return low, best
