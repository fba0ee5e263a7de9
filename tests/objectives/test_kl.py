"""KL estimators and penalties: values and expected gradients by enumeration of a whole vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longstraw.errors import ConfigError
from longstraw.objectives import KLEstimator, KLPenalty, kl_estimate


def distributions(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the policy (a leaf), and log-probs of an old and a reference policy, over 6 tokens."""
    generator = torch.Generator().manual_seed(seed)
    policy, old, ref = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    return policy.requires_grad_(), old.log_softmax(0), ref.log_softmax(0)


def expected_gradient(penalty: KLPenalty, logits: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    """The mean over every token drawn from `old`, with the gradient that backward gives for that token."""
    mean = (old.exp() * penalty.per_token(logits.log_softmax(0), old, ref)).sum()
    return torch.autograd.grad(mean, logits)[0]


def reverse_kl_gradient(logits: Tensor, ref: Tensor) -> Tensor:
    logp = logits.log_softmax(0)
    return torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits)[0]


def test_k1_and_k3_have_the_right_mean_and_k2_has_not() -> None:
    logits, _, ref = distributions()
    logp = logits.detach().log_softmax(0)
    exact = (logp.exp() * (logp - ref)).sum()
    means = {e: (logp.exp() * kl_estimate(logp, ref, e)).sum() for e in KLEstimator}
    torch.testing.assert_close(means[KLEstimator.K1], exact)
    torch.testing.assert_close(means[KLEstimator.K3], exact)
    assert not torch.allclose(means[KLEstimator.K2], exact, rtol=0.05)


def test_signs_and_precision() -> None:
    logp, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0])
    assert kl_estimate(logp, ref, KLEstimator.K1).tolist() == [1.0, -1.0]
    assert (kl_estimate(logp, ref, KLEstimator.K2) > 0).all()
    assert (kl_estimate(logp, ref, KLEstimator.K3) > 0).all()
    # e^d - 1 - d in float32 has no digit left here; the true value is d^2 / 2 = 5e-7.
    d = torch.tensor([1e-3])
    torch.testing.assert_close(kl_estimate(torch.zeros(1), d, KLEstimator.K3), d**2 / 2 + d**3 / 6, rtol=1e-3, atol=0)


@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_weighted_penalties_have_the_gradient_of_the_reverse_kl_off_policy(estimator: KLEstimator) -> None:
    logits, old, ref = distributions(1)
    penalty = KLPenalty(coef=0.7, estimator=estimator, importance_weight=True)
    torch.testing.assert_close(expected_gradient(penalty, logits, old, ref), 0.7 * reverse_kl_gradient(logits, ref))


def test_k2_without_weight_has_it_on_policy_only() -> None:
    logits, old, ref = distributions(2)
    penalty, want = KLPenalty(coef=1.0, estimator=KLEstimator.K2), reverse_kl_gradient(logits, ref)
    on_policy = logits.detach().log_softmax(0)
    torch.testing.assert_close(expected_gradient(penalty, logits, on_policy, ref), want)
    assert not torch.allclose(expected_gradient(penalty, logits, old, ref), want, rtol=0.05)


def test_k3_without_weight_has_the_gradient_of_the_forward_kl() -> None:
    logits, _, ref = distributions(3)
    on_policy = logits.detach().log_softmax(0)
    got = expected_gradient(KLPenalty(coef=1.0), logits, on_policy, ref)
    forward = (ref.exp() * (ref - logits.log_softmax(0))).sum()
    torch.testing.assert_close(got, torch.autograd.grad(forward, logits)[0])
    assert not torch.allclose(got, reverse_kl_gradient(logits, ref), rtol=0.05)


def test_k1_without_weight_is_refused_because_it_does_nothing() -> None:
    with pytest.raises(ConfigError, match=r"^estimator=k1 without importance_weight"):
        KLPenalty(coef=0.1, estimator=KLEstimator.K1)
    logits, _, ref = distributions(4)
    logp = logits.log_softmax(0)
    mean = (logp.detach().exp() * kl_estimate(logp, ref, KLEstimator.K1)).sum()
    torch.testing.assert_close(torch.autograd.grad(mean, logits)[0], torch.zeros(6, dtype=torch.float64))


def test_wrong_settings_are_named() -> None:
    for coef in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match=r"^coef="):
            KLPenalty(coef=coef)
    with pytest.raises(ConfigError, match=r"^estimator='k4' is unknown"):
        KLPenalty(coef=0.1, estimator="k4")  # type: ignore[arg-type]
