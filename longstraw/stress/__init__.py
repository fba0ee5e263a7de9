"""The memory-stress test: random groups through real transactions near the tiers' limits, with faults put in."""

from longstraw.stress.faults import Fault
from longstraw.stress.loop import run_stress
from longstraw.stress.options import StressOptions
from longstraw.stress.result import StressResult

__all__ = ["Fault", "StressOptions", "StressResult", "run_stress"]
