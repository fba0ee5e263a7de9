"""Mamba-2 hybrids: every parameter's gradient against plain autograd, at the edges of window and chunk."""

from __future__ import annotations

import copy
import functools
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longstraw import Runtime
from longstraw.errors import StreamOrderError, UnsupportedModelError
from longstraw.integrations.transformers import adapter as adapter_module
from longstraw.integrations.transformers.head import BehindHead
from longstraw.runtime import recurrence as glue
from tests.families.mamba2_models import KINDS, PREFIXES, build
from tests.families.router_loss import asked_for, plain_aux_step, replay_aux
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


@pytest.fixture
def exact_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own float32 islands (recurrence, norms) in float64.

    They are the same code in the plain run and in ours, and only hide what is to be compared.
    """

    def norm(self: Any, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.square().mean(-1, keepdim=True)
        return self.weight * hidden_states * (variance + self.variance_epsilon).rsqrt()

    def gated_norm(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
        gated = hidden_states * nn.functional.silu(gate)
        grouped = gated.unflatten(-1, (-1, getattr(self, "group_size", gated.shape[-1])))
        variance = grouped.square().mean(-1, keepdim=True)
        return self.weight * (grouped * (variance + self.variance_epsilon).rsqrt()).flatten(-2)

    narrow_softmax = nn.functional.softmax

    def softmax(x: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        return narrow_softmax(x, dim=dim, dtype=x.dtype if x.dtype == torch.float64 else dtype, **options)

    single = Tensor.float

    def in_single(rotary: Any) -> Any:
        """Positions are rotated by float32 angles on both sides."""

        def forward(self: Any, x: Tensor, position_ids: Tensor) -> Any:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(Tensor, "float", single)
                return rotary(self, x, position_ids)

        return forward

    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(nn.functional, "softmax", softmax)
    for name, prefix in PREFIXES.items():
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        monkeypatch.setattr(getattr(module, f"{prefix}RMSNorm"), "forward", norm)
        # Nemotron-H has borrowed another family's up to some release.
        (gated,) = (value for name, value in vars(module).items() if name.endswith("RMSNormGated"))
        monkeypatch.setattr(gated, "forward", gated_norm)
        if rotary := getattr(module, f"{prefix}RotaryEmbedding", None):
            monkeypatch.setattr(rotary, "forward", in_single(rotary.forward))


check_exact = functools.partial(check_parity, tolerance=1e-9)


@pytest.mark.usefixtures("exact_oracle")
class TestExact:
    """Everything in float64, so that a share of a gradient as small as 1e-9 of it cannot go missing."""

    @pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_family(self, kind: str, checkpoint: bool) -> None:
        config = settings(replay={"checkpoint": checkpoint})
        layers = "LEAML" if kind == "nemotron_h" else "LAL"
        # Nemotron-H's router computes in float32 by casts that the oracle does not reach.
        tolerance = 1e-6 if kind == "nemotron_h" else 1e-9
        check_parity(build(kind, layers), [make_group(lengths=LENGTHS)], config, tolerance=tolerance)

    @pytest.mark.parametrize("layers", ["LA", "MLAM", "LMAE"])
    def test_nemotron_h_without_and_with_layers_that_mix_nothing(self, layers: str) -> None:
        tolerance = 1e-6 if "E" in layers else 1e-9
        check_parity(build("nemotron_h", layers), [make_group(lengths=LENGTHS)], tolerance=tolerance)

    @pytest.mark.parametrize("chunk", [1, 3, 20, 100])
    def test_falcons_two_mixers_in_a_layer(self, chunk: int) -> None:
        prompt = 14 if chunk < 3 else 61
        config = settings(capture={"chunk_tokens": chunk}, replay={"checkpoint": chunk % 2 == 1, "temperature": 1.3})
        check_exact(build("falcon_h1", "HH", mamba_rms_norm=chunk > 3), [make_group(prompt, lengths=LENGTHS)], config)

    def test_falcon_with_a_lora_and_one_of_its_mixers_trained(self) -> None:
        model = add_lora(build("falcon_h1", "HH"), target_modules=["in_proj", "q_proj"])
        check_exact(model, [make_group(lengths=LENGTHS)])
        for trained in ("1.mamba.in_proj", "1.self_attn.v_proj"):
            model = build("falcon_h1", "HH")
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(trained in name)
            check_exact(model, [make_group(lengths=LENGTHS)])

    @pytest.mark.parametrize("config", [{"num_local_experts": 0}, {"position_embedding_type": None}])
    def test_granite_without_experts_or_positions(self, config: dict[str, Any]) -> None:
        check_exact(build("granitemoehybrid", "LA", **config), [make_group(lengths=LENGTHS)])

    def test_granites_logits_are_divided_and_by_the_temperature_too(self) -> None:
        config = settings(replay={"temperature": 0.7, "entropy": True})
        model = build("granitemoehybrid", "LA")
        check_exact(model, [make_group(lengths=LENGTHS)], config)
        assert model.config.logits_scaling == 2.5

    def test_granites_logits_undivided_are_missed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = adapter_module.head_output
        monkeypatch.setattr(adapter_module, "head_output", lambda *args: original(*args[:4], BehindHead()))
        with pytest.raises(AssertionError):
            check_exact(build("granitemoehybrid", "LA"), [make_group(lengths=LENGTHS)])

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

    @pytest.mark.parametrize("lane_tokens", [1, 100])
    def test_branches_of_one_lane_and_of_many(self, lane_tokens: int) -> None:
        config = settings(replay={"lane_tokens": lane_tokens})
        check_exact(build(layers="AL"), [make_group(lengths=LENGTHS)], config)

    def test_several_groups(self) -> None:
        check_exact(build(layers="LA"), [make_group(30, (3, 1), seed=s) for s in range(2)])

    @pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
    def test_lora_on_a_frozen_base(self, checkpoint: bool) -> None:
        model = add_lora(build(layers="LAL"), target_modules=["in_proj", "out_proj", "q_proj"])
        assert sum("in_proj" in name and p.requires_grad for name, p in model.named_parameters()) >= 4
        check_exact(model, [make_group(lengths=LENGTHS)], settings(replay={"checkpoint": checkpoint}))

    @pytest.mark.parametrize(
        "trained", ["0.mamba.A_log", "0.mamba.D", "0.mamba.conv1d", "1.mamba.dt_bias", "1.mamba.norm", "1.feed_forward",
                    "embed_tokens"],
    )  # fmt: skip
    def test_one_parameter_alone(self, trained: str) -> None:
        """Only some states are then worth a gradient page, and which ones differs from layer to layer."""
        model = build(layers="LLA")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        check_exact(model, [make_group(lengths=LENGTHS)])

    def test_convolution_of_one_tap_carries_no_window(self) -> None:
        check_exact(build(layers="LA", mamba_d_conv=1), [make_group(lengths=LENGTHS)])

    def test_limits_of_the_step(self) -> None:
        """Softplus of noise lies on both sides of 0.6 and of 1.1: a limited step has no gradient."""
        check_exact(build(layers="LA", time_step_limit=(0.6, 1.1)), [make_group(lengths=LENGTHS)])

    @pytest.mark.parametrize("bias", [True, False])
    def test_biases(self, bias: bool) -> None:
        model = build(layers="LA", mamba_conv_bias=bias, mamba_proj_bias=bias)
        check_exact(model, [make_group(lengths=LENGTHS)])

    def test_auxiliary_loss_of_granites_routers(self) -> None:
        """transformers' routers return logits first from 5.24 on; others are refused instead of misread."""
        model, group = asked_for(build("granitemoehybrid", "LA")), make_group(lengths=LENGTHS)
        router = model.model.layers[0].block_sparse_moe.router
        reads_well = router(torch.ones(1, 32, dtype=torch.float64))[0].is_floating_point()
        if not reads_well:
            with pytest.raises(UnsupportedModelError, match="TopKRouter does not return logits"):
                Runtime(model, settings()).transaction(group.prompt)
            return
        reference = copy.deepcopy(model)
        plain_aux_step(reference, group)
        with Runtime(model, settings()) as runtime, runtime.transaction(group.prompt) as txn:
            replay_aux(txn, group)
        # transformers divides its counts in float32.
        assert_parity(model, reference, 1e-7)

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

    def test_detached_differs_from_exact(self) -> None:
        model, group = build(layers="LA"), make_group(lengths=LENGTHS)
        plain = copy.deepcopy(model)
        plain_step(plain, [group])
        runtime = Runtime(model, settings(gradient={"prompt": "detached"}))
        paged_step(runtime, [group])
        assert worst(model, plain)[0][0] > 0.1
        assert_idle(runtime)


