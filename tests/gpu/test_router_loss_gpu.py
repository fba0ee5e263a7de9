"""The routers' auxiliary loss on a CUDA device: value and gradient in float32, value in bfloat16, determinism."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from longstraw import Runtime
from tests.families.router_loss import asked_for, plain_aux_step, replay_aux
from tests.families.windowed_models import windowed_model
from tests.parity.models import Group, distance, gradients, make_group, settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = settings(
    capture={"chunk_tokens": 64}, replay={"lane_tokens": 100}, pages={"tokens": 64, "block_tokens": 64}
)  # fmt: skip
SIZE: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "max_position_embeddings": 2048}


def on_gpu(group: Group) -> Group:
    return Group(prompt=group.prompt.cuda(), responses=[r.cuda() for r in group.responses], loss=group.loss)


def tiny(kind: str) -> Any:
    return asked_for(windowed_model(kind, window=33, oracle=False, attn_implementation="eager", **SIZE))


def paged(model: Any, group: Group) -> float:
    with Runtime(model, CONFIG) as runtime, runtime.transaction(group.prompt) as txn:
        return replay_aux(txn, group)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_float32_is_as_near_to_float64_as_plain_float32(kind: str) -> None:
    group = on_gpu(make_group(301, (40, 1, 77, 3)))
    model = tiny(kind).float().cuda()
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    value = plain_aux_step(exact, group)
    plain_aux_step(plain, group)
    assert paged(model, group) == pytest.approx(value, rel=1e-4)
    whole = sum(float(g.double().square().sum()) for g in gradients(exact).values() if g is not None) ** 0.5
    ours, theirs = distance(model, exact) / whole, distance(plain, exact) / whole
    print(kind, f"{ours:.2e}", f"{theirs:.2e}")
    assert ours < max(1e-4, 1.1 * theirs)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_bfloat16_has_the_value_of_plain_bfloat16(kind: str) -> None:
    group = on_gpu(make_group(301, (40, 1, 77, 3)))
    model = tiny(kind).bfloat16().cuda()
    value = plain_aux_step(copy.deepcopy(model), group)
    assert paged(model, group) == pytest.approx(value, rel=0.01)
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_two_steps_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    group = on_gpu(make_group(301, (40, 1, 77, 3)))
    found = []
    with deterministic():
        for _ in range(2):
            model = tiny("qwen3_moe").float().cuda()
            value = paged(model, group)
            found.append((value, gradients(model)))
    assert found[0][0] == found[1][0]
    for name, gradient in found[0][1].items():
        other = found[1][1][name]
        assert (gradient is None) == (other is None)
        assert gradient is None or torch.equal(gradient, other), name  # type: ignore[arg-type]
