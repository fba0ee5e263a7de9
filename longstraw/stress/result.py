"""What a stress run found: figures, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longstraw.runtime.report import Report
from longstraw.stress.growth import Held


@dataclass(kw_only=True)
class StressResult:
    """Of one rank. Bytes by tier's name; `worst_error` is a relative error of a parameter's gradient.

    Attributes:
        seconds: wall time.
        steps, transactions: that ended well.
        refused: steps whose largest group did not fit the budgets and was told so.
        read, written: bytes between tiers and compute.
        disk_written: bytes that the nvme tier gave its disk, the wear.
        drawn, faults: steps that each kind of fault was put into, and those of them in which it happened.
        failed_cleanly: steps that a fault of this rank's ended with a clear error; each was run again and then ended
            well.
        failed_elsewhere: steps that failed here because another rank had failed; likewise.
        retries: lanes that ran out of memory and were run narrower.
        compared: steps whose gradients were compared with plain autograd.
        repeated: steps with altered bytes that ended well and whose gradients were compared with those of their repeat
            without it: prompts too long for plain autograd, or a run that does not ask for it.
        worst_error, worst_parameter, tolerance: of those compared with plain autograd.
        stall_seconds: compute waited for pages.
        budgets, peaks: the largest budget of each tier, and the most that one transaction reserved of it.
        fullest: the largest share of its budget that one transaction reserved of each tier.
        dtype: of the model.
        resident_bytes, device_bytes, files, threads: what the process held between runtimes, when it was warm and at
            the end; `device_bytes` of CUDA memory, (0, 0) on a CPU.
        problems: what must not be; empty in a run that passed.
        notes: what the verdict says nothing about, because it did not happen in this run.
    """

    rank: int = 0
    seconds: float = 0.0
    steps: int = 0
    transactions: int = 0
    refused: int = 0
    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    disk_written: int = 0
    drawn: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    failed_cleanly: Counter[str] = field(default_factory=Counter)
    failed_elsewhere: int = 0
    retries: int = 0
    compared: int = 0
    repeated: int = 0
    worst_error: float = 0.0
    worst_parameter: str = ""
    tolerance: float = 0.0
    stall_seconds: float = 0.0
    dtype: str = ""
    resident_bytes: tuple[int, int] = (0, 0)
    device_bytes: tuple[int, int] = (0, 0)
    files: tuple[int, int] = (0, 0)
    threads: tuple[int, int] = (0, 0)
    budgets: dict[str, int] = field(default_factory=dict)
    peaks: Counter[str] = field(default_factory=Counter)
    fullest: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems

    def add(self, report: Report, budgets: Mapping[str, int]) -> None:
        """Count a transaction that ended well, in tiers of these budgets."""
        self.transactions += 1
        self.read.update(report.bytes_read)
        self.written.update(report.bytes_written)
        self.retries += report.retries
        self.stall_seconds += sum(report.stall_seconds.values())
        for tier, nbytes in report.tier_bytes.items():
            self.peaks[tier] = max(self.peaks[tier], nbytes)
            if budgets[tier]:
                self.fullest[tier] = max(self.fullest.get(tier, 0.0), nbytes / budgets[tier])

    def held(self, warm: Held, last: Held) -> None:
        """Note what the process holds between runtimes."""
        for what in ("resident_bytes", "device_bytes", "files", "threads"):
            setattr(self, what, (getattr(warm, what), getattr(last, what)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {k: dict(v) if isinstance(v, Counter) else v for k, v in found.items()} | {"passed": self.passed}
