"""Modes of torch under which no transaction can run."""

from __future__ import annotations

import torch

from longstraw.errors import TransactionStateError


def refuse_inference_mode(call: str) -> None:
    """Raises TransactionStateError inside `torch.inference_mode()`: what is made there can never have a gradient, and a
    model that is looked at there seems to have nothing that is trained."""
    if torch.is_inference_mode_enabled():
        raise TransactionStateError(f"{call}: torch.inference_mode() is on; use torch.no_grad() around it, or nothing")
