"""What once gave a wrong gradient or log-prob without a word: now it is right, or refused."""

# ruff: noqa: PT012, SIM117
# What raises is a transaction, and a transaction is a block.

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from longstraw import Runtime
from longstraw.errors import StaleWeightsError, TransactionStateError, UnsupportedModelError
from tests.families.latent_models import KINDS
from tests.parity.models import (
    SMALL,
    add_lora,
    assert_idle,
    assert_parity,
    build,
    lane_loss,
    make_group,
    paged_step,
    plain_step,
    replay_group,
)

GROUP = make_group(61, (7, 1, 12, 5))


def assert_step(runtime: Runtime, model: Any, reference: Any) -> None:
    model.zero_grad()
    plain_step(reference, [GROUP])
    paged_step(runtime, [GROUP])
    assert_parity(model, reference)
    assert_idle(runtime)


# How the model is looked at


def test_inference_mode_is_refused_and_teaches_nothing() -> None:
    model = build()
    runtime = Runtime(model, SMALL)
    for call in (runtime.transaction, lambda prompt: runtime.score(prompt, GROUP.responses)):
        with torch.inference_mode(), pytest.raises(TransactionStateError, match="inference_mode"):
            call(GROUP.prompt)
    assert_step(runtime, model, copy.deepcopy(model))


def test_inference_mode_inside_a_transaction_is_refused() -> None:
    runtime = Runtime(build(), SMALL)
    with pytest.raises(TransactionStateError, match="inference_mode"), runtime.transaction(GROUP.prompt) as txn:
        with torch.inference_mode():
            txn.score(GROUP.responses)
    assert_idle(runtime)


def test_a_dropout_set_after_the_first_transaction() -> None:
    model = add_lora(build())
    runtime = Runtime(model, SMALL)
    runtime.score(GROUP.prompt, GROUP.responses)
    model.base_model.model.model.layers[0].self_attn.q_proj.lora_dropout["default"] = nn.Dropout(0.5)
    with pytest.raises(UnsupportedModelError, match=r"p=0\.5"):
        runtime.transaction(GROUP.prompt)


def test_the_mode_is_named_when_it_changed() -> None:
    model = build()
    runtime = Runtime(model, SMALL)
    with pytest.raises(StaleWeightsError, match="train or eval"), runtime.transaction(GROUP.prompt) as txn:
        model.eval()
        txn.score(GROUP.responses)


def test_a_saved_buffer_that_changed() -> None:
    model = build("deepseek_v3", **KINDS["deepseek_v3"])
    runtime = Runtime(model, SMALL)
    with pytest.raises(StaleWeightsError, match="e_score_correction_bias"), runtime.transaction(GROUP.prompt) as txn:
        model.model.layers[1].mlp.gate.e_score_correction_bias.add_(1.0)
        txn.score(GROUP.responses)


# Modules that do more than their class says


def test_a_hook_on_the_head_that_came_later() -> None:
    model = build()
    runtime = Runtime(model, SMALL)
    runtime.score(GROUP.prompt, GROUP.responses)
    handle = model.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)
    with pytest.raises(UnsupportedModelError, match="changes its logits"):
        runtime.score(GROUP.prompt, GROUP.responses)
    handle.remove()
    assert_step(runtime, model, copy.deepcopy(model))


def halved(linear: nn.Module) -> nn.Module:
    """`linear` with a forward of its own."""
    linear.forward = lambda x: nn.functional.linear(x, linear.weight) * 0.5  # type: ignore[method-assign, arg-type]
    return linear


def test_a_forward_of_the_heads_own() -> None:
    model, reference = build(), build()
    halved(model.lm_head)
    halved(reference.lm_head)
    assert_step(Runtime(model, SMALL), model, reference)


@pytest.mark.parametrize("kind", ["hook", "forward"])
def test_an_absorbed_projection_that_is_altered(kind: str) -> None:
    models = [build("deepseek_v3", **KINDS["deepseek_v3"]) for _ in range(2)]
    for model in models:
        projection = model.model.layers[1].self_attn.kv_b_proj
        if kind == "hook":
            projection.register_forward_hook(lambda module, args, output: output * 0.5)
        else:
            halved(projection)
    assert_step(Runtime(models[0], SMALL), *models)


def test_a_layer_copied_with_its_config() -> None:
    model = build(num_hidden_layers=3)
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])
    model.model.layers[1].self_attn.layer_idx = 1
    assert_step(Runtime(model, SMALL), model, copy.deepcopy(model))


