"""How wide lanes and chunks are, and whether their graphs are checkpointed, from measured bytes a token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from longstraw.config import AUTO, PagesConfig
from longstraw.kernels.logprobs import blocks_held
from longstraw.runtime.adapter import ModelProfile

USABLE = 0.6
"""Share of the free memory that live graphs may plan to take; the rest is for workspaces and fragments."""

_WIDEST = {"cuda": 32_768, "cpu": 8_192}
_CHUNK = {"cuda": 8_192, "cpu": 1_024}
# A streamed layer is hidden behind about 2,500 tokens of compute on an H200; below this, checkpointing pays.
_WIDE_ENOUGH = 4_096

_TILE = 128
"""Rows of a tile of a matrix product on a GPU: a chunk that ends inside one pays for all of it."""

_BLOCK_TOKENS = {"cuda": 67_584, "cpu": 8_192}
"""On an H200 this many keys are whole waves of cuDNN's tiles on its 132 multiprocessors (benchmarks/RESULTS.md)."""

_KEEP_OUTPUT_FROM = {"cuda": 24_576, "cpu": 256}
"""Prompt tokens from which on a kept attention output costs less to move than to compute again: 4 bytes a head's
channel over the link (50 GB/s; memory on a CPU) against 2 x prompt operations (600 TFLOP/s; 0.1)."""


_MOST_CHUNKS = 1024

_OPERATIONS_A_LINK_BYTE = 12_000
"""What a GPU computes while a byte crosses the host's link: 650 TFLOP/s over 55 GB/s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSize:
    """Tokens whose live graph fits, and whether it is checkpointed."""

    tokens: int
    checkpoint: bool


def checkpointed_bytes(profile: ModelProfile) -> int:
    """Bytes a token that checkpointing keeps throughout: each layer's input and what it keeps beside it."""
    inputs = profile.blocks * profile.hidden_size * profile.hidden_dtype.itemsize
    return inputs + sum(layer.kept_bytes for layer in profile.layers)


def again_bytes(profile: ModelProfile) -> int:
    """Bytes a token of the largest layer as a checkpointed backward runs it again.

    Its graph with the gradients in its MLP; or, where that is more, what is left of its graph behind the MLP, with the
    workspace of its mixing of tokens. `tests/planner/test_checkpointed.py` counts both.
    """
    layer = profile.largest_layer_bytes
    return math.ceil(max(1.35 * layer, 0.5 * layer + workspace_bytes(profile)))


def pass_bytes(profile: ModelProfile, checkpoint: bool) -> int:
    """Bytes a token of a pass with its backward, without its logits."""
    if checkpoint and profile.blocks:
        return checkpointed_bytes(profile) + again_bytes(profile)
    return profile.graph_bytes + workspace_bytes(profile)


def workspace_bytes(profile: ModelProfile) -> int:
    """Bytes a token that one layer needs for a moment, beside the graph."""
    return max((layer.workspace_bytes for layer in profile.layers), default=0)


def logits_bytes(profile: ModelProfile, block_tokens: int, entropy: bool) -> int:
    """Bytes that the LM head has at once beside its inputs and outputs: some blocks of logits in float32 or float64."""
    blocks = blocks_held(linear=profile.linear_head, entropy=entropy, softcap=profile.softcap)
    return blocks * max(profile.hidden_dtype.itemsize, 4) * block_tokens * profile.vocab_size


