"""Which calls have different machine code than in an earlier `rooftile inspect --json`.

`rooftile inspect --against OLD.json` compiles and compares; `python -m rooftile.inspect.compare OLD.json NEW.json`
compares two files. Names of kernels are ignored. Both print, for each moved call, its old kernels and its new ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Fields = Mapping[str, Any]  # a row of the JSON file
Call = tuple[str, str, str, str]  # target, op, direction, dtype

# Kernels that agree in these are the same: the instructions, the launch, and its shared memory.
_IDENTITY = ("machine_code", "num_warps", "num_ctas", "shared")
_SHOWN = ("registers", "spills", "instructions", "shared")


def _line(call: Call, points: Sequence[str]) -> str:
    more = f" and {len(points) - 2} more" if len(points) > 2 else ""
    return f"{' '.join(call)}: {', '.join(points[:2])}{more}"


@dataclasses.dataclass(frozen=True)
class Move:
    """Calls of one op whose kernels differ: those in `old` alone and those in `new` alone."""

    call: Call
    points: tuple[str, ...]
    old: tuple[Fields, ...]
    new: tuple[Fields, ...]

    def __str__(self) -> str:
        lines = [_line(self.call, self.points)]
        for sign, kernels in (("-", self.old), ("+", self.new)):
            for kernel in kernels:
                figures = ", ".join(f"{name} {kernel[name]}" for name in _SHOWN)
                lines.append(f"  {sign} {kernel['name']} {kernel['machine_code']}: {figures}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What moved, the number of points that did not, and by call the points that only one of the files has."""

    moves: tuple[Move, ...]
    unmoved: int
    only_old: Mapping[Call, Sequence[str]]
    only_new: Mapping[Call, Sequence[str]]

    def __str__(self) -> str:
        lines = [str(move) for move in self.moves]
        lines += [f"only before: {_line(call, points)}" for call, points in self.only_old.items()]
        lines += [f"only now: {_line(call, points)}" for call, points in self.only_new.items()]
        moved = sum(len(move.points) for move in self.moves)
        return "\n".join([*lines, f"{self.unmoved} calls have the machine code they had, {moved} have another"])


def _identity(row: Fields) -> tuple[Any, ...]:
    return tuple(row[name] for name in _IDENTITY)


def _by_point(
    rows: Iterable[Fields], renamed: Mapping[str, str]
) -> dict[Call, dict[str, dict[tuple[Any, ...], Fields]]]:
    """For each call, by point, its kernels by their identity."""
    found: dict[Call, dict[str, dict[tuple[Any, ...], Fields]]] = {}
    for row in rows:
        if "name" not in row:  # excluded, or it did not compile
            continue
        call = (row["arch"], renamed.get(row["op"], row["op"]), row["direction"], row["dtype"])
        for point in row["points"]:
            found.setdefault(call, {}).setdefault(point, {})[_identity(row)] = row
    return found


def compare(old: Sequence[Fields], new: Sequence[Fields], renamed: Mapping[str, str] | None = None) -> Comparison:
    """Compare the rows of two JSON files, point by point. Ops that only the older file has are ignored.

    A point with another name in the other file (its options were renamed) is compared with all kernels of the op
    there. If each is among them, it has not moved.

    Args:
        old: the "rows" of the earlier file.
        new: those of the later one.
        renamed: new names of ops by their old names; several ops may have become one.

    Raises:
        ValueError: a file was written without hashes.
    """
    for rows, which in ((old, "earlier"), (new, "later")):
        if any("name" in row and not row.get("machine_code") for row in rows):
            raise ValueError(f"the {which} file has no hashes of machine code")
    before, now = _by_point(old, renamed or {}), _by_point(new, {})
    asked = {call[:2] for call in now}
    unmoved = 0
    moves: dict[tuple[Any, ...], Move] = {}
    only_old: dict[Call, list[str]] = {}
    only_new: dict[Call, list[str]] = {}
    for call in dict.fromkeys([*now, *(call for call in before if call[:2] in asked)]):
        ours, theirs = now.get(call, {}), before.get(call, {})
        for point in dict.fromkeys([*ours, *theirs]):
            if point in ours and point in theirs:
                gone = {k: v for k, v in theirs[point].items() if k not in ours[point]}
                come = {k: v for k, v in ours[point].items() if k not in theirs[point]}
                if not gone and not come:
                    unmoved += 1
                    continue
                key = (call, frozenset(gone), frozenset(come))
                points = (*moves[key].points, point) if key in moves else (point,)
                moves[key] = Move(call, points, tuple(gone.values()), tuple(come.values()))
                continue
            there, only = (theirs, only_new) if point in ours else (ours, only_old)
            known = {identity for kernels in there.values() for identity in kernels}
            if known.issuperset((ours if point in ours else theirs)[point]):
                unmoved += point in ours
            else:
                only.setdefault(call, []).append(point)
    return Comparison(tuple(moves.values()), unmoved, only_old, only_new)


def read(path: Path) -> dict[str, Any]:
    """Read a file of `rooftile inspect --json`.

    Raises:
        ValueError: it is not such a file.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or not {"meta", "rows"} <= data.keys():
        raise ValueError(f"{path} is no file of `rooftile inspect --json`")
    return data


def read_renamed(path: Path | None) -> dict[str, str]:
    """A JSON object from old names of ops to new ones; empty without a file.

    Raises:
        ValueError: it holds something else.
    """
    if path is None:
        return {}
    names = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{path} is no JSON object from earlier names of ops to those of now")
    return names


def notes(old: Fields, new: Fields) -> list[str]:
    """Reasons in "meta" why two files may differ although no kernel changed."""
    return [
        f"the earlier file has {name} {old.get(name)}, the later one {new.get(name)}"
        for name in ("triton", "tuning")
        if old.get(name) != new.get(name)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rooftile.inspect.compare", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--renamed", type=Path, help="JSON object from earlier names of ops to those of now")
    given = parser.parse_args()
    try:
        old, new = read(given.old), read(given.new)
        compared = compare(old["rows"], new["rows"], read_renamed(given.renamed))
    except ValueError as error:
        parser.error(str(error))
    print("\n".join([*notes(old["meta"], new["meta"]), str(compared)]))
    return 1 if compared.moves or compared.only_new else 0


if __name__ == "__main__":
    sys.exit(main())
