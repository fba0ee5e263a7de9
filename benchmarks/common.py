"""Shapes, models, timing and records that the benchmarks share."""

from __future__ import annotations

import gc
import json
import platform
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

QWEN3_8B: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 1 << 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": False,
}


def device_name() -> str:
    """The machine, as the records name it."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{platform.machine()} CPU, torch {torch.__version__}"


def commit() -> str:
    """The commit that is measured."""
    # A copy of the tree without its history may carry the commit in a file.
    noted = Path("COMMIT")
    if noted.exists():
        return noted.read_text().strip()
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def qwen3(layers: int, device: str, dtype: torch.dtype, lora: bool, seed: int = 0, **shape: Any) -> torch.nn.Module:
    """A Qwen3 of the 8B's layer shapes with random weights; with LoRA r 16 on every linear layer of its decoder."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen3ForCausalLM(Qwen3Config(**{**QWEN3_8B, "num_hidden_layers": layers, **shape}))
    finally:
        torch.set_default_dtype(before)
    model.train()
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    peft = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=targets))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                # A zero B would leave lora_A without a gradient.
                parameter.normal_(0, 0.02)
    return peft.to(dtype)


def random_group(
    prompt: int, responses: int, length: int, vocab: int, seed: int = 0
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A prompt and its responses of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (prompt,), generator=generator)
    return ids, [torch.randint(vocab, (length,), generator=generator) for _ in range(responses)]


def seconds(function: Callable[[], Any], repeats: int = 3, warmup: int = 1) -> float:
    """Median wall time of `function`, its CUDA work included."""
    for _ in range(warmup):
        function()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def matrix_rate() -> float:
    """Operations a second of bfloat16 matrix products of 8,192 x 8,192 x 8,192 random values."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def products() -> None:
        for _ in range(20):
            a @ b

    return 20 * 2.0 * 8192**3 / seconds(products)


def free_memory() -> None:
    """Collect garbage and give torch's cache back, so that the next measurement starts alike."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class Record:
    """Appends results to a JSON-lines file, and prints each."""

    def __init__(self, path: str | None) -> None:
        self._path = Path(path) if path else None

    def add(self, figure: str, **values: Any) -> None:
        row = {"figure": figure, "machine": device_name(), "commit": commit(), **values}
        print(json.dumps(row), flush=True)
        if self._path is not None:
            with self._path.open("a") as out:
                out.write(json.dumps(row) + "\n")
