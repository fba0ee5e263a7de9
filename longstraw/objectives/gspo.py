"""GSPO (arXiv 2507.18071): one length-normalised importance ratio for a whole response."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longstraw.objectives.clipping import Clip, clipped_surrogate
from longstraw.objectives.kl import KLPenalty
from longstraw.objectives.metrics import PolicyObjective
from longstraw.objectives.policy import LaneTokens, finish, refuse_filtered
from longstraw.objectives.size import Aggregation, GroupSize, per_token, token_weights


def gspo_loss(
    logprobs: Sequence[Tensor],
    old: Sequence[Tensor],
    advantages: Tensor,
    *,
    size: GroupSize,
    clip: Clip = Clip(low=3e-4, high=4e-4),  # noqa: B008 (frozen)
    ref: Sequence[Tensor] | None = None,
    kl: KLPenalty | None = None,
) -> PolicyObjective:
    """GSPO's loss (arXiv 2507.18071, equations 5 and 7), a lane's share of it:

        -1/G sum_i min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i),   s_i = exp(1/|o_i| sum_t log r_it)

    with `zscore_advantages`. s_i is a geometric mean of token ratios, so its useful clip range is orders of
    magnitude below GRPO's; the defaults are the paper's. The paper leaves its KL term out; `kl` adds GRPO's,
    a mean over each response's tokens. In the metrics a ratio is a response's.

    Arguments, result and errors are those of `grpo_loss`.
    """
    refuse_filtered(size, "gspo_loss")
    lane = LaneTokens.gather(logprobs, old, advantages, ref, kl)
    weights_N = token_weights(lane.lengths, size=size, how=Aggregation.SEQUENCE_MEAN, like=lane.logprobs_T)
    log_ratio_N = lane.mean_over_tokens(lane.log_ratio())
    objective_N, clipped_N = clipped_surrogate(log_ratio_N, lane.advantages_N, clip)
    loss = -objective_N.sum() * size.replicas / size.responses
    return finish(lane, loss, log_ratio_N.detach().exp(), clipped_N, per_token(weights_N, lane.lengths))
