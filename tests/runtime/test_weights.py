"""The watch on the weights: what it sees, what it counts, and that it goes with its runtime."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from longstraw import Runtime
from longstraw.errors import StaleWeightsError
from longstraw.runtime.weights import WeightsWatch
from tests.parity.models import SMALL, build, make_group, replay_group


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    ],
    ids=["sgd", "foreach", "fused"],
)
def test_steps_are_counted(make: object) -> None:
    model = build("llama", dtype=torch.float32)
    watch = Runtime(model, SMALL)._engine.watch
    before = watch.now()
    optimizer = make(model.parameters())  # type: ignore[operator]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for count in (1, 2):
        optimizer.step()
        assert watch.check(before, staleness=2, call="test") == count
    with pytest.raises(StaleWeightsError, match="2 optimizer step"):
        watch.check(before, staleness=1, call="test")


def test_nothing_changed() -> None:
    watch = Runtime(build("llama"), SMALL)._engine.watch
    assert watch.check(watch.now(), staleness=0, call="test") == 0


def test_reading_and_training_forward_are_no_change() -> None:
    model = build("llama")
    watch = Runtime(model, SMALL)._engine.watch
    before = watch.now()
    model(torch.zeros(1, 3, dtype=torch.int64)).logits.sum().backward()
    model.state_dict()
    model.zero_grad()
    assert watch.check(before, staleness=0, call="test") == 0


def test_without_the_check_a_stale_replay_goes_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightsWatch, "check", lambda self, captured, *, staleness, call: 0)
    model, group = build("llama"), make_group(30, (4, 1, 7))
    with Runtime(model, SMALL).transaction(group.prompt) as txn:
        txn.score(group.responses)
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.5)
        replay_group(txn, group)
    assert (txn.report.drift_max or 0) > 0.01


def test_the_watch_goes_with_its_runtime() -> None:
    gc.collect()
    hooks = torch_optimizer._global_optimizer_post_hooks
    count = len(hooks)
    runtime = Runtime(build("llama"), SMALL)
    assert len(hooks) == count + 1
    gone = weakref.ref(runtime._engine.watch)
    runtime.close()
    del runtime
    gc.collect()
    assert gone() is None
    assert len(hooks) == count
