"""A whole training step of one group, three ways: ours, the ordinary one, the packed shared-prefix one.

    python -m benchmarks.step --prompt 32768 --group 8 --response 1024 --lora

Without `--lora` all weights are trained, and each step ends with one of SGD.

Ordinary: the prompt repeated for each response, one row at a time, activation checkpointing, cuDNN or flash attention.
Rows are alike, so `--ordinary-rows` of them are timed and the time is scaled to the group.
Packed: one row of the prompt and all responses under a compiled FlexAttention mask, activation checkpointing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common import Record, free_memory, matrix_rate, qwen3, random_group
from benchmarks.operations import exact_step, ordinary_row, qwen3_8b, replay_lanes
from longstraw import Runtime

WAYS = {
    "host": ("host", "exact"),
    "device": ("device", "exact"),
    "detached": ("host", "detached"),
    "detached-device": ("device", "detached"),
}
"""What `--ours` measures: the tier that holds the pages, and the prompt's gradient."""


def loss_of(logprobs: Tensor, advantage: float, tokens: int) -> Tensor:
    """The policy gradient of one response at a ratio of 1."""
    return -(logprobs * advantage).sum() / tokens


def sgd(model: Any, lora: bool) -> torch.optim.Optimizer | None:
    """The step that ends each way of training all weights; LoRA's is too small to count."""
    return None if lora else torch.optim.SGD(model.parameters(), lr=1e-9)


@contextmanager
def checkpointed(model: Any, attention: str) -> Iterator[Any]:
    """The model below PEFT's wrapper, each layer checkpointed, under this attention; as before behind it."""
    wrapped = hasattr(model, "get_base_model")
    base = model.get_base_model() if wrapped else model
    base.set_attn_implementation(attention)
    base.gradient_checkpointing_enable({"use_reentrant": False})
    if wrapped:
        base.enable_input_require_grads()
    try:
        yield base
    finally:
        base.gradient_checkpointing_disable()
        if wrapped:
            base.disable_input_require_grads()
        base.set_attn_implementation("sdpa")


