"""Gated-delta hybrids: every parameter's gradient against plain autograd, at the edges of window and chunk."""

from __future__ import annotations

import copy
import functools
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from longstraw import Runtime
from longstraw.errors import StreamOrderError, UnsupportedModelError
from longstraw.integrations.transformers.families import gated_delta as family
from longstraw.kernels.gated_delta.naive import naive_delta_rule
from longstraw.runtime import recurrence as glue
from tests.families.delta_models import KINDS, MODULES, build, multimodal
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

LENGTHS = (7, 1, 12, 2, 3)
PREFIXES = {
    "qwen3_next": "Qwen3Next",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "olmo_hybrid": "OlmoHybrid",
    "kimi_linear": "KimiLinear",
}
RULES = {"kimi_linear": "chunk_kimi_delta_attention"}
"""transformers' names of modules, classes and recurrences."""


@pytest.fixture
def exact_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own float32 islands (recurrence, norms, decay, router) in float64, the recurrence token by token.

    They are the same code in the plain run and in ours, and only hide what is to be compared.
    """

    def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
        out, _ = naive_delta_rule(query[0], key[0], value[0], g[0], beta[0], lengths=[query.shape[1]], initial_VKD=None)
        return out[None], None

    def gated_norm(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
        variance = hidden_states.square().mean(-1, keepdim=True)
        normed = self.weight * hidden_states * (variance + self.variance_epsilon).rsqrt()
        return normed * ACT2FN[self.activation](gate)

    def norm(self: Any, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.square().mean(-1, keepdim=True)
        return self.weight * hidden_states * (variance + self.variance_epsilon).rsqrt()

    narrow_softmax = nn.functional.softmax

    def softmax(x: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        return narrow_softmax(x, dim=dim, dtype=x.dtype if x.dtype == torch.float64 else dtype, **options)

    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(nn.functional, "softmax", softmax)
    for name, prefix in PREFIXES.items():
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        monkeypatch.setattr(module, RULES.get(name, "torch_chunk_gated_delta_rule"), rule)
        monkeypatch.setattr(getattr(module, f"{prefix}RMSNormGated"), "forward", gated_norm)
        if not name.startswith("qwen"):
            monkeypatch.setattr(getattr(module, f"{prefix}RMSNorm"), "forward", norm)


check_exact = functools.partial(check_parity, tolerance=1e-9)


@pytest.mark.usefixtures("exact_oracle")
class TestExact:
    """Everything in float64, so that a share of a gradient as small as 1e-9 of it cannot go missing."""

    @pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_family(self, kind: str, checkpoint: bool) -> None:
        # Kimi's router computes in float32 by a cast that the oracle does not reach.
        tolerance = 1e-6 if kind == "kimi_linear" else 1e-9
        config = settings(replay={"checkpoint": checkpoint})
        check_parity(build(kind, "LAL"), [make_group(lengths=LENGTHS)], config, tolerance=tolerance)

    @pytest.mark.parametrize("chunk", [2, 20, 100])
    def test_decays_per_channel_over_chunks(self, chunk: int) -> None:
        model = build("kimi_linear", "LA", mlp_layer_types=["dense"] * 2)
        prompt = 14 if chunk < 3 else 61
        check_exact(model, [make_group(prompt, lengths=(20, 1, 3))], settings(capture={"chunk_tokens": chunk}))

    @pytest.mark.parametrize("chunk", [1, 3, 4, 20, 100])
    def test_chunks_shorter_and_longer_than_the_window(self, chunk: int) -> None:
        prompt = 14 if chunk < 3 else 61
        config = settings(capture={"chunk_tokens": chunk})
        check_exact(build(layers="LA"), [make_group(prompt, lengths=LENGTHS)], config)

    @pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5, 24])
    def test_prompts_around_the_window_and_a_chunk(self, prompt: int) -> None:
        check_exact(build(layers="LL"), [make_group(prompt, lengths=LENGTHS)])

    @pytest.mark.parametrize("lengths", [(1,), (1, 1, 2), (3, 2, 1, 70)])
    def test_short_branches_and_one_of_several_recurrence_chunks(self, lengths: tuple[int, ...]) -> None:
        check_exact(build(layers="LA"), [make_group(lengths=lengths)], settings(replay={"lane_tokens": 80}))

    def test_branches_of_one_lane_and_of_many(self) -> None:
        for lane_tokens in (1, 100):
            config = settings(replay={"lane_tokens": lane_tokens})
            check_exact(build(layers="AL"), [make_group(lengths=LENGTHS)], config)

    def test_several_groups(self) -> None:
        check_exact(build(layers="LA"), [make_group(30, (3, 1), seed=s) for s in range(2)])

    @pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
    @pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text"])
    def test_lora_on_a_frozen_base(self, kind: str, checkpoint: bool) -> None:
        linears = ["in_proj_qkv", "in_proj_qkvz", "in_proj_ba", "in_proj_a", "out_proj", "q_proj"]
        model = add_lora(build(kind, "LAL"), target_modules=linears)
        assert sum("in_proj" in name and p.requires_grad for name, p in model.named_parameters()) >= 4
        check_exact(model, [make_group(lengths=LENGTHS)], settings(replay={"checkpoint": checkpoint}))

    @pytest.mark.parametrize(
        "trained", ["0.linear_attn.A_log", "0.linear_attn.conv1d", "0.linear_attn.in_proj_z", "0.linear_attn.in_proj_b",
                    "1.linear_attn.dt_bias", "1.mlp", "embed_tokens"],
    )  # fmt: skip
    def test_one_parameter_alone(self, trained: str) -> None:
        """Only some states are then worth a gradient page, and which ones differs from layer to layer."""
        model = build(layers="LLA")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        check_exact(model, [make_group(lengths=LENGTHS)])

    def test_convolution_of_one_tap_carries_no_window(self) -> None:
        check_exact(build(layers="LA", linear_conv_kernel_dim=1), [make_group(lengths=LENGTHS)])

    @pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
    def test_text_part_of_a_multimodal_class(self, kind: str) -> None:
        check_exact(multimodal(kind), [make_group(lengths=LENGTHS)])

    @pytest.mark.parametrize("state", ["recurrent", "convolution"])
    def test_a_state_without_its_gradient_is_noticed(self, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
        handed_on = glue.carried_out

        def forgetful(io: Any, name: str, value: Tensor, output: Tensor) -> Tensor:
            return handed_on(io, name, value.detach() if name == state else value, output)

        monkeypatch.setattr(glue, "carried_out", forgetful)
        with pytest.raises(StreamOrderError, match=r"the schedule is"):
            check_exact(build(layers="LA"), [make_group(lengths=LENGTHS)])

    @pytest.mark.parametrize("state", ["recurrent", "convolution"])
    def test_a_state_that_is_not_handed_on_is_noticed(self, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
        read = glue.carried_in

        def blank(io: Any, name: str, shape: tuple[int, ...]) -> Tensor | None:
            value = read(io, name, shape)
            return value if name != state or value is None else value * 0

        monkeypatch.setattr(glue, "carried_in", blank)
        with pytest.raises(AssertionError):
            check_exact(build(layers="LA"), [make_group(lengths=LENGTHS)])


def rechunked(monkeypatch: pytest.MonkeyPatch, kind: str, size: int) -> None:
    """Let transformers' recurrence cut rows into chunks of `size` tokens instead of 64."""
    name = MODULES[kind]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    rule = RULES.get(name, "torch_chunk_gated_delta_rule")
    monkeypatch.setattr(module, rule, functools.partial(getattr(module, rule), chunk_size=size))


