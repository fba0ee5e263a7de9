"""The routers' auxiliary loss: its value and every parameter's gradient are those of one batch of the group's rows."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from longstraw import Report, Runtime
from longstraw.errors import StaleWeightsError, TransactionStateError, UnsupportedModelError
from longstraw.integrations.transformers.families import FAMILIES
from longstraw.runtime.branches import PackedBranches
from longstraw.runtime.passes import ForwardPass
from longstraw.runtime.router_loss import RouterLoss
from tests.families import delta_models
from tests.families.router_loss import COEFFICIENT, asked_for, balance_loss, plain_aux_step, replay_aux
from tests.families.test_gated_delta import exact_oracle, rechunked  # noqa: F401
from tests.families.windowed_models import windowed_model
from tests.parity.models import (
    Group,
    add_lora,
    assert_idle,
    assert_parity,
    build,
    distance,
    lane_loss,
    make_group,
    plain_step,
    replay_group,
    settings,
    worst,
)
from tests.runtime.faults import Fuse, out_of_memory_in_forward

KINDS = ["mixtral", "mixtral-windowed", "qwen3_moe", "qwen3_moe-windowed", "gpt_oss"]
DELTA = ["qwen3_next", "qwen3_5_moe_text"]
CHECKPOINT = pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
FLOAT32_SHARES = 1e-7
"""Where all else is float64: transformers divides its counts in float32."""
GROUP = make_group()
ONE_LANE = settings(replay={"lane_tokens": 100})


def check(
    model: Any,
    config: Mapping[str, Any] | None = None,
    *,
    group: Group = GROUP,
    score: bool = False,
    tolerance: float = 1e-6,
) -> Report:
    """One step with the auxiliary loss against plain autograd."""
    reference = copy.deepcopy(model)
    expected = plain_aux_step(reference, group)
    with Runtime(model, settings() if config is None else config) as runtime:
        with runtime.transaction(group.prompt) as txn:
            old = txn.score(group.responses) if score else None
            found = replay_aux(txn, group)
        assert_idle(runtime)
    report: Report = txn.report
    assert ("count" in report.seconds) == (old is None and report.lanes > 1)
    assert found == pytest.approx(expected, rel=tolerance)
    assert report.aux_loss == pytest.approx(expected, rel=tolerance)
    assert (report.aux_loss_scale, report.aux_loss_prompt_weight) == (COEFFICIENT, len(group.responses))
    assert_parity(model, reference, tolerance)
    assert model.config.get_text_config().output_router_logits
    return report


# Families


@CHECKPOINT
@pytest.mark.parametrize("kind", KINDS)
def test_attention_families(kind: str, checkpoint: bool) -> None:
    assert check(asked_for(windowed_model(kind)), settings(replay={"checkpoint": checkpoint})).lanes > 1


@CHECKPOINT
@pytest.mark.parametrize("layers", ["LAL", "LLA"])
@pytest.mark.parametrize("kind", DELTA)
@pytest.mark.usefixtures("exact_oracle")
def test_hybrids(kind: str, layers: str, checkpoint: bool) -> None:
    model = asked_for(delta_models.build(kind, layers))
    check(model, settings(replay={"checkpoint": checkpoint}), tolerance=FLOAT32_SHARES)


@pytest.mark.usefixtures("exact_oracle")
def test_the_text_part_of_a_multimodal_hybrid() -> None:
    check(asked_for(delta_models.multimodal("qwen3_5_moe")), tolerance=FLOAT32_SHARES)


@pytest.mark.parametrize("kind", DELTA)
def test_hybrids_against_transformers_own_recurrence(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """It computes in float32: at most 2e-4, and at most twice what another way to cut it into chunks changes."""
    model = asked_for(delta_models.build(kind, "LAL"))
    plain, other = copy.deepcopy(model), copy.deepcopy(model)
    plain_aux_step(plain, GROUP)
    with monkeypatch.context() as patch:
        rechunked(patch, kind, 16)
        plain_aux_step(other, GROUP)
    with Runtime(model, settings()).transaction(GROUP.prompt) as txn:
        replay_aux(txn, GROUP)
    ours, cut = worst(model, plain), worst(other, plain)
    assert ours[0][0] <= 2e-4, ours[:4]
    assert ours[0][0] <= 2 * cut[0][0], (ours[:4], cut[:4])


def test_every_family_with_an_auxiliary_loss_names_its_routers() -> None:
    """Of the classes that are supported, those whose file in transformers computes one."""
    attentions = {name for family in FAMILIES for name in family.attention_classes}
    known = {name for family in FAMILIES for name in family.router_classes}
    found = set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = path.read_text(encoding="utf-8")
        if "def load_balancing_loss_func(" not in text:
            continue
        supported = [name for name in re.findall(r"^class (\w+)\(", text, re.MULTILINE) if name in attentions]
        recorded = re.search(r'"router_logits": OutputRecorder\((\w+), index=0', text)
        # Granite's logits are not collected up to some release, its aux_loss is 0, and its router is refused.
        if supported and '"router_logits"' in text:
            assert recorded is not None, path.name
            assert recorded[1] in known, (path.name, recorded[1])
            found.add(recorded[1])
    assert {"MixtralTopKRouter", "Qwen3_5MoeTopKRouter"} <= found


# Sizes, lanes, scores


@pytest.mark.parametrize("config", [settings(), ONE_LANE], ids=["lanes", "one lane"])
@pytest.mark.parametrize("score", [False, True], ids=["counted", "scored"])
def test_lanes_with_and_without_a_score(score: bool, config: dict[str, Any]) -> None:
    check(asked_for(windowed_model("qwen3_moe")), config, score=score)


@pytest.mark.parametrize(
    ("prompt_tokens", "lengths"), [(1, (3, 1, 6)), (2, (3, 1)), (24, (4, 1, 9)), (65, (40, 1, 3)), (30, (5,))]
)
def test_sizes(prompt_tokens: int, lengths: tuple[int, ...]) -> None:
    check(asked_for(windowed_model("gpt_oss")), group=make_group(prompt_tokens, lengths))


@pytest.mark.parametrize("chunk", [1, 7, 200])
@pytest.mark.parametrize("keep", ["always", "never"])
def test_chunks_and_kept_outputs(chunk: int, keep: str) -> None:
    config = settings(capture={"chunk_tokens": chunk, "keep_attention": keep})
    check(asked_for(windowed_model("mixtral")), config, group=make_group(33, (5, 1, 3)))


def test_equal_responses_count_as_often_as_they_are_there() -> None:
    group = make_group(61, (7, 7, 7))
    check(asked_for(windowed_model("mixtral")), group=dataclasses.replace(group, responses=group.responses[:1] * 3))


def test_scores_are_what_replay_gives_bit_for_bit() -> None:
    with Runtime(asked_for(windowed_model("mixtral")).float(), settings()).transaction(GROUP.prompt) as txn:
        old = txn.score(GROUP.responses)
        for lane in txn.replay(GROUP.responses):
            for i, logprobs in zip(lane.indices, lane.logprobs, strict=True):
                assert torch.equal(logprobs, old[i])
                assert len(logprobs) == len(GROUP.responses[i])
            lane.skip()


def test_several_groups_in_one_accumulate() -> None:
    model = asked_for(windowed_model("qwen3_moe"))
    reference = copy.deepcopy(model)
    groups = [make_group(61, (7, 1, 12, 5), 0), make_group(2, (3, 1, 2), 1)]
    for group in groups:
        plain_aux_step(reference, group)
    runtime = Runtime(model, settings())
    with runtime.accumulate():
        for group in groups:
            with runtime.transaction(group.prompt) as txn:
                replay_aux(txn, group)
    assert_parity(model, reference)


def test_each_replay_is_a_group_of_its_own() -> None:
    model = asked_for(windowed_model("qwen3_moe"))
    reference = copy.deepcopy(model)
    other = dataclasses.replace(make_group(61, (4, 9), 3), prompt=GROUP.prompt)
    plain_aux_step(reference, GROUP)
    plain_aux_step(reference, other, 0.5)
    with Runtime(model, settings()).transaction(GROUP.prompt) as txn:
        replay_aux(txn, GROUP)
        replay_aux(txn, other, 0.5)
    assert_parity(model, reference)


def test_the_masked_loss_of_a_padded_batch_is_the_same() -> None:
    """What a trainer computes: rows padded on the right, the padding masked."""
    model = windowed_model("qwen3_moe")
    rows = [torch.cat([GROUP.prompt, response]) for response in GROUP.responses]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    with torch.no_grad():
        padded = model(input_ids=ids, attention_mask=mask, use_cache=False, output_router_logits=True).aux_loss
    with Runtime(asked_for(model), settings()).transaction(GROUP.prompt) as txn:
        assert replay_aux(txn, GROUP) == pytest.approx(float(padded), rel=1e-6)


# What is trained


@pytest.mark.parametrize("changed", ["output_router_logits", "training"])
def test_what_changes_after_the_capture_is_named(changed: str) -> None:
    model = asked_for(windowed_model("qwen3_moe"))
    with pytest.raises(StaleWeightsError, match=r"train or eval.*output_router_logits changed since"):  # noqa: PT012, SIM117
        with Runtime(model, settings()).transaction(GROUP.prompt) as txn:
            holder = model.config if changed == "output_router_logits" else model
            setattr(holder, changed, False)
            replay_group(txn, GROUP)


@CHECKPOINT
def test_lora_on_attention(checkpoint: bool) -> None:
    model = add_lora(windowed_model("qwen3_moe"), target_modules=["q_proj", "v_proj"])
    check(asked_for(model), settings(replay={"checkpoint": checkpoint}))


@pytest.mark.parametrize("trained", ["layers.2.mlp.gate", "layers.2.self_attn.q_proj", "layers.0.mlp.gate", "embed"])
def test_a_few_parameters(trained: str) -> None:
    """With the last router alone nothing trained is behind the prompt's state, and its tokens are swept for it."""
    model = asked_for(windowed_model("qwen3_moe"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    check(model)


def test_frozen_routers_have_a_value_and_no_gradient() -> None:
    model = asked_for(windowed_model("qwen3_moe"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    assert "sweep" in check(model).seconds


def test_bfloat16_is_as_near_to_float64_as_plain_bfloat16() -> None:
    ratios = []
    for seed in range(5):
        group = make_group(70, (7, 1, 12, 5, 3), seed)
        ours = asked_for(build("qwen3_moe", dtype=torch.bfloat16, seed=seed, num_experts=4, num_experts_per_tok=2,
                               moe_intermediate_size=16, head_dim=8))  # fmt: skip
        ours.set_experts_implementation("eager")
        plain, reference = copy.deepcopy(ours), copy.deepcopy(ours).double()
        aux = plain_aux_step(plain, group)
        plain_aux_step(reference, group)
        with Runtime(ours, settings()).transaction(group.prompt) as txn:
            assert replay_aux(txn, group) == pytest.approx(aux, rel=0.02)
        ratios.append(distance(ours, reference) / distance(plain, reference))
    assert sum(ratios) / len(ratios) <= 1.1, ratios


# Detached, and not asked for


def test_detached_leaves_out_the_prompts_share_of_the_gradient() -> None:
    from transformers import DynamicCache

    model = asked_for(windowed_model("qwen3_moe", oracle=False))
    reference, exact = copy.deepcopy(model), copy.deepcopy(model)
    expected = plain_aux_step(exact, GROUP)
    with Runtime(model, settings(gradient={"prompt": "detached"})).transaction(GROUP.prompt) as txn:
        assert replay_aux(txn, GROUP) == pytest.approx(expected, rel=1e-6)
    assert "no gradient through the prompt's share" in str(txn.report)
    assert worst(model, exact)[0][0] > 0.1

    losses, logits = [], []
    for i, response in enumerate(GROUP.responses):
        cache = DynamicCache(config=reference.config)
        options = {"past_key_values": cache, "output_router_logits": True}
        with torch.no_grad():
            prompt = reference(GROUP.prompt[None, :-1], **options).router_logits
        out = reference(torch.cat([GROUP.prompt[-1:], response])[None], **options)
        logits.append([torch.cat(pair) for pair in zip(prompt, out.router_logits, strict=True)])
        log_p = out.logits[0, :-1].log_softmax(-1)
        losses.append(GROUP.loss(i, log_p.gather(-1, response[:, None])[:, 0], None))
    aux = balance_loss(reference, tuple(torch.cat(rows) for rows in zip(*logits, strict=True)))
    (torch.stack(losses).sum() + COEFFICIENT * aux).backward()
    assert_parity(model, reference)


def test_a_loss_without_it_has_no_effect_and_the_report_says_so() -> None:
    model = asked_for(windowed_model("qwen3_moe"))
    reference = copy.deepcopy(model)
    plain_step(reference, [GROUP])
    with Runtime(model, settings()).transaction(GROUP.prompt) as txn:
        replay_group(txn, GROUP)
    assert_parity(model, reference)
    assert (txn.report.aux_loss_scale, txn.report.aux_loss_prompt_weight) == (0.0, 4)
    assert "no loss asked for its gradient" in str(txn.report)


def test_the_report_says_how_often_a_prompt_token_counts() -> None:
    report = check(asked_for(windowed_model("qwen3_moe")))
    assert "with coefficient 3, each prompt token counted 4 time(s)" in str(report)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: asked_for(build("llama")), "LlamaForCausalLM has no routers of experts"),
        (lambda: windowed_model("mixtral"), "config.output_router_logits is False; set it to True"),
    ],
)
def test_why_there_is_none(model: Any, reason: str) -> None:
    with Runtime(model(), settings()).transaction(GROUP.prompt) as txn:
        for lane in txn.replay(GROUP.responses):
            with pytest.raises(TransactionStateError, match=reason):
                _ = lane.aux_loss
            lane.skip()
    assert txn.report.aux_loss is None
    assert "auxiliary" not in str(txn.report)
    assert "count" not in txn.report.seconds


def test_a_router_that_returns_another_order_is_refused() -> None:
    model = asked_for(windowed_model("mixtral"))
    model.model.layers[0].mlp.gate.register_forward_hook(lambda module, args, output: output[::-1])
    with pytest.raises(UnsupportedModelError, match="MixtralTopKRouter does not return logits, weights and choices"):
        Runtime(model, settings()).transaction(GROUP.prompt)


def test_a_router_that_serves_two_layers_is_refused() -> None:
    model = asked_for(windowed_model("qwen3_moe"))
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(UnsupportedModelError, match="layer 1 shares its Qwen3MoeTopKRouter with an earlier layer"):
        Runtime(model, settings()).transaction(GROUP.prompt)
    model.config.output_router_logits = False
    reference = copy.deepcopy(model)
    plain_step(reference, [GROUP])
    with Runtime(model, settings()).transaction(GROUP.prompt) as txn:
        replay_group(txn, GROUP)
    assert_parity(model, reference)


def test_routers_of_one_weight_are_followed_one_by_one() -> None:
    model = asked_for(windowed_model("qwen3_moe"))
    model.model.layers[1].mlp.gate.weight = model.model.layers[0].mlp.gate.weight
    check(model)


# Mistakes


def replay_with(loss: Any) -> None:
    with Runtime(asked_for(windowed_model("qwen3_moe")), settings()).transaction(GROUP.prompt) as txn:
        for number, lane in enumerate(txn.replay(GROUP.responses)):
            lane.backward(loss(number, lane))


def test_lanes_with_different_coefficients() -> None:
    def loss(number: int, lane: Any) -> Tensor:
        value = lane_loss(GROUP, lane)
        return value + 0.5 * lane.aux_loss if number == 0 else value

    with pytest.raises(TransactionStateError, match=r"weight 0 in the lane of .* gave it 0\.5 in that of branches"):
        replay_with(loss)


def test_a_loss_that_is_not_a_number_is_the_users_to_see() -> None:
    """A loss scale that overflows, say: the step goes on, as an ordinary one would, and whoever scales skips it."""
    replay_with(lambda number, lane: lane_loss(GROUP, lane) + float("nan") * lane.aux_loss)


def test_another_lanes_share() -> None:
    seen: list[Any] = []

    def loss(number: int, lane: Any) -> Tensor:
        seen.append(lane.aux_loss)
        return lane_loss(GROUP, lane) + seen[0]

    with pytest.raises(TransactionStateError, match="another lane's"):
        replay_with(loss)


def test_a_backward_by_hand() -> None:
    def loss(number: int, lane: Any) -> Tensor:
        lane.aux_loss.backward()
        return lane_loss(GROUP, lane)

    with pytest.raises(TransactionStateError, match="by hand"):
        replay_with(loss)


def test_a_loss_of_nothing_else() -> None:
    model = asked_for(windowed_model("qwen3_moe"))
    reference = copy.deepcopy(model)
    nothing = dataclasses.replace(GROUP, loss=lambda i, logprobs, entropies: 0.0 * logprobs.sum())
    plain_aux_step(reference, nothing)
    with Runtime(model, settings()).transaction(GROUP.prompt) as txn:
        for lane in txn.replay(GROUP.responses):
            lane.backward(COEFFICIENT * lane.aux_loss)
    assert_parity(model, reference)


# Memory, weights


@pytest.mark.parametrize("lane_tokens", [20, 100], ids=["two lanes", "one lane"])
def test_lanes_that_run_out_of_memory_are_counted_and_run_narrower(lane_tokens: int) -> None:
    model = asked_for(windowed_model("qwen3_moe"))
    reference = copy.deepcopy(model)
    expected = plain_aux_step(reference, GROUP)
    config = settings(replay={"lane_tokens": lane_tokens})
    with Runtime(model, config).transaction(GROUP.prompt) as txn:
        # The longest branch has 12 tokens, and the one behind them. However two lanes are cut, one is wider.
        with out_of_memory_in_forward(model, Fuse(above=13)):
            found = replay_aux(txn, GROUP)
        assert txn.report.retries > 0
        assert "count" in txn.report.seconds
    assert found == pytest.approx(expected, rel=1e-6)
    assert_parity(model, reference)


@pytest.mark.parametrize("fails", [1, 2])
def test_a_backward_that_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
    """The lanes are run again, with what each was told, in lanes that mix two groups."""
    model = asked_for(windowed_model("qwen3_moe"))
    reference = copy.deepcopy(model)
    other = dataclasses.replace(make_group(61, (4, 9), 3), prompt=GROUP.prompt)
    plain_aux_step(reference, GROUP)
    plain_aux_step(reference, other, 0.5)
    runtime = Runtime(model, settings(replay={"lane_tokens": 60}))
    backward, calls = type(runtime._engine.sharding).backward, []

    def fused(self: Any, out: Tensor, gradient: Tensor) -> None:
        backward(self, out, gradient)
        calls.append(1)
        if len(calls) == fails:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(type(runtime._engine.sharding), "backward", fused)
    with runtime.transaction(GROUP.prompt) as txn:
        replay_aux(txn, GROUP)
        replay_aux(txn, other, 0.5)
    assert txn.report.retries > 0
    assert_parity(model, reference)


def test_a_sweep_that_runs_out_of_memory() -> None:
    model = asked_for(windowed_model("mixtral"))
    reference = copy.deepcopy(model)
    plain_aux_step(reference, GROUP)
    with Runtime(model, settings()).transaction(GROUP.prompt) as txn:
        replay_aux(txn, GROUP)
        with out_of_memory_in_forward(model, Fuse(at_call=1)):
            txn.sweep()
        assert txn.report.retries == 1
    assert_parity(model, reference)


def test_weights_that_changed_since_the_score_are_counted_anew() -> None:
    model = asked_for(windowed_model("qwen3_moe"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Runtime(model, settings(), staleness=1).transaction(GROUP.prompt) as txn:
        txn.score(GROUP.responses)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        replay_aux(txn, GROUP)
    assert "count" in txn.report.seconds


def test_a_failed_transaction_starts_afresh() -> None:
    model = asked_for(windowed_model("qwen3_moe"))
    reference = copy.deepcopy(model)
    plain_aux_step(reference, GROUP)
    txn = Runtime(model, settings()).transaction(GROUP.prompt)
    with pytest.raises(KeyError), txn:  # noqa: PT012
        replay_aux(txn, GROUP)
        raise KeyError
    assert not any(module._forward_hooks for module in model.modules() if type(module).__name__.endswith("Router"))
    with txn:
        replay_aux(txn, GROUP)
    assert_parity(model, reference)


# Guards


def test_a_prompt_whose_last_layer_is_not_finished_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the prompt's state is wanted of the last layer otherwise, and its attention is left out."""
    unused = ForwardPass.output_unused

    def forgetful(self: Any, index: int) -> bool:
        routers, self.routers = self.routers, None
        try:
            return unused(self, index)
        finally:
            self.routers = routers

    monkeypatch.setattr(ForwardPass, "output_unused", forgetful)
    with pytest.raises(AssertionError):
        check(asked_for(windowed_model("qwen3_moe")))


def test_responses_whose_last_token_is_not_routed_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PackedBranches.__init__
    monkeypatch.setattr(PackedBranches, "__init__", lambda self, *args, whole: original(self, *args, whole=False))
    with pytest.raises(AssertionError):
        check(asked_for(windowed_model("qwen3_moe")))


def test_prompt_tokens_that_count_once_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RouterLoss.add_prompt_share
    monkeypatch.setattr(RouterLoss, "add_prompt_share", lambda self, worth_N, rows: original(self, worth_N, 1))
    with pytest.raises(AssertionError):
        check(asked_for(windowed_model("qwen3_moe")))
