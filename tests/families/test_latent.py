"""Latent attention, all tokens or selected ones: every gradient against plain autograd on unpadded rows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw import Runtime
from longstraw.errors import UnsupportedModelError
from tests.families.latent_models import KINDS, check, reference_step, tiny
from tests.parity.models import (
    add_lora,
    assert_idle,
    build,
    distance,
    gradients,
    make_group,
    paged_step,
    plain_step,
    replay_group,
    settings,
    worst,
)

CHECKPOINT = pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
ONE_OF_EACH = pytest.mark.parametrize("kind", ["deepseek_v3", "glm_moe_dsa"])

LINEARS = r".*\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|wq_b|wk|weights_proj)"
"""Every linear layer of attention and indexer. On an MLP's names PEFT adapts the experts' stacked parameters too."""


@CHECKPOINT
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_family(kind: str, checkpoint: bool) -> None:
    check(tiny(kind), [make_group(61, (7, 1, 12, 2, 3))], settings(replay={"checkpoint": checkpoint}))


@pytest.mark.parametrize(
    "changes",
    [
        {"q_lora_rank": None},
        {"rope_interleave": False},
        {"attention_bias": True},
        {"attn_implementation": "eager"},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            }
        },
    ],
    ids=["full-rank queries", "rotated halves", "biases", "eager", "yarn"],
)
def test_variants_of_deepseek_v3(changes: dict[str, Any]) -> None:
    check(tiny("deepseek_v3", **changes), [make_group(40, (5, 1, 3))])


@ONE_OF_EACH
@pytest.mark.parametrize(
    ("prompt_tokens", "lengths"),
    [
        (2, (3, 1, 2)),
        (17, (4, 1, 9)),  # below one chunk, one row past a page
        (24, (3, 1, 2)),  # 23 captured rows: exactly one chunk
        (65, (40, 1, 3)),  # a branch wider than a lane
    ],
)
def test_sizes(kind: str, prompt_tokens: int, lengths: tuple[int, ...]) -> None:
    check(tiny(kind, num_hidden_layers=2, indexer_types=["full", "shared"]), [make_group(prompt_tokens, lengths)])


@ONE_OF_EACH
@pytest.mark.parametrize(("chunk", "page", "block"), [(1, 1, 1), (7, 4, 8), (16, 16, 16), (200, 256, 256)])
def test_chunks_pages_and_blocks(kind: str, chunk: int, page: int, block: int) -> None:
    config = settings(
        capture={"chunk_tokens": chunk}, pages={"tokens": page, "block_tokens": block}, replay={"checkpoint": True}
    )
    check(tiny(kind, num_hidden_layers=2, indexer_types=["full", "shared"]), [make_group(25, (5, 1, 3))], config)


@ONE_OF_EACH
def test_several_groups(kind: str) -> None:
    check(tiny(kind), [make_group(30, (7, 1, 2), 0), make_group(19, (3, 1), 1)])


@CHECKPOINT
@ONE_OF_EACH
def test_lora_on_every_linear(kind: str, checkpoint: bool) -> None:
    model = add_lora(tiny(kind), target_modules=LINEARS)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("kv_b_proj.lora_A" in name for name in trained)
    check(model, [make_group(40, (5, 1, 3))], settings(replay={"checkpoint": checkpoint}))


def test_dora_shows_its_matrix_by_its_own_forward() -> None:
    check(add_lora(tiny("deepseek_v3"), use_dora=True, target_modules=["kv_b_proj"]), [make_group(40, (5, 1, 3))])


@pytest.mark.parametrize("how", ["disabled", "merged"])
def test_lora_that_does_not_act(how: str) -> None:
    model = add_lora(tiny("deepseek_v3"), target_modules=["kv_b_proj", "q_b_proj"])
    for name, p in model.named_parameters():
        p.requires_grad_("mlp" in name or "kv_b_proj.base_layer" in name)
    if how == "merged":
        model.merge_adapter()
        check(model, [make_group(40, (5, 1, 3))])
        return
    # PEFT freezes and thaws its own parameters around `disable_adapter`.
    with model.disable_adapter():
        check(model, [make_group(40, (5, 1, 3))])


def test_a_small_lora_update_survives_half_precision() -> None:
    """Added to a bfloat16 matrix it would be rounded away; as a part of its own it is not."""
    from longstraw.integrations.transformers.linear import matrix_parts

    model = add_lora(build("deepseek_v3", dtype=torch.bfloat16, **KINDS["deepseek_v3"]), target_modules=["kv_b_proj"])
    linear = model.base_model.model.model.layers[0].self_attn.kv_b_proj
    with torch.no_grad():
        linear.lora_B["default"].weight.mul_(1e-3)
    base, update = matrix_parts(linear, 12)
    assert update.abs().max() > 0
    kept = ((base + update.to(base.dtype)).double() - base.double()).norm()
    assert kept < 0.9 * update.double().norm()


def test_only_the_last_layer_trained() -> None:
    model = tiny("deepseek_v3")
    for name, p in model.named_parameters():
        p.requires_grad_("layers.2" in name)
    check(model, [make_group(40, (5, 1, 3))])


@ONE_OF_EACH
def test_detached_leaves_out_what_flows_through_the_prompt(kind: str) -> None:
    model, group = tiny(kind), make_group(40, (5, 1, 3))
    exact, expected = reference_step(model, [group])
    runtime = Runtime(model, settings(gradient={"prompt": "detached"}))
    found = paged_step(runtime, [group])
    for ours, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert worst(model, exact)[0][0] > 0.1
    assert_idle(runtime)


def test_detached_is_the_gradient_behind_a_cache_without_one() -> None:
    from transformers import DynamicCache

    model, group = tiny("deepseek_v3"), make_group(40, (5, 1, 3))
    reference = copy.deepcopy(model)
    paged_step(Runtime(model, settings(gradient={"prompt": "detached"})), [group])
    for i, response in enumerate(group.responses):
        cache = DynamicCache(config=reference.config)
        with torch.no_grad():
            reference(group.prompt[None, :-1], past_key_values=cache, use_cache=True)
        row = torch.cat([group.prompt[-1:], response[:-1]])
        log_p = reference(row[None], past_key_values=cache, use_cache=True).logits[0].log_softmax(-1)
        group.loss(i, log_p.gather(-1, response[:, None])[:, 0], None).backward()
    assert worst(model, reference)[0][0] <= 1e-6


def run(model: Any, tiers: list[dict[str, Any]], checkpoint: bool) -> tuple[dict[str, Any], list[Any]]:
    group = make_group(61, (7, 1, 12, 2, 3))
    config = settings(tiers=tiers, replay={"checkpoint": checkpoint})
    with Runtime(model, config) as runtime, runtime.transaction(group.prompt) as txn:
        scored = txn.score(group.responses)
        replayed = replay_group(txn, group)
    assert all(torch.equal(a, b) for a, b in zip(scored, replayed, strict=True)), "the first ratio is not exactly 1"
    return gradients(model), replayed


@CHECKPOINT
@ONE_OF_EACH
def test_bitwise_the_same_on_every_tier(kind: str, checkpoint: bool, tmp_path: Path) -> None:
    model = tiny(kind)
    device = {"kind": "device", "budget": "64MiB"}
    host = {"kind": "host", "budget": "64MiB"}
    nvme = {"kind": "nvme", "path": str(tmp_path), "budget": "64MiB"}
    want, want_lists = run(copy.deepcopy(model), [device], checkpoint)
    for tiers in ([host], [nvme], [device | {"budget": "6KiB"}, host | {"budget": "10KiB"}, nvme]):
        found, lists = run(copy.deepcopy(model), tiers, checkpoint)
        assert all(torch.equal(a, b) for a, b in zip(lists, want_lists, strict=True))
        for name, gradient in want.items():
            assert gradient is None or torch.equal(found[name], gradient), name  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "per_token"), [("deepseek_v3", 3 * 20), ("glm_moe_dsa", 4 * 20 + 2 * 16)])
def test_a_prompt_token_is_never_expanded_to_heads(kind: str, per_token: int) -> None:
    model, group = tiny(kind), make_group(65, (5, 1, 3))
    with Runtime(model, settings()) as runtime, runtime.transaction(group.prompt) as txn:
        segments = txn._captured.state._segments.values()
        rows = sum(segment.state.row_bytes * 64 for segment in segments)
        txn.score(group.responses)
    assert rows == 64 * 8 * per_token


def test_bfloat16_is_as_near_to_float64_as_plain_bfloat16() -> None:
    ratios = []
    for seed in range(4):
        group = make_group(100, (7, 1, 12, 5, 3), seed)
        ours = build("youtu", dtype=torch.bfloat16, seed=seed, **KINDS["youtu"])
        plain, reference = copy.deepcopy(ours), copy.deepcopy(ours).double()
        plain_step(plain, [group])
        plain_step(reference, [group])
        paged_step(Runtime(ours, settings()), [group])
        ratios.append(distance(ours, reference) / distance(plain, reference))
    assert sum(ratios) / len(ratios) <= 1.1, ratios


def test_a_bias_of_kv_b_proj_is_refused() -> None:
    model = tiny("deepseek_v3")
    old = model.model.layers[1].self_attn.kv_b_proj
    model.model.layers[1].self_attn.kv_b_proj = torch.nn.Linear(
        old.in_features, old.out_features, dtype=old.weight.dtype
    )
    with pytest.raises(UnsupportedModelError, match="kv_b_proj of layer 1 has a bias"):
        Runtime(model, settings())
