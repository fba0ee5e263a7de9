"""accelerate's loop on top of DDP, FSDP2 and ZeRO-3: clipping, steps, checkpoints, accumulated steps."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from longstraw import Runtime
from longstraw.errors import UnsupportedModelError
from tests.distributed.accelerators import accelerator as accelerator_of
from tests.distributed.pool import Pool
from tests.distributed.steps import (
    CLIP,
    UNEQUAL,
    build_kind,
    groups_of,
    make_optimizer,
    paged_groups,
    plain_training,
    relative,
)
from tests.parity.models import SMALL, plain_step

KINDS = pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero-3"])


def weights(kind: str, model: Any) -> dict[str, torch.Tensor]:
    if kind == "zero-3":
        import deepspeed

        found = {}
        for name, parameter in model.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().clone()
        return found
    inner = model.module if kind == "ddp" else model
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in inner.named_parameters()}


def one_step(accelerator: Any, runtime: Runtime, model: Any, optimizer: Any, groups: Any) -> None:
    """The loop of docs/distributed.md."""
    paged_groups(runtime, groups)
    if accelerator.sync_gradients:
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()


def train(rank: int, world: int, kind: str, precision: str = "no") -> float:
    model = build_kind("qwen3")
    reference = copy.deepcopy(model)
    with accelerator_of(kind, mixed_precision=precision) as accelerator:
        model, optimizer = accelerator.prepare(model, make_optimizer(model))
        runtime = Runtime(model, SMALL, accelerator=accelerator)
        for step in range(3):
            one_step(accelerator, runtime, model, optimizer, groups_of(UNEQUAL, step)[rank])
        found = weights(kind, model)
    _, want = plain_training(reference, UNEQUAL, 3)
    return max(relative(found, want).values())


@KINDS
def test_steps(two: Pool, kind: str) -> None:
    assert max(two.run(train, kind)) <= 1e-5


@KINDS
def test_steps_in_mixed_precision(two: Pool, kind: str) -> None:
    assert max(two.run(train, kind, precision="bf16")) < 0.05


def interrupted(rank: int, world: int, kind: str, folder: str) -> float:
    """Two steps, save, a step; then load into another model and optimizer, and make that step again."""
    with accelerator_of(kind) as accelerator:
        model, optimizer = accelerator.prepare(*_pair(0))
        runtime = Runtime(model, SMALL, accelerator=accelerator)
        for step in range(2):
            one_step(accelerator, runtime, model, optimizer, groups_of(UNEQUAL, step)[rank])
        accelerator.save_state(folder)
        one_step(accelerator, runtime, model, optimizer, groups_of(UNEQUAL, 2)[rank])
        unbroken = weights(kind, model)
        runtime.close()
    with accelerator_of(kind) as accelerator:
        model, optimizer = accelerator.prepare(*_pair(7))
        runtime = Runtime(model, SMALL, accelerator=accelerator)
        one_step(accelerator, runtime, model, optimizer, groups_of(UNEQUAL, 0)[rank])
        accelerator.load_state(folder)
        one_step(accelerator, runtime, model, optimizer, groups_of(UNEQUAL, 2)[rank])
        resumed = weights(kind, model)
        runtime.close()
    return max(float((unbroken[n] - resumed[n]).abs().max()) for n in unbroken)


def _pair(seed: int) -> tuple[Any, Any]:
    model = build_kind("qwen3", seed=seed)
    return model, make_optimizer(model)


@KINDS
def test_save_load_and_go_on(two: Pool, kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert max(two.run(interrupted, kind, folder)) == 0.0


def accumulated(rank: int, world: int, kind: str) -> float:
    """Two accumulated steps of accelerate are one step on the mean of their losses."""
    model = build_kind("qwen3")
    reference = copy.deepcopy(model)
    with accelerator_of(kind, gradient_accumulation_steps=2) as accelerator:
        model, optimizer = accelerator.prepare(model, make_optimizer(model))
        runtime = Runtime(model, SMALL, accelerator=accelerator)
        for step in range(2):
            with accelerator.accumulate(model):
                one_step(accelerator, runtime, model, optimizer, groups_of(UNEQUAL, step)[rank])
        found = weights(kind, model)
    optimizer = make_optimizer(reference)
    for step in range(2):
        for mine in groups_of(UNEQUAL, step):
            plain_step(reference, mine)
    for parameter in reference.parameters():
        assert parameter.grad is not None
        parameter.grad /= 2 * world
    torch.nn.utils.clip_grad_norm_(reference.parameters(), CLIP)
    optimizer.step()
    want = {n: p.detach() for n, p in reference.named_parameters()}
    return max(relative(found, want).values())


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_accumulated_steps(two: Pool, kind: str) -> None:
    assert max(two.run(accumulated, kind)) <= 1e-5


def unprepared(rank: int, world: int) -> str:
    with accelerator_of("ddp") as accelerator:
        try:
            Runtime(build_kind("qwen3"), SMALL, accelerator=accelerator)
        except UnsupportedModelError as error:
            return str(error)
    dist.barrier()
    return ""


def test_a_model_that_was_not_prepared_is_refused(two: Pool) -> None:
    assert all("accelerator.prepare(model, optimizer)" in text for text in two.run(unprepared))
