"""`longstraw plan`: tables and JSON, exit status, and what it says of mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longstraw.cli.counts import parse_count
from longstraw.config.sizes import approximate_bytes
from longstraw.errors import ConfigError


def test_a_step_that_fits(invoke: Callable[..., Any], tiny_llama: Path) -> None:
    result = invoke("plan", tiny_llama, "--prompt", "4k", "--group", "4")
    assert result.exit_code == 0, result.output
    for word in ("capture", "sweep", "live graph of a lane", "host", "binds"):
        assert word in result.stdout
    # Paths into the folder work as the folder does.
    assert invoke("plan", tiny_llama / "config.json", "--prompt", "4k", "--group", "4").stdout == result.stdout


def test_a_step_that_does_not(invoke: Callable[..., Any], tiny_llama: Path, tmp_path: Path) -> None:
    tiers = tmp_path / "tiers.yaml"
    tiers.write_text("tiers: [{kind: host, budget: 1MiB}]\n")
    arguments = ["plan", tiny_llama, "--prompt", "1M", "--tiers", tiers]
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert "DOES NOT FIT: the tiers cannot hold the pages" in result.stdout
    assert "tiers[0].budget: 2GiB of host memory" in result.stdout
    # Where the state has no room, nothing would be kept beside it; always is a demand.
    assert "attention outputs of 0 of 1 layers kept" in result.stdout
    tiers.write_text("{tiers: [{kind: host, budget: 1MiB}], capture: {keep_attention: always}}\n")
    assert "attention outputs of 1 of 1 layers kept" in invoke(*arguments).stdout


def test_json(invoke: Callable[..., Any], tiny_llama: Path) -> None:
    result = invoke("plan", tiny_llama, "--prompt", "4k", "--detached", "--gpus", "2", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["fits"] is True
    assert found["workload"] == {"prompt": 4096, "group": 8, "response": 1024}
    assert set(found["phases"]) == {"capture", "replay", "backward", "finalize"}
    assert found["sharding"]["framework"] == "ddp"
    assert found["phases"]["finalize"]["collectives"] == {"all_reduce": 1}
    assert "2 GPUs are 2 replicas in this version" in found["notes"][0]
    assert "340 GB/s each way (assumed, not measured)" in found["notes"][1]
    # Each of the two has half of the host, of which auto takes 70%.
    assert found["tiers"]["host"]["budget"] == int((128 << 30) // 2 * 0.7)


def test_checkpointed_graphs_and_cuts(invoke: Callable[..., Any], tiny_llama: Path, tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("{replay: {checkpoint: true, lane_tokens: 3000}, capture: {chunk_tokens: 3000}}\n")
    asked = ("plan", tiny_llama, "--prompt", "4k", "--group", "4", "--tiers", settings)
    found, table = json.loads(invoke(*asked, "--json").stdout), invoke(*asked).stdout
    memory = found["device_memory"]
    for what, row in (("lane", "live graph of a lane "), ("chunk", "live graph of a chunk")):
        assert memory[f"{what}_layer"] > 0
        shown = next(line for line in table.splitlines() if row in line)
        assert approximate_bytes(memory[what] + memory[f"{what}_layer"]) in shown
    # As even as they come, the chunk in whole tiles: not what they may be at most.
    assert (found["lane"]["tokens"], found["lane"]["widest"]) == (3000, 2048)
    assert (found["chunk"]["tokens"], found["chunk"]["longest"]) == (3000, 2048)
    assert "2 chunks of up to 2,048 tokens, checkpointed; 2 lanes of up to 2,048 tokens, checkpointed" in table


def test_what_ranks_send_and_what_each_way_of_reducing_costs(invoke: Callable[..., Any], tiny_llama: Path) -> None:
    asked = ("plan", tiny_llama, "--prompt", "4k", "--gpus", "4", "--sharding", "fsdp2", "--offload-weights")
    result = invoke(*asked)
    assert result.exit_code == 0, result.output
    for word in (
        "weights gathered for a pass",
        "reduce_scatter",
        "to device",
        "deferred *",
        "each_pass",
    ):
        assert word in result.stdout
    found = json.loads(invoke(*asked, "--json").stdout)
    assert set(found["ways_to_reduce"]) == {"deferred", "each_pass"}
    assert found["phases"]["finalize"]["gradients_to_host"] > 0


def test_settings_that_are_no_text(invoke: Callable[..., Any], tiny_llama: Path, tmp_path: Path) -> None:
    tiers = tmp_path / "model.safetensors"
    tiers.write_bytes(bytes(range(256)))
    error = invoke("plan", tiny_llama, "--prompt", "4k", "--tiers", tiers).exception
    assert isinstance(error, ConfigError)
    assert "model.safetensors is no text in UTF-8" in str(error)


def test_rates_change_the_time(invoke: Callable[..., Any], tiny_llama: Path, tmp_path: Path) -> None:
    rates = tmp_path / "rates.json"
    rates.write_text('{"name": "a slow one", "matrix": 1e9}')
    slow = invoke("plan", tiny_llama, "--prompt", "4k", "--rates", rates, "--json")
    fast = invoke("plan", tiny_llama, "--prompt", "4k", "--json")
    assert json.loads(slow.stdout)["seconds"] > 10 * json.loads(fast.stdout)["seconds"]
    assert json.loads(slow.stdout)["machine"] == "a slow one"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_of_an_odd_width(invoke: Callable[..., Any], tiny_mixture: Path, dtype: str) -> None:
    result = invoke("plan", tiny_mixture, "--prompt", "4k", "--dtype", dtype, "--json")
    assert result.exit_code == 0, result.output
    (note,) = (note for note in json.loads(result.stdout)["notes"] if note.startswith("experts:"))
    assert f"has one of 42 in {dtype}; load the model with experts_implementation='eager'" in note


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "many"], "--prompt many: expected a number of tokens"),
        (["--prompt", "1"], "--prompt 1 is too small"),
        (["--prompt", "1000M"], "--prompt 1048576000 is too large to plan; use at most 134217728"),
        (["--prompt", "4k", "--response", "1000M"], "--response 1048576000 is too large"),
        (["--prompt", "4k", "--group", "1000000000"], "--group 1000000000 is too large"),
        (["--prompt", "4k", "--gpus", "0"], "--gpus 0"),
        (["--prompt", "4k", "--sharding", "fsdp"], "--sharding fsdp: use one of none, ddp, fsdp2, zero1, zero2, zero3"),
        (["--prompt", "4k", "--keep-gathered"], "--keep-gathered would be ignored with --sharding none"),
        (["--prompt", "4k", "--lora", "0"], "--lora 0"),
        (["--prompt", "4k", "--dtype", "int4"], "--dtype int4"),
    ],
)
def test_mistakes(invoke: Callable[..., Any], tiny_llama: Path, arguments: list[str], words: str) -> None:
    result = invoke("plan", tiny_llama, *arguments)
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


@pytest.mark.parametrize(
    ("text", "count"), [("4096", 4096), ("4k", 4096), ("1M", 1 << 20), ("1.5k", 1536), ("131,072", 131_072)]
)
def test_counts(text: str, count: int) -> None:
    assert parse_count("--prompt", text) == count


def test_counts_are_whole() -> None:
    with pytest.raises(ConfigError, match="no whole number"):
        parse_count("--prompt", "1.3k")
