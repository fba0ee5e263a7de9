"""The clipped surrogate objective of PPO, with separate lower and upper bounds and an optional dual clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """Bounds on the importance ratio r: 1 - low and 1 + high, and `dual` where the advantage is negative.

    Attributes:
        low: lower distance, in (0, 1].
        high: upper distance, above 0. Larger than `low` is DAPO's clip-higher (arXiv 2503.14476, section
            3.1).
        dual: c > 1 of dual-clip PPO (arXiv 1912.09729, equation 5), or None for the plain surrogate, whose
            value and gradient are unbounded where A < 0 and r is large.

    Raises:
        ConfigError: a bound outside its range.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.low <= 1:
            raise ConfigError(f"low={self.low} must be in (0, 1]: the ratio is clipped below at 1 - low")
        if not self.high > 0:
            raise ConfigError(f"high={self.high} must be above 0: the ratio is clipped above at 1 + high")
        if self.dual is not None and not self.dual > 1:
            raise ConfigError(f"dual={self.dual} must be above 1, or None for no dual clip; 3.0 is usual")


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, 1 - low, 1 + high) A), and where A < 0 at least `dual` times A; to be maximised.

    Args:
        log_ratio: log r, any shape, with graph.
        advantages: A, the same shape, no graph.
        clip: the bounds.

    Returns:
        The objective, of the same shape and with graph; and a bool tensor that is True where a bound replaced
        r, which is where the gradient is zero.
    """
    ratio = log_ratio.detach().exp()
    above = (advantages > 0) & (ratio > 1 + clip.high)
    below = (advantages < 0) & (ratio < 1 - clip.low)
    clipped = above | below
    # Not torch.where of two numbers: that rounds both to float32.
    bound = torch.full_like(ratio, 1 - clip.low).masked_fill(above, 1 + clip.high)
    if clip.dual is not None:
        dual = (advantages < 0) & (ratio > clip.dual)
        clipped = clipped | dual
        bound = bound.masked_fill(dual, clip.dual)
    # exp overflows where policies have drifted far, and backward would make nan of its zero gradient times
    # inf. So what has no gradient never enters exp.
    live_ratio = log_ratio.masked_fill(clipped | (advantages == 0), 0.0).exp()
    return torch.where(clipped, bound, live_ratio) * advantages, clipped
