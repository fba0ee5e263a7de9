"""Group advantages against plain Python arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from longstraw.errors import ConfigError
from longstraw.objectives import centered_advantages, leave_one_out_advantages, zscore_advantages

REWARDS = [0.0, 1.0, 0.25, 1.0, -0.5]
ALL = [zscore_advantages, centered_advantages, leave_one_out_advantages]


def test_values() -> None:
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    mean, std = statistics.mean(REWARDS), statistics.stdev(REWARDS)
    got = {f.__name__: f(rewards).tolist() for f in ALL}
    assert got["zscore_advantages"] == pytest.approx([(r - mean) / (std + 1e-6) for r in REWARDS])
    assert got["centered_advantages"] == pytest.approx([r - mean for r in REWARDS])
    others = [REWARDS[:i] + REWARDS[i + 1 :] for i in range(len(REWARDS))]
    assert got["leave_one_out_advantages"] == pytest.approx(
        [r - statistics.mean(rest) for r, rest in zip(REWARDS, others, strict=True)]
    )
    assert zscore_advantages(rewards, eps=0.5).tolist() == pytest.approx([(r - mean) / (std + 0.5) for r in REWARDS])


@pytest.mark.parametrize("advantages", ALL)
def test_equal_rewards_give_exactly_zero(advantages: Callable[[Tensor], Tensor]) -> None:
    rewards = torch.full((3,), 0.1, dtype=torch.float64)
    assert rewards.mean() != rewards[0]  # so subtracting the mean is not enough
    assert advantages(rewards).tolist() == [0.0] * 3


def test_equal_rewards_without_eps_are_not_nan() -> None:
    assert zscore_advantages(torch.ones(3), eps=0.0).tolist() == [0.0] * 3


@pytest.mark.parametrize("advantages", ALL)
def test_dtype_and_graph(advantages: Callable[[Tensor], Tensor]) -> None:
    assert advantages(torch.tensor([0, 1])).dtype == torch.float32
    assert advantages(torch.tensor([False, True])).dtype == torch.float32
    assert advantages(torch.tensor([0.0, 1.0], dtype=torch.float64)).dtype == torch.float64
    assert not advantages(torch.tensor([0.0, 1.0], requires_grad=True)).requires_grad


@pytest.mark.parametrize("advantages", ALL)
@pytest.mark.parametrize(
    "rewards",
    [
        torch.tensor([1.0]),
        torch.tensor([[1.0, 2.0]]),
        torch.tensor([1.0, torch.nan]),
        torch.tensor([1.0, torch.inf]),
        [0.0, 1.0],
    ],
    ids=["one", "matrix", "nan", "inf", "list"],
)
def test_wrong_rewards_are_named(advantages: Callable[[Tensor], Tensor], rewards: Tensor) -> None:
    with pytest.raises(ConfigError, match=r"^rewards"):
        advantages(rewards)


def test_negative_eps_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^eps=-1"):
        zscore_advantages(torch.tensor([0.0, 1.0]), eps=-1.0)
