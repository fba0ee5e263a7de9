"""The errors that Longstraw raises on purpose, so that callers can catch one family.

A user's mistake derives from `ValueError` as well where Python's own convention says so. An argument of a wrong type or
shape is Python's own `TypeError` or `ValueError`.
"""

from __future__ import annotations


class LongstrawError(Exception):
    """Base of all errors that the runtime raises itself."""


class ConfigError(LongstrawError, ValueError):
    """A configuration key is unknown, has an impossible value, or would be ignored."""


class UnsupportedModelError(LongstrawError):
    """The model has a part that the runtime cannot carry exactly; nothing was run."""


class CapacityError(LongstrawError):
    """The tiers together cannot hold the pages that were asked for. The message carries the figures."""


class TransactionStateError(LongstrawError):
    """A call that is illegal in the transaction's (or the lane's) current state, which the message names."""


class StaleWeightsError(LongstrawError):
    """The model's weights, adapter or dtype are not those that the state was captured under."""


class PageStateError(LongstrawError):
    """An illegal move of a page, a use after free, or a read of rows that were never filled."""


class PageLostError(LongstrawError):
    """A page's bytes could not be brought back or written (I/O error, short file, bad checksum)."""


class StreamOrderError(LongstrawError):
    """A layer asked for pages in another order than the pass had announced."""


class RankFailedError(LongstrawError):
    """Another rank failed in this step, so that this one cannot go on. The message carries that rank's error."""


class KernelMismatchError(LongstrawError):
    """A fused kernel's first result on this machine was not that of its plain version; nothing was computed with it."""


class GradientMismatchError(LongstrawError):
    """`verify` found a parameter whose gradient differs from plain autograd by more than the tolerance."""
