"""The states of a transaction, and the moves between them."""

from __future__ import annotations

import enum


class TransactionState(enum.Enum):
    """What a transaction holds.

    OPEN holds nothing yet. CAPTURED holds the prompt's pages. REPLAYING also holds gradients: parameters' in the
    ledger, the prompt's in gradient pages. SWEPT has all gradient in the ledger. CLOSED and FAILED hold nothing.
    """

    OPEN = "OPEN"
    CAPTURED = "CAPTURED"
    REPLAYING = "REPLAYING"
    SWEPT = "SWEPT"
    CLOSED = "CLOSED"
    FAILED = "FAILED"


_S = TransactionState
MOVES: dict[TransactionState, frozenset[TransactionState]] = {
    _S.OPEN: frozenset({_S.CAPTURED, _S.FAILED}),
    _S.CAPTURED: frozenset({_S.REPLAYING, _S.CLOSED, _S.FAILED}),
    _S.REPLAYING: frozenset({_S.REPLAYING, _S.SWEPT, _S.FAILED}),
    _S.SWEPT: frozenset({_S.CLOSED, _S.FAILED}),
    _S.CLOSED: frozenset(),
    _S.FAILED: frozenset({_S.OPEN}),
}
