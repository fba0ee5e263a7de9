"""Advantages from the rewards of one whole group, computed before any lane is replayed."""

from __future__ import annotations

import torch
from torch import Tensor

from longstraw.errors import ConfigError


def zscore_advantages(rewards: Tensor, *, eps: float = 1e-6) -> Tensor:
    """GRPO's advantages (arXiv 2402.03300, section 4.1.2): (r_i - mean(r)) / (std(r) + eps).

    std is the sample standard deviation (divided by G - 1), as common implementations take it; the paper does
    not say. Equal rewards give advantages of exactly 0: such a group has no gradient and needs no replay.

    Args:
        rewards: [G] of the *whole* group, any real dtype.
        eps: keeps a tiny std from blowing rounding noise up; not below 0.

    Returns:
        [G], in the dtype of `rewards` if that is floating, else float32; no graph.

    Raises:
        ConfigError: `rewards` is no tensor, not [G] with G >= 2, or not finite; or `eps` is below 0.
    """
    if not eps >= 0:
        raise ConfigError(f"eps={eps} must be at least 0")
    centered = _centered(rewards)
    std = centered.square().sum().div(rewards.numel() - 1).sqrt()
    if std == 0:
        return centered.to(_result_dtype(rewards))
    return (centered / (std + eps)).to(_result_dtype(rewards))


def centered_advantages(rewards: Tensor) -> Tensor:
    """Dr. GRPO's advantages (arXiv 2503.20783, section 3.2): r_i - mean(r).

    Argument, result and errors are those of `zscore_advantages`, without `eps`.
    """
    return _centered(rewards).to(_result_dtype(rewards))


def leave_one_out_advantages(rewards: Tensor) -> Tensor:
    """RLOO's advantages (arXiv 2402.14740): r_i minus the mean of the other G - 1 rewards.

    Equal to G / (G - 1) times `centered_advantages`, whose argument, result and errors these are.
    """
    centered = _centered(rewards)
    count = rewards.numel()
    return (centered * (count / (count - 1))).to(_result_dtype(rewards))


def _centered(rewards: Tensor) -> Tensor:
    if not isinstance(rewards, Tensor):
        raise ConfigError(f"rewards is a {type(rewards).__name__}; give a tensor [G]: torch.tensor(rewards)")
    if rewards.dim() != 1 or rewards.numel() < 2:
        raise ConfigError(
            f"rewards has shape {list(rewards.shape)}; expected [G] with G >= 2: "
            "one response has nothing to be compared with"
        )
    if rewards.is_complex():
        raise ConfigError(f"rewards has dtype {rewards.dtype}; expected a real dtype")
    values = rewards.detach().double()
    if not torch.isfinite(values).all():
        raise ConfigError(f"rewards={rewards.tolist()} has a value that is not finite; fix the reward function")
    # Equal rewards must give exactly 0, and the mean of equal floats need not be equal to them.
    return torch.zeros_like(values) if values.min() == values.max() else values - values.mean()


def _result_dtype(rewards: Tensor) -> torch.dtype:
    return rewards.dtype if rewards.is_floating_point() else torch.float32
