"""What one layer works with in one pass: its rows of the prompt, block by block, and where gradients go."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from longstraw.kernels.rows import RowBlock, RowGradient
from longstraw.pagers.stream import Request
from longstraw.resident.lease import Access
from longstraw.runtime.layer_spec import LayerSpec

if TYPE_CHECKING:
    from longstraw.runtime.passes import ForwardPass


class LayerIO:
    """The pages of one layer in one pass, in the pass's order.

    A family reads its carried states first, then streams each token state's blocks, and in a capture writes token
    states and then carried states; a backward goes the other way round. `StreamOrderError` tells of another order.

    Attributes:
        spec: the layer's states, with the probe's word on what is trained.
        recomputing: whether the layer runs a second time, to rebuild what checkpointing dropped.
    """

    def __init__(self, forward: ForwardPass, spec: LayerSpec) -> None:
        self._pass, self.spec = forward, spec
        self.recomputing = False

    def again(self) -> LayerIO:
        """The same layer, recomputing: it finds in `kept` what it must not read from the stream again."""
        self.recomputing = True
        return self

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each packed branch, or of the one chunk."""
        return self._pass.lengths

    @property
    def prefix_rows(self) -> int:
        """Captured rows that every branch sees."""
        return self._pass.prefix_rows

    @property
    def is_capture(self) -> bool:
        """Whether this pass writes the state of its own rows."""
        return self._pass.purpose.value == "capture"

    @property
    def is_sweep(self) -> bool:
        """Whether later passes left gradients for this pass's own rows."""
        return self._pass.purpose.value == "sweep"

    @property
    def output_unused(self) -> bool:
        """Whether nobody reads the layer's output."""
        return self._pass.output_unused(self.spec.index)

    @property
    def keeps_output(self) -> bool:
        """Whether the layer's outputs over the prompt are kept on pages: a capture fills them, a sweep finds them."""
        state = self._pass.state
        return state is not None and state.keeps_output(self.spec.index)

    # What a recomputation must find again

    def keep(self, name: str, value: Any) -> None:
        """Hold `value` until the pass ends, if the layer will be recomputed."""
        if self._pass.checkpoint:
            self._pass.kept[self.spec.index, name] = value

    def kept(self, name: str) -> Any | None:
        """What was held under that name, or None."""
        return self._pass.kept.get((self.spec.index, name))

    def share(self, name: str, value: Any) -> None:
        """Hand `value` to later layers of this pass, recomputed ones too."""
        self._pass.kept[None, name] = value

    def shared(self, name: str) -> Any | None:
        """What an earlier layer handed on, or None."""
        return self._pass.kept.get((None, name))

    # Token states

    def blocks(self, name: str) -> Generator[RowBlock]:
        """The prefix's rows of a token state, in token order."""
        state = self._pass.state
        if state is None:
            return
        for request in state.reads(self.spec.index, name, self._pass.prefix_rows):
            with self._pass.forward_stream().next(request.segment, request.start, request.stop) as rows:
                yield RowBlock(rows_TC=rows)

    def blocks_with_gradient(self, name: str) -> Generator[RowBlock]:
        """The same rows again in the backward, each block with where its gradient goes."""
        state = self._pass.state
        if state is None:
            return
        stream = self._pass.backward_stream(self.spec.index)
        for request in state.reads(self.spec.index, name, self._pass.prefix_rows):
            update = state.gradient_update(self.spec.index, name, request.start, request.stop)
            with stream.next(request.segment, request.start, request.stop) as rows:
                if update is None:
                    yield RowBlock(rows_TC=rows)
                    continue
                with stream.next(update.segment, update.start, update.stop) as gradient_rows:
                    yield RowBlock(rows_TC=rows, gradient=_gradient(update, gradient_rows))

    def own_gradient(self, name: str) -> Generator[Tensor]:
        """The gradient [S, C] that later passes left for this pass's own rows: one, or none."""
        state = self._pass.state
        if state is None or not self.is_sweep:
            return
        request = state.gradient_read(self.spec.index, name, *self._pass.own_rows)
        if request is not None:
            with self._pass.backward_stream(self.spec.index).next(request.segment, request.start, request.stop) as rows:
                yield rows

    def fill(self, name: str, write: Callable[[Tensor], Any]) -> None:
        """In a capture: let `write` put this pass's own rows into the [S, C] tensor that it is given."""
        state = self._pass.state
        if state is None or not self.is_capture:
            return
        request = state.fill(self.spec.index, name, *self._pass.own_rows)
        with self._pass.forward_stream().next(request.segment, request.start, request.stop) as rows:
            write(rows)

    def read_output(self, name: str) -> Tensor:
        """In a sweep: what the layer put out for this pass's own rows in the capture, [S, C], a copy."""
        state = self._pass.state
        assert state is not None, "the probe keeps no outputs"
        request = state.read(self.spec.index, name, *self._pass.own_rows)
        with self._pass.forward_stream().next(request.segment, request.start, request.stop) as rows:
            return rows.clone()

    # Carried states

    def read_carried(self, name: str) -> Tensor | None:
        """The state before this pass's rows, [elements], a copy; None before the first row."""
        state = self._pass.state
        if state is None or self._pass.prefix_rows == 0:
            return None
        request = state.carried_read(self.spec.index, name, self._pass.prefix_rows)
        with self._pass.forward_stream().next(request.segment, request.start, request.stop) as rows:
            return rows[0].clone()

    def write_carried(self, name: str, value: Tensor) -> None:
        """In a capture: the state after this pass's rows, any shape with the spec's number of elements."""
        state = self._pass.state
        if state is None or not self.is_capture:
            return
        request = state.carried_fill(self.spec.index, name, self._pass.own_rows[1])
        with self._pass.forward_stream().next(request.segment, request.start, request.stop) as rows:
            rows[0].copy_(value.reshape(-1))

    def carried_gradient(self, name: str) -> Tensor | None:
        """In a sweep's backward: the gradient [elements] of the state after this chunk, a copy; None if there is
        none."""
        state = self._pass.state
        if state is None or not self.is_sweep:
            return None
        request = state.carried_gradient_read(self.spec.index, name, self._pass.own_rows[1])
        if request is None:
            return None
        with self._pass.backward_stream(self.spec.index).next(request.segment, request.start, request.stop) as rows:
            return rows[0].clone()

    def add_carried_gradient(self, name: str, gradient: Tensor) -> None:
        """In a backward: the gradient of the state before this pass's rows, any shape."""
        state = self._pass.state
        if state is None or self._pass.prefix_rows == 0:
            return
        update = state.carried_gradient_update(self.spec.index, name, self._pass.prefix_rows)
        context = (
            nullcontext()
            if update is None
            else self._pass.backward_stream(self.spec.index).next(update.segment, update.start, update.stop)
        )
        with context as rows:
            if update is not None and rows is not None:
                _gradient(update, rows).add(gradient.reshape(1, -1))


def _gradient(update: Request, rows: Tensor) -> RowGradient:
    return RowGradient(rows_TC=rows, overwrite=update.access is Access.FILL)
