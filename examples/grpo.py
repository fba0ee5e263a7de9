"""GRPO on long prompts: one loop, unchanged under a single process, DDP, FSDP2 and ZeRO-3.

    accelerate launch --config_file examples/plain.yaml examples/grpo.py
    accelerate launch --config_file examples/ddp.yaml   examples/grpo.py
    accelerate launch --config_file examples/fsdp2.yaml examples/grpo.py
    accelerate launch --config_file examples/zero3.yaml examples/grpo.py

The model and the task are the demo's: SmolLM2-135M-Instruct finds a code that is hidden in Python's documentation.
`make demo` builds an environment that has both; on CPUs a rank takes some 4 GiB.
Every rank works on prompts of its own, of its own length; with --uneven, rank 0 has two groups and the last rank none.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from accelerate import Accelerator
from cpu import shard_on_cpus
from torch import Tensor

from longstraw import Runtime
from longstraw.demo.model import load_demo_model
from longstraw.demo.reward import reward
from longstraw.demo.sampling import sample_group
from longstraw.demo.text import Task, make_task
from longstraw.objectives import GroupSize, grpo_loss, zscore_advantages

PAGING: dict[str, Any] = {
    "capture": {"chunk_tokens": 512},
    "pages": {"tokens": 128},
    "tiers": [{"kind": "device", "budget": "64MiB"}, {"kind": "host", "budget": "1GiB"}],
}


def main() -> None:
    options = parse_options()
    shard_on_cpus()
    accelerator = Accelerator()
    rank, ranks = accelerator.process_index, accelerator.num_processes
    demo = load_demo_model(torch.device("cpu"))
    model, tokenizer = demo.model.train(), demo.tokenizer
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)
    model, optimizer = accelerator.prepare(model, optimizer)
    runtime = Runtime(model, PAGING, accelerator=accelerator)
    accelerator.print(runtime.describe().splitlines()[0])
    generator = torch.Generator(accelerator.device).manual_seed(rank)
    for step in range(options.steps):
        began = time.perf_counter()
        groups = {0: 2, ranks - 1: 0}.get(rank, 1) if options.uneven and ranks > 1 else 1
        # All ranks sample equally often: under FSDP2 and ZeRO-3 a token of one rank needs the weights of all.
        batch = []
        for number in range(2 if options.uneven else 1):
            prompt_tokens = options.prompt_tokens + 64 * rank
            task = make_task(tokenizer, prompt_tokens, seed=1000 * step + 10 * rank + number)
            responses = sample(accelerator, model, tokenizer, task, options, generator)
            if number < groups:
                batch.append((task, responses))
        rewards: list[float] = []
        with runtime.accumulate():
            for task, responses in batch:
                earned = [earn(tokenizer, task, response, options) for response in responses]
                rewards += earned
                advantages = zscore_advantages(torch.tensor(earned))
                size = GroupSize.of(responses)
                with runtime.transaction(task.prompt_ids) as txn:
                    old = txn.score(responses)
                    for lane in txn.replay(responses):
                        chosen = list(lane.indices)
                        before = [old[i] for i in chosen]
                        lane.backward(grpo_loss(lane.logprobs, before, advantages[chosen], size=size).loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        everywhere = accelerator.gather(torch.tensor([sum(rewards), float(len(rewards))], device=accelerator.device))
        total, count = everywhere.view(-1, 2).sum(0).tolist()
        accelerator.print(
            f"step {step + 1}: {int(count)} responses, mean reward {total / count:.3f}, "
            f"gradient norm {float(norm):.3f}, {time.perf_counter() - began:.1f} s"
        )
    runtime.close()
    accelerator.end_training()


def sample(
    accelerator: Accelerator, model: Any, tokenizer: Any, task: Task, options: argparse.Namespace, generator: Any
) -> list[Tensor]:
    """A group of responses, cut where they end by themselves. Every rank makes the same number of forward passes."""
    responses = sample_group(
        accelerator.unwrap_model(model),
        task.prompt_ids.to(accelerator.device),
        group=options.group,
        max_tokens=options.response_tokens,
        temperature=1.0,
        eos_token_id=-1,
        generator=generator,
    )
    ends = [(response == tokenizer.eos_token_id).nonzero() for response in responses]
    return [
        response[: int(end[0]) + 1] if len(end) else response for response, end in zip(responses, ends, strict=True)
    ]


def earn(tokenizer: Any, task: Task, response: Tensor, options: argparse.Namespace) -> float:
    """The demo's reward of one response."""
    return reward(
        tokenizer.decode(response, skip_special_tokens=True).strip(),
        task.code,
        tokens=len(response),
        max_tokens=options.response_tokens,
        ended=int(response[-1]) == tokenizer.eos_token_id,
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of rank 0; each further rank has 64 more")
    parser.add_argument("--group", type=int, default=4, help="responses of a prompt")
    parser.add_argument("--response-tokens", type=int, default=12, help="the most of a response")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="of SGD")
    parser.add_argument("--uneven", action="store_true", help="rank 0 has two groups, the last rank none")
    return parser.parse_args()


if __name__ == "__main__":
    main()
