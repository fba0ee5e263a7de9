"""DPO (arXiv 2305.18290) and IPO (arXiv 2310.12036) over pairs of branches, also where lanes split a pair."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from operator import add

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from longstraw.errors import ConfigError
from longstraw.objectives.size import check_responses


class PreferenceLoss(StrEnum):
    """The loss of one pair, with h its log-ratio margin (see `dpo_loss`)."""

    SIGMOID = "sigmoid"  # DPO
    SQUARED = "squared"  # IPO


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceMetrics:
    """Sums over a lane's sides of pairs, 0-dim and detached; each side counts as half a pair.

    Attributes:
        pairs: pairs, half a pair for each side in the lane.
        chosen_sum, rejected_sum: implicit rewards beta (log policy - log ref) of the chosen and rejected
            sides, summed.
        correct_sum: sides whose pair has a positive margin, a half each.
        drift: max |logprobs - scored| over the lane's tokens: 0 up to rounding, or a split pair's gradient is
            wrong. None without `scored`.
    """

    pairs: Tensor
    chosen_sum: Tensor
    rejected_sum: Tensor
    correct_sum: Tensor
    drift: Tensor | None = None

    @property
    def chosen_reward(self) -> Tensor:
        return self.chosen_sum / self.pairs

    @property
    def rejected_reward(self) -> Tensor:
        return self.rejected_sum / self.pairs

    @property
    def accuracy(self) -> Tensor:
        return self.correct_sum / self.pairs

    def __add__(self, other: PreferenceMetrics) -> PreferenceMetrics:
        if (self.drift is None) != (other.drift is None):
            raise ConfigError("metrics with and without scored log-probs cannot be added; give every lane the same")
        drift = None
        if self.drift is not None and other.drift is not None:
            drift = torch.maximum(self.drift, other.drift)
        return PreferenceMetrics(
            pairs=self.pairs + other.pairs,
            chosen_sum=self.chosen_sum + other.chosen_sum,
            rejected_sum=self.rejected_sum + other.rejected_sum,
            correct_sum=self.correct_sum + other.correct_sum,
            drift=drift,
        )

    @classmethod
    def total(cls, lanes: Iterable[PreferenceMetrics]) -> PreferenceMetrics:
        """The metrics of all lanes together (at least one); the means need both sides of each pair."""
        return reduce(add, lanes)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceObjective:
    """A lane's share of the loss (0-dim, with graph, to be minimised) and its metrics."""

    loss: Tensor
    metrics: PreferenceMetrics


def dpo_loss(
    logprobs: Sequence[Tensor],
    *,
    indices: Sequence[int],
    ref: Sequence[Tensor],
    pairs: Sequence[tuple[int, int]],
    num_pairs: int,
    scored: Sequence[Tensor] | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    variant: PreferenceLoss = PreferenceLoss.SIGMOID,
) -> PreferenceObjective:
    """DPO's loss (arXiv 2305.18290, equation 7), a lane's share of it. A pair (w chosen, l rejected) has

        h = sum_t (log policy_wt - log ref_wt) - sum_t (log policy_lt - log ref_lt)
        sigmoid: -(1 - eps) log sigmoid(beta h) - eps log sigmoid(-beta h)     eps = label_smoothing; 0 is DPO
        squared: (h - 1 / (2 beta))^2                                          IPO, arXiv 2310.12036

    and the loss is the pairs' sum over `num_pairs`. eps > 0 is "conservative DPO": labels are wrong with
    probability eps. Sequences are summed, not averaged over tokens, in both variants, as in the papers.

    A pair whose sides are in different lanes does not fall apart into a sum, but its gradient does. Each lane
    takes half of the pair's value, and the derivative by its own side with the other side's value from
    `scored`. If `scored` was taken under the very weights of this replay, values and gradients add up to the
    whole pair's; `metrics.drift` shows whether it was.

    Args:
        logprobs: the lane's log-probs under the policy, each [R_i], with graph.
        indices: the lane's branches in the group, [n]: `lane.indices`.
        ref: log-probs of the *whole group* under the reference policy, each [R_i], no graph.
        pairs: (chosen, rejected) indices into the group, all of the group's pairs. Every response of the lane
            must be in one; leave others out of replay.
        num_pairs: pairs of all groups in the optimizer step: the normaliser.
        scored: log-probs of the *whole group* under the present weights, each [R_i], no graph:
            `txn.score(responses)`. May be None while no pair is split over lanes.
        beta: above 0.
        label_smoothing: in [0, 0.5); only for `sigmoid`.
        variant: sigmoid (DPO) or squared (IPO).

    Returns:
        The lane's share of the loss and its metrics.

    Raises:
        ConfigError: an argument of a wrong shape, length or range (its name is in the message); a response in
            no pair; a split pair without `scored`; label smoothing that `variant` would ignore.
    """
    _check_settings(pairs, num_pairs, beta, label_smoothing, variant)
    lengths = check_responses("logprobs", logprobs)
    if len(indices) != len(lengths) or len(set(indices)) != len(lengths):
        raise ConfigError(f"indices={list(indices)} must name {len(lengths)} different branches; pass lane.indices")
    _check_group("ref", ref, logprobs, lengths, indices)
    _check_pairs(pairs, indices, len(ref))
    if scored is not None:
        if len(scored) != len(ref):
            raise ConfigError(f"scored has {len(scored)} responses and ref {len(ref)}; pass the whole group's in both")
        _check_group("scored", scored, logprobs, lengths, indices)

    dtype = torch.promote_types(logprobs[0].dtype, torch.float32)
    ref_sum = [x.to(dtype).sum() for x in ref]
    live = {i: x.to(dtype).sum() - ref_sum[i] for i, x in zip(indices, logprobs, strict=True)}

    def side(i: int) -> Tensor:
        """log policy - log ref of a response: live where this lane holds it, else as scored."""
        if i in live:
            return live[i]
        assert scored is not None
        return scored[i].to(dtype).sum() - ref_sum[i]

    zero = logprobs[0].detach().new_zeros((), dtype=dtype)
    loss, chosen_sum, rejected_sum, correct_sum, sides = zero, zero, zero, zero, 0
    for w, l in pairs:  # noqa: E741 (the papers' letters)
        here = (w in live) + (l in live)
        if not here:
            continue
        if here == 1 and scored is None:
            raise ConfigError(
                f"pairs holds ({w}, {l}), whose sides are in different lanes, and scored is None; "
                "pass scored=txn.score(responses), taken under these weights"
            )
        ratio_w, ratio_l = side(w), side(l)
        margin = ratio_w - ratio_l
        value = _pair_loss(margin, beta, label_smoothing, variant)
        loss = loss + (value if here == 2 else value - value.detach() / 2)
        if w in live:
            chosen_sum = chosen_sum + beta * ratio_w.detach()
        if l in live:
            rejected_sum = rejected_sum + beta * ratio_l.detach()
        correct_sum = correct_sum + (margin.detach() > 0) * (here / 2)
        sides += here
    drift = None
    if scored is not None:
        gaps = [(x.detach() - scored[i]).abs().max() for i, x in zip(indices, logprobs, strict=True)]
        drift = torch.stack(gaps).max()
    return PreferenceObjective(
        loss=loss / num_pairs,
        metrics=PreferenceMetrics(
            pairs=zero + sides / 2,
            chosen_sum=chosen_sum,
            rejected_sum=rejected_sum,
            correct_sum=correct_sum,
            drift=drift,
        ),
    )


