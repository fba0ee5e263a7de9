"""Files that commands write: where they go is looked at before the work begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer


def in_a_folder(path: Path | None) -> Path | None:
    """Typer's callback of an option that names a file to write. Raises BadParameter if it cannot be written there."""
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; name a file in it")
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is no folder; create it, or name a file in one that exists")
    return path


def json_option(text: str) -> Any:
    """The option `--json FILE` of a command that also writes its figures."""
    return typer.Option("--json", help=text, callback=in_a_folder)
