"""Log-probs of given tokens from hidden states, a block of tokens at a time, in both passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


def head_logprobs(
    hidden_TE: Tensor,
    weight_VE: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    *,
    temperature: float,
    block_tokens: int,
    entropy: bool,
    softcap: float | None = None,
) -> Tensor:
    """Log-probs under a linear LM head; the logits exist one block at a time, forward and backward.

    The logits are computed in the head's dtype, as the model itself would, and the softmax in float32 (float64 for a
    float64 head). The weight's gradient is summed over blocks in that wide dtype too.

    Args:
        hidden_TE: [T, hidden_size].
        weight_VE, bias_V: the head, [vocabulary, hidden_size] and [vocabulary] or None.
        targets_T: int64 [T].
        temperature: divides the logits.
        block_tokens: tokens whose logits are held at once.
        entropy: whether to compute the entropy too.
        softcap: c of c * tanh(logit / c), before the temperature (Gemma 2, arXiv 2408.00118, section 2), or None.

    Returns:
        [T, 2] in the wide dtype: log-probs and entropies (nats; zeros unless asked for).
    """
    return _HeadLogprobs.apply(hidden_TE, weight_VE, bias_V, targets_T, temperature, block_tokens, entropy, softcap)


def module_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden_TE: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    block_tokens: int,
    entropy: bool,
    softcap: float | None = None,
) -> Tensor:
    """The same under any head module (a LoRA head, say): each block is a checkpoint of the head's own forward."""

    def block(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = _wide(head(hidden))
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        log_p = logits.div(temperature).log_softmax(-1)
        chosen = log_p.gather(-1, targets[:, None]).squeeze(-1)
        spread = -(log_p.exp() * log_p).sum(-1) if entropy else torch.zeros_like(chosen)
        return torch.stack([chosen, spread], dim=-1)

    blocks = []
    for at in range(0, hidden_TE.shape[0], block_tokens):
        rows = slice(at, at + block_tokens)
        blocks.append(
            checkpoint(block, hidden_TE[rows], targets_T[rows], use_reentrant=False, preserve_rng_state=False)
        )
    return torch.cat(blocks)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _logits(hidden_TE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, softcap: float | None) -> Tensor:
    """Logits [T, vocabulary] in the wide dtype, behind the soft cap."""
    logits = _wide(torch.nn.functional.linear(hidden_TE, weight_VE, bias_V))
    return logits if softcap is None else torch.tanh(logits.div_(softcap)).mul_(softcap)


def _d_logits(
    logits_TV: Tensor,
    targets_T1: Tensor,
    grad_T2: Tensor,
    lse_T1: Tensor,
    entropies_T1: Tensor | None,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """The gradient of the logits before the soft cap. Takes the place of the logits where no entropy is wanted."""
    # d tanh(x) = 1 - tanh(x)^2
    slope = None if softcap is None else (logits_TV / softcap).square_().neg_().add_(1)
    log_p = logits_TV.div_(temperature).sub_(lse_T1)
    p = log_p.exp_() if entropies_T1 is None else log_p.exp()
    if entropies_T1 is None:
        d_scores = p.mul_(-grad_T2[:, :1])
    else:
        d_scores = p * -grad_T2[:, :1]
        # dH/dscore = -p (log p + H)
        d_scores -= p.mul_(log_p.add_(entropies_T1)).mul_(grad_T2[:, 1:])
    d_scores.scatter_add_(1, targets_T1, grad_T2[:, :1])
    if slope is not None:
        d_scores *= slope
    return d_scores.div_(temperature)


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        block_tokens: int,
        entropy: bool,
        softcap: float | None,
    ) -> Tensor:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        result = torch.zeros(hidden.shape[0], 2, dtype=wide, device=hidden.device)
        lse = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
        for at in range(0, hidden.shape[0], block_tokens):
            rows = slice(at, at + block_tokens)
            scores = _logits(hidden[rows], weight, bias, softcap).div_(temperature)
            lse[rows] = scores.logsumexp(-1)
            result[rows, 0] = scores.gather(-1, targets[rows, None]).squeeze(-1) - lse[rows]
            if entropy:
                # H = lse - sum(p * score)
                result[rows, 1] = lse[rows] - (scores - lse[rows, None]).exp_().mul_(scores).sum(-1)
            # Or they would be there beside the next block's.
            del scores
        ctx.save_for_backward(hidden, weight, bias, targets, lse, result[:, 1].clone() if entropy else None)
        ctx.temperature, ctx.block_tokens, ctx.softcap = temperature, block_tokens, softcap
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, lse, entropies = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device) if need_weight else None
        d_bias = torch.zeros(bias.shape, dtype=lse.dtype, device=bias.device) if need_bias else None
        for at in range(0, hidden.shape[0], ctx.block_tokens):
            rows = slice(at, at + ctx.block_tokens)
            d_logits = _d_logits(
                _logits(hidden[rows], weight, bias, ctx.softcap), targets[rows, None], grad[rows], lse[rows, None],
                None if entropies is None else entropies[rows, None], ctx.temperature, ctx.softcap,
            ).to(hidden.dtype)  # fmt: skip
            if d_hidden is not None:
                d_hidden[rows] = d_logits @ weight
            if d_weight is not None:
                d_weight += d_logits.T @ hidden[rows]
            if d_bias is not None:
                d_bias += d_logits.sum(0, dtype=lse.dtype)
            # Or it would be there beside the next block's logits.
            del d_logits
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None, None, None, None, None,
        )  # fmt: skip