@pytest.mark.parametrize("kind", KINDS)
def test_against_transformers_own_recurrence(kind: str) -> None:
    """It computes in float32: at most 2e-4, and at most twice what another way to cut it into chunks changes."""
    model, group = build(kind, "LAL"), make_group(lengths=LENGTHS)
    plain, other = copy.deepcopy(model), copy.deepcopy(model)
    plain_step(plain, [group])
    for module in other.modules():
        if hasattr(module, "chunk_size"):
            module.chunk_size = 64
    plain_step(other, [group])
    paged_step(Runtime(model, settings()), [group])
    ours, cut = worst(model, plain), worst(other, plain)
    assert ours[0][0] <= 2e-4, ours[:4]
    assert ours[0][0] <= 2 * cut[0][0], (ours[:4], cut[:4])


TIERS: dict[str, list[dict[str, Any]]] = {
    "device": [{"kind": "device", "budget": "64MiB"}],
    "host": [{"kind": "host", "budget": "64MiB"}],
    "all three": [{"kind": "device", "budget": "8KiB"}, {"kind": "host", "budget": "16KiB"}, {"kind": "nvme"}],
}


@pytest.mark.parametrize("kind", KINDS)
def test_tiers_agree_bit_for_bit(kind: str, tmp_path: Any) -> None:
    group, found = make_group(lengths=LENGTHS), []
    for tiers in TIERS.values():
        tiers = [tier | ({"path": tmp_path, "budget": "64MiB"} if tier["kind"] == "nvme" else {}) for tier in tiers]
        model = build(kind, "LAL", dtype=torch.float32)
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


