"""Scoring under a reference policy: another model, or a PEFT model's base."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from packaging import version
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers.integrations.peft import MIN_PEFT_VERSION

from longstraw import Runtime
from tests.parity.models import (
    SMALL,
    add_lora,
    assert_idle,
    assert_parity,
    build,
    gradients,
    make_group,
    plain_logprobs,
    plain_step,
    replay_group,
    settings,
)

GROUP = make_group(61, (7, 1, 12, 5))


def plain(model: torch.nn.Module, temperature: float = 1.0) -> list[torch.Tensor]:
    with torch.no_grad():
        return [plain_logprobs(model, GROUP.prompt, r, temperature=temperature)[0] for r in GROUP.responses]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert not any(x.requires_grad for x in found)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_another_model(temperature: float) -> None:
    model, reference = build("llama"), build("qwen3", seed=5)
    runtime = Runtime(model, settings(replay={"temperature": temperature}))
    assert_close(runtime.score(GROUP.prompt, GROUP.responses, model=reference), plain(reference, temperature))
    assert_idle(runtime)
    assert_close(runtime.score(GROUP.prompt, GROUP.responses), plain(model, temperature))


def test_the_base_of_a_peft_model() -> None:
    base = build("llama")
    model = add_lora(copy.deepcopy(base))
    runtime = Runtime(model, SMALL)
    found = runtime.score(GROUP.prompt, GROUP.responses, adapter=None)
    assert_close(found, plain(base))
    adapted = runtime.score(GROUP.prompt, GROUP.responses)
    assert_close(adapted, plain(model))
    assert max(float((a - b).abs().max()) for a, b in zip(found, adapted, strict=True)) > 0.01


def native_lora() -> Any:
    """As transformers' own `add_adapter` makes it, which asks for a newer PEFT."""
    model = build("llama")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    model._hf_peft_config_loaded = True
    return model


@pytest.mark.parametrize("make", [lambda: add_lora(build("llama")), native_lora], ids=["peft", "transformers"])
def test_frozen_adapters_stay_frozen(make: Callable[[], Any]) -> None:
    model = make()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name and "layers.1" in name)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert 0 < sum(before.values()) < sum("lora_" in name for name in before)
    runtime = Runtime(model, SMALL)
    with runtime.transaction(GROUP.prompt) as txn:
        runtime.score(GROUP.prompt, GROUP.responses, adapter=None)
        replay_group(txn, GROUP)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    assert {name for name, gradient in gradients(model).items() if gradient is not None} == {
        name for name, trained in before.items() if trained
    }


@pytest.mark.parametrize("make", [lambda: add_lora(build("llama")), native_lora], ids=["peft", "transformers"])
def test_disabled_adapters_stay_disabled(make: Callable[[], Any]) -> None:
    model = make()
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    runtime = Runtime(model, SMALL)
    assert_close(runtime.score(GROUP.prompt, GROUP.responses, adapter=None), plain(model))
    assert all(layer.disable_adapters for layer in layers)


@pytest.mark.parametrize("when", ["captured", "replaying"])
def test_a_reference_inside_a_transaction_leaves_it_as_it_was(when: str) -> None:
    model = add_lora(build("llama"))
    reference = copy.deepcopy(model)
    runtime = Runtime(model, SMALL)
    with runtime.transaction(GROUP.prompt) as txn:
        if when == "captured":
            runtime.score(GROUP.prompt, GROUP.responses, adapter=None)
            replay_group(txn, GROUP)
        else:
            replay_group(txn, GROUP)
            runtime.score(GROUP.prompt, GROUP.responses, adapter=None)
    plain_step(reference, [GROUP])
    assert_parity(model, reference)


def test_scoring_holds_no_gradient_pages_and_leaves_no_gradient() -> None:
    model = build("llama")
    # K and V of 60 rows on two layers in float64 are 30 KiB; with gradient pages they would be 60.
    runtime = Runtime(model, settings(tiers=[{"kind": "host", "budget": "40KiB"}]))
    runtime.score(GROUP.prompt, GROUP.responses)
    assert all(g is None for g in gradients(model).values())
    assert_idle(runtime)


@pytest.mark.skipif(
    version.parse(peft.__version__) < version.parse(MIN_PEFT_VERSION), reason="transformers refuses this PEFT's version"
)
def test_peft_through_transformers_own_methods() -> None:

    model = build("llama")
    expected = plain(copy.deepcopy(model))
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    runtime = Runtime(model, SMALL)
    assert_close(runtime.score(GROUP.prompt, GROUP.responses, adapter=None), expected)
    assert_close(runtime.score(GROUP.prompt, GROUP.responses), plain(model))
