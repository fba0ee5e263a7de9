"""Plans against transactions that run: the same cuts, the same pages, the same bytes moved; and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw import Config, Runtime
from longstraw.cli.plan import _notes
from longstraw.integrations.transformers.blueprint import blueprint
from longstraw.planner import Blueprint, Machine, Plan, Workload, advise, make_plan
from longstraw.planner.seconds import visible
from tests.families import delta_models, latent_models, windowed_models
from tests.families.router_loss import asked_for
from tests.parity.models import build, make_group, replay_group

MODELS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: build("qwen3", dtype=torch.float32),
    "qwen3_next": lambda: delta_models.build(
        "qwen3_next", dtype=torch.bfloat16, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "gemma2": lambda: windowed_models.windowed_model("gemma2").float(),
    "glm_moe_dsa": lambda: latent_models.tiny("glm_moe_dsa").bfloat16(),
}


@pytest.mark.parametrize("mode", ["exact", "detached"])
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_a_transaction_moves_what_the_plan_says(kind: str, mode: str, tmp_path: Path) -> None:
    compare(MODELS[kind](), mode=mode, group=3, lane_tokens=14, path=tmp_path)


@pytest.mark.parametrize("mode", ["exact", "detached"])
@pytest.mark.parametrize(("lane_tokens", "lanes"), [(14, 4), (16, 2), (32, 1)])
def test_a_transaction_with_the_auxiliary_loss_moves_what_the_plan_says(
    lane_tokens: int, lanes: int, mode: str, tmp_path: Path
) -> None:
    """A response takes 8 tokens of a lane. Several lanes are counted before the first backward."""
    sizes: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    model = asked_for(build("qwen3_moe", dtype=torch.float32, **sizes))
    found = compare(model, mode=mode, group=4, lane_tokens=lane_tokens, path=tmp_path)
    assert (found.lanes, found.widest_lane) == (lanes, 32 // lanes)
    assert ("count" in found.phases) is (lanes > 1)
    assert any(note.startswith("count: ") for note in _notes(found, None)) is (lanes > 1)


def compare(model: Any, *, mode: str, group: int, lane_tokens: int, path: Path) -> Plan:
    """The plan of a step that also runs, on responses of 7 tokens: the same cuts, pages, phases and bytes."""
    ids = make_group(61, (7,) * group)
    config = Config(
        gradient={"prompt": mode},
        pages={"tokens": 16, "block_tokens": 16},
        capture={"chunk_tokens": 23, "keep_attention": "always"},
        replay={"lane_tokens": lane_tokens, "checkpoint": False},
        tiers=[{"kind": "nvme", "path": str(path), "budget": "64MiB", "checksum": False}],
    )
    with Runtime(model, config) as runtime, runtime.transaction(ids.prompt) as txn:
        replay_group(txn, ids)
    report = txn.report
    found = blueprint(model.config, dtype=model.dtype)
    plan = make_plan(found, Workload(prompt=61, group=group, response=7), config, Machine())
    assert plan.problem is None
    assert (plan.chunks, plan.lanes) == (report.chunks, report.lanes)
    assert plan.kept_output_layers == report.kept_output_layers
    assert plan.tiers["nvme"]["used"] == report.tier_bytes["nvme"]
    read = sum(cost.bytes_read.get("nvme", 0) for cost in plan.phases.values())
    written = sum(cost.bytes_written.get("nvme", 0) for cost in plan.phases.values())
    assert (read, written) == (report.bytes_read["nvme"], report.bytes_written["nvme"])
    assert plan.phases.keys() == report.seconds.keys() - {"finalize", *(["sweep"] if mode == "detached" else [])}
    return plan


@pytest.fixture(scope="module")
def small() -> Blueprint:
    """A two-layer model of some width."""
    config = build("qwen3").config
    config.hidden_size, config.num_hidden_layers = 256, 2
    return blueprint(config)


def plan(small: Blueprint, *, prompt: int = 100_000, machine: Machine | None = None, **settings: Any) -> Plan:
    settings = {"tiers": [{"kind": "host", "budget": "1GiB"}], **settings}
    workload = Workload(prompt=prompt, group=4, response=256)
    return make_plan(small, workload, Config(**settings), machine or Machine())


def test_what_binds(small: Blueprint) -> None:
    assert plan(small).phases["sweep"].binds == "compute"
    slow = plan(small, machine=Machine(h2d=1e8, d2h=1e8, both=1e8))
    assert slow.phases["sweep"].binds == "link"
    assert slow.phases["sweep"].seconds == pytest.approx(slow.phases["sweep"].link)
    disk = plan(small, tiers=[{"kind": "nvme", "path": ".", "budget": "1GiB"}], machine=Machine(disk_read=1e6))
    assert disk.phases["replay"].binds == "disk"


def test_a_detached_step_has_no_sweep_and_no_gradient_pages(small: Blueprint) -> None:
    found = plan(small, gradient={"prompt": "detached"})
    assert "sweep" not in found.phases
    assert found.pages["its gradient"] == 0
    assert found.seconds < plan(small).seconds


def test_a_detached_prompt_costs_three_products_of_five_where_they_are_alone(qwen3_8b_lora: Blueprint) -> None:
    workload, tiers = Workload(prompt=131_072, group=8, response=1024), [{"kind": "host", "budget": "100GiB"}]

    def backward(mode: str, machine: Machine) -> float:
        config = Config(gradient={"prompt": mode}, replay={"checkpoint": False}, tiers=tiers)
        return make_plan(qwen3_8b_lora, workload, config, machine).phases["backward"].operations

    saved = backward("exact", Machine()) - backward("detached", Machine())
    # Two products over the prompt: 32 heads of 128 channels in 36 layers, two operations a pair and channel each.
    assert saved == pytest.approx(2 * 2 * 32 * 128 * 36 * 8 * 1024 * 131_071, rel=1e-6)
    without = replace(Machine(), attention_queries={})
    assert backward("detached", without) == backward("exact", Machine())


def test_checkpointing_takes_less_memory_and_more_time(small: Blueprint) -> None:
    profile = small.profile
    profile = replace(
        profile, layers=profile.layers * 6, blocks=profile.blocks * 6, graph_bytes=profile.graph_bytes * 6
    )
    deep = replace(small, profile=profile, work=small.work * 6)
    with_it, without = (plan(deep, prompt=2000, replay={"checkpoint": choice}) for choice in (True, False))
    assert with_it.memory.beyond_weights < without.memory.beyond_weights
    assert with_it.phases["backward"].seconds > without.phases["backward"].seconds


def test_the_routers_auxiliary_loss_finishes_the_prompts_last_layer(small: Blueprint) -> None:
    assert small.profile.no_aux_loss is not None
    with_it, without = plan(replace(small, profile=replace(small.profile, no_aux_loss=None))), plan(small)
    for phase in ("capture", "sweep"):
        assert with_it.phases[phase].bytes_read["host"] > without.phases[phase].bytes_read["host"]
        assert with_it.phases[phase].seconds > without.phases[phase].seconds
    assert with_it.phases["replay"].bytes_read == without.phases["replay"].bytes_read


def test_a_full_tier_is_a_problem_and_every_advice_cures_it(small: Blueprint) -> None:
    found = plan(small, tiers=[{"kind": "host", "budget": "4MiB"}])
    assert found.problem is not None
    assert "the tiers cannot hold the pages" in found.problem
    assert not found.phases
    advice = advise(found)
    assert any("tiers[0].budget: 2GiB" in line for line in advice), advice
    assert any("kind: nvme" in line for line in advice)
    (shorter,) = [line for line in advice if line.startswith("--prompt")]
    longest = int(shorter.split()[1])
    assert plan(small, prompt=longest, tiers=[{"kind": "host", "budget": "4MiB"}]).problem is None
    assert plan(small, prompt=longest + 1024, tiers=[{"kind": "host", "budget": "4MiB"}]).problem is not None


def test_what_cannot_be_cured_is_not_named(small: Blueprint) -> None:
    tiny = Machine(device_bytes=1_000_500_000)
    found = plan(small, machine=tiny, replay={"logit_block_tokens": 1 << 20})
    assert found.problem is not None
    assert "the device cannot hold the step" in found.problem
    assert advise(found) == []


def test_weights_that_are_too_large_with_all_gradients_fit_with_lora() -> None:
    config = build("qwen3").config
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 1024, 4096, 2
    whole = blueprint(config)
    machine = Machine(device_bytes=whole.weight_bytes + 90_000_000, context_bytes=1)
    found = plan(whole, prompt=2000, machine=machine)
    assert found.problem is not None
    advice = advise(found, lambda rank: blueprint(config, lora_rank=rank))
    assert any(line.startswith("--lora 16") for line in advice), (found.memory, advice)


@pytest.mark.parametrize("sees", [None, 1, 3, 7, 100])
@pytest.mark.parametrize(("length", "prefix"), [(1, 0), (5, 0), (5, 4), (9, 2), (2, 50)])
def test_pairs_are_counted_as_by_hand(length: int, prefix: int, sees: int | None) -> None:
    expected = sum(min(prefix + i + 1, sees or 1 << 30) for i in range(length))
    assert visible(length, prefix, sees) == expected
