"""Device memory of a step: what is there throughout, and the largest live graph beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from longstraw.config import Config
from longstraw.planner.blueprint import Blueprint
from longstraw.planner.pages import DEVICE
from longstraw.planner.sharding import RankMemory
from longstraw.resident.state import DTYPE_BYTES
from longstraw.runtime.prompt_state import PromptState, output_specs, token_specs
from longstraw.runtime.sizing import (
    GraphSize,
    again_bytes,
    block_rows,
    checkpointed_bytes,
    logits_bytes,
    workspace_bytes,
)

# Layers' graphs that are freed when the first workspace is needed: a lane's backward comes to the last layer's mixing
# after its MLP; a chunk's skips the last layer's mixing. Fitted to measured peaks (tests/planner/test_measured.py).
_FREED_LANE, _FREED_CHUNK = 0.5, 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Bytes on the device, and when they are there together.

    Attributes:
        weights: of the model, adapters included; of a sharded one this rank's part.
        gathered: weights that are there for a pass only.
        gradients: sums over passes, from the first lane's backward on.
        arriving: the largest gradient, or a unit's gradients, on their way into the sums.
        head: the LM head's own gradient while it is summed over blocks, where it is trained.
        pages: prompt state that a device tier holds.
        lane, chunk: what autograd keeps of the widest lane, and of the longest chunk of the sweep (0 without one).
        lane_layer, chunk_layer: of a layer that checkpointing runs again, with gradients and workspace; 0 without.
        lane_workspace, chunk_workspace: without checkpointing, of a layer's mixing of tokens, beyond what its backward
            has freed by then.
        logits: one block, beside a lane.
        staging: slots that pages pass through.
        one_lane: whether there is no second lane, which would meet the first one's gradients.
    """

    weights: int
    gathered: int
    gradients: int
    arriving: int
    head: int
    pages: int
    lane: int
    chunk: int
    lane_layer: int
    chunk_layer: int
    lane_workspace: int
    chunk_workspace: int
    logits: int
    staging: int
    one_lane: bool

    @property
    def beyond_weights(self) -> int:
        """The peak, without the weights."""
        before = 0 if self.one_lane else self.gradients
        replay = before + self.lane + max(self.logits + self.head, self.lane_layer + self.lane_workspace)
        sweep = self.gradients + self.arriving + self.chunk + self.chunk_layer + self.chunk_workspace
        return max(replay, sweep) + self.gathered + self.pages + self.staging

    @property
    def total(self) -> int:
        """The peak."""
        return self.weights + self.beyond_weights

    def to_dict(self) -> dict[str, int]:
        """Plain values, with the sums."""
        return asdict(self) | {"beyond_weights": self.beyond_weights, "total": self.total}


def device_memory(
    blueprint: Blueprint,
    config: Config,
    *,
    rank: RankMemory,
    lane: GraphSize,
    lane_tokens: Sequence[int],
    chunk: GraphSize,
    chunk_tokens: int,
    state: PromptState,
    rows: int,
    device_pages: int,
) -> DeviceMemory:
    """Memory of a step with lanes of `lane_tokens`, on a prompt of `rows` rows in chunks of up to `chunk_tokens`."""
    profile, exact = blueprint.profile, config.gradient.prompt == "exact"
    swept = chunk_tokens if exact else 0
    widest = max(lane_tokens)
    layer = profile.graph_bytes / max(profile.blocks, 1)

    def kept(size: GraphSize) -> int:
        return checkpointed_bytes(profile) if runs_again(size) else profile.graph_bytes

    def again(size: GraphSize) -> int:
        return again_bytes(profile) if runs_again(size) else 0

    def workspace(size: GraphSize, freed: float) -> float:
        return 0.0 if runs_again(size) else max(workspace_bytes(profile) - freed * layer, 0.0)

    def runs_again(size: GraphSize) -> bool:
        return size.checkpoint and profile.blocks > 0

    return DeviceMemory(
        weights=rank.weights,
        gathered=rank.gathered,
        gradients=rank.gradients,
        arriving=rank.arriving,
        head=blueprint.head * (4 + blueprint.element) if blueprint.head_trained else 0,
        pages=device_pages,
        lane=widest * kept(lane),
        chunk=swept * kept(chunk),
        lane_layer=widest * again(lane),
        chunk_layer=swept * again(chunk),
        lane_workspace=int(widest * workspace(lane, _FREED_LANE)),
        chunk_workspace=int(swept * workspace(chunk, _FREED_CHUNK)),
        logits=logits_bytes(profile, min(config.replay.logit_block_tokens, widest), config.replay.entropy),
        staging=_staging(blueprint, config, state, rows, swept),
        one_lane=len(lane_tokens) == 1,
    )


def _staging(blueprint: Blueprint, config: Config, state: PromptState, rows: int, swept: int) -> int:
    """Slots of the layer with the largest rows: those ahead and the open one; in a backward as many with gradients,
    every other of what is ahead."""
    block, ahead = min(block_rows(config.pages, DEVICE), rows), config.pages.lookahead
    wide = config.gradient.accumulate == "float32"
    largest = 0
    for layer in blueprint.profile.layers:
        for spec in token_specs(layer):
            here = (ahead + 1) * block * spec.state(layer.index).row_bytes
            if config.gradient.prompt == "exact" and spec.trained:
                gradient = spec.gradient_state(layer.index, wide)
                here += (ahead // 2 + 1) * block * gradient.row_elements * DTYPE_BYTES[gradient.dtype]
            largest = max(largest, here)
    outputs = max(
        (
            sum(spec.state(layer.index).row_bytes for spec in output_specs(layer))
            for layer in blueprint.profile.layers
            if state.keeps_output(layer.index)
        ),
        default=0,
    )
    return largest + swept * outputs
