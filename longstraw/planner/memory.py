"""Device memory of a step: what is there throughout, and the largest live graph beside it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from longstraw.config import Config
from longstraw.planner.blueprint import Blueprint
from longstraw.planner.pages import DEVICE
from longstraw.resident.state import DTYPE_BYTES
from longstraw.runtime.prompt_state import PromptState, output_specs, token_specs
from longstraw.runtime.sizing import GraphSize, block_rows, graph_bytes, logits_bytes, workspace_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Bytes on the device. A lane's graph and a chunk's are never there together.

    Attributes:
        weights: of the model, adapters included.
        gradients: sums over passes, and the one gradient on its way into them.
        pages: prompt state that a device tier holds.
        lane, chunk: live graph of the widest lane, and of a chunk of the sweep (0 without one).
        workspace: of one layer's attention, for that lane or chunk.
        logits: one block, beside a lane.
        staging: slots that pages pass through.
    """

    weights: int
    gradients: int
    pages: int
    lane: int
    chunk: int
    workspace: int
    logits: int
    staging: int

    @property
    def beyond_weights(self) -> int:
        """The peak, without the weights."""
        return self.gradients + self.pages + max(self.lane + self.logits, self.chunk) + self.workspace + self.staging

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
    lane: GraphSize,
    lane_tokens: int,
    chunk: GraphSize,
    state: PromptState,
    rows: int,
    device_pages: int,
) -> DeviceMemory:
    """Memory of a step whose widest lane has `lane_tokens`, on a prompt of `rows` rows cut as `chunk` says."""
    profile, exact = blueprint.profile, config.gradient.prompt == "exact"
    swept = min(chunk.tokens, rows) if exact else 0
    return DeviceMemory(
        weights=blueprint.weight_bytes,
        gradients=gradient_sums(blueprint, config) + blueprint.largest_gradient,
        pages=device_pages,
        lane=lane_tokens * graph_bytes(profile, lane.checkpoint),
        chunk=swept * graph_bytes(profile, chunk.checkpoint),
        workspace=max(lane_tokens, swept) * workspace_bytes(profile),
        logits=logits_bytes(profile, min(config.replay.logit_block_tokens, lane_tokens)),
        staging=_staging(blueprint, config, state, rows, swept),
    )


def gradient_sums(blueprint: Blueprint, config: Config) -> int:
    """Bytes of the parameters' gradient sums until the step ends."""
    return blueprint.gradient_bytes if config.gradient.accumulate == "float32" else blueprint.model_gradient_bytes


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
