"""The oracle of the log-prob kernels: the whole logit matrix, written for reading."""

from __future__ import annotations

from torch import Tensor


def naive_logprobs(logits_TV: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs [T] of the targets and entropies [T] of softmax(logits / temperature), in the logits' dtype."""
    log_p = (logits_TV / temperature).log_softmax(-1)
    return log_p.gather(-1, targets_T[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
