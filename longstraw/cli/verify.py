"""`longstraw verify`: the gradients of the user's own model, against plain autograd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from longstraw.cli.outputs import json_option
from longstraw.errors import ConfigError

if TYPE_CHECKING:
    from longstraw.verify import VerifyResult

_WORST = 10


def verify(
    model_dir: Annotated[
        Path, typer.Argument(help="Folder of a transformers causal LM.", exists=True, file_okay=False)
    ],
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt, drawn at random.")] = 100,
    responses: Annotated[int, typer.Option(help="Responses, of unequal length, the last of 1 token.")] = 3,
    response_tokens: Annotated[int, typer.Option(help="Tokens of the longest response.")] = 12,
    mode: Annotated[
        str, typer.Option(help="exact, or detached (compared with autograd through a detached prompt).")
    ] = "exact",
    dtype: Annotated[str, typer.Option(help="float64 (tells most), float32, bfloat16, float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    tolerance: Annotated[
        float | None, typer.Option(help="Largest relative error that passes.", show_default="by dtype")
    ] = None,
    gguf_file: Annotated[str | None, typer.Option(help="Name of a GGUF file in MODEL_DIR to load.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random tokens and loss weights.")] = 0,
    json_out: Annotated[Path | None, json_option("Also write every parameter here.")] = None,
) -> None:
    """Compare every parameter's gradient with plain autograd on unpadded prompt+response rows.

    The error of a parameter is the norm of the difference over the norm of plain autograd's gradient. A
    parameter that has no gradient there must have none here. Exit status 1 if one differs by more than the
    tolerance.
    """
    if mode not in ("exact", "detached"):
        raise ConfigError(f"--mode {mode}: use exact or detached")
    # torch and transformers take seconds to import, and --help needs neither.
    from longstraw.cli.device import parse_device, parse_dtype
    from longstraw.integrations.transformers.experts import loop_where_needed
    from longstraw.verify import VerifyOptions, verify_model

    checked_mode: Literal["exact", "detached"] = "exact" if mode == "exact" else "detached"
    options = VerifyOptions(
        prompt_tokens=prompt_tokens,
        responses=responses,
        response_tokens=response_tokens,
        tolerance=tolerance,
        mode=checked_mode,
        seed=seed,
    )
    model = _load(model_dir, gguf_file, parse_dtype(dtype)).to(parse_device(device))
    looped = loop_where_needed(model)
    result = verify_model(model, options)
    if json_out is not None:
        json_out.write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
    _print(result, looped)
    if result.failures:
        raise typer.Exit(1)


def _load(directory: Path, gguf_file: str | None, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM

    if gguf_file is not None and not (directory / gguf_file).is_file():
        raise ConfigError(f"--gguf-file {gguf_file}: no such file in {directory}")
    try:
        return AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=dtype, local_files_only=True, gguf_file=gguf_file
        ).eval()
    except (OSError, ValueError) as error:
        hint = "" if gguf_file else "; if the folder holds a .gguf file, name it with --gguf-file"
        raise ConfigError(f"cannot load a causal LM from {directory}: {error}{hint}") from error


def _print(result: VerifyResult, looped: str | None) -> None:
    console = Console()
    worst = result.differences[:_WORST]
    table = Table(title=f"the {len(worst)} worst of {len(result.differences)} parameters")
    table.add_column("parameter", overflow="fold")
    table.add_column("relative error", justify="right")
    table.add_column("norm", justify="right")
    table.add_column("note")
    failed = {difference.name for difference in result.failures}
    for difference in worst:
        table.add_row(
            difference.name,
            f"{difference.relative:.2e}",
            f"{difference.norm:.2e}",
            difference.note,
            style="red" if difference.name in failed else None,
        )
    console.print(table)
    if looped is not None:
        console.print(
            f"experts ran in a loop (experts_implementation='eager'), on both sides: {looped}", soft_wrap=True
        )
    console.print(f"largest difference of a log-prob: {result.logprob_difference:.1e} nats")
    console.print(f"tolerance: {result.tolerance:g} ({result.reason})")
    if failed:
        console.print(f"FAILED: {len(failed)} parameters differ by more", style="bold red")
    else:
        console.print("passed: every parameter agrees", style="bold green")
