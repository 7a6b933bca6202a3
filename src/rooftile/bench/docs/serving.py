"""The documentation's tables of an engine under load and of speculative decoding."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rooftile.bench import load, load_charts, speculation
from rooftile.bench.docs.sweeps import FROM_PAGES
from rooftile.bench.docs.tables import NO_RESULTS, aged, is_older, machine, markdown
from rooftile.bench.report import number, ratio

RATIOS = {"of_offline": "of the engine", "ratio_to_best_peer": "over vLLM"}  # of tokens/s


def _files(results: Path, folder: str) -> Iterator[tuple[Path, Mapping[str, Any], list[dict[str, Any]]]]:
    for path in sorted(results.glob(f"*/{folder}/*.json"), key=lambda path: (path.parent, path.stem)):
        data = json.loads(path.read_text(encoding="utf-8"))
        yield path, data["meta"], data["rows"]


def _machine(meta: Mapping[str, Any], suite: str) -> str:
    return f"{machine(meta)}.{aged({'': is_older('decode', meta, suite)})}"


def under_load(results: Path) -> str:
    """Every row of `rooftile bench serve`, below a chart where there are loads enough for a line."""
    parts = []
    for path, meta, rows in _files(results, load_charts.FOLDER):
        asked = meta["workload"]
        lengths = f"{asked['prompt']} + {asked['new']} tokens{'' if asked['fixed'] else ' on average'}"
        prefix = f" after {asked['prefix']} that all have in common" if asked.get("prefix") else ""
        cells = [[*load.cells(row), number(row.get("host_us")), *map(ratio, map(row.get, RATIOS))] for row in rows]
        columns = (*load.COLUMNS, "host, us a step>", *(f"{said}>" for said in RATIOS.values()))
        said = f"`{meta['model']}`, {lengths}{prefix}{_engines(rows)}"
        parts += [f"{said}: {_machine(meta, 'serve')}{_starts(rows)}", ""]
        if (chart := load_charts.of_page(path, FROM_PAGES)) is not None:
            shown = dict.fromkeys(panel.title for panel in chart.panels)
            parts += [f"![{meta['model']} under load: {', '.join(shown)}]({chart.path.as_posix()})", ""]
        parts += [markdown(columns, cells), ""]
    return "\n".join(parts).strip() or NO_RESULTS


def _starts(rows: list[dict[str, Any]]) -> str:
    """How long each engine took to start; of one that was started again for some rows, the last one."""
    said = {}
    for row in rows:
        if "load_s" in row:
            text = f"`{row['impl']}` loaded in {row['load_s']:.0f} s"
            if row.get("load_gbs"):
                text += f" ({number(row['load_gbs'])} GB/s)"
            if row.get("start_to_first_token_s"):
                text += f", first token {row['start_to_first_token_s']:.0f} s after the start"
            said[row["impl"]] = text
    return f" {'; '.join(said.values())}." if said else ""


def _engines(rows: list[dict[str, Any]]) -> str:
    """The sizes of the engines, where rows say them."""
    found = set()
    for engine in (row["engine"] for row in rows if "engine" in row):
        impl = f"vLLM {engine['version']}: " if "version" in engine else ""
        sizes = f"{engine.get('max_batch')} sequences at a time and {engine.get('step_tokens')} tokens of a step"
        found.add(f"{impl}at most {sizes}")
    return f", {', '.join(sorted(found))}" if found else ""


def speculated(results: Path, text: bool = False) -> str:
    """Every row of `rooftile bench speculation`, or of `rooftile bench speculation --text`."""
    parts = []
    for _, meta, rows in _files(results, speculation.FOLDER):
        if ("text" in rows[0]) is not text:
            continue
        if text:
            dtype = meta["dtype"].removeprefix("torch.")
            draft = f", with proposals of `{meta['draft']}`" if meta.get("draft") else ""
            said = f"`{meta['model']}` in {dtype}{draft}, {meta['new']} tokens after each prompt"
        else:
            said = f"`{meta['model']}`, {meta['tokens']} proposals a step, {meta['prompt']} + {meta['new']} tokens"
        parts += [f"{said}: {_machine(meta, 'e2e')}", "", markdown(*speculation.table(rows)), ""]
    return "\n".join(parts).strip() or NO_RESULTS
