"""The random model, groups and settings of a stress run, all from seeds, so that any rank can make another's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from longstraw.stress.options import StressOptions

VOCABULARY = 101


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A prompt [P] and responses [R_i], int64, and a weight [R_i] for each token's log-prob."""

    prompt: Tensor
    responses: list[Tensor]
    weights: list[Tensor]

    def loss(self, index: int, logprobs_R: Tensor) -> Tensor:
        """Not linear in the log-probs, and with other weights for each token, so that no two errors cancel out."""
        weights_R = self.weights[index].to(logprobs_R)
        return (weights_R * logprobs_R).sum() + 0.05 * logprobs_R.square().sum() / len(weights_R)


def build_model(options: StressOptions, device: torch.device) -> Any:
    """A random Qwen3."""
    dtype = options.dtype or (torch.float64 if device.type == "cpu" else torch.float32)
    heads = max(options.hidden_size // 64, 4)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden_size,
        intermediate_size=2 * options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=16 if device.type == "cpu" else 128,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=False,
    )
    torch.manual_seed(options.seed)
    model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(options.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Attention that is far from uniform, and norms that are not 1.
            if parameter.dim() > 1:
                parameter.copy_(noise * (0.2 if "layers" not in name else 1.2 / parameter.shape[1] ** 0.5))
            else:
                parameter.copy_(1 + 0.1 * noise)
    return model.to(device, dtype).train()


def make_groups(options: StressOptions, step: int, rank: int, *, most_prompt: int) -> list[Group]:
    """One rank's groups of a step: one to three, prompts of 2 to `most_prompt` tokens, the longest among them often."""
    rng = random.Random(f"{options.seed} {step} {rank}")
    return [_make_group(options, rng, most_prompt) for _ in range(rng.choice((1, 1, 2, 3)))]


def largest_group(options: StressOptions) -> Group:
    """The largest that `make_groups` makes."""
    rng = random.Random(options.seed)
    lengths = [options.response_tokens] * options.group
    return _fill(rng, options.prompt_tokens, lengths)


def _make_group(options: StressOptions, rng: random.Random, most_prompt: int) -> Group:
    prompt = most_prompt if rng.random() < 0.3 else rng.randint(2, most_prompt)
    lengths = [rng.randint(1, options.response_tokens) for _ in range(rng.randint(1, options.group))]
    return _fill(rng, prompt, lengths)


def _fill(rng: random.Random, prompt: int, lengths: list[int]) -> Group:
    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    return Group(
        prompt=torch.randint(VOCABULARY, (prompt,), generator=generator),
        responses=[torch.randint(VOCABULARY, (n,), generator=generator) for n in lengths],
        weights=[torch.randn(n, generator=generator) / n for n in lengths],
    )


def make_settings(options: StressOptions, era: int, budgets: tuple[int, int, int]) -> dict[str, Any]:
    """Settings of a runtime, the same on every rank: pages, chunks, lanes and budgets of other sizes each time."""
    rng = random.Random(f"{options.seed} settings {era}")
    unit = max(options.prompt_tokens // 24, 4)
    page = rng.choice((unit // 2, unit, 2 * unit + 1))
    # Now and then a tier is left out, so that all overflow goes over the others.
    device, host, disk = budgets
    if rng.random() < 0.2:
        device, disk = 0, disk + device
    elif rng.random() < 0.2:
        host, disk = 0, disk + host
    return {
        "pages": {"tokens": page, "block_tokens": page * rng.randint(1, 3), "lookahead": rng.randint(1, 3)},
        "capture": {
            "chunk_tokens": rng.choice((3 * unit - 1, 7 * unit, options.prompt_tokens)),
            "keep_attention": rng.choice(("never", "auto")),
        },
        "replay": {
            "lane_tokens": rng.choice((options.response_tokens, 2 * options.response_tokens + 3)),
            "checkpoint": rng.choice((False, True)),
            "logit_block_tokens": 16,
        },
        "tiers": [
            {"kind": "device", "budget": device},
            {"kind": "host", "budget": host},
            {
                "kind": "nvme", "path": str(options.scratch), "budget": disk, "engine": "posix",
                "threads": rng.randint(1, 4), "block": rng.choice(("64KiB", "1MiB")),
            },
        ],
    }  # fmt: skip
