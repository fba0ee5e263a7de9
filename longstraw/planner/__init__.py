"""What a step will take, before it runs: bytes by tier, operations and seconds by phase, and what binds them."""

from longstraw.planner.advice import advise
from longstraw.planner.blueprint import Blueprint, LayerWork
from longstraw.planner.machine import Machine
from longstraw.planner.plan import Plan, Workload, make_plan
from longstraw.planner.reduce import ways_to_reduce
from longstraw.planner.sharding import Framework, ShardingChoice

__all__ = [
    "Blueprint",
    "Framework",
    "LayerWork",
    "Machine",
    "Plan",
    "ShardingChoice",
    "Workload",
    "advise",
    "make_plan",
    "ways_to_reduce",
]
