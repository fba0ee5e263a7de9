"""Block-wise log-probs against the whole logit matrix, values and gradients."""

from __future__ import annotations

import pytest
import torch

from longstraw.kernels.logprobs import blocks_held, head_logprobs, module_logprobs
from longstraw.kernels.logprobs.naive import naive_logprobs
from tests.live_bytes import LiveBytes

TOKENS, HIDDEN, VOCABULARY = 23, 12, 41


def inputs(bias: bool) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=bias).double()
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    return head, hidden, torch.randint(VOCABULARY, (TOKENS,)), torch.randn(TOKENS, 2, dtype=torch.float64)


@pytest.mark.parametrize("block", [1, 7, 23, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("generic", [False, True])
def test_values_and_gradients(
    block: int, temperature: float, bias: bool, entropy: bool, softcap: float | None, generic: bool
) -> None:
    head, hidden, targets, grad = inputs(bias)
    options = {"temperature": temperature, "block_tokens": block, "entropy": entropy, "softcap": softcap}
    if generic:
        got = module_logprobs(head, hidden, targets, **options)  # type: ignore[arg-type]
    else:
        got = head_logprobs(hidden, head.weight, head.bias, targets, **options)  # type: ignore[arg-type]
    leaves = [hidden, *head.parameters()]
    got_grads = torch.autograd.grad(got, leaves, grad)
    logits = head(hidden) if softcap is None else softcap * torch.tanh(head(hidden) / softcap)
    chosen, spread = naive_logprobs(logits, targets, temperature)
    torch.testing.assert_close(got[:, 0], chosen)
    total = (chosen * grad[:, 0]).sum()
    if entropy:
        torch.testing.assert_close(got[:, 1], spread)
        total = total + (spread * grad[:, 1]).sum()
    else:
        assert not got[:, 1].any()
    for g, want in zip(got_grads, torch.autograd.grad(total, leaves), strict=True):
        torch.testing.assert_close(g, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("generic", [False, True])
def test_no_tokens_by_vocabulary_matrix_is_saved(generic: bool) -> None:
    head, hidden, targets, _ = inputs(bias=False)
    saved: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        if generic:
            module_logprobs(head, hidden, targets, temperature=1.0, block_tokens=4, entropy=True)
        else:
            head_logprobs(hidden, head.weight, None, targets, temperature=1.0, block_tokens=4, entropy=True)
    assert max(saved, default=0) < TOKENS * VOCABULARY


def test_a_frozen_head_gets_no_gradient() -> None:
    head, hidden, targets, grad = inputs(bias=False)
    head.weight.requires_grad_(False)
    out = head_logprobs(hidden, head.weight, None, targets, temperature=1.0, block_tokens=5, entropy=False)
    out.backward(grad)
    assert head.weight.grad is None
    assert hidden.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("linear", [True, False])
def test_as_many_blocks_are_there_together_as_is_said(
    linear: bool, entropy: bool, softcap: float | None, dtype: torch.dtype
) -> None:
    """In the wide dtype, with what single operators need beside them, however many blocks a pass has."""
    tokens, hidden, vocabulary, block = 64, 4, 5000, 16
    torch.manual_seed(0)
    rows = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    head = torch.nn.Linear(hidden, vocabulary, bias=False, dtype=dtype).requires_grad_(False)
    targets = torch.randint(vocabulary, (tokens,))
    options = {"temperature": 0.9, "block_tokens": block, "entropy": entropy, "softcap": softcap}
    with LiveBytes() as live:
        if linear:
            out = head_logprobs(rows, head.weight, None, targets, **options)  # type: ignore[arg-type]
        else:
            out = module_logprobs(head, rows, targets, **options)  # type: ignore[arg-type]
        out.sum().backward()
    unit = block * vocabulary * (8 if dtype == torch.float64 else 4)
    said = blocks_held(linear=linear, entropy=entropy, softcap=softcap is not None)
    assert said - 1 < live.peak / unit < said + 0.1


def test_a_gradient_of_the_gradient_is_refused() -> None:
    head, hidden, targets, _ = inputs(bias=False)
    out = head_logprobs(hidden, head.weight, None, targets, temperature=1.0, block_tokens=5, entropy=True)
    (grad,) = torch.autograd.grad(out.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
