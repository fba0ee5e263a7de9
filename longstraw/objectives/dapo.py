"""DAPO (arXiv 2503.14476): a token-mean loss with clip-higher, and its two ways with overlong responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longstraw.errors import ConfigError
from longstraw.objectives.clipping import Clip, clipped_surrogate
from longstraw.objectives.kl import KLPenalty
from longstraw.objectives.metrics import PolicyObjective
from longstraw.objectives.policy import LaneTokens, token_objective
from longstraw.objectives.size import Aggregation, GroupSize, keep_mask


def dapo_loss(
    logprobs: Sequence[Tensor],
    old: Sequence[Tensor],
    advantages: Tensor,
    *,
    size: GroupSize,
    clip: Clip = Clip(low=0.2, high=0.28),  # noqa: B008 (frozen)
    keep: Sequence[bool] | Tensor | None = None,
    ref: Sequence[Tensor] | None = None,
    kl: KLPenalty | None = None,
) -> PolicyObjective:
    """DAPO's loss (arXiv 2503.14476, equation 8), a lane's share of it:

        -1/(sum_i |o_i|) sum_i sum_t min(r_it A_i, clip(r_it, 1 - low, 1 + high) A_i)

    with `zscore_advantages`. The paper has no KL term; `kl` adds one under the same normaliser. Its token
    mean runs over all groups of the step: give `GroupSize.total` of them.

    Args:
        keep: [n] booleans of the lane's responses; False is overlong filtering (section 3.4): the response
            keeps its part in the group's advantages and has none in the loss, its count or the metrics.
            `size` must have been built with the whole group's `keep`. Where possible leave the response out
            of replay instead: it costs memory and time, and its gradient is zero.

    The other arguments, the result and errors are those of `grpo_loss`; also a ConfigError if `keep` and
    `size.filtered` disagree.
    """
    lane = LaneTokens.gather(logprobs, old, advantages, ref, kl)
    mask = keep_mask(keep, len(logprobs))
    dropped = mask.count(False)
    if dropped > size.filtered:
        raise ConfigError(
            f"keep filters {dropped} responses of this lane and size.filtered={size.filtered}; "
            "build the size with GroupSize.of(all responses, keep=the whole group's keep)"
        )
    if size.filtered and keep is None:
        raise ConfigError(f"keep is None and size.filtered={size.filtered}; pass the lane's own part of keep")
    if dropped:
        lane = _without(lane, mask)
    objective_T, clipped_T = clipped_surrogate(lane.log_ratio(), lane.token_advantages(), clip)
    return token_objective(lane, objective_T, clipped_T, size=size, how=Aggregation.TOKEN_MEAN)


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_tokens: int) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), to be added to the rewards:

        0 if |y| <= L_max - L_buffer;  ((L_max - L_buffer) - |y|) / L_buffer up to L_max;  -1 above

    Args:
        lengths: response lengths in tokens [G], integer.
        max_tokens: L_max, in tokens.
        buffer_tokens: L_buffer, in tokens, in [1, max_tokens].

    Returns:
        float32 [G], in [-1, 0].

    Raises:
        ConfigError: `lengths` is not an integer [G], or `buffer_tokens` is out of range.
    """
    if lengths.dim() != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ConfigError(f"lengths has shape {list(lengths.shape)} and dtype {lengths.dtype}; expected integers [G]")
    if not 1 <= buffer_tokens <= max_tokens:
        raise ConfigError(f"buffer_tokens={buffer_tokens} must be in [1, max_tokens={max_tokens}]")
    return ((max_tokens - buffer_tokens - lengths).float() / buffer_tokens).clamp(min=-1.0, max=0.0)


def _without(lane: LaneTokens, mask: list[bool]) -> LaneTokens:
    """The lane with only its kept responses, possibly none.

    All parts are cut from the one tensor that holds every response, so those left out keep a graph and get a
    zero gradient: hooks on a branch's outputs then still see a backward.
    """

    def pick(values_T: Tensor) -> Tensor:
        parts = [part for part, kept in zip(values_T.split(lane.lengths), mask, strict=True) if kept]
        return torch.cat(parts) if parts else values_T[:0]

    return replace(
        lane,
        lengths=tuple(length for length, kept in zip(lane.lengths, mask, strict=True) if kept),
        logprobs_T=pick(lane.logprobs_T),
        old_T=pick(lane.old_T),
        ref_T=None if lane.ref_T is None else pick(lane.ref_T),
        advantages_N=lane.advantages_N[[i for i, kept in enumerate(mask) if kept]],
    )
