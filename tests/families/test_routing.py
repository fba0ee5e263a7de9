"""Every family with experts: each pass sends a token to the same experts, and nothing but tokens to any."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

from longstraw import Runtime
from tests.families import delta_models, latent_models, mamba2_models, windowed_models
from tests.parity.models import make_group, replay_group, settings

GROUP = make_group(61, (7, 1, 12, 2, 3))
MODELS: dict[str, Callable[[], Any]] = {
    **{kind: lambda kind=kind: windowed_models.windowed_model(kind) for kind in ("gpt_oss", "mixtral", "qwen3_moe")},
    **{
        kind: lambda kind=kind: latent_models.tiny(kind)
        for kind in sorted(latent_models.KINDS)
        if "n_routed_experts" in latent_models.KINDS[kind]
    },
    **{
        kind: lambda kind=kind: delta_models.build(kind, "LAL")
        for kind in ("qwen3_next", "qwen3_5_moe_text", "kimi_linear")
    },
    "granitemoehybrid": lambda: mamba2_models.build("granitemoehybrid", "LAL"),
    "nemotron_h": lambda: mamba2_models.build("nemotron_h", "LEAE"),
}


class Routes:
    """Within it, the experts of every token that reaches some: by the module of the experts, call by call."""

    def __init__(self, model: nn.Module) -> None:
        self._experts = {n: m for n, m in model.named_modules() if type(m).__name__.endswith("Experts")}
        self.calls: dict[str, list[Tensor]] = {name: [] for name in self._experts}
        assert len(self._experts) >= 2

    def __enter__(self) -> Self:
        self._hooks = [m.register_forward_pre_hook(self._hook(n)) for n, m in self._experts.items()]
        return self

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            chosen = args[1]
            assert not chosen.is_floating_point()
            self.calls[name].append(chosen.clone())

        return hook

    def take(self) -> dict[str, list[Tensor]]:
        """What was seen since the last call."""
        seen, self.calls = self.calls, {name: [] for name in self._experts}
        return seen

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()


@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_the_sweep_routes_as_the_capture_did_and_replay_as_the_score(
    kind: str, dtype: torch.dtype, checkpoint: bool
) -> None:
    model = MODELS[kind]().to(dtype)
    runtime = Runtime(model, settings(replay={"checkpoint": checkpoint}))
    runtime._engine.adapter.profile()
    times = 2 if checkpoint else 1
    with Routes(model) as routes, runtime.transaction(GROUP.prompt) as txn:
        captured = routes.take()
        txn.score(GROUP.responses)
        scored = routes.take()
        replay_group(txn, GROUP)
        replayed = routes.take()
        txn.sweep()
        swept = routes.take()
    assert len({tuple(row) for calls in captured.values() for chunk in calls for row in chunk.tolist()}) > 2
    for name, chunks in captured.items():
        assert sum(map(len, chunks)) == len(GROUP.prompt) - 1, "something else than the prompt's tokens was routed"
        backwards = [chunk for chunk in chunks[::-1] for _ in range(times)]
        assert all(torch.equal(a, b) for a, b in zip(swept[name], backwards, strict=True)), name
    tokens = sum(map(len, GROUP.responses))
    for name, lanes in scored.items():
        assert sum(map(len, lanes)) == tokens, "padding was routed"
        repeated = [lane for lane in lanes for _ in range(times)]
        assert all(torch.equal(a, b) for a, b in zip(replayed[name], repeated, strict=True)), name
