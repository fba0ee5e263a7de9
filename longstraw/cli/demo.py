"""`longstraw demo`: the main job on real input, with the ordinary step beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from longstraw.cli.outputs import json_option


def demo(
    steps: Annotated[int, typer.Option(help="Optimizer steps, each with responses sampled anew.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 1024,
    group: Annotated[int, typer.Option(help="Responses in each step.")] = 6,
    seed: Annotated[int, typer.Option(help="Seed of the text, the fact in it, and sampling.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    scratch: Annotated[
        Path | None,
        typer.Option(help="Folder for pages that overflow.", exists=True, file_okay=False),
    ] = None,
    json_out: Annotated[Path | None, json_option("Also write all figures here.")] = None,
) -> None:
    """Train a real model on a long prompt, and take one gradient the ordinary way beside it.

    A fact is hidden in Python's own documentation, SmolLM2-135M-Instruct answers a question about it, and
    GRPO steps follow a checkable reward. Tiers are small, so that pages overflow to host memory and to disk.
    With the defaults it takes under 5 minutes and 6 GiB on two CPU cores. On a terminal it shows how far it is;
    elsewhere it prints nothing before its tables.
    """
    # torch and transformers take seconds to import, and --help needs neither.
    from longstraw.cli.device import parse_device
    from longstraw.demo import DemoOptions, run_demo
    from longstraw.demo.view import TerminalWatcher, show

    options = DemoOptions(steps=steps, prompt_tokens=prompt_tokens, group=group, seed=seed)
    result = run_demo(options, TerminalWatcher(), device=parse_device(device), scratch=scratch)
    if json_out is not None:
        json_out.write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
    show(result, Console(highlight=False))
