"""`longstraw plan`: memory by tier and time by phase of a step, from a model's config alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from longstraw.cli.counts import parse_count
from longstraw.config import Config
from longstraw.config.sizes import approximate_bytes
from longstraw.errors import ConfigError

if TYPE_CHECKING:
    from longstraw.planner import Blueprint, Machine, Plan, ShardingChoice


def plan(
    model: Annotated[Path, typer.Argument(help="Folder of a transformers causal LM, or its config.json.")],
    prompt: Annotated[str, typer.Option(help="Tokens of the prompt: 131072, 128k, 1M.")],
    group: Annotated[int, typer.Option(help="Responses of the prompt.")] = 8,
    response: Annotated[str, typer.Option(help="Tokens of each response: 1024, 4k.")] = "1k",
    gpus: Annotated[int, typer.Option(help="GPUs, one process each.")] = 1,
    sharding: Annotated[
        str | None,
        typer.Option(help="What holds the model: ddp (of several GPUs), fsdp2, zero1, zero2, zero3, or none (of one)."),
    ] = None,
    offload_weights: Annotated[
        bool, typer.Option("--offload-weights", help="Weights lie in host memory between passes (fsdp2, zero3).")
    ] = False,
    keep_gathered: Annotated[
        bool, typer.Option("--keep-gathered", help="FSDP2's reshard_after_forward is false.")
    ] = False,
    tiers: Annotated[
        Path | None,
        typer.Option(help="YAML of the runtime's settings, tiers and all.", exists=True, dir_okay=False),
    ] = None,
    lora: Annotated[int | None, typer.Option(help="Rank of LoRA on every linear layer; all weights without.")] = None,
    detached: Annotated[bool, typer.Option("--detached", help="No gradient through the prompt.")] = False,
    dtype: Annotated[str, typer.Option(help="Of weights and activations: bfloat16, float16, float32.")] = "bfloat16",
    rates: Annotated[
        Path | None,
        typer.Option(
            help="JSON of rates and sizes over those of an H200, or a record of `longstraw probe`.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Tell what a step will take before it runs: memory by tier, time by phase, and what binds each.

    Nothing is loaded and no GPU is needed. Exit status 1 if the step cannot fit; the settings that would make it
    fit are named then, each tried before.
    """
    if lora is not None and lora < 1:
        raise ConfigError(f"--lora {lora}: a rank is at least 1; leave --lora out to train all weights")
    # torch and transformers take seconds to import, and --help needs neither.
    from longstraw.cli.device import parse_dtype
    from longstraw.integrations.transformers.blueprint import blueprint, read_config
    from longstraw.planner import Machine, Workload, advise, make_plan, ways_to_reduce

    choice = _choice(sharding, gpus, offload_weights, keep_gathered)
    settings = Config.load(tiers, **({"gradient": {"prompt": "detached"}} if detached else {}))
    config, kind = read_config(model), parse_dtype(dtype)
    workload = Workload(
        prompt=parse_count("--prompt", prompt), group=group, response=parse_count("--response", response)
    )
    machine = _share(Machine() if rates is None else Machine.load(rates), gpus)
    rule = settings.kernels.gated_delta
    made = blueprint(config, dtype=kind, lora_rank=lora, gated_delta=rule)
    found = make_plan(made, workload, settings, machine, sharding=choice)
    ways = ways_to_reduce(found)
    advice = []
    if found.problem is not None:

        def with_lora(rank: int) -> Blueprint:
            return blueprint(read_config(model), dtype=kind, lora_rank=rank, gated_delta=rule)

        advice = advise(found, None if lora else with_lora)
    notes = _notes(found, lora)
    if as_json:
        typer.echo(
            json.dumps(
                found.to_dict() | {"gpus": gpus, "ways_to_reduce": ways, "advice": advice, "notes": notes}, indent=2
            )
        )
    else:
        _print(found, ways, advice, notes)
    if found.problem is not None:
        raise typer.Exit(1)


def _choice(name: str | None, gpus: int, offload: bool, keep_gathered: bool) -> ShardingChoice:
    from longstraw.planner import Framework, ShardingChoice

    name = name or ("none" if gpus == 1 else "ddp")
    known = [framework.value for framework in Framework]
    if name not in known:
        raise ConfigError(f"--sharding {name}: use one of {', '.join(known)}")
    return ShardingChoice(framework=Framework(name), replicas=gpus, reshard=not keep_gathered, offload=offload)


