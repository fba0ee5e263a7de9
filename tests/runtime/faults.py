"""Failures put into a step where a test wants them, and what must be true after one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longstraw import Runtime
from longstraw.kernels.attention.ops import CpuFlashOps
from longstraw.pagers.stream import PageStream
from tests.parity.models import assert_idle


class Fuse:
    """Raises torch's out-of-memory error: at one call (`at_call`, from 0), or whenever more than `above` tokens run."""

    def __init__(self, *, at_call: int | None = None, above: int | None = None) -> None:
        self._at_call, self._above = at_call, above
        self.calls = self.blown = 0

    def __call__(self, tokens: int) -> None:
        call, self.calls = self.calls, self.calls + 1
        if call == self._at_call or (self._above is not None and tokens > self._above):
            self.blown += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


@contextmanager
def out_of_memory_in_forward(model: Any, fuse: Fuse) -> Iterator[Fuse]:
    """Within it each forward pass of the model's second layer asks the fuse."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    hook = inner.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: fuse(args[0].shape[1]))
    try:
        yield fuse
    finally:
        hook.remove()


@contextmanager
def out_of_memory_in_backward(model: Any, fuse: Fuse) -> Iterator[Fuse]:
    """Within it the backward of the attention op asks the fuse, for each block of keys and each branch."""
    original = CpuFlashOps.backward

    def backward(self: Any, grad: Tensor, q: Tensor, *args: Any, **kwargs: Any) -> Any:
        fuse(q.shape[2])
        return original(self, grad, q, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuFlashOps, "backward", backward)
        yield fuse


Injection = Callable[[Any, Fuse], Any]


class Entry:
    """`.grad` of every parameter as it was when this was made: some with values, some None."""

    def __init__(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(11)
        for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            if number % 3:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        self._model = model
        self._tensors = {n: p.grad for n, p in model.named_parameters()}
        self._values = {n: None if g is None else g.clone() for n, g in self._tensors.items()}

    def assert_untouched(self) -> None:
        """Bit for bit, and the very tensors."""
        for name, parameter in self._model.named_parameters():
            value = self._values[name]
            assert parameter.grad is self._tensors[name], name
            if value is not None:
                assert parameter.grad is not None, name
                assert torch.equal(parameter.grad, value), name


@contextmanager
def watched_streams() -> Iterator[list[PageStream]]:
    """Every page stream made within it."""
    streams: list[PageStream] = []
    original = PageStream.__init__

    def init(self: PageStream, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        streams.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageStream, "__init__", init)
        yield streams


def assert_undone(runtime: Runtime, model: nn.Module, entry: Entry) -> None:
    """No page, no hook on a parameter, no foreign forward, and `.grad` as on entry."""
    entry.assert_untouched()
    assert_idle(runtime)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())
