"""The longest prompt that the packed shared-prefix step can do on one GPU.

    python -m benchmarks.longest_packed --group 8

A step of checkpointed layers needs most when its last layer runs backward: all checkpoints are there. So each try ends
behind that. Two short prompts give the bytes a token, and tries around what these foretell give the answer.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

# Before torch reads it: pieces of fixed size would refuse what fits.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from torch import Tensor

from benchmarks.common import Record, free_memory, qwen3, random_group
from benchmarks.step import PackedRow, checkpointed


class LastLayerDone(Exception):
    """The last layer's backward has run."""


def stop_behind(layer: torch.nn.Module) -> Any:
    """Raise `LastLayerDone` once the gradient of this layer's input is known. Returns the hook's handle."""

    def arrived(gradient: Tensor) -> None:
        raise LastLayerDone

    def entered(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(arrived)

    return layer.register_forward_pre_hook(entered)


def peak_of(model: Any, prompt: int, group: int, response: int, vocab: int) -> int | None:
    """Bytes at the step's peak, weights included; None where it does not fit."""
    ids, responses = random_group(prompt, group, response, vocab)
    free_memory()
    with checkpointed(model, "flex_attention") as base:
        handle = stop_behind(base.model.layers[-1])
        try:
            PackedRow.pack(ids, responses).loss(base).backward()
        except LastLayerDone:
            return torch.cuda.max_memory_allocated()
        except torch.OutOfMemoryError:
            return None
        finally:
            handle.remove()
            model.zero_grad(set_to_none=True)
    raise RuntimeError("the last layer's input has no gradient")


def longest(fits: Callable[[int], bool], guess: int, step: int) -> int:
    """The longest multiple of `step` that fits, where every shorter one does; tried outwards from `guess`."""
    length = max(guess // step, 1) * step
    if fits(length):
        while fits(length + step):
            length += step
        return length
    while length > step:
        length -= step
        if fits(length):
            return length
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--short", type=int, nargs=2, default=[32_768, 65_536], help="the two short prompts")
    parser.add_argument("--step", type=int, default=8192, help="the answer is a multiple of it")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--out")
    options = parser.parse_args()
    record = Record(options.out)
    model = qwen3(options.layers, "cuda", torch.bfloat16, lora=True)
    free, total = torch.cuda.mem_get_info()
    room = free + torch.cuda.memory_allocated()
    tries: dict[int, float | None] = {}

    def peak(prompt: int) -> int | None:
        start = time.perf_counter()
        found = peak_of(model, prompt, options.group, options.response, 151_936)
        tries[prompt] = None if found is None else found / 2**30
        print(f"{prompt}: {tries[prompt]} GiB, {time.perf_counter() - start:.1f} s", flush=True)
        return found

    first, second = (peak(prompt) for prompt in options.short)
    if first is None or second is None:
        raise SystemExit(f"--short {options.short[0]} {options.short[1]} do not fit: try shorter ones")
    token = (second - first) / (options.short[1] - options.short[0])
    guess = options.short[0] + int((room - first) / token)
    found = longest(lambda prompt: peak(prompt) is not None, guess, options.step)
    record.add(
        "longest prompt, packed shared prefix", layers=options.layers, group=options.group, response=options.response,
        longest=found, multiple_of=options.step, bytes_per_token=token, room_gib=room / 2**30, device_gib=total / 2**30,
        peaks_gib=tries,
    )  # fmt: skip


if __name__ == "__main__":
    main()
