"""Plans against steps measured on one H200 (benchmarks/RESULTS.md), bfloat16: memory within 10%, time within 25%."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from transformers import AutoConfig

from benchmarks.common import QWEN3_8B
from benchmarks.family_layers import SHAPES
from longstraw import Config
from longstraw.integrations.transformers.blueprint import blueprint
from longstraw.planner import Blueprint, Machine, Plan, Workload, make_plan


@dataclass(frozen=True, kw_only=True)
class Measured:
    prompt: int
    group: int
    chunk: int
    keep: str
    seconds: dict[str, float]
    peak_gib: float
    host_bytes: int | None = None


MEASURED = {
    "32k, outputs kept": Measured(
        prompt=32_768,
        group=8,
        chunk=8192,
        keep="always",
        seconds={"capture": 1.80, "replay": 0.81, "backward": 1.28, "sweep": 4.22},
        peak_gib=54.9,
        host_bytes=24_036_827_136,
    ),
    "128k, outputs kept": Measured(
        prompt=131_072,
        group=16,
        chunk=4096,
        keep="always",
        seconds={"capture": 13.8, "replay": 3.0, "backward": 7.08, "sweep": 36.3},
        peak_gib=55.1,
        host_bytes=96_149_495_808,
    ),
    "128k, outputs computed again": Measured(
        prompt=131_072,
        group=16,
        chunk=4096,
        keep="never",
        seconds={"capture": 13.8, "replay": 3.0, "backward": 7.08, "sweep": 44.2},
        peak_gib=55.1,
        host_bytes=57_981_616_128,
    ),
}


def five_blocks(plan: Plan, vocabulary: int) -> float:
    """The planned peak in GiB beyond the weights, as the steps here were measured: the LM head had up to five
    blocks of logits beside one another. Now it has two, or three with entropies."""
    return replace(plan.memory, logits=5 * 4 * 1024 * vocabulary).beyond_weights / 2**30


def planned(blueprint: Blueprint, step: Measured) -> Plan:
    config = Config(
        tiers=[{"kind": "host", "budget": "100GiB"}],
        capture={"chunk_tokens": step.chunk, "keep_attention": step.keep},
        replay={"lane_tokens": 8192, "checkpoint": False},
    )
    return make_plan(blueprint, Workload(prompt=step.prompt, group=step.group, response=1024), config, Machine())


@pytest.mark.parametrize("name", MEASURED)
def test_memory(qwen3_8b_lora: Blueprint, name: str) -> None:
    step = MEASURED[name]
    plan = planned(qwen3_8b_lora, step)
    assert five_blocks(plan, QWEN3_8B["vocab_size"]) == pytest.approx(step.peak_gib, rel=0.10)
    if step.host_bytes is not None:
        assert plan.tiers["host"]["used"] == step.host_bytes


@pytest.mark.parametrize("name", MEASURED)
def test_time(qwen3_8b_lora: Blueprint, name: str) -> None:
    step = MEASURED[name]
    plan = planned(qwen3_8b_lora, step)
    assert {phase: cost.seconds for phase, cost in plan.phases.items()} == pytest.approx(step.seconds, rel=0.25)
    assert plan.seconds == pytest.approx(sum(step.seconds.values()), rel=0.25)


@dataclass(frozen=True, kw_only=True)
class Later:
    """A step measured after the planner was made: none of its constants knew of it."""

    prompt: int
    group: int
    seconds: float
    peak_gib: float
    lora: int | None = 16
    settings: Mapping[str, Any] = field(default_factory=dict)


_CUT = {"capture": {"chunk_tokens": 4096, "keep_attention": "never"}, "replay": {"lane_tokens": 8192}}
_HOST = {"tiers": [{"kind": "host", "budget": "100GiB"}]}
_DEVICE = {"tiers": [{"kind": "device", "budget": "100GiB"}]}
_DETACHED = {"gradient": {"prompt": "detached"}}

LATER = {
    "32k": Later(prompt=32_768, group=8, seconds=7.97, peak_gib=54.92),
    "32k, 16 responses": Later(prompt=32_768, group=16, seconds=9.60, peak_gib=55.08),
    "32k, all weights": Later(prompt=32_768, group=8, seconds=8.63, peak_gib=79.15, lora=None),
    "32k, detached": Later(prompt=32_768, group=8, seconds=3.32, peak_gib=54.92, settings=_DETACHED),
    "64k": Later(prompt=65_536, group=8, seconds=19.15, peak_gib=54.92),
    "128k": Later(prompt=131_072, group=8, seconds=51.73, peak_gib=54.92, settings=_HOST),
    "128k, 16 responses": Later(prompt=131_072, group=16, seconds=67.94, peak_gib=55.08, settings=_CUT),
    "128k, on the device": Later(prompt=131_072, group=16, seconds=67.13, peak_gib=109.09, settings=_CUT | _DEVICE),
    "128k, detached": Later(prompt=131_072, group=16, seconds=20.84, peak_gib=55.08, settings=_CUT | _DETACHED),
}


@pytest.mark.parametrize("name", LATER)
def test_steps_that_the_planner_was_not_fitted_to(name: str) -> None:
    step = LATER[name]
    config = Config(**{"tiers": [{"kind": "host", "budget": "90GiB"}], **step.settings})
    made = blueprint(AutoConfig.for_model("qwen3", **QWEN3_8B), lora_rank=step.lora)
    plan = make_plan(made, Workload(prompt=step.prompt, group=step.group, response=1024), config, Machine())
    assert five_blocks(plan, QWEN3_8B["vocab_size"]) == pytest.approx(step.peak_gib, rel=0.10)
    assert plan.seconds == pytest.approx(step.seconds, rel=0.25)


def few_layers(name: str) -> Blueprint:
    """Some layers of real shape, as `benchmarks` measures them."""
    if name == "qwen3, 2 layers, LoRA":
        return blueprint(AutoConfig.for_model("qwen3", **(QWEN3_8B | {"num_hidden_layers": 2})), lora_rank=16)
    if name == "qwen3.6":
        return blueprint(AutoConfig.for_model("qwen3_5_text", **SHAPES["qwen3_6"]), gated_delta="torch")
    return blueprint(AutoConfig.for_model("glm_moe_dsa", **(SHAPES["glm5_2"] | {"n_routed_experts": 16})))


@pytest.mark.parametrize(
    ("name", "peak_gib"), [("qwen3, 2 layers, LoRA", 7.546), ("qwen3.6", 29.4), ("glm5.2, 16 experts", 37.7)]
)
def test_memory_of_other_layers(name: str, peak_gib: float) -> None:
    config = Config(tiers=[{"kind": "host", "budget": "90GiB"}])
    workload = Workload(prompt=131_072, group=8, response=1024)
    made = few_layers(name)
    plan = make_plan(made, workload, config, Machine(), timed=False)
    assert five_blocks(plan, made.profile.vocab_size) == pytest.approx(peak_gib, rel=0.10)


@pytest.fixture(scope="module")
def qwen3_6_27b() -> Blueprint:
    """Qwen3.6-27B's shape with LoRA and flash-linear-attention's kernels."""
    shape = {"num_hidden_layers": 64, "layer_types": SHAPES["qwen3_6"]["layer_types"] * 16}
    return blueprint(AutoConfig.for_model("qwen3_5_text", **(SHAPES["qwen3_6"] | shape)), lora_rank=16)


def test_a_hybrid_of_64_layers_exact(qwen3_6_27b: Blueprint) -> None:
    config = Config(tiers=[{"kind": "host", "budget": "70GiB"}])
    plan = make_plan(qwen3_6_27b, Workload(prompt=131_072, group=8, response=1024), config, Machine())
    assert plan.tiers["host"]["used"] == pytest.approx(52_941_434_880, rel=1e-6)
    assert five_blocks(plan, 248_320) == pytest.approx(13.10, rel=0.10)
    assert plan.seconds == pytest.approx(115.4, rel=0.25)


def test_a_hybrid_of_64_layers_detached(qwen3_6_27b: Blueprint) -> None:
    """524,288 tokens, lanes as they were cut. `fused_recurrent` comes from this step.

    Its memory is not compared: it had 10.7 GiB, and what is planned is 9.2 with the head of that time. Where the rest
    was is not known; the peak of each pass was not noted then.
    """
    config = Config(
        tiers=[{"kind": "host", "budget": "40GiB"}],
        gradient={"prompt": "detached"},
        replay={"lane_tokens": 7372, "checkpoint": True},
    )
    plan = make_plan(qwen3_6_27b, Workload(prompt=524_288, group=8, response=1024), config, Machine())
    assert plan.lanes == 2
    assert plan.tiers["host"]["used"] == 34_516_566_016
    assert plan.seconds == pytest.approx(172.2, rel=0.25)


def test_memory_does_not_grow_with_the_prompt(qwen3_8b_lora: Blueprint) -> None:
    def peak(prompt: int) -> int:
        config = Config(tiers=[{"kind": "host", "budget": "1TiB"}])
        return make_plan(
            qwen3_8b_lora, Workload(prompt=prompt, group=8, response=1024), config, Machine(), timed=False
        ).memory.beyond_weights

    assert peak(524_288) == pytest.approx(peak(65_536), rel=0.02)
