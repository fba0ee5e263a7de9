"""CISPO (MiniMax-M1, arXiv 2506.13585): a clipped, detached importance weight; no token is dropped."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longstraw.errors import ConfigError
from longstraw.objectives.kl import KLPenalty
from longstraw.objectives.metrics import PolicyObjective
from longstraw.objectives.policy import LaneTokens, refuse_filtered, token_objective
from longstraw.objectives.size import Aggregation, GroupSize


def cispo_loss(
    logprobs: Sequence[Tensor],
    old: Sequence[Tensor],
    advantages: Tensor,
    *,
    size: GroupSize,
    clip_high: float,
    clip_low: float | None = None,
    ref: Sequence[Tensor] | None = None,
    kl: KLPenalty | None = None,
) -> PolicyObjective:
    """CISPO's loss (arXiv 2506.13585, equations 4 and 5), a lane's share of it:

        -1/(sum_i |o_i|) sum_i sum_t sg(clip(r_it, 1 - clip_low, 1 + clip_high)) A_i log policy_it

    with `zscore_advantages` and sg the stop-gradient. The value is not one to watch (it does not fall as the
    policy improves); the gradient is REINFORCE's with a bounded importance weight. The paper has no KL term;
    `kl` adds one under the same normaliser. `metrics.clipped` counts tokens whose weight hit a bound,
    whatever the sign of A.

    Args:
        clip_high: the weight is at most 1 + clip_high. The paper tunes this bound and does not print it, so
            there is no default.
        clip_low: the weight is at least 1 - clip_low, in (0, 1]; None, the paper's setting, is no lower
            bound.

    The other arguments, the result and errors are those of `grpo_loss`.
    """
    if not clip_high > 0:
        raise ConfigError(f"clip_high={clip_high} must be above 0: the weight is at most 1 + clip_high")
    if clip_low is not None and not 0 < clip_low <= 1:
        raise ConfigError(f"clip_low={clip_low} must be in (0, 1], or None for no lower bound")
    refuse_filtered(size, "cispo_loss")
    lane = LaneTokens.gather(logprobs, old, advantages, ref, kl)
    ratio_T = lane.log_ratio().detach().exp()
    weight_T = ratio_T.clamp(min=0.0 if clip_low is None else 1 - clip_low, max=1 + clip_high)
    objective_T = weight_T * lane.token_advantages() * lane.logprobs_T
    return token_objective(lane, objective_T, weight_T != ratio_T, size=size, how=Aggregation.TOKEN_MEAN)
