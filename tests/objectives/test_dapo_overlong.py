"""DAPO's overlong filtering and soft overlong punishment."""

from __future__ import annotations

import pytest
import torch

from longstraw.errors import ConfigError
from longstraw.objectives import GroupSize, KLPenalty, PolicyMetrics, dapo_loss, overlong_penalty
from tests.objectives.padded import Group, make_group, pad, partitions, surrogate

KEEP = [True, False, True, False, True]


def lane_loss(group: Group, lane: list[int], size: GroupSize, keep: list[bool] | None):
    return dapo_loss(
        [group.logprobs[i] for i in lane],
        [group.old[i] for i in lane],
        group.advantages[lane],
        size=size,
        keep=None if keep is None else [keep[i] for i in lane],
        ref=[group.ref[i] for i in lane],
        kl=KLPenalty(coef=0.2),
    )


def test_filtered_responses_count_nowhere_in_every_split() -> None:
    group = make_group()
    size = GroupSize.of(group.logprobs, keep=KEEP)
    assert (size.responses, size.tokens, size.filtered) == (3, 12, 2)
    (logp, mask), (old, _), (ref, _) = pad(group.logprobs), pad(group.old), pad(group.ref)
    mask = mask * torch.tensor(KEEP)[:, None]
    d = ref - logp
    values = -surrogate((logp - old).exp(), group.advantages[:, None], 0.2, 0.28, None) + 0.2 * (d.exp() - d - 1)
    want = (values * mask).sum() / mask.sum()
    gradients = torch.autograd.grad(want, group.logprobs)
    for lanes in partitions([0, 1, 2, 3, 4]):
        parts = [lane_loss(group, lane, size, KEEP) for lane in lanes]
        total = torch.stack([part.loss for part in parts]).sum()
        torch.testing.assert_close(total, want)
        # No allow_unused: every response keeps a graph, filtered or not.
        for got, gradient in zip(torch.autograd.grad(total, group.logprobs), gradients, strict=True):
            torch.testing.assert_close(got, gradient)
        metrics = PolicyMetrics.total(part.metrics for part in parts)
        assert metrics.tokens == 12
        torch.testing.assert_close(metrics.ref_kl, ((d.exp() - d - 1) * mask).sum().detach() / 12)


def test_a_filtered_response_with_infinite_log_probs_does_no_harm() -> None:
    group = make_group()
    broken = Group(
        logprobs=[torch.full((3,), -torch.inf, dtype=torch.float64).requires_grad_(), *group.logprobs[1:]],
        old=group.old,
        ref=group.ref,
        advantages=group.advantages,
    )
    keep = [False, True, True, True, True]
    result = lane_loss(broken, [0, 1, 2, 3, 4], GroupSize.of(broken.logprobs, keep=keep), keep)
    for gradient in torch.autograd.grad(result.loss, broken.logprobs):
        assert gradient.isfinite().all()


def test_keep_and_size_must_agree() -> None:
    group = make_group()
    with pytest.raises(ConfigError, match=r"^keep filters 2 responses"):
        lane_loss(group, [0, 1, 2, 3, 4], GroupSize.of(group.logprobs), KEEP)
    with pytest.raises(ConfigError, match=r"^keep is None and size.filtered=2"):
        lane_loss(group, [0, 2], GroupSize.of(group.logprobs, keep=KEEP), None)
    with pytest.raises(ConfigError, match=r"^keep has 4 entries"):
        dapo_loss(group.logprobs, group.old, group.advantages, size=GroupSize(responses=5, tokens=17), keep=KEEP[:4])
    with pytest.raises(ConfigError, match=r"^keep has shape"):
        GroupSize.of(group.logprobs, keep=torch.ones(5))


def test_keep_as_a_tensor() -> None:
    group, keep = make_group(), torch.tensor(KEEP)
    assert GroupSize.of(group.logprobs, keep=keep) == GroupSize.of(group.logprobs, keep=KEEP)


def test_overlong_penalty_is_the_papers_ramp() -> None:
    lengths = torch.tensor([1, 80, 81, 90, 100, 101, 500])
    got = overlong_penalty(lengths, max_tokens=100, buffer_tokens=20)
    torch.testing.assert_close(got, torch.tensor([0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0]))


@pytest.mark.parametrize(
    ("lengths", "buffer", "match"),
    [
        (torch.tensor([1.0]), 5, "lengths"),
        (torch.tensor([[1]]), 5, "lengths"),
        (torch.tensor([1]), 0, "buffer_tokens"),
        (torch.tensor([1]), 11, "buffer_tokens"),
    ],
)
def test_overlong_penalty_names_a_wrong_argument(lengths: torch.Tensor, buffer: int, match: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{match}"):
        overlong_penalty(lengths, max_tokens=10, buffer_tokens=buffer)
