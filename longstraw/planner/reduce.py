"""What each value of `gradient.reduce` costs: the same step, planned both ways."""

from __future__ import annotations

from typing import Any

from longstraw.config import Config
from longstraw.planner.plan import Plan, make_plan
from longstraw.planner.sharding import Framework


def ways_to_reduce(plan: Plan) -> dict[str, dict[str, Any]]:
    """By value of `gradient.reduce`: bytes held and sent, and seconds. Empty where there is no choice.

    "reduced_bytes" are of whole tensors, of a step; "seconds" are None where the step does not fit.
    """
    if plan.sharding.framework is not Framework.FSDP2:
        return {}
    found = {}
    for way in ("deferred", "each_pass"):
        other = plan
        if way != plan.config.gradient.reduce:
            config = Config.load(plan.config, gradient={"reduce": way})
            other = make_plan(plan.blueprint, plan.workload, config, plan.machine, sharding=plan.sharding)
        kinds = ("reduce_scatter", "all_reduce")
        phases = other.phases.values()
        found[way] = {
            "gradient_bytes": other.memory.gradients,
            "arriving_bytes": other.memory.arriving,
            "peak_bytes": other.memory.total,
            "reductions": sum(phase.collectives.get(kind, 0) for phase in phases for kind in kinds),
            "reduced_bytes": sum(phase.collective_bytes.get(kind, 0) for phase in phases for kind in kinds),
            "rank_seconds": sum(phase.ranks for phase in phases) if other.phases else None,
            "seconds": other.seconds if other.phases else None,
        }
    return found
