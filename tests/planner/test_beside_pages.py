"""Lanes and chunks are cut to what the prompt's pages leave of the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from longstraw import Config
from longstraw.integrations.transformers.blueprint import blueprint
from longstraw.planner import Blueprint, Machine, Plan, Workload, advise, make_plan
from longstraw.planner.pages import CountingPager, budgets, prompt_state
from longstraw.runtime.adapter import ModelProfile
from longstraw.runtime.beside_pages import beside, device_page_bytes, size_beside_pages
from longstraw.runtime.sizing import GraphSize, plan_chunks
from tests.families import delta_models

LOAD = Workload(prompt=262_144, group=8, response=8_192)
GIB = 1 << 30


@pytest.fixture(scope="module")
def hybrid() -> ModelProfile:
    """A small model with states of both kinds."""
    sizes: dict[str, Any] = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    return blueprint(delta_models.build("qwen3_next", dtype=torch.bfloat16, **sizes).config).profile


def tiers(device: str) -> list[dict[str, Any]]:
    return [{"kind": "device", "budget": device}, {"kind": "host", "budget": "100GiB"}]


def plan(model: Blueprint, load: Workload = LOAD, machine: Machine | None = None, **settings: Any) -> Plan:
    return make_plan(model, load, Config(**settings), machine or Machine(), timed=False)


def test_a_device_tier_narrows_lanes_instead_of_running_out(qwen3_8b_lora: Blueprint) -> None:
    found = plan(qwen3_8b_lora, tiers=tiers("90GiB"))
    assert found.problem is None
    assert found.memory.pages == pytest.approx(90 * GIB, rel=1e-3)
    on_host = plan(qwen3_8b_lora, tiers=[{"kind": "host", "budget": "200GiB"}])
    assert found.lane.checkpoint and not on_host.lane.checkpoint
    assert found.chunk.tokens < on_host.chunk.tokens


def test_a_budget_that_the_prompt_does_not_fill_is_left_to_the_graphs(qwen3_8b_lora: Blueprint) -> None:
    load = replace(LOAD, prompt=8_192)
    on_host = plan(qwen3_8b_lora, load, tiers=[{"kind": "host", "budget": "100GiB"}])
    on_device = plan(qwen3_8b_lora, load, tiers=tiers("100GiB"))
    assert 0 < on_device.memory.pages < 4 * GIB
    # They lie in what graphs leave free anyway.
    assert (on_device.lane, on_device.chunk) == (on_host.lane, on_host.chunk)


@pytest.mark.parametrize("mode", ["exact", "detached"])
@pytest.mark.parametrize("keep", ["auto", "always", "never"])
@pytest.mark.parametrize("budget", [0, 1_000_000, 2_700_000, 40_000_000])
def test_what_is_taken_off_is_what_will_be_placed(hybrid: ModelProfile, mode: str, keep: Any, budget: int) -> None:
    """Or a little more: a tier takes whole pages, and kept outputs of whole layers."""
    config = Config(
        gradient={"prompt": mode},
        capture={"keep_attention": keep},
        pages={"tokens": 16},
        tiers=tiers(str(budget)),
    )
    chunks, exact = plan_chunks(30_000, 1_000), mode == "exact"
    pagers = budgets(config, Machine())
    expected = device_page_bytes(pagers, hybrid.layers, chunks, exact=exact, wide=True, keep_outputs=keep)
    prompt_state(pagers, hybrid, chunks, config)
    placed = pagers[0].used
    assert placed <= expected <= min(budget, placed + 100_000)
    assert expected == 0 if budget == 0 else expected > 0
    # Another prompt finds that much less.
    again = device_page_bytes(pagers, hybrid.layers, chunks, exact=exact, wide=True, keep_outputs=keep)
    assert again <= budget - placed


def test_shorter_chunks_that_hold_more_are_counted_again() -> None:
    """Five bytes of pages a chunk beside a hundred, and a chunk as long as there are bytes."""

    def held(chunks: Any) -> int:
        return 100 + 5 * len(chunks)

    size, left = size_beside_pages(lambda free: GraphSize(tokens=max(free, 1), checkpoint=False), 300, held, 2_000)
    chunks, first = (plan_chunks(2_000, tokens) for tokens in (size.tokens, 300))
    assert len(chunks) > len(first)
    assert size.tokens == left == beside(300, held(chunks)) < beside(300, held(first)) < 300
    nothing = size_beside_pages(lambda free: GraphSize(tokens=max(free, 1), checkpoint=False), 0, held, 100)
    assert nothing == (GraphSize(tokens=1, checkpoint=False), 0)


def test_other_tiers_take_nothing(hybrid: ModelProfile) -> None:
    pagers = [CountingPager("host", 1 << 40, "host"), CountingPager("nvme", 1 << 40, "nvme")]
    chunks = plan_chunks(999, 100)
    assert device_page_bytes(pagers, hybrid.layers, chunks, exact=True, wide=True, keep_outputs="always") == 0


def test_advice_names_checkpointing_and_narrower_lanes(qwen3_8b_lora: Blueprint) -> None:
    found = plan(qwen3_8b_lora, tiers=tiers("110GiB"), replay={"checkpoint": False, "lane_tokens": 32_768})
    assert "the device cannot hold the step" in (found.problem or "")
    wide = plan(qwen3_8b_lora, tiers=tiers("110GiB"), replay={"checkpoint": True, "lane_tokens": 32_768})
    assert wide.problem is not None
    (line,) = [line for line in advise(found) if line.startswith("replay.checkpoint: true")]
    tokens = int(line.removeprefix("replay.checkpoint: true and replay.lane_tokens: "))
    for factor in (1, 2):
        settings = {"checkpoint": True, "lane_tokens": factor * tokens}
        tried = plan(qwen3_8b_lora, tiers=tiers("110GiB"), replay=settings)
        assert (tried.problem is None) is (factor == 1)


def test_advice_names_a_smaller_device_tier(qwen3_8b_lora: Blueprint) -> None:
    found = plan(qwen3_8b_lora, tiers=tiers("130GiB"))
    (line,) = [line for line in advise(found) if line.startswith("tiers[0].budget")]
    assert "of device memory (slower tiers take the rest)" in line
    budget = line.removeprefix("tiers[0].budget: ").split()[0]
    assert plan(qwen3_8b_lora, tiers=tiers(budget)).problem is None
    assert found.problem is not None
