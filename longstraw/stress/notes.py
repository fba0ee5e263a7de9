"""What the verdict of a stress run says nothing about."""

from __future__ import annotations

from longstraw.stress.growth import STEADY_ERAS, WARM_ERAS
from longstraw.stress.options import StressOptions
from longstraw.stress.result import StressResult


def make_notes(result: StressResult, options: StressOptions, *, eras: int) -> list[str]:
    """One sentence for each thing that a run of so many runtimes did not try."""
    notes, more = [], f"in {result.steps} steps; give it more --seconds"
    if options.fault_rate == 0:
        notes.append("no fault was put in: --fault-rate is 0")
    elif not any(result.faults.values()):
        notes.append(f"no fault happened {more}")
    for kind, count in result.drawn.items():
        if not result.faults[kind]:
            notes.append(f"{kind} never happened (steps that it was put into: {count})")
    if options.parity_rate == 0:
        notes.append("no gradient was compared with plain autograd: --parity-rate is 0")
    elif not result.compared:
        notes.append(f"no gradient was compared {more}")
    if eras <= WARM_ERAS:
        notes.append(f"growth was not checked: it is from runtime {WARM_ERAS + 1} on, and there were {eras}")
    elif eras < STEADY_ERAS:
        notes.append(
            "a steady rise (of memory in small steps, of open files, of threads) was not looked for: it is from "
            f"runtime {STEADY_ERAS} on, and there were {eras}"
        )
    return notes
