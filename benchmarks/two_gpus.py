"""An exact step of one group a rank under FSDP2 or ZeRO-3, and the share of its time that collectives take.

    torchrun --nproc-per-node 2 -m benchmarks.two_gpus --framework fsdp2 --prompt 65536 --profile

Qwen3-8B's shape with random weights in bfloat16, all of them trained unless `--lora`. `--framework none` is the same
step without a framework, each rank alone: what it is faster by is what sharding costs. Without CUDA it runs over gloo
(`--small --layers 2 --prompt 300 --response 20` rehearses it).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.collective_time import measure
from benchmarks.common import Record, free_memory, qwen3, random_group
from benchmarks.step import loss_of
from longstraw import Runtime

SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
CLIP = 1.0


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer without a state: what is measured is the gradient."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-6)


def torch_step(model: nn.Module) -> Callable[[], None]:
    optimizer = sgd(model)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp2(model: Any, device: torch.device, reshard: bool) -> tuple[nn.Module, Callable[[], None]]:
    """Each decoder layer a unit, and the rest in the root."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for unit in [*base.model.layers, model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return model, torch_step(model)


def zero3(model: nn.Module, device: torch.device) -> tuple[nn.Module, Callable[[], None]]:
    """With torch's own optimizer: no operation of DeepSpeed's is compiled."""
    os.environ["DS_ACCELERATOR"] = device.type
    import deepspeed

    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=config)
    return engine, engine.step


def wrap(model: nn.Module, device: torch.device, options: argparse.Namespace) -> tuple[nn.Module, Callable[[], None]]:
    """The model as its framework holds it, and the call that clips and steps."""
    if options.framework == "fsdp2":
        return fsdp2(model, device, reshard=not options.keep_weights)
    if options.framework == "zero3":
        return zero3(model, device)
    return model, torch_step(model)


def transaction(runtime: Runtime, ids: Tensor, responses: list[Tensor]) -> dict[str, Any]:
    total = sum(len(r) for r in responses)
    with runtime.transaction(ids) as txn:
        for lane in txn.replay(responses):
            parts = [loss_of(lp, (-1.0) ** i, total) for i, lp in zip(lane.indices, lane.logprobs, strict=True)]
            lane.backward(sum(parts[1:], parts[0]))
    report = txn.report.to_dict()
    del report["passes"]
    return report


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call that all ranks begin together, and its result."""
    synchronize()
    dist.barrier()
    start = time.perf_counter()
    result = function()
    synchronize()
    return time.perf_counter() - start, result


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", default="fsdp2", choices=["fsdp2", "zero3", "none"])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--prompt", type=int, default=65_536)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--lora", action="store_true", help="train LoRA r 16 on all linear layers, not all weights")
    parser.add_argument("--reduce", default="deferred", choices=["deferred", "each_pass"])
    parser.add_argument("--keep-weights", action="store_true", help="FSDP2 without resharding after a forward")
    parser.add_argument("--tier", default="host", choices=["host", "device"])
    parser.add_argument("--budget", default="60GiB", help="of the tier, for each rank")
    parser.add_argument("--keep", default="auto", choices=["auto", "always", "never"], help="attention outputs")
    parser.add_argument("--repeats", type=int, default=2, help="steps; the first is not warm")
    parser.add_argument("--profile", action="store_true", help="one step more, for the time of NCCL's kernels")
    parser.add_argument("--small", action="store_true", help="a tiny shape, to rehearse on CPUs")
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.profile and not torch.cuda.is_available():
        parser.error("--profile: there is no GPU here whose kernels could be timed; leave it out")
    if options.keep_weights and options.framework != "fsdp2":
        parser.error("--keep-weights: it is FSDP2's reshard_after_forward; use --framework fsdp2")
    return options


def main() -> None:
    options = arguments()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, shape = dist.get_rank(), SMALL if options.small else {}
    began = time.perf_counter()
    model, step = wrap(qwen3(options.layers, str(device), torch.bfloat16, options.lora, **shape), device, options)
    free_memory()
    setup = time.perf_counter() - began
    ids, responses = random_group(
        options.prompt, options.group, options.response, shape.get("vocab_size", 151_936), seed=rank
    )  # fmt: skip
    settings = {
        "gradient": {"reduce": options.reduce},
        "capture": {"keep_attention": options.keep},
        "tiers": [{"kind": options.tier, "budget": options.budget}],
    }
    record = Record(options.out) if rank == 0 else None

    def add(figure: str, mine: dict[str, Any]) -> None:
        """Every rank's figures, as they come: a run that is cut short leaves those that it had."""
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine)
        if record is not None:
            common = {name: value for name, value in vars(options).items() if name != "out"}
            for number, figures in enumerate(told):
                record.add(figure, ranks=len(told), rank=number, **common, **figures)

    with Runtime(model, settings) as runtime:
        for repeat in range(options.repeats):
            seconds, report = timed(lambda: transaction(runtime, ids, responses))
            optimizer_seconds, _ = timed(step)
            add(
                "step on several GPUs",
                {
                    "repeat": repeat, "seconds": seconds, "optimizer_seconds": optimizer_seconds,
                    "setup_seconds": setup, "report": report,
                },
            )  # fmt: skip
        if options.profile:
            dist.barrier()
            found = measure(lambda: transaction(runtime, ids, responses))
            step()
            add("time of collectives on several GPUs", found.to_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