def _pair_loss(margin: Tensor, beta: float, label_smoothing: float, variant: PreferenceLoss) -> Tensor:
    match variant:
        case PreferenceLoss.SIGMOID:
            value = -(1 - label_smoothing) * logsigmoid(beta * margin)
            return value - label_smoothing * logsigmoid(-beta * margin) if label_smoothing else value
        case PreferenceLoss.SQUARED:
            return (margin - 1 / (2 * beta)).square()


def _check_settings(
    pairs: Sequence[tuple[int, int]],
    num_pairs: int,
    beta: float,
    label_smoothing: float,
    variant: PreferenceLoss,
) -> None:
    if not beta > 0:
        raise ConfigError(f"beta={beta} must be above 0; 0.1 is usual")
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(f"label_smoothing={label_smoothing} must be in [0, 0.5)")
    if variant not in list(PreferenceLoss):
        raise ConfigError(f"variant={variant!r} is unknown; use one of {[str(known) for known in PreferenceLoss]}")
    if label_smoothing and variant == PreferenceLoss.SQUARED:
        raise ConfigError(f"label_smoothing={label_smoothing} would be ignored by variant=squared; set it to 0")
    if num_pairs < len(pairs):
        raise ConfigError(
            f"num_pairs={num_pairs} is below this group's {len(pairs)} pairs; pass those of the whole step"
        )


def _check_pairs(pairs: Sequence[tuple[int, int]], indices: Sequence[int], group: int) -> None:
    for pair in pairs:
        if len(pair) != 2 or pair[0] == pair[1] or not all(0 <= i < group for i in pair):
            raise ConfigError(
                f"pairs holds {pair}; expected (chosen, rejected), two different indices into the group, "
                f"which has {group} responses by ref"
            )
    unpaired = set(indices) - {i for pair in pairs for i in pair}
    if unpaired:
        raise ConfigError(f"pairs leaves out responses {sorted(unpaired)} of this lane; leave them out of replay")


def _check_group(
    name: str,
    group: Sequence[Tensor],
    logprobs: Sequence[Tensor],
    lengths: tuple[int, ...],
    indices: Sequence[int],
) -> None:
    """Check a whole group's log-probs against the lane's."""
    check_responses(name, group)
    for i, length in zip(indices, lengths, strict=True):
        if not 0 <= i < len(group):
            raise ConfigError(
                f"{name} has {len(group)} responses and the lane holds branch {i}; pass the whole group's"
            )
        if group[i].numel() != length:
            raise ConfigError(
                f"{name}[{i}] has {group[i].numel()} tokens and the lane's branch {i} has {length}; "
                "pass the whole group's, in the group's order"
            )
    for i, tensor in enumerate(group):
        if tensor.requires_grad:
            raise ConfigError(f"{name}[{i}] requires grad; pass scored log-probs, or {name}[{i}].detach()")
        if tensor.device != logprobs[0].device:
            raise ConfigError(f"{name}[{i}] is on {tensor.device} and logprobs on {logprobs[0].device}")