def block_rows(pages: PagesConfig, device: torch.device) -> int:
    """Prompt rows that are brought to the device at once."""
    if pages.block_tokens != AUTO:
        return pages.block_tokens
    return max(_BLOCK_TOKENS[device.type] // pages.tokens, 1) * pages.tokens


def keep_outputs(
    setting: Literal["auto", "always", "never"], rows: int, device: torch.device
) -> Literal["auto", "always", "never"]:
    """`capture.keep_attention` for a prompt of so many rows: "auto" is "never" where it would not pay."""
    return "never" if setting == AUTO and rows < _KEEP_OUTPUT_FROM[device.type] else setting


def fitting_tokens(profile: ModelProfile, free: int, checkpoint: bool, logits: int) -> int:
    """The most tokens whose graph and workspace fit in `free` bytes; 0 if none do.

    Beside the graph there are the LM head's `logits` bytes, of `logits_bytes`, and one layer's workspace.
    """
    room = int(free * USABLE - logits)
    return max(room // pass_bytes(profile, checkpoint), 0)


def hiding_tokens(link_bytes_a_parameter: float) -> int:
    """Tokens of a pass whose products take as long as its weights on the host's link, two operations a parameter and
    token; 0 where weights are on the device.

    Pages share the link, and are hidden from a number of tokens of their own: a pass with more than either hides both,
    as computing on weights and on pages both grow with the tokens.
    """
    return math.ceil(link_bytes_a_parameter * _OPERATIONS_A_LINK_BYTE / 2)


def size_lane(
    profile: ModelProfile,
    lengths: Sequence[int],
    *,
    free: int,
    device: torch.device,
    lane_tokens: int | Literal["auto"],
    checkpoint: bool | Literal["auto"],
    logits: int,
    hidden_from: int = 0,
) -> GraphSize:
    """Lane width for branches of these lengths: as wide as memory allows, without checkpointing if that is wide enough.

    A branch that is longer than the width still gets a lane of its own; it cannot be cut, so "auto" has it checkpointed
    where it does not fit without. `logits`: of `logits_bytes`. `hidden_from`: of `hiding_tokens`; weights that cross
    the link are hidden, if need be by checkpointing.
    """
    wanted = min(sum(lengths), _WIDEST.get(device.type, _WIDE_ENOUGH)) if lane_tokens == "auto" else lane_tokens
    needed = min(max(wanted, max(lengths)), sum(lengths))
    enough = max(_WIDE_ENOUGH, hidden_from, max(lengths))
    least = 1 if lane_tokens == "auto" else wanted
    return _size(profile, wanted, needed, least, free, checkpoint, logits, enough)


def shortest_chunk(rows: int) -> int:
    """The fewest tokens that little memory, or memory running out, makes of a chunk of so many prompt rows.

    Every chunk reads all pages before it: a long prompt in chunks of a few tokens would seem to hang.
    """
    return max(-(-rows // _MOST_CHUNKS), 1)


def size_chunk(
    profile: ModelProfile,
    rows: int,
    *,
    free: int,
    device: torch.device,
    chunk_tokens: int | Literal["auto"],
    checkpoint: bool | Literal["auto"],
    hidden_from: int = 0,
) -> GraphSize:
    """Prompt tokens a chunk, and whether the sweep's graph of a chunk is checkpointed. `hidden_from` as for lanes."""
    wanted = _CHUNK.get(device.type, 1_024) if chunk_tokens == "auto" else chunk_tokens
    if chunk_tokens == "auto" and hidden_from > wanted:
        wanted = min(-(-hidden_from // 1_024) * 1_024, _WIDEST.get(device.type, wanted))
    wanted = max(min(wanted, rows), 1)
    enough = max(_WIDE_ENOUGH, hidden_from)
    least = min(shortest_chunk(rows), wanted) if chunk_tokens == "auto" else wanted
    return _size(profile, wanted, wanted, least, free, checkpoint, 0, enough)


def _size(
    profile: ModelProfile,
    wanted: int,
    needed: int,
    least: int,
    free: int,
    checkpoint: bool | Literal["auto"],
    logits: int,
    enough: int,
) -> GraphSize:
    """From `least` to `wanted` tokens. `enough`: tokens from which on wider is not worth checkpointing."""

    def fits(recompute: bool) -> int:
        return fitting_tokens(profile, free, recompute, logits)

    if checkpoint == "auto":
        checkpoint = fits(False) < (min(needed, enough) if least < wanted else needed)
    return GraphSize(tokens=max(min(wanted, fits(checkpoint)), least), checkpoint=checkpoint)


def plan_lanes(lengths: Sequence[int], lane_tokens: int) -> list[tuple[int, ...]]:
    """Branches packed into lanes of at most `lane_tokens`, as even as they come; a longer branch is alone.

    The same lengths always give the same lanes, so that scoring and replay compute bitwise the same.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    lanes = _first_fit(lengths, order, lane_tokens)
    # Each lane streams the whole prompt's state, so few come first; a narrow last one would wait for the link.
    even = _least_loaded(lengths, order, len(lanes))
    if all(len(lane) == 1 or sum(lengths[i] for i in lane) <= lane_tokens for lane in even):
        lanes = even
    return [tuple(sorted(lane)) for lane in lanes]


def wider_half(lengths: Sequence[int]) -> int:
    """Tokens of the larger of two parts, as even as they come, of a lane of two branches or more."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return max(sum(lengths[i] for i in part) for part in _least_loaded(lengths, order, 2))


def _first_fit(lengths: Sequence[int], order: Sequence[int], lane_tokens: int) -> list[list[int]]:
    lanes: list[list[int]] = []
    room: list[int] = []
    for index in order:
        at = next((i for i, left in enumerate(room) if left >= lengths[index]), None)
        if at is None:
            lanes.append([index])
            room.append(lane_tokens - lengths[index])
        else:
            lanes[at].append(index)
            room[at] -= lengths[index]
    return lanes


def _least_loaded(lengths: Sequence[int], order: Sequence[int], count: int) -> list[list[int]]:
    lanes: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for index in order:
        at = load.index(min(load))
        lanes[at].append(index)
        load[at] += lengths[index]
    return lanes


def plan_chunks(rows: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """The prompt's rows cut into chunks of at most `chunk_tokens`, first to last: as few as can be, and even."""
    if not rows:
        return []
    count = -(-rows // chunk_tokens)
    # Whole tiles of the matrix products, where chunks are that long.
    even = min(-(-rows // (count * _TILE)) * _TILE, chunk_tokens)
    return [(at, min(at + even, rows)) for at in range(0, rows, even)]
