"""The states of a transaction, and the moves between them."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager

from longstraw.errors import TransactionStateError


class TransactionState(enum.Enum):
    """What a transaction holds.

    OPEN holds nothing yet. CAPTURED holds the prompt's pages. REPLAYING also holds gradients: parameters' in the
    ledger, the prompt's in gradient pages. SWEPT has all gradient in the ledger. BROKEN has lost part of it to an
    error: whoever catches that can only leave. CLOSED and FAILED hold nothing.
    """

    OPEN = "OPEN"
    CAPTURED = "CAPTURED"
    REPLAYING = "REPLAYING"
    SWEPT = "SWEPT"
    BROKEN = "BROKEN"
    CLOSED = "CLOSED"
    FAILED = "FAILED"


_S = TransactionState
MOVES: dict[TransactionState, frozenset[TransactionState]] = {
    _S.OPEN: frozenset({_S.CAPTURED, _S.FAILED}),
    _S.CAPTURED: frozenset({_S.REPLAYING, _S.CLOSED, _S.FAILED}),
    _S.REPLAYING: frozenset({_S.REPLAYING, _S.SWEPT, _S.BROKEN, _S.FAILED}),
    _S.SWEPT: frozenset({_S.CLOSED, _S.FAILED}),
    _S.BROKEN: frozenset({_S.FAILED}),
    _S.CLOSED: frozenset(),
    _S.FAILED: frozenset({_S.OPEN}),
}


class Lifecycle:
    """The state that a transaction is in, and what broke it."""

    def __init__(self) -> None:
        self.state = TransactionState.OPEN
        self._broken = ""

    def require(self, call: str, *states: TransactionState) -> None:
        """Raises TransactionStateError, which names the call, outside these states."""
        if self.state in states:
            return
        if self.state is TransactionState.BROKEN:
            raise TransactionStateError(
                f"{call}: {self._broken}; leave the transaction with that error, and enter it again"
            )
        allowed = " or ".join(state.value for state in states)
        raise TransactionStateError(f"{call}: the transaction is {self.state.value}; it must be {allowed}")

    def move(self, to: TransactionState) -> None:
        """Raises TransactionStateError for a move that is not in the table."""
        if to not in MOVES[self.state]:
            raise TransactionStateError(f"a transaction cannot go from {self.state.value} to {to.value}")
        self.state = to

    def break_off(self, call: str, error: BaseException) -> None:
        """The call has failed and left part of its gradient, or lost what was there: the transaction can only fail,
        also if the error is caught and the block goes on."""
        self._broken = f"{call} failed ({type(error).__name__}: {error}) and left part of its gradient"
        self.move(TransactionState.BROKEN)

    @contextmanager
    def whole_or_broken(self, call: str) -> Iterator[None]:
        """What fails within breaks the transaction, as `break_off`."""
        try:
            yield
        except BaseException as error:
            self.break_off(call, error)
            raise
