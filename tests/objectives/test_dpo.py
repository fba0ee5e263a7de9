"""DPO and IPO: values and gradients by a second way, also where a pair is split over lanes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from longstraw.errors import ConfigError
from longstraw.objectives import PreferenceLoss, PreferenceMetrics, PreferenceObjective, dpo_loss
from tests.objectives.padded import Group, make_group, pad, partitions

# Response 0 is in two pairs; every response is in one at least.
PAIRS = [(0, 1), (2, 3), (4, 0)]
VARIANTS = [
    {"beta": 0.1},
    {"beta": 0.7, "label_smoothing": 0.2},
    {"beta": 0.4, "variant": PreferenceLoss.SQUARED},
]


def reference(group: Group, *, beta: float, label_smoothing: float = 0.0, variant: Any = None) -> Tensor:
    (logp, mask), (ref, _) = pad(group.logprobs), pad(group.ref)
    sums = ((logp - ref) * mask).sum(1)
    losses = []
    for w, l in PAIRS:  # noqa: E741
        h = sums[w] - sums[l]
        if variant is PreferenceLoss.SQUARED:
            losses.append((h - 1 / (2 * beta)) ** 2)
        else:
            p = 1 / (1 + torch.exp(-beta * h))
            losses.append(-(1 - label_smoothing) * torch.log(p) - label_smoothing * torch.log(1 - p))
    return sum(losses) / 4


def run(group: Group, lane: list[int], **options: Any) -> PreferenceObjective:
    return dpo_loss(
        [group.logprobs[i] for i in lane],
        **{
            "indices": lane,
            "ref": group.ref,
            "pairs": PAIRS,
            "num_pairs": 4,
            "scored": [x.detach() for x in group.logprobs],
            **options,
        },
    )


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_every_split_matches_the_padded_reference(options: dict[str, Any]) -> None:
    group = make_group()
    want = reference(group, **options)
    gradients = torch.autograd.grad(want, group.logprobs)
    one = run(group, [0, 1, 2, 3, 4], **options).metrics
    for lanes in partitions([0, 1, 2, 3, 4]):
        parts = [run(group, lane, **options) for lane in lanes]
        total = torch.stack([part.loss for part in parts]).sum()
        torch.testing.assert_close(total, want, rtol=1e-12, atol=1e-12)
        for got, gradient in zip(torch.autograd.grad(total, group.logprobs), gradients, strict=True):
            torch.testing.assert_close(got, gradient, rtol=1e-12, atol=1e-12)
        metrics = PreferenceMetrics.total(part.metrics for part in parts)
        assert metrics.pairs == 3
        assert metrics.drift == 0
        for field in ("chosen_reward", "rejected_reward", "accuracy"):
            torch.testing.assert_close(getattr(metrics, field), getattr(one, field))


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_gradient_is_that_of_finite_differences(options: dict[str, Any]) -> None:
    group = make_group(1)

    def loss(*logprobs: Tensor) -> Tensor:
        return dpo_loss(logprobs, indices=range(5), ref=group.ref, pairs=PAIRS, num_pairs=3, **options).loss

    assert torch.autograd.gradcheck(loss, group.logprobs)


def test_policy_equal_to_reference_gives_log_two() -> None:
    logprobs = [torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-3.0], requires_grad=True)]
    result = dpo_loss(
        logprobs, indices=[0, 1], ref=[x.detach() for x in logprobs], pairs=[(0, 1)], num_pairs=1, beta=0.3
    )
    assert result.loss.item() == pytest.approx(math.log(2))
    result.loss.backward()
    assert logprobs[0].grad.tolist() == pytest.approx([-0.15, -0.15])
    assert logprobs[1].grad.tolist() == pytest.approx([0.15])


def test_metrics() -> None:
    group = make_group()
    metrics = run(group, [0, 1, 2, 3, 4], beta=0.5).metrics
    reward = [0.5 * (x.detach() - r).sum() for x, r in zip(group.logprobs, group.ref, strict=True)]
    torch.testing.assert_close(metrics.chosen_reward, (reward[0] + reward[2] + reward[4]) / 3)
    torch.testing.assert_close(metrics.rejected_reward, (reward[1] + reward[3] + reward[0]) / 3)
    correct = sum(float(reward[chosen] > reward[rejected]) for chosen, rejected in PAIRS)
    assert metrics.accuracy.item() == pytest.approx(correct / 3)
    assert not metrics.chosen_sum.requires_grad


def test_drift_shows_scores_from_other_weights_and_they_do_spoil_split_pairs() -> None:
    group = make_group()
    stale = [x.detach() + 0.5 for x in group.logprobs]
    stale[0] = stale[0] - 1
    parts = [run(group, [0, 2, 4], scored=stale), run(group, [1, 3], scored=stale)]
    assert PreferenceMetrics.total(part.metrics for part in parts).drift == pytest.approx(0.5)
    want = torch.autograd.grad(reference(group, beta=0.1), group.logprobs)
    got = torch.autograd.grad(parts[0].loss + parts[1].loss, group.logprobs)
    assert not all(torch.allclose(a, b, rtol=1e-3) for a, b in zip(got, want, strict=True))


def test_without_scores_a_whole_pair_is_fine_and_a_split_one_is_refused() -> None:
    group = make_group()
    whole = run(group, [2, 3], scored=None)
    assert whole.metrics.drift is None
    torch.testing.assert_close(whole.loss, run(group, [2, 3]).loss)
    with pytest.raises(ConfigError, match=r"^pairs holds \(2, 3\), whose sides are in different lanes"):
        run(group, [2], scored=None)
    with pytest.raises(ConfigError, match="with and without scored"):
        whole.metrics + run(group, [2, 3]).metrics


def test_wrong_arguments_are_named() -> None:
    group = make_group()
    lane = [0, 1, 2, 3, 4]
    for match, options in [
        ("beta=0", {"beta": 0}),
        ("label_smoothing=0.5", {"label_smoothing": 0.5}),
        ("label_smoothing=0.1 would be ignored", {"label_smoothing": 0.1, "variant": PreferenceLoss.SQUARED}),
        ("variant='hinge' is unknown", {"variant": "hinge"}),
        ("num_pairs=2 is below this group's 3 pairs", {"num_pairs": 2}),
        (r"indices=\[0, 1\] must name 5", {"indices": [0, 1]}),
        (r"indices=\[0, 0, 1, 2, 3\]", {"indices": [0, 0, 1, 2, 3]}),
        (r"pairs holds \(0, 0\)", {"pairs": [(0, 0)]}),
        (r"pairs holds \(0, 5\).*which has 5 responses by ref", {"pairs": [(0, 5)]}),
        (r"pairs leaves out responses \[2, 3\]", {"pairs": [(0, 1), (4, 0)]}),
        (r"ref\[0\] has 2 tokens", {"ref": [group.ref[0][:-1], *group.ref[1:]]}),
        (r"ref\[0\] requires grad", {"ref": group.logprobs}),
        (r"scored has 4 responses and ref 5", {"scored": group.old[:4]}),
        (r"scored\[0\] requires grad", {"scored": group.logprobs}),
        (r"scored\[1\] has 2 tokens", {"scored": [group.old[0], torch.zeros(2).double(), *group.old[2:]]}),
    ]:
        with pytest.raises(ConfigError, match=rf"^{match}"):
            run(group, lane, **options)
    with pytest.raises(ConfigError, match=r"^ref has 3 responses and the lane holds branch 3"):
        run(group, lane, ref=group.ref[:3])
    with pytest.raises(ConfigError, match=r"^logprobs is empty"):
        run(group, [])
