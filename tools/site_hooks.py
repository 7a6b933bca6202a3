"""Hooks of the documentation site (mkdocs.yml): what it takes from outside of docs/.

Pages are written so that their links also work in a checkout. A link out of docs/ to a chart in results/ shows the
chart, whose file is copied into the site. Other links out of docs/ become their text, since the site has no such file.
A line `[NAME](../NAME "included")` is replaced by that file. A line that says where docstrings are is left out.

`<!-- site: commands -->` and `<!-- site: cases -->` stand for text that is made from the code while the site is built.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files

from rooftile import cases, cli
from rooftile.bench.docs.tables import markdown as table
from rooftile.bench.report import number
from rooftile.cases.check import tolerance_rows

ROOT = Path(__file__).resolve().parent.parent
CHARTS = (".png", ".svg")
_INCLUDED = re.compile(r'^\[[^\]]*\]\((\S+) "included"\)$', re.MULTILINE)
_ELSEWHERE = re.compile(r"^Each name below stands for its docstring.*\n\n", re.MULTILINE)
_LINK = re.compile(r"\[([^\[\]]*(?:\[[^\]]*\][^\[\]]*)*)\]\((?!https?:|#)([^)\s]+)\)")
_MADE = re.compile(r"^<!-- site: (\w+) -->$", re.MULTILINE)


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the charts of results/."""
    for path in sorted((ROOT / "results").rglob("*")):
        if path.suffix in CHARTS:
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")
    page.meta.setdefault("search", {"boost": _boost(page.file.src_uri, markdown)})

    def include(match: re.Match[str]) -> str:
        path = posixpath.normpath(f"{folder}/{match[1]}")
        return _relinked((ROOT / path).read_text(encoding="utf-8"), posixpath.dirname(path), folder)

    markdown = _INCLUDED.sub(include, _relinked(_ELSEWHERE.sub("", markdown), folder, folder))
    return _MADE.sub(lambda match: "\n".join(MADE[match[1]]()), markdown)


def _boost(page: str, markdown: str) -> float:
    """How far up the search lists a page: a function's reference before tables that name it in every row."""
    tables = page.startswith("performance/") or page in ("correctness/tolerances.md", "reference/cases.md")
    return 4.0 if "\n::: " in markdown else 0.25 if tables else 1.0


def _relinked(markdown: str, source: str, folder: str) -> str:
    """The Markdown of a file in `source` with its links as a page in `folder` needs them, both relative to the root."""

    def relink(match: re.Match[str]) -> str:
        target, _, anchor = match[2].partition("#")
        path = posixpath.normpath(posixpath.join(source, target))
        if path.startswith("docs/"):
            new = posixpath.relpath(path, folder)
        elif path.startswith("results/") and path.endswith(CHARTS):
            new = posixpath.relpath(f"docs/{path}", folder)
        else:
            return match[1]
        return f"[{match[1]}]({new}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(relink, markdown)


def commands() -> Iterator[str]:
    """Every command by its group in --help: its usage, its description, its options."""
    group: Any = typer.main.get_command(cli.app)
    context = group.context_class(group, info_name="rooftile")
    panel = ""
    for name in group.list_commands(context):
        command = group.commands[name]
        if command.rich_help_panel != panel:
            panel = command.rich_help_panel
            yield f"## {panel}\n"
        inner = command.context_class(command, info_name=name, parent=context)
        usage = " ".join(["rooftile", name, *command.collect_usage_pieces(inner)])
        yield f"### rooftile {name}\n\n    {usage}\n\n{command.help.strip()}\n"
        records = filter(None, (p.get_help_record(inner) for p in command.get_params(inner)))
        # A vertical line would end the cell.
        cells = [(f"`{option.replace('|', '/')}`", " ".join(meaning.split())) for option, meaning in records]
        yield table(("option", "meaning"), [c for c in cells if c[0] != "`--help`"]) + "\n"


CHECKED_ALONE = ("tiny", "edge")  # sets of awkward sizes and modes, which are not timed


def op_cases() -> Iterator[str]:
    """Every case: its formula, gradients and tolerances, and the least traffic of each shape that is measured."""
    tolerances: dict[str, list[tuple[str, ...]]] = {}
    for op, what, dtype, ceiling, reason in tolerance_rows():
        tolerances.setdefault(op, []).append((what, dtype, f"{ceiling:.1e}", reason))
    for name, case in sorted(cases.all_cases().items()):
        yield f"## {name}\n\n    {case.formula}\n"
        gradients = ", ".join(f"`{g}`" for g in case.grads) or "none"
        points = sum(len(case.sets.get(s, ())) for s in CHECKED_ALONE)
        roof = {"copy": "a copy of the same bytes", "gemm": "the slower of a read and a GEMM"}.get(case.roof, case.roof)
        yield f"Gradients: {gradients}. Roof: {roof}. Also checked at {points} sizes and modes of `tiny` and `edge`.\n"
        sets: dict[Any, list[str]] = {}
        for set_name, found in case.sets.items():
            if set_name not in CHECKED_ALONE:
                for point in found:
                    sets.setdefault(str(point), [point]).append(set_name)  # type: ignore[list-item]
        if sets:
            columns = ["shape", "sets"] + [f"{d}, {unit}>" for d in case.directions for unit in ("MB", "GFLOP")]
            yield table(columns, (_traffic(case, shape, *found) for shape, found in sets.items())) + "\n"
        yield table(("of", "dtype", "error at most>", "because"), tolerances[name]) + "\n"


def _traffic(case: cases.OpCase, shape: str, point: Any, *sets: str) -> list[str]:
    itemsize = 2
    cells = [shape, ", ".join(sets)]
    for direction in case.directions:
        cells += [
            number(case.nbytes(point, itemsize, direction) / 1e6, 4),
            number(case.flops(point, direction) / 1e9, 4),
        ]
    return cells


MADE = {"commands": commands, "cases": op_cases}
