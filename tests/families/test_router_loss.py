"""The routers' auxiliary loss: its value and every parameter's gradient are those of one batch of the group's rows."""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from longstraw import Runtime
from longstraw.errors import StaleWeightsError
from longstraw.integrations.transformers.families import FAMILIES
from tests.families import delta_models
from tests.families.router_loss import (
    FLOAT32_SHARES,
    GROUP,
    ONE_LANE,
    asked_for,
    check,
    plain_aux_step,
    replay_aux,
)
from tests.families.test_gated_delta import exact_oracle, rechunked  # noqa: F401
from tests.families.windowed_models import windowed_model
from tests.parity.models import (
    add_lora,
    assert_parity,
    build,
    distance,
    make_group,
    replay_group,
    settings,
    worst,
)

KINDS = ["mixtral", "mixtral-windowed", "qwen3_moe", "qwen3_moe-windowed", "gpt_oss"]
DELTA = ["qwen3_next", "qwen3_5_moe_text"]
CHECKPOINT = pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])


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
