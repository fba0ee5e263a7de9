"""One forward pass of the model, its backward, and the pages that each layer is handed during both."""

from __future__ import annotations

import enum
from collections.abc import Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from torch import Tensor

from longstraw.errors import StreamOrderError
from longstraw.kernels.attention import KvBlock, KvGradient, choose_ops, keep_state_only, kv_views, paged_attention
from longstraw.pagers.stream import PageStream, Request
from longstraw.resident.lease import Access
from longstraw.runtime.prompt_state import PromptState


class Purpose(enum.Enum):
    """Why the model runs."""

    PROBE = "probe"
    CAPTURE = "capture"
    SCORE = "score"
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
    """Bytes that a pass moved, by tier, and the seconds that it waited for them."""

    read: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    stall_seconds: float = 0.0

    def add_stream(self, stream: PageStream) -> None:
        for total, part in ((self.read, stream.bytes_read), (self.written, stream.bytes_written)):
            for tier, count in part.items():
                total[tier] = total.get(tier, 0) + count
        self.stall_seconds += stream.stall_seconds


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
    ) -> None:
        self.purpose = purpose
        self.lengths = tuple(lengths)
        self.state = state
        self.prefix_rows = prefix_rows
        self.head = head
        self.checkpoint = checkpoint
        self.row_tokens = row_tokens
        self.traffic = PassTraffic()
        self.own_rows = (prefix_rows, prefix_rows + sum(self.lengths))
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._ran: set[int] = set()
        self._forward: PageStream | None = None
        self._backward: PageStream | None = None

    def __enter__(self) -> Self:
        if self.state is not None:
            self._forward = self.state.stream(self._forward_schedule())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        streams = [stream for stream in (self._forward, self._backward) if stream is not None]
        self._forward = self._backward = None
        self.kept.clear()
        for stream in streams:
            stream.close()
            self.traffic.add_stream(stream)

    def attention(self, layer: int, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scale: float) -> Tensor:
        """Layer `layer`'s attention in this pass; shapes as in `kernels.attention.paged_attention`.

        Raises StreamOrderError if a layer attends twice in one pass: its pages stream by once.
        """
        recomputing = self.checkpoint and (layer in self.kept or self._state_only(layer))
        if layer in self._ran and not recomputing:
            raise StreamOrderError(
                f"layer {layer} attended twice in one {self.purpose.value} pass; modules that are shared between "
                "layers, and recomputation by anything but Longstraw, are not supported"
            )
        self._ran.add(layer)
        pages = _LayerPages(self, layer)
        if self._state_only(layer):
            out = keep_state_only(q_BHSD, k_BKSD, v_BKSD, pages)
        else:
            ops = choose_ops(q_BHSD.device, q_BHSD.dtype, q_BHSD.shape[3])
            out = paged_attention(q_BHSD, k_BKSD, v_BKSD, lengths=self.lengths, pages=pages, ops=ops, scale=scale)
        if self.purpose is Purpose.CAPTURE:
            pages.fill(k_BKSD, v_BKSD)
        return out

    def _state_only(self, layer: int) -> bool:
        # Nothing reads the last layer's output when only the prompt's state is wanted.
        return (
            self.purpose in (Purpose.CAPTURE, Purpose.SWEEP)
            and self.state is not None
            and layer == self.state.layers[-1].index
        )

    def _forward_schedule(self) -> list[Request]:
        assert self.state is not None
        schedule: list[Request] = []
        for layer in self.state.layers:
            if not self._state_only(layer.index):
                schedule += self.state.kv_requests(layer.index, self.prefix_rows)
            if self.purpose is Purpose.CAPTURE:
                schedule.append(self.state.kv_fill(layer.index, *self.own_rows))
        return schedule

    def _backward_schedule(self) -> list[Request]:
        assert self.state is not None
        schedule: list[Request] = []
        for layer in reversed(self.state.layers):
            if not self._state_only(layer.index):
                for kv in self.state.kv_requests(layer.index, self.prefix_rows):
                    schedule.append(kv)
                    schedule += self.state.gradient_updates(layer.index, kv.start, kv.stop)
            if self.purpose is Purpose.SWEEP:
                schedule += self.state.gradient_reads(layer.index, *self.own_rows)
        return schedule

    def forward_stream(self) -> PageStream:
        assert self._forward is not None, "the pass is not open"
        return self._forward

    def backward_stream(self) -> PageStream:
        if self._backward is None:
            assert self.state is not None and self._forward is not None, "the pass is not open"
            self._backward = self.state.stream(self._backward_schedule())
        return self._backward


class _LayerPages:
    """`PrefixPages` of one layer in one pass."""

    def __init__(self, forward: ForwardPass, layer: int) -> None:
        self._pass, self._layer = forward, layer

    def forward_blocks(self) -> Generator[KvBlock]:
        state = self._pass.state
        if state is None:
            return
        for request in state.kv_requests(self._layer, self._pass.prefix_rows):
            with self._pass.forward_stream().next(request.segment, request.start, request.stop) as rows:
                yield KvBlock(rows_TC=rows)

    def backward_blocks(self) -> Generator[KvBlock]:
        state = self._pass.state
        if state is None:
            return
        for request in state.kv_requests(self._layer, self._pass.prefix_rows):
            stream = self._pass.backward_stream()
            updates = state.gradient_updates(self._layer, request.start, request.stop)
            with stream.next(request.segment, request.start, request.stop) as rows:
                update = updates[0] if updates else None
                with (
                    stream.next(update.segment, update.start, update.stop) if update else nullcontext()
                ) as gradient_rows:
                    gradient = None
                    if update is not None:
                        assert gradient_rows is not None
                        gradient = KvGradient(rows_TC=gradient_rows, overwrite=update.access is Access.FILL)
                    yield KvBlock(rows_TC=rows, gradient=gradient)

    def own_gradient(self) -> Generator[Tensor]:
        state = self._pass.state
        if state is None or self._pass.purpose is not Purpose.SWEEP:
            return
        for request in state.gradient_reads(self._layer, *self._pass.own_rows):
            with self._pass.backward_stream().next(request.segment, request.start, request.stop) as rows:
                yield rows

    def kept_output(self) -> tuple[Tensor, Tensor] | None:
        return self._pass.kept.get(self._layer)

    def keep_output(self, out_BHSD: Tensor, lse_BHS: Tensor) -> None:
        if self._pass.checkpoint:
            self._pass.kept[self._layer] = (out_BHSD, lse_BHS)

    def fill(self, k_BKSD: Tensor, v_BKSD: Tensor) -> None:
        """Copy this pass's own keys and values to their pages."""
        state = self._pass.state
        assert state is not None
        request = state.kv_fill(self._layer, *self._pass.own_rows)
        with self._pass.forward_stream().next(request.segment, request.start, request.stop) as rows:
            k_rows, v_rows = kv_views(rows, k_BKSD.shape[1], k_BKSD.shape[3])
            k_rows.copy_(k_BKSD)
            v_rows.copy_(v_BKSD)
