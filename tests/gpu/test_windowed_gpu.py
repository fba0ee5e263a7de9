"""Windows, sinks, soft caps and experts on a CUDA device, in half precision and in float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from longstraw import Runtime
from longstraw.kernels.attention.running import PartialMerge
from longstraw.kernels.windowed.ops import BandedOps, CudaFlashWindowOps, choose_window_ops
from tests.families.windowed_models import windowed_model
from tests.parity.models import gradients, make_group, paged_step, plain_step, settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("queries", "keys", "window"),
    [(1, 1, 128), (1, 128, 128), (3, 130, 128), (700, 700, 128), (700, 827, 128), (1000, 1511, 512), (64, 100, 512)],
)
@pytest.mark.parametrize("sink", [False, True])
def test_flash_with_a_window_equals_the_banded_version(
    queries: int, keys: int, window: int, head_dim: int, sink: bool
) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(torch.bfloat16)

    q, grad = (normal(1, queries, 8, head_dim).transpose(1, 2) for _ in range(2))
    k, v = (normal(1, 2, keys, head_dim) for _ in range(2))
    fused = choose_window_ops(q.device, q.dtype, head_dim)
    assert isinstance(fused, CudaFlashWindowOps)
    found = []
    for ops, dtype in ((fused, torch.bfloat16), (BandedOps(), torch.float64)):
        arguments = [x.to(dtype) for x in (q, k, v)]
        merge = PartialMerge()
        merge.add(*ops.forward(*arguments, window=window, scale=head_dim**-0.5))
        if sink:
            merge.add_sink(torch.linspace(-1, 2, 8, device="cuda"))
        out, lse = merge.result(dtype)
        gradient = ops.backward(grad.to(dtype), *arguments, out, lse, window=window, scale=head_dim**-0.5)
        found.append((out, lse, *gradient))
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), *found, strict=True):
        assert got.shape == want.shape, name
        if want.norm() > 0:
            assert error(got, want) < 1e-2, name


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gpt_oss", "mistral", "qwen3_moe-windowed"])
def test_gradients_in_float32_and_bfloat16(kind: str) -> None:
    size: dict[str, Any] = {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 2048,
    }
    model = windowed_model(kind, window=33, oracle=False, attn_implementation="eager", **size)
    model = model.to(torch.bfloat16)
    group = make_group(301, (40, 1, 77, 3))
    group.responses[:] = [response.cuda() for response in group.responses]
    group = type(group)(prompt=group.prompt.cuda(), responses=group.responses, loss=group.loss)
    config = settings(
        capture={"chunk_tokens": 64}, replay={"lane_tokens": 100}, pages={"tokens": 64, "block_tokens": 64}
    )
    exact = copy.deepcopy(model).double().cuda()
    plain_step(exact, [group])
    want = gradients(exact)
    errors: dict[tuple[torch.dtype, str], float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for who in ("plain", "paged"):
            here = copy.deepcopy(model).to(dtype).cuda()
            if who == "plain":
                plain_step(here, [group])
            else:
                with Runtime(here, config) as runtime:
                    paged_step(runtime, [group])
            got = gradients(here)
            total = sum(float(g.double().square().sum()) for g in want.values() if g is not None) ** 0.5
            off = sum(float((got[n].double() - g).square().sum()) for n, g in want.items() if g is not None) ** 0.5  # type: ignore[union-attr]
            errors[dtype, who] = off / total
    print(kind, {f"{dtype} {who}": f"{value:.2e}" for (dtype, who), value in errors.items()})
    assert errors[torch.float32, "paged"] < max(1e-4, 1.1 * errors[torch.float32, "plain"])
    if "moe" not in kind and kind != "gpt_oss":
        assert errors[torch.bfloat16, "paged"] < 1.1 * errors[torch.bfloat16, "plain"]
