"""The load balancing loss cut into passes: its oracle is transformers', and sums over passes are the oracle's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from longstraw.kernels.balance import expert_use, probability_gradient, with_gradient
from longstraw.kernels.balance.naive import naive_balance_loss

LENGTHS = (5, 1, 9)
EXPERTS, TOP_K, ROUTERS = 6, 2, 3


def some_logits(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(sum(LENGTHS), EXPERTS, generator=generator, dtype=torch.float64) for _ in range(ROUTERS)]


def branches() -> Tensor:
    return torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))


def test_the_oracle_is_transformers_own() -> None:
    logits = some_logits()
    weights = torch.tensor([1] * 5 + [0] + [1] * 9)
    theirs = load_balancing_loss_func(tuple(logits), EXPERTS, TOP_K, weights)
    assert float(naive_balance_loss(logits, weights, TOP_K)) == pytest.approx(float(theirs), rel=1e-6)


def test_a_weight_is_a_repeated_row() -> None:
    logits = some_logits()
    weights = torch.tensor([3] * 5 + [1] * 10)
    repeated = [torch.cat([x[:5]] * 3 + [x[5:]]) for x in logits]
    found = naive_balance_loss(logits, weights, TOP_K)
    torch.testing.assert_close(found, naive_balance_loss(repeated, torch.ones(25), TOP_K))


def test_counts_and_sums_give_the_loss_and_its_gradient() -> None:
    logits = [x.requires_grad_() for x in some_logits()]
    weights = torch.tensor([4.0] * 5 + [1.0] * 10)
    expected = naive_balance_loss(logits, weights, TOP_K)
    expected.backward()

    weight_B = torch.tensor([4, 1, 1])
    uses = [expert_use(x, branches(), len(LENGTHS), TOP_K) for x in logits]
    counts_N = (torch.stack([use.counts_BN for use in uses]).sum(0) * weight_B[:, None]).sum(0)
    rows = float(weights.sum()) * ROUTERS
    coefficient_N = EXPERTS * counts_N.double() / rows**2
    value = sum(float((x.softmax(-1) * weights[:, None] @ coefficient_N).sum()) for x in logits)
    assert value == pytest.approx(float(expected))
    for x in logits:
        found = probability_gradient(x.detach(), weights[:, None] * coefficient_N)
        torch.testing.assert_close(found, x.grad)


def test_probabilities_are_summed_over_all_branches() -> None:
    logits = some_logits()[0]
    use = expert_use(logits, branches(), len(LENGTHS), TOP_K)
    torch.testing.assert_close(use.probability_N, logits.softmax(-1).sum(0))
    assert use.counts_BN.sum(1).tolist() == [TOP_K * n for n in LENGTHS]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_logits_are_read_as_transformers_reads_them(dtype: torch.dtype) -> None:
    logits = [x.to(dtype) for x in some_logits()]
    theirs = load_balancing_loss_func(tuple(logits), EXPERTS, TOP_K)
    uses = [expert_use(x, branches(), len(LENGTHS), TOP_K) for x in logits]
    counts_N = sum(use.counts_BN.sum(0) for use in uses)
    sums_N = sum(use.probability_N for use in uses)
    rows = ROUTERS * sum(LENGTHS)
    found = EXPERTS * (counts_N.double() / rows) @ (sums_N / rows)  # type: ignore[union-attr, operator]
    assert float(found) == pytest.approx(float(theirs), rel=1e-5)


class Source:
    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def logits_gradient(self, logits_SN: Tensor) -> Tensor | None:
        return self.gradient


def test_the_gradient_enters_by_a_backward_of_zero_and_may_be_known_late() -> None:
    logits, weights = some_logits()[0].requires_grad_(), torch.rand(15, 2, dtype=torch.float64).requires_grad_()
    source = Source()
    out = with_gradient(weights, logits, source)
    assert torch.equal(out, weights)
    source.gradient = torch.ones_like(logits)
    out.backward(torch.zeros_like(out))
    assert torch.equal(logits.grad, source.gradient)  # type: ignore[arg-type]
    assert weights.grad is not None
    assert not weights.grad.any()


def test_no_gradient_is_none() -> None:
    logits, weights = some_logits()[0].requires_grad_(), torch.rand(15, 2, dtype=torch.float64).requires_grad_()
    with_gradient(weights, logits, Source()).sum().backward()
    assert logits.grad is None
