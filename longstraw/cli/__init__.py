"""The `longstraw` command."""

from longstraw.cli.main import app, main

__all__ = ["app", "main"]
