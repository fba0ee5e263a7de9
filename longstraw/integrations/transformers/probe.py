"""A short run of the model that shows what its layers keep and what its graph costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from longstraw.errors import UnsupportedModelError
from longstraw.runtime.adapter import ModelProfile
from longstraw.runtime.layer_spec import LayerSpec
from longstraw.runtime.passes import ForwardPass, Purpose
from longstraw.runtime.routers import RouterTally

if TYPE_CHECKING:
    from longstraw.integrations.transformers.adapter import TransformersAdapter

_SHORT, _LONG = 8, 24
"""Tokens of the two runs whose difference is the cost of a token."""


def probe(adapter: TransformersAdapter, config: Any) -> ModelProfile:
    """Run `_SHORT` and `_LONG` tokens with autograd, and once more with a backward where the framework wants to see
    one first; nothing is changed."""
    if adapter.sharding.rehearses:
        _rehearse(adapter, config.vocab_size)
    short, _, _ = _run(adapter, _SHORT, config.vocab_size)
    long, layers, hidden_dtype = _run(adapter, _LONG, config.vocab_size)
    more = {where: (nbytes - short[where]) // (_LONG - _SHORT) for where, nbytes in long.items()}
    return ModelProfile(
        layers=tuple(layers),
        blocks=adapter.blocks,
        graph_bytes=max((long.total() - short.total()) // (_LONG - _SHORT), 1),
        largest_layer_bytes=max((nbytes for where, nbytes in more.items() if where is not None), default=0),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        hidden_dtype=hidden_dtype,
        linear_head=adapter.linear_head,
        softcap=adapter.softcap,
        no_aux_loss=adapter.no_aux_loss(),
    )


def _rehearse(adapter: TransformersAdapter, vocab_size: int) -> None:
    ids, positions = _input(adapter, _SHORT, vocab_size)
    forward = ForwardPass(Purpose.PROBE, [_SHORT])
    with forward, adapter.active(forward), torch.enable_grad():
        out = adapter.run(forward, ids, positions)
        if out.requires_grad:
            adapter.sharding.rehearse(out)


def _input(adapter: TransformersAdapter, tokens: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(tokens, device=adapter.device)
    # Different tokens: a padding token's embedding may be zero, and from zeros nothing can be told.
    return positions % vocab_size, positions


def _run(
    adapter: TransformersAdapter, tokens: int, vocab_size: int
) -> tuple[Counter[int | None], list[LayerSpec], torch.dtype]:
    """Bytes that autograd saves beside parameters, by decoder layer, and under None outside of all; what the layers
    declared, in order; the hidden states' dtype."""
    ids, positions = _input(adapter, tokens, vocab_size)
    parameters = adapter.sharding.storages()
    # Held until they are counted: a freed address could be reused and be counted once for two tensors.
    saved: dict[int, torch.UntypedStorage] = {}
    nbytes: Counter[int | None] = Counter()
    current: int | None = None

    @contextmanager
    def entered(number: int) -> Iterator[None]:
        nonlocal current
        current = number
        yield
        current = None

    def pack(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # What has a shape and no memory has no address; the storage object tells it apart.
        key = storage._cdata if isinstance(tensor, FakeTensor) else storage.data_ptr()
        # The graph is told to keep nothing: of weights that a framework gathers, it would keep the whole model.
        if key not in parameters and key not in saved:
            saved[key] = storage
            nbytes[current] += storage.nbytes()

    tally = RouterTally([tokens], counting=False) if adapter.no_aux_loss() is None else None
    forward = ForwardPass(Purpose.PROBE, [tokens], routers=tally)
    saving = torch.autograd.graph.saved_tensors_hooks(pack, _nothing_saved)
    with forward, adapter.active(forward), adapter.each_layer(entered), torch.enable_grad(), saving:
        out = adapter.run(forward, ids, positions)
    missing = adapter.layer_numbers - {layer.index for layer in forward.declared}
    if missing:
        raise UnsupportedModelError(
            f"layers {sorted(missing)} computed attention without asking transformers' attention interface for it, and "
            "would not see the captured prompt; take the patch off their forward"
        )
    if tally is not None and tally.routers == 0:
        raise UnsupportedModelError(
            "config.output_router_logits is True, but the model's experts are chosen without a call of its routers: "
            "their auxiliary loss cannot be computed; take the patch off their forward, or set it to False"
        )
    return nbytes, forward.declared, out.dtype


def _nothing_saved(_: None) -> Tensor:
    raise AssertionError("no backward runs through a graph that is only measured")
