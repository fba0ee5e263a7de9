"""Inside a warm pass the host never waits for the device: it issues the whole pass, copies and all, and goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from longstraw import Runtime
from longstraw.runtime.passes import ForwardPass
from tests.families.delta_models import build
from tests.gpu.test_transaction_gpu import group, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextmanager
def no_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Refuse, from entering a pass to leaving it, what waits inside torch; yields the purposes of the passes seen."""
    seen: list[str] = []
    enter, leave = ForwardPass.__enter__, ForwardPass.__exit__

    def entering(self: ForwardPass) -> ForwardPass:
        seen.append(self.purpose.value)
        entered = enter(self)
        torch.cuda.set_sync_debug_mode("error")
        return entered

    def leaving(self: ForwardPass, *error: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        return leave(self, *error)

    with monkeypatch.context() as patch:
        patch.setattr(ForwardPass, "__enter__", entering)
        patch.setattr(ForwardPass, "__exit__", leaving)
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")


def step(runtime: Runtime, ids: torch.Tensor, responses: list[torch.Tensor]) -> None:
    with runtime.transaction(ids) as transaction:
        transaction.score(responses)
        for lane in transaction.replay(responses):
            lane.backward(torch.stack([logprobs.sum() for logprobs in lane.logprobs]).sum())


def dense() -> tuple[Any, int, dict[str, Any]]:
    return make(torch.bfloat16), 4099, {}


def hybrid() -> tuple[Any, int, dict[str, Any]]:
    return build("qwen3_5_text", "LAL").cuda(), 64, {"kernels": {"gated_delta": "torch"}}


@pytest.mark.parametrize("made", [dense, hybrid])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_warm_step(
    made: Callable[[], tuple[Any, int, dict[str, Any]]], tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, vocab, settings = made()
    ids, responses, _ = group(2500)
    ids, responses = ids % vocab, [response % vocab for response in responses]
    settings |= {"tiers": [{"kind": tier, "budget": "256MiB"}], "capture": {"chunk_tokens": 700}}
    with Runtime(model, settings) as runtime:
        step(runtime, ids, responses)
        with no_waits(monkeypatch) as seen:
            step(runtime, ids, responses)
    assert {"capture", "score", "replay", "sweep"} <= set(seen)


def test_a_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of the test above: reading a value inside a pass is refused."""
    model, _, _ = dense()
    ids, responses, _ = group(300)
    with Runtime(model, tiers=[{"kind": "device", "budget": "64MiB"}]) as runtime:
        step(runtime, ids, responses)
        model.model.norm.register_forward_hook(lambda module, inputs, out: (float(out.sum()), out)[1])
        with no_waits(monkeypatch), pytest.raises(RuntimeError, match="synchroniz"):
            step(runtime, ids, responses)
