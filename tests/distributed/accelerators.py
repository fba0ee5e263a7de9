"""Accelerators on CPUs: accelerate itself shards on GPUs and their like only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

from tests.distributed.steps import CLIP

_BACKEND = PartialState._prepare_backend


def _on_cpu(self: Any, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
    """In the place of accelerate's choice of a backend: gloo, taken for what it takes GPUs for."""
    return "gloo", DistributedType.MULTI_GPU


@contextmanager
def accelerator(kind: str, **options: Any) -> Iterator[Accelerator]:
    """An `Accelerator` for "ddp", "fsdp2" or "zero-3", and its global state undone afterwards."""
    before = dict(os.environ)
    if kind != "ddp":
        PartialState._prepare_backend = _on_cpu
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    try:
        if kind == "ddp":
            yield Accelerator(cpu=True, **options)
        elif kind == "fsdp2":
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
                state_dict_type="SHARDED_STATE_DICT",
                cpu_ram_efficient_loading=False,
            )
            yield Accelerator(fsdp_plugin=plugin, **options)
        else:
            import deepspeed

            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": CLIP,
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            }
            yield Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), **options)
    finally:
        PartialState._prepare_backend = _BACKEND
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
