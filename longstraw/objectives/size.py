"""How large the whole group is, and how per-token values are averaged over it.

A lane holds only some of a group's branches, and a loss is called once per lane. The lanes' losses add up to
the group's loss only if each divides by the size of the *whole*, so every loss takes that size as an argument
and none ever takes a mean over the tensors it was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from longstraw.errors import ConfigError


class Aggregation(StrEnum):
    """How the per-token values l_it of n responses become one number; `GroupSize` has n, |o_i| and L_max."""

    TOKEN_MEAN = "token_mean"  # sum_it l_it / sum_i |o_i|            DAPO, CISPO
    SEQUENCE_MEAN = "sequence_mean"  # 1/n sum_i 1/|o_i| sum_t l_it   GRPO, GSPO
    FIXED_LENGTH = "fixed_length"  # sum_it l_it / (n L_max)          Dr. GRPO


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSize:
    """The normalisers of a whole group, or of a step's groups: computed once and given to every lane.

    Attributes:
        responses: responses that take part in the loss.
        tokens: their tokens, summed.
        max_tokens: the generation budget L_max, a constant of the run and not the longest response seen; only
            `Aggregation.FIXED_LENGTH` reads it.
        filtered: responses that were sampled but are masked out of the loss (see `dapo_loss`); they are
            counted in neither `responses` nor `tokens`.
        replicas: data-parallel replicas whose groups are counted here and whose gradients will be averaged; a loss
            is multiplied by it. See `size_over_ranks`.

    Raises:
        ConfigError: a count is negative, there are fewer tokens than responses, or more than the budget
            allows.
    """

    responses: int
    tokens: int
    max_tokens: int | None = None
    filtered: int = 0
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("responses", "tokens", "filtered"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is negative; pass a count of the whole group")
        if self.tokens < self.responses:
            raise ConfigError(
                f"tokens={self.tokens} is below responses={self.responses}; a response has at least one token"
            )
        if self.max_tokens is not None and self.tokens > self.responses * self.max_tokens:
            raise ConfigError(
                f"max_tokens={self.max_tokens} is below the mean length of {self.responses} responses with "
                f"{self.tokens} tokens; pass the generation budget"
            )

    @classmethod
    def of(
        cls,
        responses: Sequence[Tensor],
        *,
        keep: Sequence[bool] | Tensor | None = None,
        max_tokens: int | None = None,
    ) -> GroupSize:
        """Measure a whole group.

        Args:
            responses: token ids or log-probs of *all* the group's responses, each [R_i].
            keep: [G] booleans; False masks a response out of the loss (give the same to `dapo_loss`).
            max_tokens: the generation budget in tokens.

        Raises:
            ConfigError: no responses, one that is no tensor, empty or not 1-D, one above `max_tokens`, or `keep` of
                another length.
        """
        if len(responses) == 0:
            raise ConfigError("responses is empty; pass every response of the group")
        for i, response in enumerate(responses):
            if not isinstance(response, Tensor):
                raise ConfigError(f"responses[{i}] is a {type(response).__name__}; give a tensor [R_i]")
            if response.dim() != 1 or response.numel() == 0:
                raise ConfigError(f"responses[{i}] has shape {list(response.shape)}; expected [R_i] with R_i >= 1")
            if max_tokens is not None and response.numel() > max_tokens:
                raise ConfigError(
                    f"responses[{i}] has {response.numel()} tokens, above max_tokens={max_tokens}; "
                    "pass the budget that generation ran with"
                )
        mask = keep_mask(keep, len(responses))
        lengths = [r.numel() for r, kept in zip(responses, mask, strict=True) if kept]
        return cls(
            responses=len(lengths),
            tokens=sum(lengths),
            max_tokens=max_tokens,
            filtered=len(mask) - len(lengths),
        )

    @classmethod
    def total(cls, sizes: Iterable[GroupSize]) -> GroupSize:
        """The size of several groups together, for a mean over a whole optimizer step.

        Raises:
            ConfigError: no sizes, or groups with different `max_tokens`.
        """
        parts = list(sizes)
        if not parts:
            raise ConfigError("sizes is empty; pass one GroupSize for each group of the step")
        budgets = {part.max_tokens for part in parts}
        if len(budgets) > 1:
            raise ConfigError(f"sizes have different max_tokens {budgets}; the budget is one constant of the run")
        return cls(
            responses=sum(part.responses for part in parts),
            tokens=sum(part.tokens for part in parts),
            max_tokens=parts[0].max_tokens,
            filtered=sum(part.filtered for part in parts),
        )


def aggregate(values: Sequence[Tensor], *, size: GroupSize, how: Aggregation) -> Tensor:
    """A lane's share of the group's average of per-token values; the shares of all lanes add up to it.

    Args:
        values: per-token values of the lane's responses, each [R_i] and floating; gradients pass through.
        size: of the whole group, or of all groups of the step. Values of filtered responses are the caller's
            to leave out: `size` does not know which they are.
        how: which average.

    Returns:
        A 0-dim tensor, float32 or wider.

    Raises:
        ConfigError: `values` is empty or holds a tensor that is no [R_i], the lane is larger than `size`, or
            `how` needs a `max_tokens` that `size` lacks.
    """
    lengths = check_responses("values", values)
    dtype = torch.promote_types(values[0].dtype, torch.float32)
    flat_T = torch.cat(list(values)).to(dtype)
    return (flat_T * per_token(token_weights(lengths, size=size, how=how, like=flat_T), lengths)).sum()


def token_weights(lengths: Sequence[int], *, size: GroupSize, how: Aggregation, like: Tensor) -> Tensor:
    """The weight [n] that each token of each of a lane's n responses carries in the whole group's average."""
    if size.tokens == 0:
        raise ConfigError("size counts no tokens: every response was filtered out; skip this group")
    if len(lengths) > size.responses or sum(lengths) > size.tokens:
        raise ConfigError(
            f"size has {size.responses} responses and {size.tokens} tokens, but this lane alone has "
            f"{len(lengths)} and {sum(lengths)}; build it once with GroupSize.of(all responses of the group)"
        )
    if how not in list(Aggregation):
        raise ConfigError(f"how={how!r} is unknown; use one of {[str(known) for known in Aggregation]}")
    match how:
        case Aggregation.TOKEN_MEAN:
            weights = [1 / size.tokens for _ in lengths]
        case Aggregation.SEQUENCE_MEAN:
            weights = [1 / (length * size.responses) for length in lengths]
        case Aggregation.FIXED_LENGTH:
            if size.max_tokens is None:
                raise ConfigError(
                    "size.max_tokens is None, and a fixed-length average divides by it; "
                    "build the size with GroupSize.of(responses, max_tokens=...)"
                )
            weights = [1 / (size.responses * size.max_tokens) for _ in lengths]
    weights = [weight * size.replicas for weight in weights]
    return torch.tensor(weights, dtype=like.dtype, device=like.device)


def per_token(values_N: Tensor, lengths: Sequence[int]) -> Tensor:
    """Repeat one value a response for each of its tokens: [n] to [T]."""
    repeats = torch.tensor(lengths, dtype=torch.long, device=values_N.device)
    # Without output_size a CUDA tensor of repeats would be read back, a synchronisation in every lane.
    return torch.repeat_interleave(values_N, repeats, output_size=sum(lengths))


def keep_mask(keep: Sequence[bool] | Tensor | None, count: int) -> list[bool]:
    """`keep` as `count` booleans; None keeps all."""
    if keep is None:
        return [True] * count
    if isinstance(keep, Tensor) and (keep.dim() != 1 or keep.dtype != torch.bool):
        raise ConfigError(f"keep has shape {list(keep.shape)} and dtype {keep.dtype}; expected a bool tensor [{count}]")
    if len(keep) != count:
        raise ConfigError(f"keep has {len(keep)} entries for {count} responses; pass one boolean for each")
    return [bool(kept) for kept in keep]


def check_responses(
    name: str, tensors: Sequence[Tensor] | Tensor, like: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Check a list of floating [R_i] tensors (of the lengths `like`, when given) and return its lengths."""
    if isinstance(tensors, Tensor):
        raise ConfigError(
            f"{name} is one tensor of shape {list(tensors.shape)}; pass a list of [R_i] tensors, unpadded"
        )
    if len(tensors) == 0:
        raise ConfigError(f"{name} is empty; a lane has at least one response")
    if like is not None and len(tensors) != len(like):
        raise ConfigError(
            f"{name} has {len(tensors)} responses and the lane has {len(like)}; "
            f"pick the lane's own: [{name}[i] for i in lane.indices]"
        )
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{name}[{i}] is a {type(tensor).__name__}; give a tensor [R_i]")
        if tensor.dim() != 1 or tensor.numel() == 0:
            raise ConfigError(f"{name}[{i}] has shape {list(tensor.shape)}; expected [R_i] with R_i >= 1")
        if not tensor.is_floating_point():
            raise ConfigError(f"{name}[{i}] has dtype {tensor.dtype}; expected a floating dtype")
        if like is not None and tensor.numel() != like[i]:
            raise ConfigError(
                f"{name}[{i}] has {tensor.numel()} tokens and the lane's response has {like[i]}; "
                f"pick the lane's own: [{name}[i] for i in lane.indices]"
            )
        if tensor.device != tensors[0].device:
            raise ConfigError(f"{name}[{i}] is on {tensor.device} and {name}[0] on {tensors[0].device}; use one device")
    return tuple(tensor.numel() for tensor in tensors)
