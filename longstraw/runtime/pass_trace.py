"""A pass in a trace: one span for the whole, and one after another for its layers."""

from __future__ import annotations

from typing import Any

import torch

from longstraw.pagers.trace import Span, Tracer, Track


class PassTrace:
    """Spans of one pass, on the stream that computes. A layer's lasts from its mixing of tokens to the next layer's."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._stream: torch.cuda.Stream | None = None
        self._whole: Span | None = None
        self._part: Span | None = None
        self._at: tuple[int, str] | None = None

    def begin(self, name: str, device: torch.device, **details: Any) -> None:
        """The pass begins."""
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._whole = self._tracer.begin_on(self._stream, Track.PASS, name, **details)

    def layer(self, index: int, way: str) -> None:
        """Layer `index` begins, and the one before it ends. Nothing if it goes on."""
        if self._whole is None or self._at == (index, way):
            return
        self._end_part()
        self._at = (index, way)
        self._part = self._tracer.begin_on(self._stream, Track.LAYER, f"layer {index} {way}")

    def end(self) -> None:
        """The pass is over. Idempotent."""
        self._end_part()
        if self._whole is not None:
            self._whole.end()
            self._whole = None

    def _end_part(self) -> None:
        if self._part is not None:
            self._part.end()
            self._part = self._at = None
