"""Lets accelerate shard on CPUs, so that the examples can be tried on a machine without GPUs."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType


def shard_on_cpus() -> None:
    """Where there is no GPU: gloo and the CPU in the place of NCCL and GPUs.

    accelerate offers FSDP and DeepSpeed on GPUs and their like only, and goes on without them, and without a word, on
    a CPU. Call it before `Accelerator()`. It replaces a private method of accelerate; with GPUs it does nothing.
    """
    asked = [os.environ.get(name) == "true" for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")]
    if torch.cuda.is_available():
        return
    if not any(asked):
        os.environ["ACCELERATE_USE_CPU"] = "true"
        return
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ["DS_ACCELERATOR"] = "cpu"

    def gloo(self: Any, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = gloo
    if asked[1]:
        import deepspeed

        # A collective of DeepSpeed's own for CPUs, compiled at first use; gloo serves as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