@pytest.mark.parametrize("kind", KINDS)
def test_against_transformers_own_recurrence(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """It computes in float32: at most 2e-4, and at most twice what another way to cut it into chunks changes."""
    model, group = build(kind, "LAL"), make_group(lengths=LENGTHS)
    plain, other = copy.deepcopy(model), copy.deepcopy(model)
    plain_step(plain, [group])
    with monkeypatch.context() as patch:
        rechunked(patch, kind, 16)
        plain_step(other, [group])
    paged_step(Runtime(model, settings()), [group])
    ours, cut = worst(model, plain), worst(other, plain)
    assert ours[0][0] <= 2e-4, ours[:4]
    assert ours[0][0] <= 2 * cut[0][0], (ours[:4], cut[:4])


@pytest.mark.usefixtures("exact_oracle")
def test_detached_differs_from_exact() -> None:
    model, group = build(layers="LA"), make_group(lengths=LENGTHS)
    plain = copy.deepcopy(model)
    plain_step(plain, [group])
    runtime = Runtime(model, settings(gradient={"prompt": "detached"}))
    paged_step(runtime, [group])
    assert worst(model, plain)[0][0] > 0.1
    assert_idle(runtime)


TIERS: dict[str, list[dict[str, Any]]] = {
    "device": [{"kind": "device", "budget": "64MiB"}],
    "host": [{"kind": "host", "budget": "64MiB"}],
    "all three": [{"kind": "device", "budget": "8KiB"}, {"kind": "host", "budget": "16KiB"}, {"kind": "nvme"}],
}


def test_tiers_agree_bit_for_bit(tmp_path: Any) -> None:
    group, found = make_group(lengths=LENGTHS), []
    for tiers in TIERS.values():
        tiers = [tier | ({"path": tmp_path, "budget": "64MiB"} if tier["kind"] == "nvme" else {}) for tier in tiers]
        model = build(layers="LAL", dtype=torch.float32)
        with Runtime(model, settings(tiers=tiers)) as runtime:
            with runtime.transaction(group.prompt) as txn:
                replay_group(txn, group)
            used = txn.report.tier_bytes
        assert all(used.get(tier["kind"]) for tier in tiers), used
        found.append(gradients(model))
    for other in found[1:]:
        for name, grad in found[0].items():
            assert grad is not None
            assert torch.equal(grad, other[name]), name


def test_gradients_of_carried_states_take_two_rows_however_many_chunks() -> None:
    model, group = build(layers="LA"), make_group()
    with Runtime(model, settings(capture={"chunk_tokens": 5})) as runtime, runtime.transaction(group.prompt) as txn:
        assert txn.report.chunks == 12
        held, gradients_held = txn._captured.state._segments, txn._captured.state._gradients
        rows = {name: (held[layer, name].rows, each.rows) for (layer, name), each in gradients_held.items()}
        assert rows == {"recurrent": (12, 2), "convolution": (12, 2), "kv": (60, 60)}


@pytest.mark.usefixtures("exact_oracle")
@pytest.mark.parametrize("row_tokens", [None, 80])
def test_multimodal_rotations_of_a_scaled_length(row_tokens: int | None) -> None:
    """Positions have three rows there; the pass adds the row's last position to each."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0, "mrope_section": [1, 1, 0]}
    model = build(layers="LA", max_position_embeddings=32, rope_parameters=rope | {"partial_rotary_factor": 0.5})
    group = make_group(61, (7, 7)) if row_tokens is None else make_group(61, LENGTHS)
    if row_tokens is None:
        with pytest.raises(ValueError, match="row_tokens"):
            check_exact(model, [group], row_tokens=row_tokens)
    else:
        check_exact(model, [group], row_tokens=row_tokens)


def test_score_is_the_first_replay() -> None:
    model, group = build(dtype=torch.float32), make_group(lengths=LENGTHS)
    with Runtime(model, settings()) as runtime, runtime.transaction(group.prompt) as txn:
        scored = txn.score(group.responses)
        for mine, other in zip(replay_group(txn, group), scored, strict=True):
            assert torch.equal(mine, other)


def saved_bytes(kind: str, prompt: int, checkpoint: bool) -> tuple[int, int]:
    """Most bytes that autograd holds at once in replay (with its backward) and in the sweep."""
    model, group = build(kind, "LLA", dtype=torch.float32), make_group(prompt, (40, 1, 60))
    config = settings(
        replay={"lane_tokens": 64, "checkpoint": checkpoint},
        capture={"chunk_tokens": 128},
        pages={"tokens": 512, "block_tokens": 1024},
    )
    with Runtime(model, config) as runtime, runtime.transaction(group.prompt) as txn:
        with SavedBytes(model) as replay:
            replay_group(txn, group)
        with SavedBytes(model) as sweep:
            txn.sweep()
    return replay.peak, sweep.peak


@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_bytes_do_not_grow_with_the_prompt(kind: str, checkpoint: bool) -> None:
    figures = [saved_bytes(kind, prompt, checkpoint) for prompt in (300, 1_200)]
    for phase in zip(*figures, strict=True):
        assert min(phase) > 10_000, "nothing was counted"
        # Which expert a token goes to decides how many rows each expert's products save.
        assert max(phase) <= 1.1 * min(phase), figures


def test_adapter_on_the_convolution_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="convolution of layer 0"):
        Runtime(add_lora(build(layers="LA"), target_modules=["conv1d"], r=56))


def test_masks_and_unknown_arguments_are_refused() -> None:
    mixer = build(layers="LA").model.layers[0].linear_attn
    with pytest.raises(UnsupportedModelError, match="padding mask"):
        family.check_arguments(mixer, torch.ones(1, 3), {})
    with pytest.raises(UnsupportedModelError, match="called with seq_idx"):
        family.check_arguments(mixer, None, {"seq_idx": torch.zeros(1), "use_cache": False, "cache": None})


def test_fla_is_refused_on_a_cpu_before_anything_runs() -> None:
    group = make_group()
    runtime = Runtime(build(layers="LA"), settings(kernels={"gated_delta": "fla"}))
    with pytest.raises(UnsupportedModelError, match=r"kernels\.gated_delta"):
        runtime.transaction(group.prompt)


def test_parity_of_a_wrong_gradient_fails() -> None:
    """The comparison itself can fail: half of one gradient is noticed."""
    model = build(layers="LA")
    plain = copy.deepcopy(model)
    for each in (model, plain):
        plain_step(each, [make_group(10, (2,))])
    model.model.layers[0].linear_attn.conv1d.weight.grad *= 0.5
    with pytest.raises(AssertionError, match="conv1d"):
        assert_parity(model, plain)
