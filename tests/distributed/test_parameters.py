"""Parameters that few passes use, or none, and buffers: under each framework as in the ordinary step."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from longstraw import Runtime
from longstraw.errors import RankFailedError, StaleWeightsError
from tests.distributed.pool import Pool
from tests.distributed.steps import (
    CLIP,
    UNEQUAL,
    Held,
    build_kind,
    compare_training,
    groups_of,
    make_optimizer,
    paged_groups,
    relative,
)
from tests.distributed.wraps import ddp, fsdp2, zero
from tests.families.latent_models import tiny
from tests.parity.models import SMALL, Group, make_group, plain_step, replay_group

MARK = 96
"""A token that stands in one place of one rank's prompt only."""

EACH_PASS = {"gradient": {"reduce": "each_pass"}}


def fsdp2_filled(model: Any) -> Held:
    """FSDP2 that reduces zeros for what a pass does not use: where it reduces in each pass, ranks have to agree."""
    held = fsdp2(model)
    held.model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    return held


WRAPS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "ddp": (ddp, {}, {}),
    "fsdp2": (fsdp2, {}, {}),
    "fsdp2-each_pass": (fsdp2_filled, EACH_PASS, {}),
    "zero-1": (zero, {}, {"stage": 1}),
    "zero-2": (zero, {}, {"stage": 2}),
    "zero-3": (zero, {}, {"stage": 3}),
}
FILLS_GAPS = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="this torch cannot fill gaps with zeros"
)
BY_WRAP = pytest.mark.parametrize(
    "wrap", [pytest.param(name, marks=FILLS_GAPS if name == "fsdp2-each_pass" else ()) for name in WRAPS]
)
CHECKPOINT = pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])


class Remembering(nn.Embedding):
    """An embedding that knows which tokens it saw last."""

    seen: Tensor

    def forward(self, input: Tensor) -> Tensor:
        self.seen = input
        return super().forward(input)


class Marked(nn.Module):
    """An MLP with a parameter that only `MARK` meets, one that nothing meets, and one that is frozen."""

    def __init__(self, mlp: nn.Module, embedding: Remembering, size: int) -> None:
        super().__init__()
        self.mlp = mlp
        self._embedding = (embedding,)  # not a submodule of this one
        generator = torch.Generator().manual_seed(9)
        self.late = nn.Parameter(torch.randn(size, generator=generator))
        self.unused = nn.Parameter(torch.randn(3, generator=generator))
        self.frozen = nn.Parameter(torch.randn(size, generator=generator), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.mlp(x) + 0.1 * x * self.frozen
        marked = self._embedding[0].seen == MARK
        return out + marked[..., None] * x * self.late if bool(marked.any()) else out


def marked_model() -> Any:
    model = build_kind("qwen3")
    old = model.model.embed_tokens
    embedding = Remembering(old.num_embeddings, old.embedding_dim)
    embedding.weight = old.weight
    model.model.embed_tokens = embedding
    first = model.model.layers[0]
    first.mlp = Marked(first.mlp, embedding, model.config.hidden_size)
    return model


def marked_groups(step: int) -> list[list[Group]]:
    """Groups of two ranks, of which the second has `MARK` near the beginning of its prompt: the sweep comes there
    last."""
    found = []
    for rank, mine in enumerate(groups_of(UNEQUAL, step)):
        found.append([])
        for group in mine:
            prompt = group.prompt.clamp(max=MARK - 1)
            if rank == 1:
                prompt[2] = MARK
            responses = [response.clamp(max=MARK - 1) for response in group.responses]
            found[-1].append(replace(group, prompt=prompt, responses=responses))
    return found


def used_late(rank: int, world: int, wrap: str, checkpoint: bool) -> tuple[dict[str, float], dict[str, float], bool]:
    function, config, options = WRAPS[wrap]
    model = marked_model()
    reference = copy.deepcopy(model)
    held: Held = function(model, **options)
    settings = SMALL | config | {"replay": {"checkpoint": checkpoint, "lane_tokens": 14}}
    optimizer = make_optimizer(reference)
    first: tuple[dict[str, float], bool] = ({}, False)
    with Runtime(held.model, settings) as runtime:
        for step in range(2):
            paged_groups(runtime, marked_groups(step)[rank])
            for mine in marked_groups(step):
                plain_step(reference, mine)
            for parameter in reference.parameters():
                if parameter.grad is not None:
                    parameter.grad /= world
            if step == 0:
                want = {n: p.grad for n, p in reference.named_parameters()}
                found = held.gradients()
                met = [want[f"model.layers.0.mlp.{name}"] for name in ("late", "unused", "frozen")]
                assert met[0] is not None
                assert met[1:] == [None, None]
                assert bool(met[0].any())
                first = relative(found, want), found["model.layers.0.mlp.unused"] is None
            torch.nn.utils.clip_grad_norm_(reference.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            held.step()
    return first[0], relative(held.weights(), dict(reference.named_parameters())), first[1]


@CHECKPOINT
@BY_WRAP
def test_a_parameter_first_used_in_the_last_pass_of_one_rank(two: Pool, wrap: str, checkpoint: bool) -> None:
    for gradient, weights, unused_has_none in two.run(used_late, wrap, checkpoint):
        assert max(gradient.values()) <= 1e-5, gradient
        assert max(weights.values()) <= 1e-5, weights
        # ZeRO fills gaps with zeros, and FSDP2 does as it was told.
        assert unused_has_none or wrap.startswith("zero") or wrap == "fsdp2-each_pass"


def not_filled(rank: int, world: int) -> str:
    held = fsdp2(marked_model())
    runtime = Runtime(held.model, SMALL | EACH_PASS)
    paged_groups(runtime, marked_groups(0)[rank])
    return "not reached"


def test_gradients_that_only_one_ranks_pass_has_are_not_reduced_in_each_pass() -> None:
    """Without the guard the ranks' reductions differ in size; gloo ends the processes then."""
    pool = Pool(2)
    with pytest.raises(AssertionError, match=r"mlp\.late has a gradient in this pass(?s:.*)reduce to deferred"):
        pool.run(not_filled, timeout=60)


def balanced(_: Any) -> Any:
    """A model whose routers have biases that no optimizer steps: buffers, and not zero."""
    model = tiny("deepseek_v3").float()
    # Experts that run one by one call as many modules as have tokens, and ZeRO-3 wants the same ones on every rank.
    model.set_experts_implementation("grouped_mm")
    biases = [b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    assert all(bool(b.any()) for b in biases)
    return model


@BY_WRAP
def test_buffers(two: Pool, wrap: str) -> None:
    function, config, options = WRAPS[wrap]
    for errors in two.run(compare_training, function, prepare=balanced, config=config, **options):
        assert errors["gradient"] <= 1e-5, errors
        assert errors["weights"] <= 1e-5, errors


def changed_buffer(rank: int, world: int, wrap: str) -> str:
    function, config, options = WRAPS[wrap]
    model = balanced(None)
    held = function(model, **options)
    group = make_group(20, (3,))
    with Runtime(held.model, SMALL | config) as runtime:
        paged_groups(runtime, [group])
        held.step()
        try:
            with runtime.transaction(group.prompt) as txn:
                if rank == 1:
                    model.model.layers[1].mlp.gate.e_score_correction_bias.add_(1.0)
                replay_group(txn, group)
        except (StaleWeightsError, RankFailedError) as error:
            return str(error)
    return ""


@BY_WRAP
def test_a_buffer_that_changed_since_the_capture(two: Pool, wrap: str) -> None:
    for text in two.run(changed_buffer, wrap):
        assert "e_score_correction_bias changed since the prompt was captured" in text
