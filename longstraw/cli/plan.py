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
    from longstraw.planner import Machine, Plan


def plan(
    model: Annotated[Path, typer.Argument(help="Folder of a transformers causal LM, or its config.json.")],
    prompt: Annotated[str, typer.Option(help="Tokens of the prompt: 131072, 128k, 1M.")],
    group: Annotated[int, typer.Option(help="Responses of the prompt.")] = 8,
    response: Annotated[str, typer.Option(help="Tokens of each response: 1024, 4k.")] = "1k",
    gpus: Annotated[int, typer.Option(help="GPUs, one process each.")] = 1,
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
    if gpus < 1:
        raise ConfigError(f"--gpus {gpus}: use at least 1")
    if lora is not None and lora < 1:
        raise ConfigError(f"--lora {lora}: a rank is at least 1; leave --lora out to train all weights")
    # torch and transformers take seconds to import, and --help needs neither.
    from longstraw.cli.device import parse_dtype
    from longstraw.integrations.transformers.blueprint import blueprint, read_config
    from longstraw.planner import Machine, Workload, advise, make_plan

    settings = Config.load(tiers, **({"gradient": {"prompt": "detached"}} if detached else {}))
    config, kind = read_config(model), parse_dtype(dtype)
    workload = Workload(
        prompt=parse_count("--prompt", prompt), group=group, response=parse_count("--response", response)
    )
    machine = _share(Machine() if rates is None else Machine.load(rates), gpus)
    found = make_plan(blueprint(config, dtype=kind, lora_rank=lora), workload, settings, machine)
    advice = []
    if found.problem is not None:
        advice = advise(found, None if lora else lambda rank: blueprint(read_config(model), dtype=kind, lora_rank=rank))
    notes = _notes(found, gpus, lora)
    if as_json:
        typer.echo(json.dumps(found.to_dict() | {"gpus": gpus, "advice": advice, "notes": notes}, indent=2))
    else:
        _print(found, advice, notes)
    if found.problem is not None:
        raise typer.Exit(1)


def _share(machine: Machine, gpus: int) -> Machine:
    """What one of `gpus` processes has: a GPU, and an equal share of the host and the disk."""
    if gpus == 1:
        return machine
    rates: dict[str, Any] = {name: getattr(machine, name) / gpus for name in ("disk_read", "disk_write")}
    return replace(machine, host_bytes=machine.host_bytes // gpus, disk_bytes=machine.disk_bytes // gpus, **rates)


def _notes(plan: Plan, gpus: int, lora: int | None) -> list[str]:
    notes = []
    for kind, there in (("host", plan.machine.host_bytes), ("nvme", plan.machine.disk_bytes)):
        used = sum(tier["used"] for tier in plan.tiers.values() if tier["kind"] == kind)
        if used > there:
            notes.append(
                f"the planned machine has {approximate_bytes(there)} for {kind} pages and these are "
                f"{approximate_bytes(used)}: the budget is taken at its word; another machine is given with --rates"
            )
    if gpus > 1:
        notes.append(
            f"{gpus} GPUs are {gpus} replicas in this version: each works on a group of its own, with a share of the "
            "host and of the disk, and the figures are one process's. A prompt is not split over GPUs. FSDP2 and ZeRO "
            "shard weights and gradient sums, which is not counted here"
        )
    kinds = {work.kind for work in plan.blueprint.work} - {"attention"}
    if kinds:
        notes.append(
            f"time: for layers of kind {', '.join(sorted(kinds))} the rates come from few measurements; give your own "
            "with --rates where it matters"
        )
    if plan.blueprint.profile.hidden_dtype.itemsize > 2:
        notes.append("time: rates are those of half precision; wider types are slower")
    optimizer = "LoRA's optimizer state is small" if lora else "the optimizer's state (8 bytes a parameter for AdamW)"
    notes.append(f"not counted: {optimizer}{'' if lora else ' is yours to place'}; score() takes what replay takes")
    if plan.problem is None and plan.pin_seconds > 1:
        notes.append(f"the first step also locks its host pages: about {plan.pin_seconds:.0f} s, once")
    return notes


def _print(plan: Plan, advice: list[str], notes: list[str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    load, model = plan.workload, plan.blueprint
    console.print(f"{model.name}, {model.trained / 1e6:,.1f} M trained; on {plan.machine.name}")
    console.print(
        f"prompt {load.prompt:,}, {load.group} responses of {load.response:,} tokens, "
        f"{plan.config.gradient.prompt} gradient"
    )
    console.print(_cut("chunks", plan.chunks, plan.chunk.tokens, plan.chunk.checkpoint), end="; ")
    console.print(_cut("lanes", plan.lanes, plan.lane.tokens, plan.lane.checkpoint), end="; ")
    console.print(f"attention outputs of {plan.kept_output_layers} of {plan.outputs_possible} layers kept\n")
    console.print(_device_table(plan))
    console.print(_page_table(plan))
    if plan.phases:
        console.print(_phase_table(plan))
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
        "gradient sums of parameters": memory.gradients,
        "a gradient on its way": memory.arriving,
        "the LM head's gradient": memory.head,
        "pages": memory.pages,
        "live graph of a lane": memory.lane,
        "live graph of a chunk (not beside a lane's)": memory.chunk,
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
    table = Table(title="time", title_justify="left")
    for name in ("phase", "seconds", "compute", "link", "disk", "binds", "PFLOP", "moved"):
        table.add_column(name, justify="left" if name in ("phase", "binds") else "right")
    for name, cost in plan.phases.items():
        moved = sum(cost.bytes_read.values()) + sum(cost.bytes_written.values())
        times = (f"{value:.2f}" for value in (cost.seconds, cost.compute, cost.link, cost.disk))
        table.add_row(name, *times, cost.binds, f"{cost.operations / 1e15:.2f}", approximate_bytes(moved))
    table.add_section()
    table.add_row("step", f"{plan.seconds:.2f}", "", "", "", "", "", "")
    return table
