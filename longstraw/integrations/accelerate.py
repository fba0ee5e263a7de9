"""accelerate: what of an `Accelerator` the runtime can work under."""

from __future__ import annotations

from typing import Any

from longstraw.errors import ConfigError, UnsupportedModelError


def check_accelerator(accelerator: Any) -> None:
    """Refuse what would be ignored or would give wrong gradients.

    Raises:
        UnsupportedModelError: several processes, or float16 loss scaling.
        ConfigError: gradient accumulation by the accelerator.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if accelerator.num_processes > 1 or kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise UnsupportedModelError(
            f"accelerator with distributed type {kind} on {accelerator.num_processes} process(es): this version "
            "finalizes gradients on one process only; launch with one process and no FSDP or DeepSpeed plugin"
        )
    if getattr(accelerator, "scaler", None) is not None:
        raise UnsupportedModelError(
            "accelerator with mixed_precision='fp16': loss scaling is not supported; use mixed_precision='bf16'"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise ConfigError(
            f"accelerator: gradient_accumulation_steps={accelerator.gradient_accumulation_steps} would be ignored; "
            "set it to 1 and put the groups of one optimizer step inside runtime.accumulate()"
        )