def measure_ours(
    model: Any,
    ids: Tensor,
    responses: list[Tensor],
    settings: dict[str, Any],
    repeats: int,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """The last of `repeats` transactions of one runtime: the first also pins memory and plans kernels."""
    total = sum(len(r) for r in responses)
    walls = []
    with Runtime(model, settings) as runtime:
        for _ in range(repeats):
            model.zero_grad(set_to_none=True)
            free_memory()
            before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            with runtime.transaction(ids) as transaction:
                for lane in transaction.replay(responses):
                    parts = [loss_of(lp, (-1.0) ** i, total) for i, lp in zip(lane.indices, lane.logprobs, strict=True)]
                    lane.backward(sum(parts[1:], parts[0]))
            if optimizer is not None:
                optimizer.step()
            torch.cuda.synchronize()
            walls.append(time.perf_counter() - start)
        report = transaction.report.to_dict()
    peak = (report["peak_device_bytes"] - before) / 2**30
    return {"seconds": walls[-1], "all_seconds": walls, "peak_beyond_weights_gib": peak, "report": report}


def measure_ordinary(
    model: Any, ids: Tensor, responses: list[Tensor], rows: int, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    total = sum(len(r) for r in responses)
    free_memory()
    times = []
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with checkpointed(model, "sdpa"):
        for i in range(rows):
            response = responses[i]
            torch.cuda.synchronize()
            start = time.perf_counter()
            row = torch.cat([ids, response])[None].cuda()
            with sdpa_kernel(backends, set_priority=True):
                logits = model(input_ids=row, use_cache=False, logits_to_keep=len(response) + 1).logits[0, :-1]
                chosen = logits.float().log_softmax(-1).gather(-1, response.cuda()[:, None])[:, 0]
                loss_of(chosen, (-1.0) ** i, total).backward()
            del logits, chosen
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    step = 0.0
    if optimizer is not None:
        start = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        step = time.perf_counter() - start
    return {
        "row_seconds": times,
        "seconds": min(times) * len(responses) + step,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A prompt and all its responses in one row, N tokens; each response sees the prompt and itself."""

    rows_1N: Tensor
    positions_1N: Tensor
    mask: Any
    """FlexAttention's `BlockMask`."""
    predictors_R: Tensor
    """Where in the row each response token is predicted: a response's first by the prompt's last."""
    targets_R: Tensor
    signs_R: Tensor

    @classmethod
    def pack(cls, ids: Tensor, responses: list[Tensor]) -> PackedRow:
        from torch.nn.attention.flex_attention import create_block_mask

        prompt, lengths = len(ids), [len(r) for r in responses]
        branch = torch.cat([torch.full((prompt,), -1)] + [torch.full((n,), i) for i, n in enumerate(lengths)]).cuda()

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & ((branch[k] == -1) | (branch[k] == branch[q]))

        positions = torch.cat([torch.arange(prompt)] + [torch.arange(prompt, prompt + n) for n in lengths])
        starts = [prompt + sum(lengths[:i]) for i in range(len(lengths))]
        predictors = torch.cat(
            [torch.cat([torch.tensor([prompt - 1]), torch.arange(start, start + n - 1)])
             for start, n in zip(starts, lengths, strict=True)]
        )  # fmt: skip
        return cls(
            rows_1N=torch.cat([ids, *responses])[None].cuda(),
            positions_1N=positions[None].cuda(),
            mask=create_block_mask(visible, None, None, len(branch), len(branch), device="cuda", _compile=True),
            predictors_R=predictors.cuda(),
            targets_R=torch.cat(responses).cuda(),
            signs_R=torch.cat([torch.full((n,), (-1.0) ** i) for i, n in enumerate(lengths)]).cuda(),
        )

    def loss(self, base: Any) -> Tensor:
        """The group's loss through a model under `checkpointed(model, "flex_attention")`."""
        hidden = base.model(
            input_ids=self.rows_1N, position_ids=self.positions_1N, attention_mask=self.mask, use_cache=False
        )
        logits = base.lm_head(hidden.last_hidden_state[0, self.predictors_R])
        chosen = logits.float().log_softmax(-1).gather(-1, self.targets_R[:, None])[:, 0]
        return -(chosen * self.signs_R).sum() / len(self.targets_R)


def measure_packed(
    model: Any,
    ids: Tensor,
    responses: list[Tensor],
    repeats: int,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    packed = PackedRow.pack(ids, responses)
    free_memory()
    times = []
    with checkpointed(model, "flex_attention") as base:
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            packed.loss(base).backward()
            if optimizer is not None:
                optimizer.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return {"seconds": min(times), "first_seconds": times[0], "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    taken = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken


def worst_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[str, float]:
    def difference(name: str) -> float:
        return float((ours[name].float() - theirs[name].float()).norm() / theirs[name].float().norm())

    return max(((name, difference(name)) for name in theirs), key=lambda item: item[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--prompt", type=int, nargs="+", default=[32_768])
    parser.add_argument("--group", type=int, nargs="+", default=[8])
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--ours", nargs="+", default=["host"], choices=list(WAYS))
    parser.add_argument("--host-budget", default="90GiB")
    parser.add_argument("--device-budget", default="100GiB")
    parser.add_argument("--chunk", default="auto")
    parser.add_argument("--lane", default="auto")
    parser.add_argument("--checkpoint", default="auto")
    parser.add_argument("--keep", default="auto", choices=["auto", "always", "never"])
    parser.add_argument(
        "--repeats", type=int, nargs="+", default=[1], help="transactions of each way of --ours; the last counts"
    )
    parser.add_argument("--ordinary-rows", type=int, default=0)
    parser.add_argument("--packed", type=int, default=0, help="repeats of the packed step")
    parser.add_argument("--compare", action="store_true", help="compare the gradients with the packed step's")
    parser.add_argument("--out")
    options = parser.parse_args()
    if len(options.repeats) not in (1, len(options.ours)):
        parser.error(f"--repeats takes one number, or one for each of the {len(options.ours)} ways of --ours")
    repeats = options.repeats if len(options.repeats) > 1 else options.repeats * len(options.ours)
    record = Record(options.out)
    model = qwen3(options.layers, "cuda", torch.bfloat16, options.lora)
    shape = qwen3_8b(options.layers, options.lora)
    optimizer = sgd(model, options.lora)
    matrix = matrix_rate()
    for prompt in options.prompt:
        for group in options.group:
            ids, responses = random_group(prompt, group, options.response, 151_936)
            common = {
                "layers": options.layers, "lora": options.lora, "prompt": prompt, "group": group,
                "response": options.response,
            }  # fmt: skip
            mine: dict[str, Tensor] = {}
            for way, times in zip(options.ours, repeats, strict=True):
                tier, gradient = WAYS[way]
                budget = options.host_budget if tier == "host" else options.device_budget
                settings: dict[str, Any] = {
                    "tiers": [{"kind": tier, "budget": budget}],
                    "gradient": {"prompt": gradient},
                    "capture": {
                        "chunk_tokens": options.chunk if options.chunk == "auto" else int(options.chunk),
                        "keep_attention": options.keep,
                    },
                    "replay": {
                        "lane_tokens": options.lane if options.lane == "auto" else int(options.lane),
                        "checkpoint": {"auto": "auto", "true": True, "false": False}[options.checkpoint],
                    },
                }
                result = measure_ours(model, ids, responses, settings, times, optimizer)
                mine = gradients(model)
                report = result["report"]
                count = exact_step(
                    shape, prompt, group, options.response,
                    recompute_replay=report["checkpoint_replay"], recompute_sweep=report["checkpoint_sweep"],
                    kept=report["kept_output_layers"] > 0, detached=gradient == "detached",
                )  # fmt: skip
                replayed = replay_lanes(
                    shape, prompt, group, options.response,
                    recompute=report["checkpoint_replay"], detached=gradient == "detached",
                )  # fmt: skip
                rate = replayed / (report["seconds"]["replay"] + report["seconds"]["backward"])
                record.add(
                    f"step, ours ({way})", **common, **result, settings=settings, operations=count,
                    tflops=count / result["seconds"] / 1e12, replay_tflops=rate / 1e12, matrix_tflops=matrix / 1e12,
                    replay_share_of_matrix_rate=rate / matrix,
                )  # fmt: skip
            if not options.compare:
                mine = {}
            if options.packed:
                try:
                    result = measure_packed(model, ids, responses, options.packed, optimizer)
                except torch.OutOfMemoryError as error:
                    # How far the packed step goes is a figure too.
                    result = {"out_of_memory": str(error).splitlines()[0]}
                record.add("step, packed shared prefix", **common, **result)
                theirs = gradients(model)
                if mine and options.packed == 1:
                    record.add(
                        "worst gradient difference, ours to packed", **common, worst=worst_difference(mine, theirs)
                    )
                del theirs
            mine = {}
            if options.ordinary_rows:
                count = ordinary_row(shape, prompt, options.response)
                result = measure_ordinary(model, ids, responses, options.ordinary_rows, optimizer)
                record.add("step, ordinary", **common, **result, operations=count * group,
                           tflops=count / min(result["row_seconds"]) / 1e12)  # fmt: skip
                gradients(model)


if __name__ == "__main__":
    main()
