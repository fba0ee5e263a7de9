"""A layer runs once in a pass: what runs it again is named, before its pages are asked for in another order."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.checkpoint import checkpoint

from longstraw import Runtime
from longstraw.errors import StreamOrderError
from tests.parity.models import SMALL, assert_idle, build, make_group, replay_group

GROUP = make_group()


def test_recomputation_by_the_users_own_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    layer = model.model.layers[0]
    original = layer.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(original, *args, use_reentrant=False, **kwargs)

    monkeypatch.setattr(layer, "forward", checkpointed)
    runtime = Runtime(model, SMALL)
    refusal = pytest.raises(StreamOrderError, match="layer 0 ran twice in one replay pass")
    with refusal, runtime.transaction(GROUP.prompt) as txn:
        replay_group(txn, GROUP)
    assert_idle(runtime)
    assert all(p.grad is None for p in model.parameters())


def test_an_attention_that_is_called_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    attention = model.model.layers[1].self_attn
    original = attention.forward

    def twice(*args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(attention, "forward", twice)
    with pytest.raises(StreamOrderError, match="layer 1 ran twice in one probe pass"):
        Runtime(model, SMALL).transaction(GROUP.prompt)
