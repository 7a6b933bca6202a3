"""The command line. Each command parses its options and calls the package that does the work."""

from rooftile.cli import engine, models, ops, results, serve  # importing them registers their commands
from rooftile.cli.common import DType, SetName, app, choose_mode, console

__all__ = ["DType", "SetName", "app", "choose_mode", "console", "engine", "main", "models", "ops", "results", "serve"]


def main() -> None:
    app()
