"""Which experts can go through grouped matrix products, and what to run where they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

GROUPED, LOOP = "grouped_mm", "eager"
"""transformers' names of two implementations: one product for all experts, which is its default, and a loop."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STRIDE_BYTES = 16
"""`torch.nn.functional.grouped_mm` wants rows that begin at multiples of this, in the backward too: of weights,
activations and gradients."""


def refuses_grouped(model: PreTrainedModel, dtype: torch.dtype | None = None) -> str | None:
    """Why the model's experts cannot go through grouped products in training, or None.

    Args:
        dtype: of weights and activations; None takes the weights' own.
    """
    for name, module in model.named_modules():
        # What transformers' own decorator of experts leaves on a module.
        if not hasattr(module, "is_transposed"):
            continue
        for key, weight in module.named_parameters(recurse=False):
            if weight.dim() != 3:
                continue
            kind = dtype or weight.dtype
            if kind not in _DTYPES:
                return f"torch's grouped products take no {_plain(kind)}"
            odd = next((size for size in weight.shape[1:] if size * kind.itemsize % _STRIDE_BYTES), None)
            if odd is not None:
                return (
                    f"torch's grouped products take widths of whole {_STRIDE_BYTES} bytes, and {name}.{key} has one of "
                    f"{odd} in {_plain(kind)}"
                )
    return None


def loop_where_needed(model: PreTrainedModel) -> str | None:
    """Switch the model's experts from grouped products to the loop if the products cannot take them.

    Returns why, or None if nothing was switched.
    """
    if not model._can_set_experts_implementation() or model.config._experts_implementation != GROUPED:
        return None
    reason = refuses_grouped(model)
    if reason is not None:
        model.set_experts_implementation(LOOP)
    return reason


class AnyGroup(TorchFunctionMode):
    """Within it a grouped product multiplies all rows by one expert's matrix, in every dtype and width.

    For tensors that have shapes and no memory: the result's shape, and what autograd keeps, do not depend on how tokens
    are routed, and torch's own checks of such tensors are narrower than its kernels.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._grouped_mm:
            rows_SK: Tensor = args[0]
            matrices_EKN: Tensor = args[1]
            return rows_SK @ matrices_EKN[0]
        return func(*args, **(kwargs or {}))


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
