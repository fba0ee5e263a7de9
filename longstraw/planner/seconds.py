"""Operations and seconds of a pass, from its tokens, what they see, and what it moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from longstraw.planner.blueprint import Blueprint, LayerWork
from longstraw.planner.machine import Machine
from longstraw.planner.pages import Traffic
from longstraw.planner.sharding import Sent

# Between matrix products a layer reads and writes activations many times: so many bytes of device memory for each byte
# of graph that it leaves, forward and backward. Fitted to measured steps (tests/planner/test_measured.py).
FORWARD_TRAFFIC, BACKWARD_TRAFFIC = 12.0, 8.0
# Passes over a block of logits in float32.
_HEAD_FORWARD, _HEAD_BACKWARD = 10, 15
# Products of attention's backward for the two of its forward: FlashAttention-2 (arXiv 2307.08691) computes five.
_ATTENTION_BACKWARD = 2.5
# Three of them where only the queries' gradient is wanted.
_QUERIES_BACKWARD = 1.5


@dataclass(kw_only=True)
class PhaseCost:
    """What the passes of a phase take. `seconds` is the sum over passes of what binds each.

    `link` is the host's, which pages share with offloaded weights and their gradients; `ranks` the GPUs' among each
    other. Collectives' bytes are of whole tensors.
    """

    operations: float = 0.0
    compute: float = 0.0
    link: float = 0.0
    disk: float = 0.0
    ranks: float = 0.0
    seconds: float = 0.0
    bytes_read: dict[str, int] = field(default_factory=dict)
    bytes_written: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)
    collective_bytes: dict[str, int] = field(default_factory=dict)
    weights_to_device: int = 0
    gradients_to_host: int = 0

    def add(self, operations: float, compute: float, traffic: Traffic, sent: Sent, machine: Machine) -> None:
        """One pass: copies and collectives run beside compute, and the slowest is what it takes."""
        read, written = traffic.all_read + sent.weights_to_device, traffic.all_written + sent.gradients_to_host
        link = max(read / machine.h2d, written / machine.d2h, (read + written) / machine.both)
        disk = max(traffic.read.get("nvme", 0) / machine.disk_read, traffic.written.get("nvme", 0) / machine.disk_write)
        self.operations += operations
        self.compute += compute
        self.link += link
        self.disk += disk
        self.ranks += sent.seconds
        self.seconds += max(compute, link, disk, sent.seconds)
        self.weights_to_device += sent.weights_to_device
        self.gradients_to_host += sent.gradients_to_host
        for total, part in (
            (self.bytes_read, traffic.read),
            (self.bytes_written, traffic.written),
            (self.collectives, sent.counts),
            (self.collective_bytes, sent.bytes),
        ):
            for key, count in part.items():
                total[key] = total.get(key, 0) + count

    @property
    def binds(self) -> str:
        """Which of compute, the host's link, the disk and the links between ranks is the slowest."""
        times = {"compute": self.compute, "link": self.link, "disk": self.disk, "ranks": self.ranks}
        return max(times, key=lambda name: times[name])


class Costs:
    """Operations and compute seconds of a model's parts on a machine.

    `detached`: nobody wants the gradient of the prompt's keys and values.
    """

    def __init__(self, blueprint: Blueprint, machine: Machine, *, detached: bool) -> None:
        self._model, self._machine, self._detached = blueprint, machine, detached

    def linear(self, tokens: int, *, backward: bool) -> tuple[float, float]:
        """All layers' matrices and what lies between them."""
        model, machine = self._model, self._machine
        # Backward: the gradient of the input, and of the weights where they are trained.
        products = model.matrices + (model.trained_matrices if backward else 0)
        operations = 2.0 * products * tokens
        moved = (BACKWARD_TRAFFIC if backward else FORWARD_TRAFFIC) * model.profile.graph_bytes * tokens
        return operations, operations / machine.matrix + moved / machine.memory

    def head(self, tokens: int, *, backward: bool) -> tuple[float, float]:
        """Log-probs by blocks; the backward computes the logits again."""
        model, machine = self._model, self._machine
        products = 2 + model.head_trained if backward else 1
        operations = 2.0 * products * model.head * tokens
        passes = _HEAD_BACKWARD if backward else _HEAD_FORWARD
        return (
            operations,
            operations / machine.matrix + passes * 4.0 * model.profile.vocab_size * tokens / machine.memory,
        )

    def mixing(
        self, lengths: Sequence[int], prefix: int, *, backward: bool, skip: Sequence[int]
    ) -> tuple[float, float]:
        """Attention and recurrence of branches (or one chunk) on top of a prefix, without the layers in `skip`."""
        operations = seconds = 0.0
        for number, work in enumerate(self._model.work):
            if number not in skip:
                for count, rate in self._layer(work, lengths, prefix, backward):
                    operations += count
                    seconds += count / rate
        return operations, seconds

    def _layer(self, work: LayerWork, lengths: Sequence[int], prefix: int, backward: bool) -> list[tuple[float, float]]:
        """Operations, and the rate that they run at."""
        pairs = sum(visible(length, prefix, work.sees) for length in lengths)
        rate = self._rate(work, backward)
        if not backward:
            scanned = sum(visible(length, prefix, None) for length in lengths) if work.scan else 0.0
            return [(work.pair * pairs + work.scan * scanned + work.token * sum(lengths), rate)]
        recurrence = 2.0 * work.token * sum(lengths)
        queries = self._machine.attention_queries.get(work.head_dim) if work.kind == "attention" else None
        if not self._detached or queries is None:
            return [(_ATTENTION_BACKWARD * work.pair * pairs + recurrence, rate)]
        own = sum(visible(length, 0, work.sees) for length in lengths)
        return [
            (_QUERIES_BACKWARD * work.pair * (pairs - own), queries),
            (_ATTENTION_BACKWARD * work.pair * own + recurrence, rate),
        ]

    def _rate(self, work: LayerWork, backward: bool) -> float:
        machine = self._machine
        if work.kind == "recurrent":
            return machine.recurrent
        if work.kind == "fused recurrent":
            return machine.fused_recurrent
        if work.kind in ("latent", "sparse latent"):
            return machine.latent_backward if backward else machine.latent_forward
        return machine.attention_rate(
            machine.attention_backward if backward else machine.attention_forward, work.head_dim
        )


def visible(length: int, prefix: int, sees: int | None) -> float:
    """Pairs of a query and a key that it sees, for `length` queries behind `prefix` tokens."""
    causal = length * prefix + length * (length + 1) / 2
    if sees is None:
        return causal
    # The first queries may have fewer keys before them than they could see.
    short = max(min(sees - prefix, length), 0)
    return short * prefix + short * (short + 1) / 2 + (length - short) * sees
