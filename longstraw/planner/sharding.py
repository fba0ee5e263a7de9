"""What frameworks that shard or replicate a model cost: memory of one rank, and what ranks send one another."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from longstraw.collectives import GATHER, REDUCE, SCATTER
from longstraw.config import Config
from longstraw.errors import ConfigError
from longstraw.planner.blueprint import Blueprint
from longstraw.planner.machine import Machine

_HELD_LAYERS = 3
"""Layers' weights that FSDP2 has gathered at once: the one that computes, the buffer that it was copied from, and the
next one's."""
_ZERO3_LIVE = 1_000_000_000
"""Gathered parameters that ZeRO-3 keeps at most, and for a backward: DeepSpeed's default of
`stage3_max_live_parameters` and `stage3_max_reuse_distance`."""


class Framework(enum.Enum):
    """What holds the model."""

    NONE = "none"
    DDP = "ddp"
    FSDP2 = "fsdp2"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingChoice:
    """How the model is held, on how many ranks.

    FSDP2 has one unit a decoder layer, and the rest in the root. Raises ConfigError for what would be ignored.

    Attributes:
        replicas: ranks; each works on groups of its own.
        reshard: `reshard_after_forward` of all units.
        offload: weights lie in host memory between passes (`CPUOffloadPolicy`, `offload_param`).
    """

    framework: Framework = Framework.NONE
    replicas: int = 1
    reshard: bool = True
    offload: bool = False

    def __post_init__(self) -> None:
        name = self.framework.value
        if self.replicas < 1:
            raise ConfigError(f"--gpus {self.replicas}: use at least 1")
        if self.framework is Framework.NONE and self.replicas > 1:
            raise ConfigError(
                f"--gpus {self.replicas} --sharding none: gradients of several processes must be averaged; use ddp, "
                "fsdp2, zero1, zero2 or zero3"
            )
        if not self.reshard and self.framework is not Framework.FSDP2:
            raise ConfigError(f"--keep-gathered would be ignored with --sharding {name}; it is of fsdp2")
        if self.offload and not self.sharded:
            raise ConfigError(f"--offload-weights would be ignored with --sharding {name}; use fsdp2 or zero3")

    @property
    def sharded(self) -> bool:
        """Whether a rank holds a part of the weights only."""
        return self.framework in (Framework.FSDP2, Framework.ZERO3)

    def link_bytes_a_parameter(self, blueprint: Blueprint) -> float:
        """As the runtime's sharding tells it."""
        whole = blueprint.weight_bytes / blueprint.parameters
        return whole / self.replicas if self.offload else 0.0

    def check(self, config: Config) -> None:
        """Raises ConfigError where `gradient.reduce` would be ignored, as the runtime does."""
        if config.gradient.reduce == "each_pass" and self.framework is not Framework.FSDP2:
            raise ConfigError(
                f"gradient.reduce: each_pass would be ignored with --sharding {self.framework.value}; it is of fsdp2"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes on one rank's device.

    Attributes:
        weights: there throughout.
        gathered: the most that is there beside them in a pass.
        gradients: sums over passes, until the step ends.
        arriving: gradients on their way into the sums.
    """

    weights: int
    gathered: int
    gradients: int
    arriving: int


def rank_memory(blueprint: Blueprint, config: Config, choice: ShardingChoice) -> RankMemory:
    """Memory of weights and gradients; the optimizer is the user's."""
    wide = config.gradient.accumulate == "float32"
    sums = blueprint.gradient_bytes if wide else blueprint.model_gradient_bytes
    weights, gathered, arriving = blueprint.weight_bytes, 0, blueprint.largest_gradient
    if choice.sharded:
        weights = 0 if choice.offload else -(-blueprint.weight_bytes // choice.replicas)
        gathered = _gathered(blueprint, choice)
    if config.gradient.reduce == "each_pass":
        # A unit's gradients are there together, and again in the buffer that is reduced; the root's until the end.
        sums = -(-sums // choice.replicas)
        arriving = blueprint.outside_gradient + 2 * blueprint.layer_gradient
    return RankMemory(weights=weights, gathered=gathered, gradients=sums, arriving=arriving)


def _gathered(blueprint: Blueprint, choice: ShardingChoice) -> int:
    if choice.framework is Framework.ZERO3:
        return min(blueprint.weight_bytes, _ZERO3_LIVE * blueprint.element)
    if not choice.reshard:
        return blueprint.weight_bytes + blueprint.layer_bytes
    return min(blueprint.outside_bytes + _HELD_LAYERS * blueprint.layer_bytes, blueprint.weight_bytes)


def _kept(blueprint: Blueprint, choice: ShardingChoice) -> float:
    """The part of the weights that is gathered still when a backward follows its forward."""
    if choice.framework is Framework.ZERO3:
        return min(_ZERO3_LIVE / blueprint.parameters, 1.0)
    return 0.0 if choice.reshard else 1.0


@dataclass(kw_only=True, slots=True)
class Sent:
    """What a rank sends and receives in a pass, or at the end of a step.

    Attributes:
        counts, bytes: collectives by kind, and bytes of the whole tensors, as `Report.collectives` has them.
        seconds: over the links between GPUs.
        weights_to_device, gradients_to_host: bytes over the host's link.
    """

    counts: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    weights_to_device: int = 0
    gradients_to_host: int = 0

    def add(self, other: Sent) -> None:
        """Count `other` in as well."""
        for mine, its in ((self.counts, other.counts), (self.bytes, other.bytes)):
            for kind, number in its.items():
                mine[kind] = mine.get(kind, 0) + number
        self.seconds += other.seconds
        self.weights_to_device += other.weights_to_device
        self.gradients_to_host += other.gradients_to_host


class RankTraffic:
    """Collectives of a step's passes, asked for in the order in which they run: what is gathered stays until resharded.

    Of ZeRO-3 each weight counts as one gather, whatever is merged. A model of more than `_ZERO3_LIVE` is let go between
    passes; within one, that much of it stays from the forward to the backward.
    """

    def __init__(self, blueprint: Blueprint, config: Config, choice: ShardingChoice, machine: Machine) -> None:
        self._model, self._config, self._choice, self._machine = blueprint, config, choice, machine
        self._held = False
        self._kept = _kept(blueprint, choice)
        self._units = len(blueprint.profile.layers) + 1 if choice.framework is Framework.FSDP2 else blueprint.tensors

    def forward(self) -> Sent:
        """A pass's forward."""
        if self._held or not self._choice.sharded:
            return Sent()
        self._held = self._kept == 1.0
        return self._gather(1.0)

    def backward(self, *, head: bool) -> Sent:
        """A pass's backward; `head`: whether log-probs were computed, so that the LM head has a gradient."""
        if not self._choice.sharded:
            return Sent()
        sent = self._gather(1.0 - self._kept)
        self._held = False
        if self._config.gradient.reduce == "each_pass":
            model = self._model
            unused = model.head * model.element if model.head_trained and not model.tied and not head else 0
            sent.add(self._send(SCATTER, self._units, model.model_gradient_bytes - unused, stays=True))
        return sent

    def finalize(self) -> Sent:
        """The end of the step."""
        model, framework = self._model, self._choice.framework
        sums = model.gradient_bytes if self._config.gradient.accumulate == "float32" else model.model_gradient_bytes
        if framework is Framework.DDP:
            return self._send(REDUCE, max(sums // (64 << 20), 1), sums)
        if framework in (Framework.ZERO1, Framework.ZERO2):
            return self._send(REDUCE, 1, model.model_gradient_bytes)
        if framework is Framework.ZERO3:
            sent = self._send(GATHER, model.trained_tensors, model.model_gradient_bytes)
            sent.add(self._send(SCATTER, 1, model.model_gradient_bytes))
            return sent
        if framework is Framework.FSDP2 and self._config.gradient.reduce == "deferred":
            return self._send(SCATTER, model.trained_tensors, sums, stays=True)
        return Sent()

    def _gather(self, share: float) -> Sent:
        nbytes = round(share * self._model.weight_bytes)
        sent = self._send(GATHER, round(share * self._units), nbytes)
        if self._choice.offload:
            sent.weights_to_device = -(-nbytes // self._choice.replicas)
        return sent

    def _send(self, kind: str, count: int, nbytes: int, *, stays: bool = False) -> Sent:
        """`stays`: the reduced shard goes where the weights lie, in their type."""
        ranks = self._choice.replicas
        sent = Sent()
        if ranks > 1 and nbytes:
            ring = nbytes * (ranks - 1) / ranks * (2 if kind == REDUCE else 1)
            sent = Sent(counts={kind: count}, bytes={kind: nbytes}, seconds=ring / self._machine.ranks)
        if stays and self._choice.offload:
            sent.gradients_to_host = -(-self._model.model_gradient_bytes // ranks)
        return sent
