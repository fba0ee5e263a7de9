"""How a step ended on each rank, and whether it may have ended so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longstraw.errors import CapacityError, RankFailedError
from longstraw.stress.faults import ALTERS, ENDS, Armed


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a rank tells the others about its step.

    Attributes:
        error: name of the type of what ended it; None if it ended well.
        refused: the error is a CapacityError, of whichever subclass.
        elsewhere: the error says only that another rank failed.
        altered: bytes of a file were altered in it.
    """

    error: str | None
    refused: bool
    elsewhere: bool
    altered: bool

    @classmethod
    def of(cls, error: BaseException | None, armed: Armed | None) -> Outcome:
        return cls(
            error=None if error is None else type(error).__name__,
            refused=isinstance(error, CapacityError),
            elsewhere=isinstance(error, RankFailedError),
            altered=armed is not None and armed.fault in ALTERS and armed.happened > 0,
        )


def names(outcomes: Sequence[Outcome]) -> list[str | None]:
    """Each rank's error."""
    return [outcome.error for outcome in outcomes]


def judge(
    error: BaseException | None, armed: Armed | None, first: Sequence[Outcome], again: Sequence[Outcome]
) -> str | None:
    """What is wrong with how this rank's step ended, or None.

    Args:
        error: what ended it.
        armed: the fault that was put into it, if any.
        first: how it ended on every rank, on one of them with an error.
        again: the same of its repeat without faults.
    """
    if error is None:
        return f"this rank's step ended well and others' did not: {names(first)}"
    if isinstance(error, RankFailedError):
        told = any(outcome.error is not None and not outcome.elsewhere for outcome in first)
        return None if told else f"a step failed for another rank's failure, and no rank has any: {error!r}"
    happened = armed is not None and armed.happened > 0
    if armed is not None and happened and isinstance(error, ENDS[armed.fault]):
        return None
    # A rank whose repeat was broken off because another did not fit may not have fitted either: nobody knows.
    if isinstance(error, CapacityError) and any(outcome.refused for outcome in again):
        return None
    if armed is None or not happened:
        return f"a step failed without a fault: {error!r}"
    if not ENDS[armed.fault]:
        return f"{armed.fault.value} is to be survived, and ended a step: {error!r}"
    allowed = " or ".join(kind.__name__ for kind in ENDS[armed.fault])
    return f"{armed.fault.value} may end a step in {allowed}, and ended it in {error!r}"
