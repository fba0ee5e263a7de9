"""GRPO (arXiv 2402.03300) and Dr. GRPO (arXiv 2503.20783): token-level clipped surrogates over a group."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longstraw.objectives.clipping import Clip, clipped_surrogate
from longstraw.objectives.kl import KLPenalty
from longstraw.objectives.metrics import PolicyObjective
from longstraw.objectives.policy import LaneTokens, refuse_filtered, token_objective
from longstraw.objectives.size import Aggregation, GroupSize


def grpo_loss(
    logprobs: Sequence[Tensor],
    old: Sequence[Tensor],
    advantages: Tensor,
    *,
    size: GroupSize,
    clip: Clip = Clip(),  # noqa: B008 (frozen)
    ref: Sequence[Tensor] | None = None,
    kl: KLPenalty | None = None,
) -> PolicyObjective:
    """GRPO's loss (arXiv 2402.03300, equation 3), a lane's share of it:

        -1/G sum_i 1/|o_i| sum_t { min(r_it A_i, clip(r_it, 1 - low, 1 + high) A_i) - beta KL_it }

    with r_it = policy / old at token t of response i. The paper's KL is k3, its A `zscore_advantages`.

    Args:
        logprobs: the lane's log-probs under the policy, each [R_i], with graph.
        old: those under the policy that sampled (or as scored before the first step), each [R_i], no graph.
        advantages: [n] of the lane's n responses, floating, no graph.
        size: G and the tokens of the whole group, or of all groups of the step.
        clip: bounds on the ratio.
        ref: log-probs under the reference policy, each [R_i], no graph; given exactly when `kl` is.
        kl: the penalty's weight and estimator.

    Returns:
        The lane's share of the loss and its metrics.

    Raises:
        ConfigError: an argument of a wrong shape, length, dtype or device (its name is in the message); one
            that would be ignored; or a lane larger than `size`.
    """
    refuse_filtered(size, "grpo_loss")
    lane = LaneTokens.gather(logprobs, old, advantages, ref, kl)
    objective_T, clipped_T = clipped_surrogate(lane.log_ratio(), lane.token_advantages(), clip)
    return token_objective(lane, objective_T, clipped_T, size=size, how=Aggregation.SEQUENCE_MEAN)


def dr_grpo_loss(
    logprobs: Sequence[Tensor],
    old: Sequence[Tensor],
    advantages: Tensor,
    *,
    size: GroupSize,
    clip: Clip = Clip(),  # noqa: B008 (frozen)
    ref: Sequence[Tensor] | None = None,
    kl: KLPenalty | None = None,
) -> PolicyObjective:
    """Dr. GRPO's loss (arXiv 2503.20783, section 3.2), a lane's share of it:

        -1/(G L_max) sum_i sum_t min(r_it A_i, clip(r_it, 1 - low, 1 + high) A_i)

    GRPO without its two biases: 1/|o_i|, which favours long wrong responses, becomes the constant 1/L_max
    (`size.max_tokens`), and A is `centered_advantages`, not divided by the standard deviation. The paper has
    no KL term; `kl` adds one under the same normaliser.

    Arguments, result and errors are those of `grpo_loss`; also a ConfigError if `size.max_tokens` is None.
    """
    refuse_filtered(size, "dr_grpo_loss")
    lane = LaneTokens.gather(logprobs, old, advantages, ref, kl)
    objective_T, clipped_T = clipped_surrogate(lane.log_ratio(), lane.token_advantages(), clip)
    return token_objective(lane, objective_T, clipped_T, size=size, how=Aggregation.FIXED_LENGTH)
