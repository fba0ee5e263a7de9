"""What sharding costs by plan: memory of a rank, collectives, and weights that share the host's link with pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from longstraw import Config
from longstraw.errors import ConfigError
from longstraw.planner import Blueprint, Framework, Machine, Plan, ShardingChoice, Workload, advise, make_plan
from longstraw.planner.reduce import ways_to_reduce
from longstraw.runtime.sizing import hiding_tokens

LOAD = Workload(prompt=65_536, group=8, response=1_024)


def plan(model: Blueprint, framework: str, gpus: int = 4, machine: Machine | None = None, **options: Any) -> Plan:
    reduce = options.pop("reduce", "deferred")
    choice = ShardingChoice(framework=Framework(framework), replicas=gpus, **options)
    config = Config(gradient={"reduce": reduce}, tiers=[{"kind": "host", "budget": "64GiB"}])
    return make_plan(model, LOAD, config, machine or Machine(), sharding=choice)


def test_memory_of_a_rank(qwen3_8b: Blueprint) -> None:
    model = qwen3_8b
    alone, sharded = plan(model, "none", 1).memory, plan(model, "fsdp2").memory
    assert alone.weights == model.weight_bytes == plan(model, "zero2").memory.weights
    assert sharded.weights == pytest.approx(model.weight_bytes / 4, rel=1e-6)
    assert plan(model, "zero3").memory.weights == sharded.weights
    assert sharded.gathered == model.outside_bytes + 3 * model.layer_bytes
    assert plan(model, "fsdp2", reshard=False).memory.gathered == model.weight_bytes + model.layer_bytes
    assert plan(model, "fsdp2", offload=True).memory.weights == 0
    # Deferred sums are whole, in float32; a shard of them is held where every pass reduces.
    assert sharded.gradients == alone.gradients == 2 * model.weight_bytes
    assert plan(model, "fsdp2", reduce="each_pass").memory.gradients == pytest.approx(alone.gradients / 4, rel=1e-6)


def test_a_layer_and_what_is_outside_of_all(qwen3_8b: Blueprint) -> None:
    model = qwen3_8b
    assert model.outside_bytes + 36 * model.layer_bytes == model.weight_bytes
    assert model.outside_gradient + 36 * model.layer_gradient == model.model_gradient_bytes
    assert model.tensors == model.trained_tensors == 36 * 11 + 3


def test_lora_gradients_are_few(qwen3_8b_lora: Blueprint) -> None:
    assert plan(qwen3_8b_lora, "fsdp2").phases["finalize"].ranks < 0.01
    assert qwen3_8b_lora.outside_gradient == 0
    assert qwen3_8b_lora.trained_tensors == 36 * 7 * 2


def test_gathers_by_pass(qwen3_8b: Blueprint) -> None:
    found = plan(qwen3_8b, "fsdp2")
    units = 37
    assert found.phases["capture"].collectives == {"all_gather": units * found.chunks}
    assert found.phases["sweep"].collectives == {"all_gather": 2 * units * found.chunks}
    kept = plan(qwen3_8b, "fsdp2", reshard=False)
    assert kept.phases["capture"].collectives == {"all_gather": units}
    assert kept.phases["sweep"].collectives == {"all_gather": units * kept.chunks}
    # Three quarters of the weights come from the three other ranks.
    each = 0.75 * qwen3_8b.weight_bytes / Machine().ranks
    assert found.phases["capture"].ranks == pytest.approx(found.chunks * each)


def test_zero_3_keeps_what_its_defaults_allow(qwen3_8b: Blueprint) -> None:
    found, weights = plan(qwen3_8b, "zero3"), qwen3_8b.weight_bytes
    assert found.phases["capture"].collective_bytes == {"all_gather": weights * found.chunks}
    # Of 8.2 billion parameters the last 1 billion is there for the backward.
    both = 2 - 1e9 / qwen3_8b.parameters
    assert found.phases["sweep"].collective_bytes["all_gather"] == pytest.approx(both * weights * found.chunks)
    small = replace(qwen3_8b, parameters=900_000_000)
    whole = plan(small, "zero3").phases
    assert whole["capture"].collectives == {"all_gather": small.tensors}
    assert whole["sweep"].collectives == {"all_gather": small.tensors * found.chunks}


def test_slow_links_between_ranks_bind(qwen3_8b: Blueprint) -> None:
    slow = plan(qwen3_8b, "fsdp2", machine=Machine(ranks=5e9))
    assert slow.phases["sweep"].binds == "ranks"
    assert slow.phases["sweep"].seconds == pytest.approx(slow.phases["sweep"].ranks)


def test_what_each_way_of_reducing_costs(qwen3_8b: Blueprint) -> None:
    ways = ways_to_reduce(plan(qwen3_8b, "fsdp2"))
    deferred, each = ways["deferred"], ways["each_pass"]
    assert deferred["gradient_bytes"] == pytest.approx(4 * each["gradient_bytes"], rel=1e-6)
    assert deferred["reduced_bytes"] < each["reduced_bytes"]
    assert deferred["peak_bytes"] > each["peak_bytes"]
    assert each["rank_seconds"] > deferred["rank_seconds"]
    assert ways_to_reduce(plan(qwen3_8b, "zero3")) == {}


def test_offloaded_weights_share_the_link_with_pages(qwen3_8b: Blueprint) -> None:
    on, off = plan(qwen3_8b, "fsdp2"), plan(qwen3_8b, "fsdp2", offload=True)
    share = -(-qwen3_8b.weight_bytes // 4)
    assert off.phases["replay"].weights_to_device == off.lanes * share
    assert off.phases["sweep"].weights_to_device == 2 * off.chunks * share
    assert off.phases["finalize"].gradients_to_host == share
    # Same pages, and a replay's copies are one way: the weights come on top.
    assert (on.lanes, on.phases["replay"].bytes_read) == (off.lanes, off.phases["replay"].bytes_read)
    assert off.phases["replay"].link == pytest.approx(on.phases["replay"].link + off.lanes * share / Machine().h2d)


def test_chunks_are_long_enough_to_hide_offloaded_weights(qwen3_8b: Blueprint) -> None:
    """One rank brings 2 bytes a parameter over the link: 12,000 tokens of compute. Four bring half a byte each."""
    assert [hiding_tokens(bytes_) for bytes_ in (0.0, 0.5, 2.0)] == [0, 3_000, 12_000]
    alone = plan(qwen3_8b, "fsdp2", 1, machine=Machine(device_bytes=300_000_000_000), offload=True)
    four = plan(qwen3_8b, "fsdp2", 4, machine=Machine(device_bytes=300_000_000_000), offload=True)
    assert (alone.chunk.tokens, four.chunk.tokens) == (12_288, 8_192)
    assert alone.phases["sweep"].binds == "compute"
    short = Config(capture={"chunk_tokens": 4_096}, tiers=[{"kind": "host", "budget": "64GiB"}])
    shorter = make_plan(qwen3_8b, LOAD, short, alone.machine, sharding=alone.sharding)
    assert shorter.phases["capture"].seconds > alone.phases["capture"].seconds


def test_advice_names_a_sharding_that_fits(qwen3_8b: Blueprint) -> None:
    small = Machine(device_bytes=54_000_000_000)
    found = plan(qwen3_8b, "ddp", 8, machine=small)
    assert found.problem is not None
    assert "--sharding fsdp2" in advise(found)
    kept = plan(qwen3_8b, "fsdp2", 8, machine=Machine(device_bytes=50_000_000_000), reshard=False)
    assert kept.problem is not None
    assert "gradient.reduce: each_pass (sums are sharded; a reduction in every backward pass)" in advise(kept)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"framework": Framework.NONE, "replicas": 2}, "--sharding none: gradients of several processes"),
        ({"framework": Framework.ZERO3, "reshard": False}, "--keep-gathered would be ignored with --sharding zero3"),
        ({"framework": Framework.DDP, "offload": True}, "--offload-weights would be ignored with --sharding ddp"),
        ({"framework": Framework.FSDP2, "replicas": 0}, "--gpus 0: use at least 1"),
    ],
)
def test_what_would_be_ignored_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ShardingChoice(**options)
    assert words in str(caught.value)


def test_each_pass_is_fsdp2s(qwen3_8b: Blueprint) -> None:
    with pytest.raises(ConfigError, match="each_pass would be ignored with --sharding zero3"):
        plan(qwen3_8b, "zero3", reduce="each_pass")
