"""A lane: the branches that share one live autograd graph, as the user's loss sees them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from longstraw.errors import TransactionStateError

if TYPE_CHECKING:
    from longstraw.runtime.passes import ForwardPass


class LaneState(enum.Enum):
    """LIVE holds the lane's graph; in every other state it is freed."""

    LIVE = "live"
    DONE = "backward was called"
    FAILED = "its backward failed"
    SKIPPED = "skipped"
    CLOSED = "closed"


class Lane:
    """Some branches of a group, replayed with autograd.

    Attributes:
        indices: positions of the branches in the list given to `replay`.
        logprobs: for each of them, log-probs of its tokens, float32 [R_i] (float64 for a float64 model), in nats,
            after temperature. They require a gradient; the model's own graph hangs behind them.
        entropies: for each of them, entropies [R_i] in nats with gradient, or None unless `replay.entropy` is set.

    Args:
        aux_loss: the lane's share of the routers' auxiliary loss, a scalar, or why there is none.
    """

    def __init__(
        self,
        indices: Sequence[int],
        lengths: Sequence[int],
        packed_S2: Tensor,
        forward: ForwardPass,
        on_backward: Callable[[Lane, Tensor], None],
        *,
        on_skip: Callable[[Tensor, ForwardPass], None] | None = None,
        entropy: bool,
        aux_loss: Tensor | str,
    ) -> None:
        self.indices = tuple(indices)
        self.forward = forward
        self.state = LaneState.LIVE
        self._lengths, self._on_backward, self._on_skip = tuple(lengths), on_backward, on_skip
        self._packed: Tensor | None = packed_S2
        # The user's loss ends at this leaf: its small graph runs first, the model's heavy one afterwards, and the
        # gradient between the two is known, so that a lane that ran out of memory can be run again without the user.
        self._leaf = packed_S2.detach().requires_grad_()
        _LEAVES[id(self._leaf)] = self._leaf
        self._aux_leaf: Tensor | None = None
        self._no_aux_loss = aux_loss if isinstance(aux_loss, str) else ""
        if isinstance(aux_loss, Tensor):
            self._aux_leaf = aux_loss.detach().to(packed_S2.dtype).requires_grad_()
            _LEAVES[id(self._aux_leaf)] = self._aux_leaf
        self.logprobs: list[Tensor] = list(self._leaf[:, 0].split(self._lengths))
        self.entropies: list[Tensor] | None = list(self._leaf[:, 1].split(self._lengths)) if entropy else None

    @property
    def aux_loss(self) -> Tensor:
        """The lane's share of the routers' auxiliary loss, a scalar of the log-probs' dtype, with gradient.

        Lanes' shares add up to the `aux_loss` that transformers computes on one batch of the group's unpadded rows, in
        which each prompt token is there G times. Add the same multiple of it to each lane's loss.

        Raises:
            TransactionStateError: there is none; the message says why.
        """
        if self._aux_leaf is None:
            raise TransactionStateError(f"lane.aux_loss: {self._no_aux_loss}")
        return self._aux_leaf

    @property
    def aux_scale(self) -> float:
        """The gradient that the loss gave `aux_loss`, known after `upstream`; 0 if it gave none."""
        gradient = None if self._aux_leaf is None else self._aux_leaf.grad
        return 0.0 if gradient is None else float(gradient)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` to the transaction: through the lane's tokens, and to the prompt's state.

        Args:
            loss: a scalar that depends on `logprobs`, `entropies` or `aux_loss`. The sum over a group's lanes is
                what is trained, so divide by the group's size, not by the lane's.

        Raises:
            TypeError: `loss` is no tensor.
            TransactionStateError: the lane was already used or is closed, or the loss does not depend on the lane.
        """
        self._require_live("lane.backward")
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"lane.backward: loss is a {type(loss).__name__}; give a scalar tensor (the losses of "
                "longstraw.objectives have it as .loss)"
            )
        if loss.numel() != 1:
            raise TransactionStateError(f"lane.backward: loss has shape {tuple(loss.shape)}; reduce it to a scalar")
        self._on_backward(self, loss)

    def skip(self) -> None:
        """Leave this lane out of the gradient, on purpose, and free its graph."""
        self._require_live("lane.skip")
        if self._on_skip is not None:
            self._on_skip(self.take_packed(), self.forward)
        self.close(LaneState.SKIPPED)

    def check(self, loss: Tensor) -> None:
        """Raises TransactionStateError for a loss whose graph does not lead to this lane, or leads to another."""
        if not loss.requires_grad:
            raise TransactionStateError(
                "lane.backward: the loss has no graph; compute it from lane.logprobs without detaching, and loop over "
                "replay outside torch.no_grad(), or call lane.skip() to leave the lane out"
            )
        if self._backward_by_hand:
            raise TransactionStateError(_BACKWARD_BY_HAND)
        ends = [leaf for leaf in leaves(loss) if _LEAVES.get(id(leaf)) is leaf]
        if any(not any(leaf is own for own in self._own) for leaf in ends):
            raise TransactionStateError(
                "lane.backward: the loss depends on another lane's log-probs as well, and that part of the gradient "
                "would be lost; detach them, or set replay.lane_tokens so that branches that belong together share a "
                "lane"
            )
        if not ends:
            raise TransactionStateError(_INDEPENDENT)

    def upstream(self, loss: Tensor) -> Tensor:
        """Run the user's part of the graph: the gradient [S, 2] of `loss` at the log-probs and entropies.

        An error in it leaves the lane as it was.
        """
        try:
            loss.backward()  # type: ignore[no-untyped-call]
            if not self._backward_by_hand:
                raise TransactionStateError(_INDEPENDENT)
        except BaseException:
            for leaf in self._own:
                leaf.grad = None
            raise
        return torch.zeros_like(self._leaf) if self._leaf.grad is None else self._leaf.grad

    @property
    def _own(self) -> list[Tensor]:
        return [leaf for leaf in (self._leaf, self._aux_leaf) if leaf is not None]

    @property
    def _backward_by_hand(self) -> bool:
        return any(leaf.grad is not None for leaf in self._own)

    def take_packed(self) -> Tensor:
        """The model's output with its graph, once."""
        assert self._packed is not None
        packed, self._packed = self._packed, None
        return packed

    def settle(self) -> None:
        """Called when the loop asks for the next lane.

        Raises TransactionStateError if neither `backward` nor `skip` was called: its gradient would be lost.
        """
        if self.state is not LaneState.LIVE:
            return
        if self._backward_by_hand:
            raise TransactionStateError(_BACKWARD_BY_HAND)
        raise TransactionStateError(
            f"lane of branches {list(self.indices)} was left without a gradient; call lane.backward(loss), "
            "or lane.skip() to leave it out on purpose"
        )

    def close(self, state: LaneState) -> None:
        """Free the graph and the pass's streams."""
        if self.state is LaneState.LIVE:
            self.state = state
            self._packed = None
            self.forward.__exit__(None, None, None)

    def _require_live(self, call: str) -> None:
        if self.state is not LaneState.LIVE:
            raise TransactionStateError(f"{call}: lane of branches {list(self.indices)} is over ({self.state.value})")


_BACKWARD_BY_HAND = (
    "loss.backward() was called by hand: it stops at lane.logprobs and trains nothing; call lane.backward(loss) instead"
)


_INDEPENDENT = (
    "lane.backward: the loss does not depend on this lane's log-probs; call lane.skip() to leave the lane out"
)


_LEAVES: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""Where the losses of all lanes end, by `id`: log-probs, and shares of an auxiliary loss."""


def leaves(loss: Tensor) -> Iterator[Tensor]:
    """Every leaf that the user's graph runs into: the lane's log-probs, and what else the loss depends on."""
    todo, seen = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        todo.extend(next_node for next_node, _ in node.next_functions)


def reaches_parameter(loss: Tensor, parameters: set[torch.nn.Parameter]) -> bool:
    """Whether the user's graph runs straight into a parameter, beside the lane's log-probs."""
    return any(leaf in parameters for leaf in leaves(loss))