def _share(machine: Machine, gpus: int) -> Machine:
    """What one of `gpus` processes has: a GPU, and an equal share of the host and the disk."""
    if gpus == 1:
        return machine
    rates: dict[str, Any] = {name: getattr(machine, name) / gpus for name in ("disk_read", "disk_write")}
    return replace(machine, host_bytes=machine.host_bytes // gpus, disk_bytes=machine.disk_bytes // gpus, **rates)


def _notes(plan: Plan, lora: int | None) -> list[str]:
    notes = []
    for kind, there in (("host", plan.machine.host_bytes), ("nvme", plan.machine.disk_bytes)):
        used = sum(tier["used"] for tier in plan.tiers.values() if tier["kind"] == kind)
        if used > there:
            notes.append(
                f"the planned machine has {approximate_bytes(there)} for {kind} pages and these are "
                f"{approximate_bytes(used)}: the budget is taken at its word; another machine is given with --rates"
            )
    notes += _rank_notes(plan)
    if "count" in plan.phases:
        notes.append(
            "count: the routers' auxiliary loss asks how all responses are routed before the first backward; a step "
            "that scores them first makes no such pass"
        )
    kinds = {work.kind for work in plan.blueprint.work} - {"attention"}
    if "fused recurrent" in kinds:
        notes.append(
            "gated delta rules are planned as flash-linear-attention computes them; kernels.gated_delta: torch plans "
            "torch's own, which are slower and take more memory"
        )
    if kinds:
        notes.append(
            f"time: for layers of kind {', '.join(sorted(kinds))} the rates come from few measurements; give your own "
            "with --rates where it matters"
        )
    if plan.blueprint.looped_experts is not None:
        notes.append(
            f"experts: {plan.blueprint.looped_experts}; load the model with experts_implementation='eager', a loop, "
            "which is slower than planned; its live graph is up to a tenth larger"
        )
    if plan.blueprint.profile.hidden_dtype.itemsize > 2:
        notes.append("time: rates are those of half precision; wider types are slower")
    optimizer = "LoRA's optimizer state is small" if lora else "the optimizer's state (8 bytes a parameter for AdamW)"
    notes.append(f"not counted: {optimizer}{'' if lora else ' is yours to place'}; score() takes what replay takes")
    if plan.problem is None and plan.pin_seconds > 1:
        notes.append(f"the first step also locks its host pages: about {plan.pin_seconds:.0f} s, once")
    return notes


def _rank_notes(plan: Plan) -> list[str]:
    from longstraw.planner import Framework
    from longstraw.planner.machine import RANKS_ASSUMED

    choice, notes = plan.sharding, []
    if choice.replicas > 1:
        notes.append(
            f"{choice.replicas} GPUs are {choice.replicas} replicas in this version: each works on a group of its own, "
            "with a share of the host and the disk, and the figures are one process's. A prompt is not split over GPUs"
        )
        source = "assumed, not measured" if plan.machine.ranks == RANKS_ASSUMED else "from --rates"
        notes.append(
            f"between GPUs {plan.machine.ranks / 1e9:,.0f} GB/s each way ({source}); gathers and each_pass reductions "
            "run beside compute, what finalize reduces does not"
        )
    if choice.framework is Framework.ZERO3:
        notes.append(
            "ZeRO-3: gathers are counted one a weight, and DeepSpeed merges them; what it keeps goes by its stage3_ "
            "settings, whose defaults are planned with"
        )
    return notes


def _print(plan: Plan, ways: dict[str, dict[str, Any]], advice: list[str], notes: list[str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    load, model = plan.workload, plan.blueprint
    console.print(f"{model.name}, {model.trained / 1e6:,.1f} M trained; on {plan.machine.name}")
    console.print(
        f"prompt {load.prompt:,}, {load.group} responses of {load.response:,} tokens, "
        f"{plan.config.gradient.prompt} gradient"
    )
    console.print(_cut("chunks", plan.chunks, plan.longest_chunk, plan.chunk.checkpoint), end="; ")
    console.print(_cut("lanes", plan.lanes, plan.widest_lane, plan.lane.checkpoint), end="; ")
    console.print(f"attention outputs of {plan.kept_output_layers} of {plan.outputs_possible} layers kept\n")
    console.print(_device_table(plan))
    console.print(_page_table(plan))
    if plan.phases:
        console.print(_phase_table(plan))
        if plan.sharding.replicas > 1 or plan.sharding.offload:
            console.print(_rank_table(plan))
    if ways:
        console.print(_reduce_table(ways, plan.config.gradient.reduce))
    for note in notes:
        console.print(f"- {note}", markup=False)
    if plan.problem is None:
        return
    console.print(f"\nDOES NOT FIT: {plan.problem}", style="bold red", markup=False)
    if advice:
        console.print("Each of these alone would make it fit:")
        for line in advice:
            console.print(f"  {line}", markup=False)
    else:
        console.print("No single setting would make it fit; combine LoRA, a larger tier and a shorter prompt.")


def _cut(what: str, count: int, tokens: int, checkpoint: bool) -> str:
    return (
        f"{count} {what if count > 1 else what[:-1]} of up to {tokens:,} tokens{', checkpointed' if checkpoint else ''}"
    )


def _device_table(plan: Plan) -> Table:
    memory, machine = plan.memory, plan.machine
    table = Table(title="device memory", title_justify="left")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    rows = {
        "weights": memory.weights,
        "weights gathered for a pass": memory.gathered,
        "gradient sums of parameters": memory.gradients,
        "gradients on their way": memory.arriving,
        "the LM head's gradient": memory.head,
        "pages": memory.pages,
        "live graph of a lane": memory.lane + memory.lane_layer,
        "live graph of a chunk (not beside a lane's)": memory.chunk + memory.chunk_layer,
        "workspace of a layer": max(memory.lane_workspace, memory.chunk_workspace),
        "block of logits": memory.logits,
        "staging slots": memory.staging,
    }
    for name, count in rows.items():
        if count:
            table.add_row(name, approximate_bytes(count))
    table.add_section()
    table.add_row("peak (what is there together)", approximate_bytes(memory.total))
    table.add_row("usable", approximate_bytes(machine.device_bytes - machine.context_bytes))
    return table


def _page_table(plan: Plan) -> Table:
    table = Table(title="pages", title_justify="left")
    for name in ("tier or kind", "bytes", "budget"):
        table.add_column(name, justify="left" if name == "tier or kind" else "right")
    for name, count in plan.pages.items():
        table.add_row(name, approximate_bytes(count), "")
    table.add_section()
    for name, tier in plan.tiers.items():
        table.add_row(name, approximate_bytes(tier["used"]), approximate_bytes(tier["budget"]))
    return table


def _phase_table(plan: Plan) -> Table:
    columns = ["phase", "seconds", "compute", "link", "disk", "ranks", "binds", "PFLOP", "moved"]
    # Eighty columns hold all but one.
    if plan.sharding.replicas == 1:
        columns.remove("ranks")
    elif not any(cost.disk for cost in plan.phases.values()):
        columns.remove("disk")
    table = Table(title="time", title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in ("phase", "binds") else "right")
    for name, cost in plan.phases.items():
        moved = sum(cost.bytes_read.values()) + sum(cost.bytes_written.values())
        moved += cost.weights_to_device + cost.gradients_to_host
        cells = {key: f"{getattr(cost, key):.2f}" for key in ("seconds", "compute", "link", "disk", "ranks")}
        cells |= {"phase": name, "binds": cost.binds, "PFLOP": f"{cost.operations / 1e15:.2f}"}
        cells["moved"] = approximate_bytes(moved)
        table.add_row(*(cells[column] for column in columns))
    table.add_section()
    table.add_row("step", f"{plan.seconds:.2f}", *[""] * (len(columns) - 2))
    return table


def _rank_table(plan: Plan) -> Table:
    """Collectives by phase, and what crosses the host's link beside pages."""
    table = Table(title="between ranks; and over the host's link for offloaded weights", title_justify="left")
    for name in ("phase", "collectives", "bytes", "to device", "to host"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for name, cost in plan.phases.items():
        counts = ", ".join(f"{count:,} {kind}" for kind, count in cost.collectives.items())
        nbytes = (sum(cost.collective_bytes.values()), cost.weights_to_device, cost.gradients_to_host)
        table.add_row(name, counts, *(approximate_bytes(count) if count else "" for count in nbytes))
    return table


def _reduce_table(ways: dict[str, dict[str, Any]], chosen: str) -> Table:
    table = Table(
        title="gradient.reduce: gradient sums, peak of memory, and a step's reductions (* as planned)",
        title_justify="left",
    )
    for name in ("value", "sums", "peak", "reductions", "reduced", "ranks", "step"):
        table.add_column(name, justify="left" if name == "value" else "right")
    for way, cost in ways.items():
        if cost["seconds"] is None:
            counts = ["does not fit", "", "", ""]
        else:
            counts = [f"{cost['reductions']:,}", approximate_bytes(cost["reduced_bytes"])]
            counts += [f"{cost['rank_seconds']:.2f} s", f"{cost['seconds']:.2f} s"]
        sizes = [approximate_bytes(cost[key]) for key in ("gradient_bytes", "peak_bytes")]
        table.add_row(f"{way} *" if way == chosen else way, *sizes, *counts)
    return table
