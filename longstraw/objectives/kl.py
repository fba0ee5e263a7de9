"""Estimators of KL(policy || reference) from sampled tokens, and which of them may be used as a loss."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from longstraw.errors import ConfigError


class KLEstimator(StrEnum):
    """Schulman's estimators (joschu.net/blog/kl-approx.html); d = log ref - log policy at a sampled token."""

    K1 = "k1"  # -d              unbiased, either sign, high variance
    K2 = "k2"  # d^2 / 2         biased, non-negative, low variance
    K3 = "k3"  # e^d - d - 1     unbiased, non-negative, low variance


def kl_estimate(logprobs: Tensor, ref: Tensor, estimator: KLEstimator) -> Tensor:
    """The per-token estimate of KL(policy || reference), given tokens sampled from the policy.

    Args:
        logprobs: log policy, any shape.
        ref: log reference, the same shape.
        estimator: which one. Unbiased *values* do not make unbiased *gradients*: see `KLPenalty`.
    """
    d = ref - logprobs
    match estimator:
        case KLEstimator.K1:
            return -d
        case KLEstimator.K2:
            return d.square() / 2
        case KLEstimator.K3:
            # expm1 keeps the digits that e^d - 1 loses near d = 0, where most tokens are.
            return torch.expm1(d) - d


@dataclass(frozen=True, kw_only=True, slots=True)
class KLPenalty:
    """`coef` times a per-token KL estimate, added to a loss.

    What a penalty does is set by its expected gradient, and that is not the gradient of its expected value,
    because the tokens' distribution depends on the policy too (arXiv 2510.01555, 2512.21852). For tokens from
    `old`, with r = policy / old:

    | estimator | weighted | expected gradient |
    |---|---|---|
    | k1 | no  | zero if policy = old: only noise. Refused. |
    | k2 | no  | that of KL(policy || reference) if policy = old |
    | k3 | no  | that of KL(reference || policy), the *other* direction, if policy = old. GRPO's own. |
    | k1 | yes | that of KL(policy || reference): r k1 |
    | k2 | yes | that of KL(policy || reference): sg(r) k2, the weight detached |
    | k3 | yes | that of KL(policy || reference): r k3 (arXiv 2512.02556, equation 7) |

    The ratios here are per token: how a token changes the KL of later tokens is left out, as in the papers'
    losses.

    Attributes:
        coef: beta, above 0. For no penalty give the loss `kl=None`.
        estimator: k1, k2 or k3.
        importance_weight: whether the estimate is weighted by r.

    Raises:
        ConfigError: `coef` is not above 0, or k1 without weights.
    """

    coef: float
    estimator: KLEstimator = KLEstimator.K3
    importance_weight: bool = False

    def __post_init__(self) -> None:
        if not self.coef > 0:
            raise ConfigError(f"coef={self.coef} must be above 0; for no KL penalty pass kl=None and ref=None")
        if self.estimator not in list(KLEstimator):
            raise ConfigError(
                f"estimator={self.estimator!r} is unknown; use one of {[str(known) for known in KLEstimator]}"
            )
        if self.estimator == KLEstimator.K1 and not self.importance_weight:
            raise ConfigError(
                "estimator=k1 without importance_weight has a zero expected gradient; "
                "use estimator=k2, or importance_weight=True"
            )

    def per_token(self, logprobs: Tensor, old: Tensor, ref: Tensor) -> Tensor:
        """`coef` times the estimate, of the shape of `logprobs` and with its graph."""
        estimate = kl_estimate(logprobs, ref, self.estimator)
        if self.importance_weight:
            ratio = (logprobs - old).exp()
            # k2's own gradient is already the right integrand; a live ratio would add a term to it.
            estimate = estimate * (ratio.detach() if self.estimator == KLEstimator.K2 else ratio)
        return self.coef * estimate
