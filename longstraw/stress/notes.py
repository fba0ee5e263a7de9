"""What the verdict of a stress run says nothing about."""

from __future__ import annotations

from longstraw.stress.options import StressOptions
from longstraw.stress.result import StressResult

WARM_STEPS = 20
"""Steps after which a process is warm."""
WARM_ERAS = 2
"""Runtimes after which CUDA memory is warm."""


def make_notes(result: StressResult, options: StressOptions, *, steps: int, eras: int, cuda: bool) -> list[str]:
    """One sentence for each thing that a run of so many steps (refused ones too) and runtimes did not try."""
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
    # Sizes that are taken at the same moment are the same.
    if steps <= WARM_STEPS:
        notes.append(f"growth of the process was not checked: it is from step {WARM_STEPS} on, and there were {steps}")
    if cuda and eras <= WARM_ERAS:
        notes.append(
            f"growth of CUDA memory was not checked: it is from runtime {WARM_ERAS + 1} on, and there were {eras}"
        )
    return notes
