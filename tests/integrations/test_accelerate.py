"""accelerate's `Accelerator` on one process: plain, under autocast, and what of it is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from longstraw import Runtime
from longstraw.errors import UnsupportedModelError
from tests.parity.models import (
    SMALL,
    add_lora,
    assert_idle,
    assert_parity,
    build,
    distance,
    make_group,
    paged_step,
    plain_step,
    settings,
)

GROUP = make_group(61, (7, 1, 12, 5))


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_a_loop_with_clipping_and_steps() -> None:
    reference = build("qwen3")
    model = copy.deepcopy(reference)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    plain_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    runtime = Runtime(model, SMALL, accelerator=accelerator)
    for _ in range(2):
        paged_step(runtime, [GROUP, make_group(20, (3, 1, 4), 3)])
        plain_step(reference, [GROUP, make_group(20, (3, 1, 4), 3)])
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0.0)
        assert_parity(model, reference)
        optimizer.step()
        plain_optimizer.step()
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
    assert_idle(runtime)


@pytest.mark.parametrize(("lora", "checkpoint"), [(False, False), (False, True), (True, False)])
def test_autocast_is_as_near_to_float64_as_plain_autocast(lora: bool, checkpoint: bool) -> None:
    ratios = []
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    for seed in range(4):
        group = make_group(61, (7, 1, 12, 5), seed)
        ours = build("llama", dtype=torch.float32, seed=seed)
        if lora:
            ours = add_lora(ours)
        plain, reference = copy.deepcopy(ours), copy.deepcopy(ours).double()
        plain_step(reference, [group])
        with torch.autocast("cpu", torch.bfloat16):
            plain_step(plain, [group])
        ours = accelerator.prepare(ours)
        runtime = Runtime(ours, settings(replay={"checkpoint": checkpoint}), accelerator=accelerator)
        found = paged_step(runtime, [group])
        assert all(x.dtype == torch.float32 for x in found[0])
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in ours.parameters())
        ratios.append(distance(ours, reference) / distance(plain, reference))
    assert sum(ratios) / len(ratios) <= 1.1, ratios


def test_score_and_replay_agree_bit_for_bit_under_autocast() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(build("llama", dtype=torch.float32))
    runtime = Runtime(model, SMALL, accelerator=accelerator)
    with runtime.transaction(GROUP.prompt) as txn:
        scored = txn.score(GROUP.responses)
        for lane in txn.replay(GROUP.responses):
            for i, logprobs in zip(lane.indices, lane.logprobs, strict=True):
                assert torch.equal(logprobs, scored[i])
            lane.skip()


def test_accumulated_steps_are_divided_as_accelerate_divides_the_loss() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    reference = build("llama")
    model = accelerator.prepare(copy.deepcopy(reference))
    paged_step(Runtime(model, SMALL, accelerator=accelerator), [GROUP])
    plain_step(reference, [GROUP])
    for parameter in reference.parameters():
        assert parameter.grad is not None
        parameter.grad /= 2
    assert_parity(model, reference)


def test_loss_scaling() -> None:
    # A CPU has no float16 to scale losses for: the scaler is a real one, the rest of the accelerator is not.
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    accelerator = SimpleNamespace(
        distributed_type="NO", num_processes=1, scaler=scaler, gradient_accumulation_steps=1, mixed_precision="fp16"
    )
    reference = build("llama")
    model = copy.deepcopy(reference)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    paged_step(Runtime(model, SMALL, accelerator=accelerator), [GROUP])
    plain_step(reference, [GROUP])
    with pytest.raises(AssertionError):
        assert_parity(model, reference)
    scaler.unscale_(optimizer)
    assert_parity(model, reference)


@pytest.mark.parametrize(("kind", "word"), [("FSDP", "fsdp_version: 2"), ("MEGATRON_LM", "Megatron-LM")])
def test_refused_kinds(kind: str, word: str) -> None:
    accelerator = SimpleNamespace(distributed_type=kind, num_processes=1, mixed_precision="no")
    with pytest.raises(UnsupportedModelError, match=word):
        Runtime(build("llama"), SMALL, accelerator=accelerator)
