"""Windows, sinks, soft caps and experts: every gradient against plain autograd on unpadded rows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longstraw import Runtime, state_bytes
from longstraw.errors import UnsupportedModelError
from longstraw.integrations.transformers import adapter as adapter_module
from longstraw.integrations.transformers.head import BehindHead
from longstraw.resident.state import StateKind
from tests.families.test_routing import Routes
from tests.families.windowed_models import KINDS, WINDOW, multimodal_gemma3, windowed_model
from tests.parity.models import (
    add_lora,
    assert_idle,
    assert_parity,
    check_parity,
    gradients,
    make_group,
    paged_step,
    plain_step,
    replay_group,
    settings,
    worst,
)
from tests.parity.test_saved_bytes import SavedBytes
from tests.parity.test_tiers import tiers_of
from tests.runtime.faults import Fuse, out_of_memory_in_forward

CHECKPOINT = pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
GROUP = make_group(61, (7, 1, 12, 2, 3))
ONE_OF_EACH = pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "mistral", "qwen3_moe-windowed"])
EXPERTS = pytest.mark.parametrize("kind", ["gpt_oss", "mixtral", "qwen3_moe"])


@CHECKPOINT
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_family(kind: str, checkpoint: bool) -> None:
    check_parity(windowed_model(kind), [GROUP], settings(replay={"checkpoint": checkpoint}))


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gpt_oss", "mistral"])
def test_eager_attention_is_the_same_reference(kind: str) -> None:
    # transformers' eager softmax of a Gemma or Mistral computes in float32, whatever the model's dtype.
    model = windowed_model(kind, oracle=False, attn_implementation="eager")
    check_parity(model, [GROUP], tolerance=1e-6 if kind == "gpt_oss" else 2e-5)
    assert model.config._attn_implementation == "eager"


@CHECKPOINT
def test_the_text_part_of_multimodal_gemma3(checkpoint: bool) -> None:
    check_parity(multimodal_gemma3(), [GROUP], settings(replay={"checkpoint": checkpoint}))


# The window's edge. P - 1 tokens are captured, W - 1 are kept.


@pytest.mark.parametrize("kind", ["gpt_oss", "mistral"])
@pytest.mark.parametrize("chunk", [3, 200])
@pytest.mark.parametrize("prompt_tokens", [1, 2, 3, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, 2 * WINDOW])
def test_prompts_around_the_window(kind: str, chunk: int, prompt_tokens: int) -> None:
    group = make_group(prompt_tokens, (3, 1, WINDOW + 2, 2))
    check_parity(windowed_model(kind), [group], settings(capture={"chunk_tokens": chunk}))


@ONE_OF_EACH
@pytest.mark.parametrize("chunk", [1, 4, WINDOW - 1, WINDOW, WINDOW + 1, 16])
def test_chunks_around_the_window(kind: str, chunk: int) -> None:
    group = make_group(30, (3, 1, 9))
    check_parity(windowed_model(kind), [group], settings(capture={"chunk_tokens": chunk}))


@CHECKPOINT
@pytest.mark.parametrize("window", [2, 3, 29, 30, 31, 100])
def test_windows(window: int, checkpoint: bool) -> None:
    config = settings(capture={"chunk_tokens": 8}, replay={"checkpoint": checkpoint})
    check_parity(windowed_model("gemma3", window=window), [make_group(31, (3, 1, 9))], config)


def test_a_gradient_that_does_not_stay_in_the_window_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    from longstraw.kernels.windowed import attention

    def forgetful(state: Any, dk: Tensor, dv: Tensor, d_window_k: Tensor, d_window_v: Tensor) -> None:
        slide, arrived = state.slide, state.next_gradient()
        if arrived is not None:
            for own, gradient in zip((dk, dv), arrived, strict=True):
                own[:, :, slide.own - slide.entering :] += gradient[:, :, slide.staying :]
        state.add_gradient(d_window_k, d_window_v)

    model = windowed_model("mistral")
    reference = copy.deepcopy(model)
    plain_step(reference, [GROUP])
    monkeypatch.setattr(attention, "_pass_on", forgetful)
    paged_step(Runtime(model, settings(capture={"chunk_tokens": 3})), [GROUP])
    assert worst(model, reference)[0][0] > 1e-3


# What is kept


def test_a_windowed_layer_keeps_its_last_rows_and_nothing_more() -> None:
    runtime = Runtime(windowed_model("gemma2"), settings())
    layers = runtime._engine.adapter.profile().layers
    assert [layer.states[0].kind for layer in layers] == [StateKind.CARRIED, StateKind.TOKEN, StateKind.CARRIED]
    assert [field.shape for field in layers[0].states[0].fields] == [(WINDOW - 1, 2, 8)] * 2
    assert len(layers[0].states) == 1


def test_the_bytes_of_windowed_layers_do_not_grow_with_the_prompt() -> None:
    held = []
    for prompt_tokens in (30, 300):
        group = make_group(prompt_tokens, (3, 1))
        runtime = Runtime(windowed_model("mistral"), settings(gradient={"prompt": "detached"}))
        with runtime.transaction(group.prompt) as txn:
            replay_group(txn, group)
        held.append(sum(txn.report.tier_bytes.values()))
    assert held[0] == held[1] > 0


def test_a_window_over_the_whole_context_is_plain_attention() -> None:
    model = windowed_model("phi3", window=512)
    runtime = check_parity(model, [GROUP])
    assert {spec.kind for layer in runtime._engine.adapter.profile().layers for spec in layer.states} == {
        StateKind.TOKEN
    }
    assert state_bytes(model.config, "float64").carried == {}
    with pytest.raises(UnsupportedModelError, match=r"window of 512 tokens.*row of 513"):
        paged_step(runtime, [make_group(512, (2,))])


@CHECKPOINT
@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gpt_oss", "mistral", "mixtral", "qwen3_moe"])
def test_saved_bytes_do_not_grow_with_the_prompt(kind: str, checkpoint: bool) -> None:
    figures = []
    for prompt_tokens in (65, 513):
        model = windowed_model(kind, oracle=False, max_position_embeddings=1024)
        config = settings(capture={"chunk_tokens": 32}, replay={"checkpoint": checkpoint}, pages={"block_tokens": 512})
        group = make_group(prompt_tokens, (7, 1, 12))
        with Runtime(model, config) as runtime, runtime.transaction(group.prompt) as txn:
            with SavedBytes(model) as replay:
                replay_group(txn, group)
            with SavedBytes(model) as sweep:
                txn.sweep()
        figures.append((replay.peak, sweep.peak))
    for short, long in zip(*figures, strict=True):
        assert 0 < long <= 1.05 * short, figures


# How it is run


@ONE_OF_EACH
@pytest.mark.parametrize("place", ["nvme", "all"])
def test_bitwise_the_same_on_every_tier(kind: str, place: str, tmp_path: Path) -> None:
    found = []
    for where in ("device", place):
        model = windowed_model(kind)
        with Runtime(model, settings(tiers=tiers_of(where, tmp_path))) as runtime:
            with runtime.transaction(GROUP.prompt) as txn:
                scored = txn.score(GROUP.responses)
                replayed = replay_group(txn, GROUP)
            assert_idle(runtime)
        assert all(torch.equal(a, b) for a, b in zip(scored, replayed, strict=True)), "score is not the first replay"
        found.append(gradients(model))
    first, second = found
    for name, gradient in first.items():
        assert gradient is not None
        assert torch.equal(gradient, second[name]), name  # type: ignore[arg-type]


@CHECKPOINT
@ONE_OF_EACH
def test_lora(kind: str, checkpoint: bool) -> None:
    # On an MLP's names PEFT adapts the experts' stacked parameters too.
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = add_lora(windowed_model(kind), target_modules=targets)
    check_parity(model, [make_group(30, (7, 1, 4))], settings(replay={"checkpoint": checkpoint}))


@pytest.mark.parametrize("trained", ["layers.0.", "layers.1.", "layers.2.", "sinks", "q_proj", "k_proj", "norm"])
def test_some_parameters_frozen(trained: str) -> None:
    model = windowed_model("gpt_oss")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    check_parity(model, [make_group(30, (7, 1, 4))], settings(capture={"chunk_tokens": 5}))


def test_several_groups_with_temperature_and_entropy_behind_soft_caps() -> None:
    groups = [GROUP, make_group(2, (3, 1, 2), 1), make_group(WINDOW, (1, 8, 2), 2)]
    replay = {"temperature": 0.7, "entropy": True, "logit_block_tokens": 3}
    model = windowed_model("gemma2")
    check_parity(model, groups, settings(replay=replay))
    assert model.config.final_logit_softcapping == 3.0


@ONE_OF_EACH
def test_detached_mode_leaves_the_prompt_out(kind: str) -> None:
    model = windowed_model(kind)
    reference = copy.deepcopy(model)
    plain_step(reference, [GROUP])
    paged_step(Runtime(model, settings(gradient={"prompt": "detached"})), [GROUP])
    assert worst(model, reference)[0][0] > 1e-2


@pytest.mark.parametrize("rope_type", ["dynamic", "linear"])
def test_a_rotary_scaling_for_one_layer_type(rope_type: str) -> None:
    scaled = {"rope_type": rope_type, "rope_theta": 10_000.0, "factor": 4.0}
    plain = {"rope_type": "default", "rope_theta": 500.0}
    model = windowed_model(
        "gemma3", max_position_embeddings=40, rope_parameters={"full_attention": scaled, "sliding_attention": plain}
    )
    check_parity(model, [GROUP], row_tokens=80)


# Soft caps of the logits


def test_the_models_own_soft_cap_is_back_after_a_failure() -> None:
    model = windowed_model("gemma2")
    runtime = Runtime(model, settings())

    def fail(*args: object) -> None:
        assert model.config.final_logit_softcapping is None
        raise RuntimeError("mine")

    handle = model.model.norm.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="mine"):
        paged_step(runtime, [GROUP])
    handle.remove()
    assert model.config.final_logit_softcapping == 3.0


def test_a_soft_cap_that_is_left_out_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = adapter_module.head_output
    monkeypatch.setattr(adapter_module, "head_output", lambda *args: original(*args[:4], BehindHead()))
    model = windowed_model("gemma2")
    with pytest.raises(AssertionError):
        check_parity(model, [GROUP])


# Experts


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_shorter_chunks_after_running_out_of_memory_are_captured_and_routed_anew(kind: str) -> None:
    model = windowed_model(kind)
    reference = copy.deepcopy(model)
    plain_step(reference, [GROUP])
    with Runtime(model, settings()) as runtime, runtime.transaction(GROUP.prompt) as txn:
        replay_group(txn, GROUP)
        with Routes(model) as routes, out_of_memory_in_forward(model, Fuse(at_call=1)):
            txn.sweep()
        assert txn.report.retries == 1
    chunk = [12, 12, 12, 12, 12]
    for calls in routes.take().values():
        # Behind the failed sweep: the new capture, the lanes again, and the sweep of the new chunks.
        swept = calls[-len(chunk) :]
        at = next(i for i in range(len(calls)) if [len(c) for c in calls[i : i + len(chunk)]] == chunk)
        assert at < len(calls) - len(chunk), "the prompt was not captured again"
        assert all(torch.equal(a, b) for a, b in zip(calls[at : at + len(chunk)], swept[::-1], strict=True))
    assert_parity(model, reference)


@EXPERTS
def test_grouped_expert_products_are_used_where_the_model_has_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = windowed_model(kind).float()
    reference = copy.deepcopy(model)
    model.set_experts_implementation("grouped_mm")
    calls = []
    grouped = torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda *args, **kwargs: (calls.append(1), grouped(*args, **kwargs))[1]
    )
    plain_step(reference, [GROUP])
    assert not calls
    paged_step(Runtime(model, settings()), [GROUP])
    assert calls
    assert_parity(model, reference, 1e-3)


# Refusals


def test_a_noisy_router_is_refused() -> None:
    model = windowed_model("mixtral", router_jitter_noise=0.1)
    with pytest.raises(UnsupportedModelError, match=r"mlp.jitter_noise is 0.1"):
        Runtime(model, settings())
    Runtime(model.eval(), settings())


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("mistral", {"sliding_window": 1}, "window of 1"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("gemma3", {"use_bidirectional_attention": True}, "not causal"),
    ],
)
def test_layers_that_cannot_be_carried(kind: str, change: dict[str, Any], message: str) -> None:
    model = windowed_model(kind)
    for key, value in change.items():
        setattr(model.config, key, value)
        for module in model.modules():
            if key == "use_bidirectional_attention" and hasattr(module, "is_causal"):
                module.is_causal = False
    with pytest.raises(UnsupportedModelError, match=message):
        Runtime(model, settings())


def test_a_layer_type_that_disagrees_with_its_window() -> None:
    model = windowed_model("gemma2")
    model.config.layer_types = ["full_attention"] * 3
    with pytest.raises(UnsupportedModelError, match="layer 0 is of type 'full_attention' but its sliding window is 7"):
        Runtime(model, settings())
