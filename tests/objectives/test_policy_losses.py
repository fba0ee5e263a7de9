"""GRPO, Dr. GRPO, DAPO, GSPO and CISPO: values and gradients against padded matrices, and sums over lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from longstraw.errors import ConfigError
from longstraw.objectives import (
    Clip,
    GroupSize,
    KLEstimator,
    KLPenalty,
    PolicyMetrics,
    PolicyObjective,
    cispo_loss,
    dapo_loss,
    dr_grpo_loss,
    grpo_loss,
    gspo_loss,
)
from tests.objectives import padded
from tests.objectives.padded import LENGTHS, MAX_TOKENS, Group, make_group, pad

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


@dataclass(frozen=True)
class Case:
    loss: Callable[..., PolicyObjective]
    options: dict[str, Any]
    reference: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # logp, old, A [G, 1], mask
    average: Callable[[Tensor, Tensor], Tensor]


def _token_level(low: float, high: float, dual: float | None, average: Callable[[Tensor, Tensor], Tensor]):
    def reference(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return -average(padded.surrogate((logp - old).exp(), advantages, low, high, dual), mask)

    return reference


def _gspo(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    # The paper's other form: the |o_i|-th root of the ratio of the sequences' likelihoods.
    likelihood = ((logp * mask).sum(1).exp() / (old * mask).sum(1).exp()) ** (1 / mask.sum(1))
    return -padded.surrogate(likelihood, advantages[:, 0], 0.1, 0.2, None).mean()


def _cispo(low: float | None, high: float):
    def reference(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        weight = (logp - old).exp().detach()
        weight = torch.minimum(weight, torch.tensor(1 + high, dtype=weight.dtype))
        if low is not None:
            weight = torch.maximum(weight, torch.tensor(1 - low, dtype=weight.dtype))
        return -padded.token_mean(weight * advantages * logp, mask)

    return reference


CASES = {
    "grpo": Case(grpo_loss, {}, _token_level(0.2, 0.2, None, padded.sequence_mean), padded.sequence_mean),
    "grpo_dual": Case(
        grpo_loss,
        {"clip": Clip(low=0.1, high=0.3, dual=1.2)},
        _token_level(0.1, 0.3, 1.2, padded.sequence_mean),
        padded.sequence_mean,
    ),
    "dr_grpo": Case(dr_grpo_loss, {}, _token_level(0.2, 0.2, None, padded.fixed_length), padded.fixed_length),
    "dapo": Case(dapo_loss, {}, _token_level(0.2, 0.28, None, padded.token_mean), padded.token_mean),
    "gspo": Case(gspo_loss, {"clip": Clip(low=0.1, high=0.2)}, _gspo, padded.sequence_mean),
    "cispo": Case(cispo_loss, {"clip_high": 0.3}, _cispo(None, 0.3), padded.token_mean),
    "cispo_low": Case(cispo_loss, {"clip_high": 0.3, "clip_low": 0.2}, _cispo(0.2, 0.3), padded.token_mean),
}
PENALTIES = [None, *(KLPenalty(coef=0.3, estimator=e) for e in (KLEstimator.K2, KLEstimator.K3))]
PENALTIES += [KLPenalty(coef=0.3, estimator=e, importance_weight=True) for e in KLEstimator]


def call(case: Case, group: Group, indices: list[int], *, size: GroupSize, kl: KLPenalty | None, **extra: Any):
    return case.loss(
        [group.logprobs[i] for i in indices],
        [group.old[i] for i in indices],
        group.advantages[indices],
        size=size,
        kl=kl,
        ref=None if kl is None else [group.ref[i] for i in indices],
        **case.options,
        **extra,
    )


def expected(case: Case, group: Group, kl: KLPenalty | None) -> Tensor:
    (logp, mask), (old, _), (ref, _) = pad(group.logprobs), pad(group.old), pad(group.ref)
    loss = case.reference(logp, old, group.advantages[:, None], mask)
    if kl is not None:
        loss = loss + kl.coef * case.average(padded.kl(logp, old, ref, str(kl.estimator), kl.importance_weight), mask)
    return loss


def whole(group: Group) -> GroupSize:
    return GroupSize.of(group.logprobs, max_tokens=MAX_TOKENS)


@pytest.mark.parametrize("kl", PENALTIES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_match_padded_matrices(name: str, kl: KLPenalty | None) -> None:
    case, group = CASES[name], make_group()
    result = call(case, group, list(range(len(LENGTHS))), size=whole(group), kl=kl)
    reference = expected(case, group, kl)
    torch.testing.assert_close(result.loss, reference, **TIGHT)
    for got, want in zip(
        torch.autograd.grad(result.loss, group.logprobs),
        torch.autograd.grad(reference, group.logprobs),
        strict=True,
    ):
        torch.testing.assert_close(got, want, **TIGHT)
    assert 0 < result.metrics.clip_fraction < 1, "the group must exercise both branches of the clip"


@pytest.mark.parametrize("name", CASES)
def test_every_split_over_lanes_sums_to_the_group(name: str) -> None:
    case, group, kl = CASES[name], make_group(1), KLPenalty(coef=0.1)
    everyone = list(range(len(LENGTHS)))
    one = call(case, group, everyone, size=whole(group), kl=kl)
    want = torch.autograd.grad(one.loss, group.logprobs)
    splits = padded.partitions(everyone)
    assert len(splits) == 52  # Bell(5)
    for lanes in splits:
        parts = [call(case, group, lane, size=whole(group), kl=kl) for lane in lanes]
        total = torch.stack([part.loss for part in parts]).sum()
        torch.testing.assert_close(total, one.loss, **TIGHT)
        for got, gradient in zip(torch.autograd.grad(total, group.logprobs), want, strict=True):
            torch.testing.assert_close(got, gradient, **TIGHT)
        metrics = PolicyMetrics.total(part.metrics for part in parts)
        for field in ("mean_ratio", "clip_fraction", "approx_kl", "ref_kl"):
            torch.testing.assert_close(getattr(metrics, field), getattr(one.metrics, field))


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo"])
def test_a_size_taken_from_the_lane_is_wrong(name: str) -> None:
    """What the explicit size is there for: normalised by themselves, lanes add up to something else."""
    case, group = CASES[name], make_group()
    one = call(case, group, [0, 1, 2, 3, 4], size=whole(group), kl=None).loss
    lanes = [
        call(case, group, lane, size=GroupSize.of([group.logprobs[i] for i in lane]), kl=None).loss
        for lane in ([0, 1], [2, 3, 4])
    ]
    assert not torch.allclose(lanes[0] + lanes[1], one, rtol=1e-2)


@pytest.mark.parametrize("name", ["grpo", "grpo_dual", "dr_grpo", "dapo", "gspo"])
@pytest.mark.parametrize("estimator", [KLEstimator.K2, KLEstimator.K3])
def test_gradient_is_that_of_finite_differences(name: str, estimator: KLEstimator) -> None:
    group = make_group(2)

    def loss(*logprobs: Tensor) -> Tensor:
        moved = Group(logprobs=list(logprobs), old=group.old, ref=group.ref, advantages=group.advantages)
        return call(
            CASES[name],
            moved,
            [0, 1, 2, 3, 4],
            size=whole(group),
            kl=KLPenalty(coef=0.2, estimator=estimator),
        ).loss

    assert torch.autograd.gradcheck(loss, group.logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_first_ratio_is_exactly_one(name: str, dtype: torch.dtype) -> None:
    start = make_group(3)
    logprobs = [x.detach().to(dtype).requires_grad_() for x in start.logprobs]
    group = Group(logprobs=logprobs, old=[x.detach() for x in logprobs], ref=start.ref, advantages=start.advantages)
    result = call(CASES[name], group, [0, 1, 2, 3, 4], size=whole(group), kl=None)
    assert result.metrics.mean_ratio == 1
    assert result.metrics.clipped == 0
    assert result.metrics.approx_kl == 0
    assert result.loss.dtype == torch.promote_types(dtype, torch.float32)
    # On-policy the gradient is REINFORCE's: -A times the token's weight in the average.
    weights = {
        "grpo": [1 / (5 * r) for r in LENGTHS],
        "dapo": [1 / sum(LENGTHS)] * 5,
        "dr_grpo": [1 / 45] * 5,
    }
    weights |= {"gspo": weights["grpo"], "grpo_dual": weights["grpo"]}
    weights |= {"cispo": weights["dapo"], "cispo_low": weights["dapo"]}
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for i, got in enumerate(torch.autograd.grad(result.loss, logprobs)):
        want = torch.full_like(got, float(-start.advantages[i]) * weights[name][i])
        torch.testing.assert_close(got, want, rtol=tolerance, atol=1e-12)


def test_first_ratio_guard_refuses_a_rounded_old() -> None:
    group = make_group()
    rounded = [x.detach().float() for x in group.logprobs]
    with pytest.raises(ConfigError, match=r"old\[0\] is torch.float32"):
        grpo_loss(group.logprobs, rounded, group.advantages, size=whole(group))
    ratios = torch.cat([(a.detach() - b).exp() for a, b in zip(group.logprobs, rounded, strict=True)])
    assert (ratios != 1).any()  # what would happen without the guard


@pytest.mark.parametrize("name", CASES)
def test_responses_of_length_one(name: str) -> None:
    group, case = make_group(4, lengths=(1, 1, 1)), CASES[name]
    result = call(case, group, [0, 1, 2], size=whole(group), kl=None)
    torch.testing.assert_close(result.loss, expected(case, group, None), **TIGHT)


@pytest.mark.parametrize("name", CASES)
def test_zero_advantages_give_a_zero_gradient_with_a_graph(name: str) -> None:
    start = make_group()
    group = Group(logprobs=start.logprobs, old=start.old, ref=start.ref, advantages=torch.zeros(5, dtype=torch.float64))
    result = call(CASES[name], group, [0, 1, 2, 3, 4], size=whole(group), kl=None)
    for gradient in torch.autograd.grad(result.loss, group.logprobs):
        assert not gradient.any()


@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_an_overflowing_ratio_that_is_clipped_has_gradient_zero_not_nan(advantage: float) -> None:
    logprobs, old = torch.tensor([-1.0, -1.0], requires_grad=True), torch.tensor([-120.0, -1.0])
    result = grpo_loss([logprobs], [old], torch.tensor([advantage]), size=GroupSize(responses=1, tokens=2))
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    assert gradient.tolist() == [0.0, -advantage / 2]
    ratio = (logprobs - old).exp()  # the textbook formula
    naive = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    assert torch.autograd.grad(naive, logprobs)[0].isnan().any()


def test_dual_clip_bounds_an_overflowing_ratio_with_negative_advantage() -> None:
    logprobs, old = torch.tensor([-1.0], requires_grad=True), torch.tensor([-120.0])
    size, advantages = GroupSize(responses=1, tokens=1), torch.tensor([-1.0])
    assert grpo_loss([logprobs], [old], advantages, size=size).loss.isinf()
    result = grpo_loss([logprobs], [old], advantages, size=size, clip=Clip(dual=3.0))
    assert result.loss == 3
    assert torch.autograd.grad(result.loss, logprobs)[0] == 0


def test_cispo_keeps_the_gradient_that_grpo_clips() -> None:
    logprobs, old = torch.tensor([-1.0], requires_grad=True), torch.tensor([-3.0])
    size, advantages = GroupSize(responses=1, tokens=1), torch.tensor([1.0])
    clipped = grpo_loss([logprobs], [old], advantages, size=size)
    assert torch.autograd.grad(clipped.loss, logprobs)[0] == 0
    kept = cispo_loss([logprobs], [old], advantages, size=size, clip_high=0.5)
    assert torch.autograd.grad(kept.loss, logprobs)[0] == -1.5
    assert kept.metrics.clip_fraction == 1


def test_metrics_are_detached() -> None:
    group = make_group()
    metrics = grpo_loss(
        group.logprobs, group.old, group.advantages, size=whole(group), ref=group.ref, kl=KLPenalty(coef=1.0)
    ).metrics
    for field in ("ratios", "ratio_sum", "clipped", "tokens", "approx_kl_sum", "ref_kl_sum"):
        assert not getattr(metrics, field).requires_grad
    ratio = torch.cat([(a - b).detach().exp() for a, b in zip(group.logprobs, group.old, strict=True)])
    torch.testing.assert_close(metrics.mean_ratio, ratio.mean())
    torch.testing.assert_close(metrics.approx_kl, (ratio - 1 - ratio.log()).mean())
    advantages = torch.repeat_interleave(group.advantages, torch.tensor(LENGTHS))
    clipped = ((ratio > 1.2) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
    assert metrics.clipped == clipped.sum()
    with pytest.raises(ConfigError, match="with and without a KL penalty"):
        metrics + grpo_loss(group.logprobs, group.old, group.advantages, size=whole(group)).metrics


@pytest.mark.parametrize("name", CASES)
def test_wrong_arguments_are_named(name: str) -> None:
    case, group = CASES[name], make_group()
    size = whole(group)

    def run(logprobs: Any = None, old: Any = None, advantages: Any = None, **extra: Any) -> None:
        case.loss(
            group.logprobs if logprobs is None else logprobs,
            group.old if old is None else old,
            group.advantages if advantages is None else advantages,
            **{"size": size, **case.options, **extra},
        )

    for match, arguments in [
        (r"^logprobs is empty", {"logprobs": []}),
        (r"^logprobs is one tensor", {"logprobs": torch.zeros(5, 7)}),
        (r"^logprobs\[1\] has shape \[0\]", {"logprobs": [*group.logprobs[:1], torch.zeros(0)]}),
        (r"^logprobs\[0\] has dtype torch.int64", {"logprobs": [torch.ones(3).long()]}),
        (r"^old has 4 responses and the lane has 5", {"old": group.old[:4]}),
        (r"^old\[2\] has 6 tokens", {"old": [*group.old[:2], group.old[2][:-1], *group.old[3:]]}),
        (r"^old\[0\] requires grad", {"old": group.logprobs}),
        (r"^old\[0\] is a list", {"old": [[0.0] * len(x) for x in group.old]}),
        (r"^advantages is a list", {"advantages": group.advantages.tolist()}),
        (r"^advantages has shape \[4\]", {"advantages": group.advantages[:4]}),
        (r"^advantages has shape \[5, 1\]", {"advantages": group.advantages[:, None]}),
        (r"^advantages has dtype torch.int64", {"advantages": torch.ones(5).long()}),
        (r"^ref is given without kl", {"ref": group.ref}),
        (r"^kl is given without ref", {"kl": KLPenalty(coef=0.1)}),
        (r"^ref has 3 responses", {"ref": group.ref[:3], "kl": KLPenalty(coef=0.1)}),
        (r"^ref\[0\] requires grad", {"ref": group.logprobs, "kl": KLPenalty(coef=0.1)}),
        (r"^size has 4 responses", {"size": GroupSize(responses=4, tokens=17, max_tokens=9)}),
        (r"^size has 5 responses and 16 tokens", {"size": GroupSize(responses=5, tokens=16, max_tokens=9)}),
    ]:
        with pytest.raises(ConfigError, match=match):
            run(**arguments)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "cispo"])
def test_losses_without_a_mask_refuse_a_filtered_size(name: str) -> None:
    group = make_group()
    size = GroupSize(responses=4, tokens=17, max_tokens=9, filtered=1)
    with pytest.raises(ConfigError, match=r"size.filtered=1"):
        call(CASES[name], group, [0, 1], size=size, kl=None)


def test_dr_grpo_needs_the_budget() -> None:
    group = make_group()
    with pytest.raises(ConfigError, match=r"size.max_tokens is None"):
        dr_grpo_loss(group.logprobs, group.old, group.advantages, size=GroupSize.of(group.logprobs))


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"low": 0.0}, "low"), ({"low": 1.5}, "low"), ({"high": 0.0}, "high"), ({"dual": 1.0}, "dual")],
)
def test_clip_bounds_are_checked(settings: dict[str, float], match: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{match}="):
        Clip(**settings)


@pytest.mark.parametrize("settings", [{"clip_high": 0.0}, {"clip_high": 1.0, "clip_low": 1.5}])
def test_cispo_bounds_are_checked(settings: dict[str, float]) -> None:
    group = make_group()
    with pytest.raises(ConfigError, match=r"^clip_"):
        cispo_loss(group.logprobs, group.old, group.advantages, size=whole(group), **settings)
