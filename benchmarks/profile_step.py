"""Which kernels a step's time goes to, and where the host waits for the device: torch's profiler over one transaction.

    python -m benchmarks.profile_step --layers 4 --prompt 32768 --trace step.json

A warm transaction goes before. Waits are told apart by the pass they fall in; the ends of phases lie between passes.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.common import qwen3, random_group
from benchmarks.step import loss_of
from longstraw import Runtime
from longstraw.runtime.passes import ForwardPass

WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_PASS = "pass: "


def mark_passes() -> None:
    """Put the name of its purpose around each pass's forward, for the profiler."""
    enter, leave = ForwardPass.__enter__, ForwardPass.__exit__
    marks: dict[int, record_function] = {}

    def entering(self: ForwardPass) -> ForwardPass:
        marks[id(self)] = record_function(f"{_PASS}{self.purpose.value}")
        marks[id(self)].__enter__()
        return enter(self)

    def leaving(self: ForwardPass, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            marks.pop(id(self)).__exit__(None, None, None)

    ForwardPass.__enter__, ForwardPass.__exit__ = entering, leaving  # type: ignore[method-assign]


def waits(profiler: profile) -> dict[str, dict[str, list[float]]]:
    """By pass: how often each call of CUDA's that waits for the device was made, and its milliseconds."""
    events = profiler.events() or []
    passes = sorted(
        (e.time_range.start, e.time_range.end, e.name.removeprefix(_PASS)) for e in events if e.name.startswith(_PASS)
    )
    found: dict[str, dict[str, list[float]]] = {}
    for event in events:
        if event.name in WAITS:
            inside = [name for start, stop, name in passes if start <= event.time_range.start < stop]
            counts = found.setdefault(inside[0] if inside else "between passes", {}).setdefault(event.name, [0, 0.0])
            counts[0] += 1
            counts[1] += event.time_range.elapsed_us() / 1e3
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=32_768)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--no-lora", action="store_true")
    parser.add_argument("--rows", type=int, default=25)
    parser.add_argument("--trace")
    options = parser.parse_args()
    model = qwen3(options.layers, "cuda", torch.bfloat16, lora=not options.no_lora)
    ids, responses = random_group(options.prompt, options.group, options.response, 151_936)

    def step(runtime: Runtime) -> None:
        with runtime.transaction(ids) as transaction:
            for lane in transaction.replay(responses):
                parts = [loss_of(lp, 1.0, 1) for lp in lane.logprobs]
                lane.backward(sum(parts[1:], parts[0]))
        print(transaction.report.to_dict())

    mark_passes()
    with Runtime(model, tiers=[{"kind": "host", "budget": "40GiB"}]) as runtime:
        step(runtime)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            step(runtime)
    print(
        profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=options.rows, max_name_column_width=70)
    )
    for name, calls in waits(profiler).items():
        print(f"{name}: " + ", ".join(f"{call} x {n:.0f}, {ms:.2f} ms" for call, (n, ms) in calls.items()))
    if options.trace:
        profiler.export_chrome_trace(options.trace)


if __name__ == "__main__":
    main()
