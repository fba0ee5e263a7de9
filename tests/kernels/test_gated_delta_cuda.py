"""The gated delta rule on a GPU: the torch rule, flash-linear-attention's where it may run, and a whole model."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from longstraw import Runtime
from longstraw.errors import UnsupportedModelError
from longstraw.kernels.gated_delta import DeltaRule, choose_rule
from longstraw.kernels.gated_delta.naive import naive_delta_rule
from tests.families.delta_models import build
from tests.parity.models import make_group, paged_step, plain_step, settings

pytestmark = pytest.mark.gpu

LENGTHS = (65, 1, 128, 2, 300)


def inputs(dtype: torch.dtype, *, per_channel: bool = False) -> list[Tensor]:
    """q, k, v, g, beta and an initial state on the GPU; g and the state stay in float32 or better."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    heads, decays = (4, (tokens, 4, 64)) if per_channel else (2, (tokens, 4))
    shapes = [(tokens, heads, 64), (tokens, heads, 64), (tokens, 4, 64), decays, (tokens, 4), (4, 64, 64)]
    q, k, v, g, beta, state = (torch.randn(shape, generator=generator) for shape in shapes)
    wide = torch.promote_types(dtype, torch.float32)
    rows = [q.to(dtype), k.to(dtype), v.to(dtype), (-g.abs() * 0.1).to(wide), beta.sigmoid().to(dtype), state.to(wide)]
    return [x.cuda().requires_grad_() for x in rows]


def errors(rule: DeltaRule, tensors: list[Tensor]) -> list[float]:
    """Relative errors of output, final states and every gradient against the oracle in float64."""
    found = []
    wide = [x.detach().double().cpu().requires_grad_() for x in tensors]
    for function, given in ((rule, tensors), (naive_delta_rule, wide)):
        *rows, initial = given
        out, final = function(*rows, lengths=LENGTHS, initial_VKD=initial)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(x.shape, generator=generator).to(x) for x in (out, final)]
        loss = (out * weights[0]).double().sum() + (final * weights[1]).double().sum()
        found.append([out, final, *torch.autograd.grad(loss, given)])
    return [
        float((ours.detach().double().cpu() - theirs.detach()).norm() / theirs.detach().norm())
        for ours, theirs in zip(*found, strict=True)
    ]


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 6e-3)], ids=str
)
def test_torch_rule(dtype: torch.dtype, bound: float) -> None:
    found = errors(choose_rule(torch.device("cuda", 0), dtype, "torch"), inputs(dtype))
    assert max(found) < bound, found


@pytest.mark.parametrize("per_channel", [False, True])
def test_fla_rule(per_channel: bool) -> None:
    """It computes its products in bfloat16: each error is within a few times what bfloat16 inputs and outputs cost."""
    device = torch.device("cuda", 0)
    try:
        rule = choose_rule(device, torch.bfloat16, per_channel=per_channel)
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    found = errors(rule, inputs(torch.bfloat16, per_channel=per_channel))
    assert max(found) < 2e-2, found


@pytest.fixture
def torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own torch rule, though it would hand over to flash-linear-attention, which needs a GPU."""
    for module in (modeling_qwen3_5, modeling_qwen3_next):
        rule = inspect.unwrap(module.torch_chunk_gated_delta_rule)
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", rule)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
def test_whole_model(kind: str, torch_only: None) -> None:
    """A hybrid in float64 on the GPU against plain autograd on the CPU."""
    model, group = build(kind, "LAL"), make_group()
    plain = copy.deepcopy(model)
    plain_step(plain, [group])
    model.cuda()
    paged_step(Runtime(model, settings(tiers=[{"kind": "device", "budget": "64MiB"}])), [group])
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        error = float((ours.grad.cpu() - theirs.grad).norm() / theirs.grad.norm())
        # transformers' recurrence computes in float32 on the CPU.
        assert error < 2e-4, (name, error)
