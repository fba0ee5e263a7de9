"""What the policy-gradient losses share: a lane's inputs, checked and laid end to end, and the final sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.errors import ConfigError
from longstraw.objectives.kl import KLPenalty, kl_estimate
from longstraw.objectives.metrics import PolicyMetrics, PolicyObjective
from longstraw.objectives.size import Aggregation, GroupSize, check_responses, per_token, token_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneTokens:
    """A lane's n responses end to end, T tokens, float32 or wider; only `logprobs_T` has a graph."""

    lengths: tuple[int, ...]
    logprobs_T: Tensor
    old_T: Tensor
    ref_T: Tensor | None
    advantages_N: Tensor
    kl: KLPenalty | None

    @classmethod
    def gather(
        cls,
        logprobs: Sequence[Tensor],
        old: Sequence[Tensor],
        advantages: Tensor,
        ref: Sequence[Tensor] | None,
        kl: KLPenalty | None,
    ) -> LaneTokens:
        """Check the arguments that every policy loss takes; a ConfigError names the one at fault."""
        lengths = check_responses("logprobs", logprobs)
        check_responses("old", old, like=lengths)
        if (ref is None) != (kl is None):
            given, missing = ("ref", "kl") if kl is None else ("kl", "ref")
            raise ConfigError(f"{given} is given without {missing} and would be ignored; pass both, or neither")
        if ref is not None:
            check_responses("ref", ref, like=lengths)
        for name, tensors in (("old", old), ("ref", ref or [])):
            for i, tensor in enumerate(tensors):
                if tensor.requires_grad:
                    raise ConfigError(f"{name}[{i}] requires grad; pass scored log-probs, or {name}[{i}].detach()")
                if tensor.device != logprobs[0].device:
                    raise ConfigError(f"{name}[{i}] is on {tensor.device} and logprobs on {logprobs[0].device}")
        for i, (live, scored) in enumerate(zip(logprobs, old, strict=True)):
            if live.dtype != scored.dtype:
                # A rounded copy would make the first ratio differ from 1, unseen.
                raise ConfigError(f"old[{i}] is {scored.dtype} and logprobs[{i}] {live.dtype}; score in the same dtype")
        n = len(lengths)
        if not isinstance(advantages, Tensor):
            raise ConfigError(
                f"advantages is a {type(advantages).__name__}; pick the lane's own of a tensor [G]: "
                "torch.tensor(advantages)[list(lane.indices)]"
            )
        if advantages.shape != (n,):
            raise ConfigError(
                f"advantages has shape {list(advantages.shape)} and the lane has {n} responses; "
                "pick the lane's own: advantages[list(lane.indices)]"
            )
        if not advantages.is_floating_point() or advantages.requires_grad:
            raise ConfigError(
                f"advantages has dtype {advantages.dtype} and requires_grad={advantages.requires_grad}; "
                "pass a floating tensor without graph"
            )
        dtype = torch.promote_types(logprobs[0].dtype, torch.float32)
        return cls(
            lengths=lengths,
            logprobs_T=torch.cat(list(logprobs)).to(dtype),
            old_T=torch.cat(list(old)).to(dtype),
            ref_T=None if ref is None else torch.cat(list(ref)).to(dtype),
            advantages_N=advantages.to(device=logprobs[0].device, dtype=dtype),
            kl=kl,
        )

    def log_ratio(self) -> Tensor:
        """log (policy / old) of each token [T], with graph."""
        return self.logprobs_T - self.old_T

    def token_advantages(self) -> Tensor:
        """Each token's response's advantage [T]."""
        return per_token(self.advantages_N, self.lengths)

    def mean_over_tokens(self, values_T: Tensor) -> Tensor:
        """The mean of each response's tokens: [T] to [n], in a fixed order of summation."""
        return torch.stack([part.mean() for part in values_T.split(self.lengths)])


def refuse_filtered(size: GroupSize, loss: str) -> None:
    """Raise if `size` leaves out responses that a loss without `keep` would still count."""
    if size.filtered:
        raise ConfigError(
            f"size.filtered={size.filtered}, but {loss} has no mask; leave filtered responses out of replay, "
            "and build the size from those that are replayed"
        )


def token_objective(
    lane: LaneTokens, objective_T: Tensor, clipped_T: Tensor, *, size: GroupSize, how: Aggregation
) -> PolicyObjective:
    """The loss whose per-token objective (to be maximised) is `objective_T`, less the KL penalty."""
    weights_T = per_token(token_weights(lane.lengths, size=size, how=how, like=lane.logprobs_T), lane.lengths)
    loss = -(objective_T * weights_T).sum()
    ratio_T = lane.log_ratio().detach().exp()
    return finish(lane, loss, ratio_T, clipped_T, weights_T)


def finish(lane: LaneTokens, loss: Tensor, ratios: Tensor, clipped: Tensor, weights_T: Tensor) -> PolicyObjective:
    """Add the KL penalty under the given token weights, and measure."""
    ref_kl_sum = None
    if lane.kl is not None and lane.ref_T is not None:
        loss = loss + (lane.kl.per_token(lane.logprobs_T, lane.old_T, lane.ref_T) * weights_T).sum()
        ref_kl_sum = kl_estimate(lane.logprobs_T.detach(), lane.ref_T, lane.kl.estimator).sum()
    log_ratio_T = lane.log_ratio().detach()
    metrics = PolicyMetrics(
        ratios=torch.tensor(ratios.numel(), device=ratios.device),
        ratio_sum=ratios.sum(),
        clipped=clipped.sum(),
        tokens=torch.tensor(log_ratio_T.numel(), device=ratios.device),
        approx_kl_sum=(torch.expm1(log_ratio_T) - log_ratio_T).sum(),
        ref_kl_sum=ref_kl_sum,
    )
    return PolicyObjective(loss=loss, metrics=metrics)
