"""GroupSize, the three averages, and the entropy bonus."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longstraw.errors import ConfigError
from longstraw.objectives import Aggregation, GroupSize, aggregate, entropy_bonus
from tests.objectives import padded
from tests.objectives.padded import MAX_TOKENS, make_group, pad, partitions

AVERAGES = {
    Aggregation.TOKEN_MEAN: padded.token_mean,
    Aggregation.SEQUENCE_MEAN: padded.sequence_mean,
    Aggregation.FIXED_LENGTH: padded.fixed_length,
}


@pytest.mark.parametrize("how", list(Aggregation))
def test_aggregate_sums_to_the_padded_average_in_every_split(how: Aggregation) -> None:
    values = make_group().logprobs
    size = GroupSize.of(values, max_tokens=MAX_TOKENS)
    want = AVERAGES[how](*pad(values))
    gradients = torch.autograd.grad(want, values)
    for lanes in partitions([0, 1, 2, 3, 4]):
        total = torch.stack([aggregate([values[i] for i in lane], size=size, how=how) for lane in lanes]).sum()
        torch.testing.assert_close(total, want)
        for got, gradient in zip(torch.autograd.grad(total, values), gradients, strict=True):
            torch.testing.assert_close(got, gradient)


def test_total_is_the_size_of_a_step() -> None:
    first = GroupSize.of([torch.zeros(3), torch.zeros(1)], max_tokens=4)
    second = GroupSize.of([torch.zeros(2), torch.zeros(4)], keep=[True, False], max_tokens=4)
    assert GroupSize.total([first, second]) == GroupSize(responses=3, tokens=6, max_tokens=4, filtered=1)
    with pytest.raises(ConfigError, match=r"^sizes is empty"):
        GroupSize.total([])
    with pytest.raises(ConfigError, match=r"^sizes have different max_tokens"):
        GroupSize.total([first, GroupSize(responses=1, tokens=1, max_tokens=5)])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"responses": -1, "tokens": 3}, "responses=-1"),
        ({"responses": 1, "tokens": -3}, "tokens=-3"),
        ({"responses": 1, "tokens": 3, "filtered": -1}, "filtered=-1"),
        ({"responses": 4, "tokens": 3}, "tokens=3 is below responses=4"),
        ({"responses": 2, "tokens": 9, "max_tokens": 4}, "max_tokens=4"),
    ],
)
def test_impossible_sizes_are_named(arguments: dict[str, int], match: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{match}"):
        GroupSize(**arguments)


@pytest.mark.parametrize(
    ("responses", "options", "match"),
    [
        ([], {}, "responses is empty"),
        ([torch.zeros(2), torch.zeros(0)], {}, r"responses\[1\] has shape \[0\]"),
        ([[1, 2]], {}, r"responses\[0\] is a list"),
        ([torch.zeros(2, 2)], {}, r"responses\[0\] has shape \[2, 2\]"),
        ([torch.zeros(5)], {"max_tokens": 4}, r"responses\[0\] has 5 tokens, above max_tokens=4"),
        ([torch.zeros(5)], {"keep": [True, True]}, "keep has 2 entries"),
    ],
)
def test_wrong_responses_are_named(responses: list[Any], options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{match}"):
        GroupSize.of(responses, **options)


def test_a_group_with_nothing_left_is_refused() -> None:
    size = GroupSize.of([torch.zeros(2)], keep=[False])
    with pytest.raises(ConfigError, match="every response was filtered out"):
        aggregate([torch.zeros(2)], size=size, how=Aggregation.TOKEN_MEAN)


def test_an_unknown_average_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^how='mean' is unknown"):
        aggregate([torch.zeros(2)], size=GroupSize(responses=1, tokens=2), how="mean")  # type: ignore[arg-type]


def test_entropy_bonus_raises_entropy() -> None:
    logits = [torch.randn(r, 5, generator=torch.Generator().manual_seed(r)).requires_grad_() for r in (3, 1)]

    def entropies() -> list[torch.Tensor]:
        return [-(x.softmax(-1) * x.log_softmax(-1)).sum(-1) for x in logits]

    size = GroupSize(responses=2, tokens=4)
    bonus = entropy_bonus(entropies(), coef=0.5, size=size, how=Aggregation.SEQUENCE_MEAN)
    mean = (entropies()[0].mean() + entropies()[1].mean()) / 2
    torch.testing.assert_close(bonus, -0.5 * mean)
    bonus.backward()
    before = sum(e.sum() for e in entropies())
    with torch.no_grad():
        for x in logits:
            x -= 0.1 * x.grad
    assert sum(e.sum() for e in entropies()) > before
    with pytest.raises(ConfigError, match=r"^coef=0"):
        entropy_bonus(entropies(), coef=0.0, size=size, how=Aggregation.SEQUENCE_MEAN)
