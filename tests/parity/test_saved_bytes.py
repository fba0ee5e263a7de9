"""What autograd keeps does not grow with the prompt, in replay and in the sweep."""

from __future__ import annotations

import weakref
from collections import Counter
from types import TracebackType
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

from longstraw import Runtime
from tests.parity.models import build, make_group, replay_group, settings


class SavedBytes:
    """Within it, the most bytes that autograd held at one time: unique storages, parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._held: Counter[int] = Counter()
        self._now = self.peak = self.total = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._parameters:
            if not self._held[address]:
                self._now += size
                self.total += size
                self.peak = max(self.peak, self._now)
            self._held[address] += 1
            weakref.finalize(kept, self._drop, address, size)
        return kept

    def _drop(self, address: int, size: int) -> None:
        self._held[address] -= 1
        if not self._held[address]:
            self._now -= size

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)


class _Kept:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def measure(prompt_tokens: int, checkpoint: bool) -> tuple[int, int]:
    """Most bytes saved at once in replay (with its backward) and in the sweep."""
    config: dict[str, Any] = settings(
        replay={"checkpoint": checkpoint, "lane_tokens": 64},
        capture={"chunk_tokens": 512},
        pages={"tokens": 512, "block_tokens": 2048},
    )
    model = build("llama", dtype=torch.float32, num_attention_heads=1, num_key_value_heads=1, head_dim=16)
    group = make_group(prompt_tokens, (40, 1, 60))
    with Runtime(model, config) as runtime, runtime.transaction(group.prompt) as txn:
        with SavedBytes(model) as replay:
            replay_group(txn, group)
        with SavedBytes(model) as sweep:
            txn.sweep()
    return replay.peak, sweep.peak


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
def test_saved_bytes_do_not_grow_with_the_prompt(checkpoint: bool) -> None:
    figures = [measure(tokens, checkpoint) for tokens in (1_024, 4_096, 16_384)]
    for phase in zip(*figures, strict=True):
        assert min(phase) > 10_000, "nothing was counted"
        assert max(phase) <= 1.05 * min(phase), figures


def test_checkpointing_saves_less() -> None:
    kept, checkpointed = measure(1_024, False), measure(1_024, True)
    assert checkpointed[0] < 0.7 * kept[0]
    assert checkpointed[1] < 0.7 * kept[1]


def test_the_meter_sees_a_graph_that_grows() -> None:
    model, peaks = build("llama", dtype=torch.float32), []
    for tokens in (64, 256):
        with SavedBytes(model) as meter:
            model(torch.zeros(1, tokens, dtype=torch.int64), use_cache=False).logits.sum().backward()
        peaks.append(meter.peak)
    assert peaks[1] > 3 * peaks[0]
