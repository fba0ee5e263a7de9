"""accelerate: what of an `Accelerator` the runtime can work under, and what it expects of a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from longstraw.errors import UnsupportedModelError

_REFUSED = {
    "MEGATRON_LM": "Megatron-LM; use FSDP2 or DeepSpeed",
    "XLA": "XLA devices; use CUDA devices or CPUs",
    "TP": "tensor parallelism; use FSDP2 or DeepSpeed",
}


def check_accelerator(accelerator: Any) -> None:
    """Refuse what would give wrong gradients.

    Raises:
        UnsupportedModelError: a distributed type that is not supported, or float8 training.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in _REFUSED:
        raise UnsupportedModelError(f"accelerator with distributed type {kind}: {_REFUSED[kind]}")
    if kind == "FSDP" and not getattr(accelerator, "is_fsdp2", False):
        raise UnsupportedModelError(
            "accelerator with FSDP1: set fsdp_version: 2 in the config file, or FullyShardedDataParallelPlugin("
            "fsdp_version=2)"
        )
    if accelerator.mixed_precision == "fp8":
        raise UnsupportedModelError("accelerator with mixed_precision='fp8'; use 'bf16' or 'no'")


def loss_scaling(accelerator: Any) -> Callable[[Tensor], Tensor]:
    """What `Accelerator.backward` does to a loss: a step's share of accumulated steps, and float16's loss scale."""

    def scale(loss: Tensor) -> Tensor:
        if accelerator.gradient_accumulation_steps != 1:
            loss = loss / accelerator.gradient_accumulation_steps
        scaler = getattr(accelerator, "scaler", None)
        return loss if scaler is None else scaler.scale(loss)

    return scale
