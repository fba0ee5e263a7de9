"""Lanes, chunks and checkpointing from bytes a token and what is free."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from longstraw.runtime.adapter import ModelProfile
from longstraw.runtime.layer_spec import LayerSpec
from longstraw.runtime.sizing import (
    fitting_tokens,
    logits_bytes,
    pass_bytes,
    plan_chunks,
    plan_lanes,
    shortest_chunk,
    size_chunk,
    size_lane,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PROFILE = ModelProfile(
    layers=tuple(LayerSpec(index=i, states=(), kept_bytes=100, workspace_bytes=50) for i in range(4)),
    blocks=4,
    graph_bytes=4000,
    largest_layer_bytes=1000,
    hidden_size=10,
    vocab_size=100,
    hidden_dtype=torch.float32,
    linear_head=True,
    softcap=False,
    no_aux_loss="no experts",
)


def lane(lengths: list[int], free: int, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "lane_tokens": "auto",
        "checkpoint": "auto",
        "logits": logits_bytes(PROFILE, 1, entropy=False),
        "device": CPU,
    }
    return size_lane(PROFILE, lengths, free=free, **(options | changes))


@pytest.mark.parametrize("seed", range(20))
def test_every_branch_is_in_one_lane_and_no_lane_is_too_wide(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 30) for _ in range(draw.randint(1, 25))]
    width = draw.randint(1, 60)
    lanes = plan_lanes(lengths, width)
    assert sorted(i for lane in lanes for i in lane) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in lane) <= width or len(lane) == 1 for lane in lanes)
    assert all(lane == tuple(sorted(lane)) for lane in lanes)
    assert lanes == plan_lanes(lengths, width)


def test_lanes_are_few_and_even() -> None:
    assert plan_lanes([7, 1, 6, 5, 4], 14) == [(0, 1, 4), (2, 3)]
    assert plan_lanes([3, 40, 1], 14) == [(1,), (0, 2)]
    assert [len(lane) for lane in plan_lanes([5] * 8, 35)] == [4, 4]
    # The even packing of two lanes is one too wide here, so the first that fits is taken.
    assert plan_lanes([3, 3, 2, 2, 2], 6) == [(0, 1), (2, 3, 4)]


@pytest.mark.parametrize(("rows", "width"), [(0, 4), (1, 4), (4, 4), (5, 4), (61, 23)])
def test_chunks_cover_the_rows_in_order(rows: int, width: int) -> None:
    chunks = plan_chunks(rows, width)
    assert [row for start, stop in chunks for row in range(start, stop)] == list(range(rows))
    assert all(0 < stop - start <= width for start, stop in chunks)


def test_chunks_are_even_and_of_whole_tiles() -> None:
    sizes = [stop - start for start, stop in plan_chunks(32_767, 7_497)]
    assert sizes == [6_656, 6_656, 6_656, 6_656, 6_143]
    assert plan_chunks(10, 4) == [(0, 4), (4, 8), (8, 10)]


def test_checkpointing_costs_less_memory() -> None:
    assert pass_bytes(PROFILE, True) == 4 * 10 * 4 + 4 * 100 + 1350
    assert pass_bytes(PROFILE, True) < pass_bytes(PROFILE, False) == 4000 + 50
    # A layer whose mixing needs more than its MLP's gradients.
    heavy = replace(PROFILE, layers=tuple(replace(layer, workspace_bytes=3000) for layer in PROFILE.layers))
    assert pass_bytes(heavy, True) == 4 * 10 * 4 + 4 * 100 + 500 + 3000


def test_more_memory_never_makes_a_lane_narrower() -> None:
    logits = logits_bytes(PROFILE, 1, entropy=False)
    sizes = [fitting_tokens(PROFILE, free, False, logits) for free in range(0, 10_000_000, 500_000)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 0
    assert sizes[-1] > 1000


def test_what_fits_is_within_what_is_free() -> None:
    free = 5_000_000
    tokens = fitting_tokens(PROFILE, free, False, logits_bytes(PROFILE, 64, entropy=True))
    assert 0.55 * free < tokens * (4000 + 50) + 3 * 4 * 64 * 100 <= 0.6 * free


@pytest.mark.parametrize(
    ("changes", "entropy", "blocks"),
    [
        ({}, False, 2),
        ({}, True, 3),
        ({"softcap": True}, True, 4),
        ({"linear_head": False}, False, 3),
        ({"linear_head": False, "softcap": True}, True, 6),
    ],
)
def test_the_head_is_planned_with_its_blocks(changes: dict[str, bool], entropy: bool, blocks: int) -> None:
    profile = replace(PROFILE, **changes)  # type: ignore[arg-type]
    assert logits_bytes(profile, 64, entropy) == blocks * 4 * 64 * 100
    assert logits_bytes(replace(profile, hidden_dtype=torch.bfloat16), 64, entropy) == blocks * 4 * 64 * 100
    assert logits_bytes(replace(profile, hidden_dtype=torch.float64), 64, entropy) == blocks * 8 * 64 * 100


def test_plenty_of_memory_takes_all_branches_without_checkpointing() -> None:
    size = lane([100, 200, 300], 10**12)
    assert (size.tokens, size.checkpoint) == (600, False)


def test_a_lane_has_a_widest_useful_width() -> None:
    assert lane([100_000] * 3, 10**15).tokens == 8_192
    assert lane([100_000] * 3, 10**15, device=CUDA).tokens == 32_768


def test_little_memory_checkpoints_and_narrows() -> None:
    size = lane([100, 200, 300], 1_500_000)
    assert size.checkpoint
    assert 0 < size.tokens < 600


def test_a_branch_that_cannot_be_cut_is_checkpointed_where_it_does_not_fit() -> None:
    free = int(6_000 * (4000 + 50) / 0.6) + 12_000
    assert 5_900 < fitting_tokens(PROFILE, free, False, logits_bytes(PROFILE, 1, entropy=True)) < 6_100
    assert not lane([4_000] * 3, free).checkpoint
    assert lane([8_000] * 3, free).checkpoint
    assert not lane([8_000] * 3, free, checkpoint=False).checkpoint


def test_no_memory_still_makes_a_lane() -> None:
    assert lane([5], 0).tokens == 1


@pytest.mark.parametrize("free", [0, 10**12])
def test_what_the_user_sets_is_kept(free: int) -> None:
    size = lane([100, 200], free, lane_tokens=50, checkpoint=False)
    assert (size.tokens, size.checkpoint) == (50, False)
    assert lane([100, 200], free, checkpoint=True).checkpoint


def test_chunks_are_no_longer_than_the_prompt() -> None:
    options: dict[str, Any] = {"device": CPU, "checkpoint": "auto"}
    assert size_chunk(PROFILE, 61, free=10**12, chunk_tokens="auto", **options).tokens == 61
    assert size_chunk(PROFILE, 61, free=10**12, chunk_tokens=23, **options).tokens == 23
    assert size_chunk(PROFILE, 0, free=10**12, chunk_tokens="auto", **options).tokens == 1
    assert size_chunk(PROFILE, 10**6, free=10**12, chunk_tokens="auto", **options).tokens == 1_024
    assert size_chunk(PROFILE, 10**5, free=10**6, chunk_tokens="auto", **options).tokens == 314


@pytest.mark.parametrize(("rows", "tokens"), [(0, 1), (1, 1), (1024, 1), (1025, 2), (131_072, 128), (1 << 20, 1024)])
def test_no_memory_does_not_cut_a_long_prompt_to_pieces(rows: int, tokens: int) -> None:
    options: dict[str, Any] = {"device": CPU, "checkpoint": "auto", "free": 0}
    assert shortest_chunk(rows) == tokens
    assert size_chunk(PROFILE, rows, chunk_tokens="auto", **options).tokens == tokens
    assert size_chunk(PROFILE, rows, chunk_tokens=1, **options).tokens == 1
