"""What a policy loss returns: the loss to call backward on, and figures that can be added up over lanes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import add

from torch import Tensor

from longstraw.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyMetrics:
    """Sums over a lane, 0-dim and detached. Add lanes with `+` or `total`, then read the means.

    A mean of the lanes' means would weigh a lane of one short response like a lane of many, so sums are
    stored.

    Attributes:
        ratios: number of importance ratios: tokens, or responses for GSPO (int64).
        ratio_sum: their sum.
        clipped: how many were replaced by a clip bound in the direction that removes or limits their gradient
            (int64).
        tokens: number of tokens (int64).
        approx_kl_sum: sum over tokens of r - 1 - log r, an unbiased non-negative estimate of KL(old ||
            policy).
        ref_kl_sum: sum over tokens of the chosen estimator of KL(policy || reference); None without a KL
            penalty.
    """

    ratios: Tensor
    ratio_sum: Tensor
    clipped: Tensor
    tokens: Tensor
    approx_kl_sum: Tensor
    ref_kl_sum: Tensor | None = None

    @property
    def mean_ratio(self) -> Tensor:
        return self.ratio_sum / self.ratios

    @property
    def clip_fraction(self) -> Tensor:
        return self.clipped / self.ratios

    @property
    def approx_kl(self) -> Tensor:
        return self.approx_kl_sum / self.tokens

    @property
    def ref_kl(self) -> Tensor | None:
        return None if self.ref_kl_sum is None else self.ref_kl_sum / self.tokens

    def __add__(self, other: PolicyMetrics) -> PolicyMetrics:
        if (self.ref_kl_sum is None) != (other.ref_kl_sum is None):
            raise ConfigError("metrics with and without a KL penalty cannot be added; they come from different losses")
        ref_kl_sum = None
        if self.ref_kl_sum is not None and other.ref_kl_sum is not None:
            ref_kl_sum = self.ref_kl_sum + other.ref_kl_sum
        return PolicyMetrics(
            ratios=self.ratios + other.ratios,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            clipped=self.clipped + other.clipped,
            tokens=self.tokens + other.tokens,
            approx_kl_sum=self.approx_kl_sum + other.approx_kl_sum,
            ref_kl_sum=ref_kl_sum,
        )

    @classmethod
    def total(cls, lanes: Iterable[PolicyMetrics]) -> PolicyMetrics:
        """The metrics of all lanes together (at least one)."""
        return reduce(add, lanes)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyObjective:
    """A lane's share of the group's loss (0-dim, with graph, to be minimised) and its metrics."""

    loss: Tensor
    metrics: PolicyMetrics
