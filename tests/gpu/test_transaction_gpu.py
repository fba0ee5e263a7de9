"""The transaction on a CUDA device: gradients, tiers, memory."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from longstraw import Runtime

# cuBLAS is deterministic with a workspace of its own for each stream; it reads this when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = (300, 1, 77, 512)


def make(dtype: torch.dtype, layers: int = 3) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4099, hidden_size=512, intermediate_size=1024, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, tie_word_embeddings=True,
    )  # fmt: skip
    # Weights are the same in every dtype: made in float32, then rounded to bfloat16 once.
    model = Qwen3ForCausalLM(config).to(torch.bfloat16).to(dtype)
    return model.cuda()


def group(prompt: int, seed: int = 1) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4099, (prompt,), generator=generator)
    responses = [torch.randint(4099, (n,), generator=generator) for n in LENGTHS]
    weights = [torch.randn(n, generator=generator).cuda() for n in LENGTHS]
    return ids, responses, weights


def plain(model: Qwen3ForCausalLM, prompt: int, seed: int = 1) -> dict[str, torch.Tensor]:
    ids, responses, weights = group(prompt, seed)
    for response, weight in zip(responses, weights, strict=True):
        row = torch.cat([ids, response])[None].cuda()
        logits = model(row, use_cache=False).logits[0, prompt - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(-1, response.cuda()[:, None])[:, 0]
        (chosen * weight).sum().backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


def ours(model: Qwen3ForCausalLM, prompt: int, seed: int = 1, **settings: Any) -> tuple[dict[str, torch.Tensor], Any]:
    ids, responses, weights = group(prompt, seed)
    with Runtime(model, settings) as runtime:
        with runtime.transaction(ids) as transaction:
            old = transaction.score(responses)
            for lane in transaction.replay(responses):
                assert all(torch.equal(lp, old[i]) for i, lp in zip(lane.indices, lane.logprobs, strict=True))
                lane.backward(sum((lp * weights[i]).sum() for i, lp in zip(lane.indices, lane.logprobs, strict=True)))
        assert runtime._engine.store.pages_in_use() == 0
    return {name: p.grad.double() for name, p in model.named_parameters()}, transaction.report


def error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float((got[name] - want[name]).norm() / want[name].norm()) for name in want}


def distance(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Relative distance of the whole gradient."""
    square = sum(float((got[name] - want[name]).square().sum()) for name in want)
    return (square / sum(float(want[name].square().sum()) for name in want)) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_wide_gradients_equal_plain_autograd(dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    want = plain(make(dtype), 3001)
    got, _ = ours(make(dtype), 3001, capture={"chunk_tokens": 700}, pages={"tokens": 256, "block_tokens": 512})
    limit = 1e-6 if dtype == torch.float64 else 1e-4
    assert max(error(got, want).values()) < limit


@pytest.mark.parametrize("checkpoint", [True, False])
def test_bfloat16_is_no_further_from_float32_than_the_plain_run(checkpoint: bool) -> None:
    """The whole gradient, over groups of three seeds: a single parameter's distance is a matter of chance."""
    torch.backends.cuda.matmul.allow_tf32 = False
    here, there = 0.0, 0.0
    for seed in range(3):
        truth = plain(make(torch.float32), 3001, seed)
        there += distance(plain(make(torch.bfloat16), 3001, seed), truth)
        got, _ = ours(
            make(torch.bfloat16), 3001, seed,
            capture={"chunk_tokens": 700}, pages={"tokens": 256, "block_tokens": 512},
            replay={"lane_tokens": 600, "checkpoint": checkpoint},
        )  # fmt: skip
        here += distance(got, truth)
    print(f"distance from float32, summed over seeds: {here:.4g} here, {there:.4g} plain")
    assert here <= 1.1 * there, (here, there)


def test_every_tier_gives_the_same_bits(tmp_path: Path) -> None:
    # float32 goes through the tiled attention; the fused backward kernels add in an order of their own.
    torch.use_deterministic_algorithms(True)
    size = "1GiB"
    tiers = {
        "device": [{"kind": "device", "budget": size}],
        "host": [{"kind": "host", "budget": size}],
        "nvme": [{"kind": "nvme", "path": str(tmp_path), "budget": size}],
        "all": [
            {"kind": "device", "budget": "3MiB"},
            {"kind": "host", "budget": "5MiB"},
            {"kind": "nvme", "path": str(tmp_path), "budget": size},
        ],
    }
    results = {}
    for name, tier in tiers.items():
        results[name], report = ours(
            make(torch.float32), 5000, tiers=tier,
            capture={"chunk_tokens": 1024}, pages={"tokens": 256, "block_tokens": 1024},
            replay={"lane_tokens": 600},
        )  # fmt: skip
        assert len(report.tier_bytes) == (3 if name == "all" else 1)
    torch.use_deterministic_algorithms(False)
    for name, gradients in results.items():
        for parameter, gradient in gradients.items():
            assert torch.equal(gradient, results["device"][parameter]), (name, parameter)


def test_peak_memory_does_not_grow_with_the_prompt() -> None:
    peaks = []
    model = make(torch.bfloat16)
    ours(model, 30_000, tiers=[{"kind": "host", "budget": "4GiB"}], capture={"chunk_tokens": 2048})
    for prompt in (30_000, 60_000, 120_000):
        model.zero_grad(set_to_none=True)
        got = None  # the gradients of the prompt before
        gc.collect()
        torch.cuda.empty_cache()
        got, report = ours(
            model, prompt,
            tiers=[{"kind": "host", "budget": "4GiB"}],
            capture={"chunk_tokens": 2048}, pages={"block_tokens": 4096}, replay={"lane_tokens": 1024},
        )  # fmt: skip
        assert got
        peaks.append(report.peak_device_bytes)
    assert max(peaks) <= 1.02 * min(peaks), peaks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_closed_runtime_holds_no_device_memory(tmp_path: Path, dtype: torch.dtype) -> None:
    """Also if somebody still refers to it. The first run's memory is that of libraries' workspaces."""
    model = make(dtype)
    ids, responses, weights = group(20_000)
    tiers = [
        {"kind": "device", "budget": "8MiB"},
        {"kind": "host", "budget": "16MiB"},
        {"kind": "nvme", "path": str(tmp_path), "budget": "4GiB"},
    ]
    runtimes, held = [], []
    for _ in range(2):
        with Runtime(model, tiers=tiers, capture={"chunk_tokens": 2048}) as runtime:
            with runtime.transaction(ids) as txn:
                for lane in txn.replay(responses):
                    pairs = zip(lane.indices, lane.logprobs, strict=True)
                    lane.backward(sum((lp * weights[i]).sum() for i, lp in pairs))
            assert runtime._engine.staging.bytes > 0
        runtimes.append(runtime)
        del txn, lane, pairs
        model.zero_grad(set_to_none=True)
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[1] - held[0] < 1 << 20, held