def test_attention_that_goes_past_the_interface() -> None:
    model = build()
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **kwargs: (attention.o_proj(attention.q_proj(hidden_states)), None)
    with pytest.raises(UnsupportedModelError, match=r"layers \[1\]"):
        Runtime(model, SMALL).transaction(GROUP.prompt)


# Lanes


def test_two_replays_whose_lanes_are_asked_for_in_turn() -> None:
    runtime = Runtime(build(), SMALL)
    with pytest.raises(TransactionStateError, match="left without a gradient"):
        with runtime.transaction(GROUP.prompt) as txn:
            for first, second in zip(txn.replay(GROUP.responses[:2]), txn.replay(GROUP.responses[2:]), strict=False):
                second.backward(first.logprobs[0].sum() * second.logprobs[0].sum())
    assert_idle(runtime)


def test_a_loss_over_the_lane_before() -> None:
    runtime = Runtime(build(), SMALL)
    before = None
    with pytest.raises(TransactionStateError, match="another lane's log-probs"):
        with runtime.transaction(GROUP.prompt) as txn:
            for lane in txn.replay(GROUP.responses):
                loss = lane.logprobs[0].sum()
                lane.backward(loss if before is None else loss * before)
                before = loss
    assert_idle(runtime)


@pytest.mark.parametrize("then", ["skip", "next", "leave"])
def test_a_backward_that_failed_and_was_caught(then: str) -> None:
    model = build()

    def fail(*args: Any) -> None:
        raise ValueError("the user's own")

    runtime = Runtime(model, SMALL)
    handle = model.model.layers[0].mlp.register_full_backward_hook(fail)
    with pytest.raises(TransactionStateError, match="backward failed"), runtime.transaction(GROUP.prompt) as txn:
        for lane in txn.replay(GROUP.responses):
            with pytest.raises(ValueError, match="own"):
                lane.backward(lane_loss(GROUP, lane))
            if then == "skip":
                lane.skip()
            if then == "leave":
                break
    handle.remove()
    assert_idle(runtime)
    assert all(p.grad is None for p in model.parameters())


# The optimizer at the wrong moment


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_emptied_between_lanes(dtype: torch.dtype) -> None:
    model = build(dtype=dtype)
    reference = copy.deepcopy(model)
    paged_step(Runtime(reference, SMALL), [GROUP])
    with Runtime(model, SMALL).transaction(GROUP.prompt) as txn:
        for lane in txn.replay(GROUP.responses):
            model.zero_grad()
            lane.backward(lane_loss(GROUP, lane))
    assert_parity(model, reference, 0.0)


@pytest.mark.parametrize("then", ["end", "another group"])
def test_a_step_inside_accumulate(then: str) -> None:
    model = build()
    runtime, optimizer = Runtime(model, SMALL), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TransactionStateError, match="stepped inside"), runtime.accumulate():
        paged_step(runtime, [GROUP])
        optimizer.step()
        if then == "another group":
            # Told before its prompt is captured, not when the block ends.
            with pytest.raises(TransactionStateError, match="stepped inside"), runtime.transaction(GROUP.prompt):
                pass
    assert_idle(runtime)
    paged_step(runtime, [GROUP, GROUP])


def test_an_optimizer_fused_into_the_backward() -> None:
    model = build()
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: p.data.sub_(p.grad, alpha=0.1))
    runtime = Runtime(model, SMALL)
    with pytest.raises(TransactionStateError, match="post-accumulate-grad"):
        paged_step(runtime, [GROUP])
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert_idle(runtime)


def test_a_step_between_the_sweep_and_the_end() -> None:
    model = build()
    runtime, optimizer = Runtime(model, SMALL), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(StaleWeightsError, match="leaving the transaction"), runtime.transaction(GROUP.prompt) as txn:
        replay_group(txn, GROUP)
        txn.sweep()
        optimizer.step()
    assert_idle(runtime)


# The end


def test_a_closed_runtime() -> None:
    runtime = Runtime(build(), SMALL)
    with runtime.transaction(GROUP.prompt), pytest.raises(TransactionStateError, match="inside a transaction"):
        runtime.close()
    runtime.close()
    for call in (runtime.transaction, lambda prompt: runtime.score(prompt, GROUP.responses)):
        with pytest.raises(TransactionStateError, match="closed"):
            call(GROUP.prompt)