@pytest.mark.parametrize("kind", KINDS)
def test_score_is_the_first_replay(kind: str) -> None:
    model, group = build(kind, "LAL", dtype=torch.float32), make_group(lengths=LENGTHS)
    with Runtime(model, settings()) as runtime, runtime.transaction(group.prompt) as txn:
        scored = txn.score(group.responses)
        for mine, other in zip(replay_group(txn, group), scored, strict=True):
            assert torch.equal(mine, other)


def test_adapter_on_the_convolution_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="convolution of layer 0"):
        Runtime(add_lora(build(layers="LA"), target_modules=["conv1d"], r=88))


def measure(kind: str, prompt: int) -> tuple[int, int]:
    """Most bytes that autograd holds at once in replay (with its backward) and in the sweep."""
    model, group = build(kind, "LLA", dtype=torch.float32), make_group(prompt, (40, 1, 60))
    config = settings(
        replay={"lane_tokens": 64, "checkpoint": False},
        capture={"chunk_tokens": 128},
        pages={"tokens": 512, "block_tokens": 1024},
    )
    with Runtime(model, config) as runtime, runtime.transaction(group.prompt) as txn:
        with SavedBytes(model) as replay:
            replay_group(txn, group)
        with SavedBytes(model) as sweep:
            txn.sweep()
    return replay.peak, sweep.peak


@pytest.mark.parametrize("kind", KINDS)
def test_saved_bytes_do_not_grow_with_the_prompt(kind: str) -> None:
    figures = [measure(kind, prompt) for prompt in (300, 1_200)]
    for phase in zip(*figures, strict=True):
        assert min(phase) > 10_000, "nothing was counted"
        assert max(phase) <= 1.05 * min(phase), figures
