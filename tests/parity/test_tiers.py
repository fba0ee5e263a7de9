"""Where the pages lie changes no bit; how lanes are cut changes only the rounding."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw import Runtime
from tests.parity.models import assert_idle, build, gradients, make_group, replay_group, settings

GROUP = make_group(61, (7, 1, 12, 5))


def tiers_of(place: str, path: Path) -> list[dict[str, Any]]:
    device = {"kind": "device", "budget": "64MiB"}
    host = {"kind": "host", "budget": "64MiB"}
    nvme = {"kind": "nvme", "path": str(path), "budget": "64MiB"}
    if place == "all":
        return [device | {"budget": "6KiB"}, host | {"budget": "10KiB"}, nvme]
    return {"device": [device], "host": [host], "nvme": [nvme]}[place]


def run(model: Any, place: str, path: Path, **changes: Any) -> tuple[dict[str, Any], list[Any], Any]:
    """Gradients, scores and replayed log-probs, and the report of a step with its pages in one place."""
    with Runtime(model, settings(tiers=tiers_of(place, path), **changes)) as runtime:
        with runtime.transaction(GROUP.prompt) as txn:
            scored = txn.score(GROUP.responses)
            replayed = replay_group(txn, GROUP)
        assert_idle(runtime)
    used = {name for name, count in txn.report.tier_bytes.items() if count}
    assert used == ({"device", "host", "nvme"} if place == "all" else {place})
    return gradients(model), [*scored, *replayed], txn.report


@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("place", ["host", "nvme", "all"])
def test_bitwise_the_same_on_every_tier(place: str, dtype: torch.dtype, checkpoint: bool, tmp_path: Path) -> None:
    model = build("qwen3", dtype=dtype)
    expected, expected_lists, _ = run(copy.deepcopy(model), "device", tmp_path, replay={"checkpoint": checkpoint})
    found, found_lists, _ = run(model, place, tmp_path, replay={"checkpoint": checkpoint})
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    assert all(torch.equal(a, b) for a, b in zip(found_lists, expected_lists, strict=True))


@pytest.mark.parametrize("place", ["host", "nvme", "all"])
def test_kept_attention_outputs_are_the_same_on_every_tier(place: str, tmp_path: Path) -> None:
    model, keep = build("llama", dtype=torch.bfloat16), {"keep_attention": "always", "chunk_tokens": 23}
    expected, _, _ = run(copy.deepcopy(model), "device", tmp_path, capture=keep)
    found, _, _ = run(model, place, tmp_path, capture=keep)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("lookahead", [1, 2, 7])
def test_lookahead_changes_no_bit(lookahead: int, tmp_path: Path) -> None:
    model = build("llama")
    expected, _, _ = run(copy.deepcopy(model), "device", tmp_path)
    found, _, _ = run(model, "nvme", tmp_path, pages={"lookahead": lookahead})
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_report_counts_what_went_to_disk(tmp_path: Path) -> None:
    _, _, report = run(build("llama"), "nvme", tmp_path)
    assert report.bytes_read["nvme"] > report.tier_bytes["nvme"]
    assert report.bytes_written["nvme"] > 0


def test_nothing_stays_on_the_disk(tmp_path: Path) -> None:
    run(build("llama"), "nvme", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_score_and_replay_agree_bit_for_bit(dtype: torch.dtype, checkpoint: bool) -> None:
    runtime = Runtime(build("qwen3", dtype=dtype), settings(replay={"checkpoint": checkpoint, "entropy": True}))
    with runtime.transaction(GROUP.prompt) as txn:
        scored = txn.score(GROUP.responses)
        again = txn.score(GROUP.responses)
        replayed = replay_group(txn, GROUP)
        later = txn.score(GROUP.responses)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for found in (again, replayed, later):
        assert all(a.dtype == b.dtype == wide for a, b in zip(found, scored, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(found, scored, strict=True))
    assert txn.report.drift_max == 0.0
    assert not any(x.requires_grad for x in scored)


@pytest.mark.parametrize("width", [1, 8, 13, 100])
def test_lanes_of_different_width_agree_within_rounding(width: int) -> None:
    model = build("llama")
    wide, narrow = (
        Runtime(m, settings(replay={"lane_tokens": w})) for m, w in ((model, 14), (copy.deepcopy(model), width))
    )
    results = []
    for runtime in (wide, narrow):
        with runtime.transaction(GROUP.prompt) as txn:
            results.append(replay_group(txn, GROUP))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
