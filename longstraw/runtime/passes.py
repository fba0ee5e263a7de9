"""One forward pass of the model and its backward: why it runs, what it may read, and in which order."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from longstraw.errors import PageLostError, StreamOrderError, UnsupportedModelError
from longstraw.pagers.stalls import Stall
from longstraw.pagers.stream import PageStream, Request
from longstraw.pagers.trace import Tracer
from longstraw.runtime.layer_io import LayerIO
from longstraw.runtime.layer_spec import LayerSpec
from longstraw.runtime.pass_trace import PassTrace
from longstraw.runtime.prompt_state import PromptState, carried_specs, output_specs, token_specs
from longstraw.runtime.routers import RouterTally


class Purpose(enum.Enum):
    """Why the model runs."""

    PROBE = "probe"
    CAPTURE = "capture"
    SCORE = "score"
    COUNT = "count"
    REPLAY = "replay"
    SWEEP = "sweep"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadRequest:
    """What the LM head is to compute: log-probs of `targets_S` (int64 [S]) instead of logits."""

    targets_S: Tensor
    temperature: float
    block_tokens: int
    entropy: bool


@dataclass(kw_only=True)
class PassTraffic:
    """Bytes that a pass moved, by tier, and its waits for them."""

    read: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    stalls: list[Stall] = field(default_factory=list)

    def add_stream(self, stream: PageStream) -> None:
        for total, part in ((self.read, stream.bytes_read), (self.written, stream.bytes_written)):
            for tier, count in part.items():
                total[tier] = total.get(tier, 0) + count
        self.stalls += stream.stalls


class ForwardPass:
    """A run of the model over packed rows on top of the first `prefix_rows` captured rows.

    The pass is a context manager that owns its page streams: one in layer order for the forward, one in reverse for
    the backward. Both end with the pass.

    Args:
        purpose: why the model runs; it decides what is read and what is written.
        lengths: tokens of each packed branch, or of the one chunk.
        state: the prompt's state, or None where the purpose is PROBE.
        prefix_rows: captured rows that every branch sees.
        head: what the LM head is to compute, or None if only state is wanted.
        checkpoint: keep only each layer's input and attention output, and recompute the rest in the backward.
        row_tokens: the row length whose position encoding is used, where that depends on the length.
        routers: follows the routers of experts, or None where their auxiliary loss is not asked for.
        tracer: told of the pass, of its layers and of its waits.

    Attributes:
        own_rows: the rows that the one chunk of a CAPTURE or SWEEP is.
        kept: by layer, what a recomputation must find again instead of computing it: attention outputs, selections.
        kernels: the user's choice of kernels, by what they compute; the adapter fills it in.
    """

    def __init__(
        self,
        purpose: Purpose,
        lengths: Sequence[int],
        *,
        state: PromptState | None = None,
        prefix_rows: int = 0,
        head: HeadRequest | None = None,
        checkpoint: bool = False,
        row_tokens: int | None = None,
        routers: RouterTally | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.purpose = purpose
        self.lengths = tuple(lengths)
        self.state = state
        self.prefix_rows = prefix_rows
        self.head = head
        self.checkpoint = checkpoint
        self.row_tokens = row_tokens
        self.routers = routers
        self.traffic = PassTraffic()
        self._tracer, self._trace = tracer, None if tracer is None else PassTrace(tracer)
        self.own_rows = (prefix_rows, prefix_rows + sum(self.lengths))
        self.kept: dict[Hashable, Any] = {}
        self.kernels: Mapping[str, str] = {}
        self.declared: list[LayerSpec] = []
        self._layers: dict[int, LayerIO] = {}
        self._known = {layer.index: layer for layer in state.layers} if state is not None else {}
        self._forward: PageStream | None = None
        self._backward: PageStream | None = None

    def __enter__(self) -> Self:
        if self.state is not None:
            if self._trace is not None:
                tokens = sum(self.lengths)
                self._trace.begin(self.purpose.value, self.state.device, tokens=tokens, prefix=self.prefix_rows)
            self._forward = self.state.stream(self.schedule(backward=False), self._tracer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._trace is not None:
            self._trace.end()
        streams = [stream for stream in (self._forward, self._backward) if stream is not None]
        self._forward = self._backward = None
        self.kept.clear()
        self._layers.clear()
        lost: PageLostError | None = None
        for stream in streams:
            # Both end, whatever the first says; and the error that ended the pass is the one to raise.
            try:
                stream.close()
            except PageLostError as cause:
                lost = lost or cause
            self.traffic.add_stream(stream)
        if lost is not None and error is None:
            raise lost
        if lost is not None and error is not None:
            error.add_note(f"while closing the pass: {lost}")

    def layer(self, spec: LayerSpec) -> LayerIO:
        """What layer `spec.index` works with in this pass. Called by its family each time that the layer runs.

        Raises:
            StreamOrderError: the layer runs twice in one pass, and not to recompute: its pages stream by once.
            UnsupportedModelError: it keeps other states than in the probe.
        """
        io = self._layers.get(spec.index)
        if io is not None:
            if not self.checkpoint:
                raise StreamOrderError(
                    f"layer {spec.index} ran twice in one {self.purpose.value} pass; modules that are shared between "
                    "layers, and recomputation by anything but Longstraw, are not supported"
                )
            self._layer_begins(spec.index, "forward again")
            return io.again()
        known = self._known.get(spec.index)
        if self.state is None:
            self.declared.append(spec)
        elif known is None or [s.state(0) for s in known.states] != [s.state(0) for s in spec.states]:
            raise UnsupportedModelError(f"layer {spec.index} keeps other state in a {self.purpose.value} than before")
        self._layer_begins(spec.index, "forward")
        io = LayerIO(self, known or spec)
        self._layers[spec.index] = io
        return io

    def _layer_begins(self, index: int, way: str) -> None:
        if self._trace is not None:
            self._trace.layer(index, way)

    def output_unused(self, index: int) -> bool:
        """Whether nobody reads the layer's output: the last layer, where only the prompt's state is wanted. The
        router behind its attention is somebody, if the auxiliary loss is asked for."""
        return (
            self.purpose in (Purpose.CAPTURE, Purpose.SWEEP)
            and self.routers is None
            and self.state is not None
            and index == self.state.layers[-1].index
        )

    def schedule(self, *, backward: bool) -> list[Request]:
        """What the pass asks of the pages, in order. A planner counts it without running the pass."""
        state = self.state
        assert state is not None, "a probe asks for nothing"
        schedule: list[Request] = []
        for layer in reversed(state.layers) if backward else state.layers:
            schedule += self._layer_backward(state, layer) if backward else self._layer_forward(state, layer)
        return schedule

    def _layer_forward(self, state: PromptState, layer: LayerSpec) -> list[Request]:
        """Carried states in, token states block by block; then, in a capture, token states, kept outputs and carried
        states are written. A sweep that finds its output kept reads that instead of the blocks."""
        schedule: list[Request] = []
        tokens, carried = token_specs(layer), carried_specs(layer)
        if self.prefix_rows:
            schedule += [state.carried_read(layer.index, spec.name, self.prefix_rows) for spec in carried]
        outputs = output_specs(layer) if state.keeps_output(layer.index) else []
        if self.purpose is Purpose.SWEEP and outputs:
            schedule += [state.read(layer.index, spec.name, *self.own_rows) for spec in outputs]
        elif not (layer.skips_unused_output and self.output_unused(layer.index)):
            for spec in tokens:
                schedule += state.reads(layer.index, spec.name, self.prefix_rows)
        if self.purpose is Purpose.CAPTURE:
            schedule += [state.fill(layer.index, spec.name, *self.own_rows) for spec in (*tokens, *outputs)]
            schedule += [state.carried_fill(layer.index, spec.name, self.own_rows[1]) for spec in carried]
        return schedule

    def _layer_backward(self, state: PromptState, layer: LayerSpec) -> list[Request]:
        """Carried gradients of the chunk's own boundary; token states with their gradients; the chunk's own rows'
        gradients; then what goes to the boundary before."""
        schedule: list[Request | None] = []
        tokens, carried = token_specs(layer), carried_specs(layer)
        sweep = self.purpose is Purpose.SWEEP
        if sweep:
            schedule += [state.carried_gradient_read(layer.index, s.name, self.own_rows[1]) for s in carried[::-1]]
        if not (layer.skips_unused_output and self.output_unused(layer.index)):
            for spec in tokens:
                if spec.backward:
                    for read in state.reads(layer.index, spec.name, self.prefix_rows):
                        update = state.gradient_update(layer.index, spec.name, read.start, read.stop)
                        schedule += [read, update]
        if sweep:
            schedule += [state.gradient_read(layer.index, spec.name, *self.own_rows) for spec in tokens]
        if self.prefix_rows:
            schedule += [state.carried_gradient_update(layer.index, s.name, self.prefix_rows) for s in carried[::-1]]
        return [request for request in schedule if request is not None]

    def forward_stream(self) -> PageStream:
        """The forward's stream."""
        assert self._forward is not None, "the pass is not open"
        return self._forward

    def backward_stream(self, layer: int) -> PageStream:
        """The backward's stream, opened when first asked for; `layer` is who asks."""
        self._layer_begins(layer, "backward")
        if self._backward is None:
            assert self.state is not None and self._forward is not None, "the pass is not open"
            self._backward = self.state.stream(self.schedule(backward=True), self._tracer)
        return self._backward
