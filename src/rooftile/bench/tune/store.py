"""A table's file, and the command recorded in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rooftile import tuning
from rooftile.bench.rows import write_whole
from rooftile.tuning import Table


class Store:
    """A table's file. It is rewritten after each problem, so that an interrupted run loses nothing."""

    def __init__(self, path: Path, op: str, gpu: str, multiprocessors: int, run: dict[str, Any]) -> None:
        self.path = path
        self.table = Table({"schema": tuning.SCHEMA, "op": op, "gpu": gpu, "multiprocessors": multiprocessors})
        try:
            self.table = tuning.read(path, op, gpu)
            if reason := tuning.other_variant(self.table, multiprocessors):
                raise ValueError(reason)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} can't be added to: {error}; move it away, or give another --out") from None
        self.runs = [*self.table.meta.get("runs", []), run]

    def add(self, key: str, entry: dict[str, Any]) -> None:
        self.table.meta["runs"] = self.runs
        self.table.entries[key] = {**entry, "run": len(self.runs) - 1}
        self.write()

    def write(self) -> None:
        write_whole(self.path, tuning.to_json(self.table))


def command(arguments: Sequence[str]) -> str:
    """The command line as recorded in a table: without this machine's folders."""
    words = ["rooftile"]
    for i, argument in enumerate(arguments):
        if argument != "--out" and not argument.startswith("--out=") and arguments[i - 1 : i] != ["--out"]:
            words.append(Path(argument).name if os.sep in argument else argument)
    return " ".join(words)
