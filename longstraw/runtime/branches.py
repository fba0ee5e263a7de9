"""Checks on the prompts and responses that a user hands over, and their packing into rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longstraw.runtime.upload import upload


def check_prompt(prompt_ids: Tensor, vocab_size: int) -> Tensor:
    """The prompt as int64 [P] on the CPU.

    Raises:
        TypeError, ValueError: it is no integer tensor of one dimension, is empty, or holds ids outside the vocabulary.
    """
    return _check_ids("prompt_ids", prompt_ids, vocab_size)


def check_responses(responses: Sequence[Tensor], vocab_size: int) -> list[Tensor]:
    """The responses as int64 [R_i] on the CPU.

    Raises:
        TypeError, ValueError: there is none, or one of them is not what `check_prompt` asks of a prompt.
    """
    if isinstance(responses, Tensor):
        raise TypeError(
            f"responses is one tensor of shape {tuple(responses.shape)}; give a list of unpadded tensors [R_i]"
        )
    if not responses:
        raise ValueError("responses is empty; give at least one tensor of token ids")
    return [_check_ids(f"responses[{i}]", response, vocab_size) for i, response in enumerate(responses)]


def _check_ids(name: str, ids: Tensor, vocab_size: int) -> Tensor:
    if not isinstance(ids, Tensor):
        raise TypeError(f"{name} is a {type(ids).__name__}; give an int64 tensor of token ids")
    if ids.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(ids.shape)}; give one unpadded row, [tokens]")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} has dtype {ids.dtype}; token ids are int64")
    if ids.numel() == 0:
        raise ValueError(f"{name} is empty; it needs at least one token")
    # A copy: the sweep, or a retry, reads them long after the call, when the caller may have reused the tensor.
    ids = ids.detach().to("cpu", torch.int64, copy=True)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        outside = low if low < 0 else high
        raise ValueError(f"{name} holds token id {outside}, outside the model's vocabulary of {vocab_size}")
    return ids


class PackedBranches:
    """Branches one after another in a single row: what the model reads and what it must predict.

    A branch's first input is the prompt's last token, whose logits predict the response's first token, so a branch
    has as many rows as its response has tokens; and one more if it is `whole`, for the response's last token, which
    predicts nothing but is routed to experts in the ordinary step.

    Attributes:
        lengths: rows of each branch.
        input_ids_S, positions_S, targets_S: int64 [S], on `device`.
    """

    def __init__(
        self,
        last_prompt_token: Tensor,
        prompt_tokens: int,
        responses: Sequence[Tensor],
        device: torch.device,
        *,
        whole: bool = False,
    ) -> None:
        self._whole = whole
        self.lengths = tuple(len(response) + whole for response in responses)
        inputs, positions, targets = [], [], []
        for response, rows in zip(responses, self.lengths, strict=True):
            inputs.append(torch.cat([last_prompt_token.view(1), response])[:rows])
            positions.append(torch.arange(prompt_tokens - 1, prompt_tokens - 1 + rows, device="cpu"))
            # Any token will do for the row that predicts nothing.
            targets.append(torch.cat([response, response[:1]])[:rows])
        self.input_ids_S = upload(torch.cat(inputs), device)
        self.positions_S = upload(torch.cat(positions), device)
        self.targets_S = upload(torch.cat(targets), device)

    def answers(self, packed_SC: Tensor) -> Tensor:
        """Of a row for each input, those that predict the responses' tokens."""
        if not self._whole:
            return packed_SC
        return torch.cat([branch[:-1] for branch in packed_SC.split(self.lengths)])
