"""The documentation's tables of training: results/<gpu>/training/."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rooftile.bench.docs.tables import (
    NO_RESULTS,
    against,
    by_gpu,
    closing,
    groups_of,
    impls_of,
    machine,
    machines,
    markdown,
    ours_of,
)
from rooftile.bench.report import number, ratio
from rooftile.bench.rows import OURS, Row
from rooftile.bench.training import SUITE
from rooftile.bench.training import convergence as convergence_
from rooftile.bench.training.steps import BATCH, COLUMNS, STEP, cells


def _memory(row: Row) -> int | None:
    """Bytes above inputs and outputs; an optimizer's step has no outputs."""
    return row.peak_bytes if row.extra_bytes is None else row.extra_bytes


def _mib(nbytes: int | None) -> str:
    return "–" if nbytes is None else number(nbytes / 2**20)


def _cells(group: list[Row], peers: Sequence[str]) -> list[str]:
    (ours,) = ours_of([group])
    cells = {r.impl: f"{number(r.us, 4)} ({_mib(_memory(r))})" if r.us is not None else r.status for r in group}
    figures = [cells[OURS], number(ours.gbs, 4), number(ours.tflops), ratio(ours.roof_fraction, 3), *against(group)]
    return [ours.place, *figures, *(cells.get(name, "–") for name in peers)]


def steps(results: Path) -> str:
    """Whole training steps, and the largest batches that fit."""
    parts = []
    for files in by_gpu(results, SUITE).values():
        for op in (STEP, BATCH):
            own = [(meta, [r for r in rows if r.op == op]) for meta, rows in files]
            if not any(rows for _, rows in own):
                continue
            parts += machines(own)
            found = groups_of(own)
            if op == STEP:
                parts += [markdown(COLUMNS, (cells(row, group) for group in found for row in group)), ""]
                continue
            impls = list(dict.fromkeys(r.impl for group in found for r in group))
            made = [{r.impl: str(r.dims["batch"]) if r.status == "ok" else r.status for r in group} for group in found]
            lines = ([g[0].shape, *(m.get(i, "–") for i in impls)] for g, m in zip(found, made, strict=True))
            parts += [markdown(("largest batch", *(f"{i}>" for i in impls)), lines), ""]
    return "\n".join(parts).strip() or NO_RESULTS


def convergence(results: Path) -> str:
    """Whole trainings of each family beside eager's and torch.compile's."""
    parts = []
    for path in sorted(results.glob(f"*/{convergence_.FOLDER}/convergence.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        runs, usual = data["runs"], convergence_.typical(data["runs"])
        parts += [f"{machine(data['meta'])}.", ""]
        parts += [markdown(convergence_.COLUMNS, (convergence_.cells(each, usual) for each in runs)), ""]
        parts += [
            f"{each['name']} {each['dtype']}: {why}."
            for each in runs
            if (why := convergence_.verdict(each, usual)) != "ok"
        ]
        parts += [convergence_.RATIOS, ""]
        if means := convergence_.means_of(runs):
            parts += [f"bf16: off from eager, over `torch.compile`'s, geometric means over the families: {means}.", ""]
    return "\n".join(parts).strip() or NO_RESULTS


def from_scratch(results: Path) -> str:
    """What examples/train_bytes.py printed: losses on the way, and the texts that its model wrote."""
    parts = []
    for path in sorted(results.glob(f"*/{SUITE}/from_scratch/train_bytes.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        run, last = data["run"], data["run"]["losses"][-1]["step"]
        shown = [each for i, each in enumerate(run["losses"]) if i % 5 == 0 or each["step"] == last]
        parts += [
            f"{machine(data['meta'])}: {run['parameters'] / 1e6:.1f}M parameters, {run['text_bytes'] / 1e6:.1f} MB of "
            f"text, {run['steps']} steps of {run['batch']} x {run['context']} bytes.",
            "",
            markdown(
                ("step>", "loss, nats a byte>", "tokens/s>"),
                # The first step compiles.
                ([str(e["step"]), f"{e['loss']:.3f}", f"{e['tokens_s']:,.0f}" if e["step"] else "–"] for e in shown),
            ),
            "",
            f"On files that it was not trained on, the loss is {run['held_out_loss']:.3f} nats a byte. It wrote:",
            "",
        ]
        for text in run["texts"]:
            parts += [
                "````text",
                *("".join(c if c.isprintable() or c == "\n" else "?" for c in text).splitlines()),
                "````",
                "",
            ]
    return "\n".join(parts).strip() or NO_RESULTS


def table(results: Path) -> str:
    """Every row of losses and optimizers, slower ones included: a table for each op and dtype."""
    parts = []
    for files in by_gpu(results, SUITE).values():
        files = [(meta, [r for r in rows if r.op not in (STEP, BATCH)]) for meta, rows in files]
        by_op: dict[tuple[str, str, str], list[list[Row]]] = {}
        for group in groups_of(files):
            by_op.setdefault((group[0].op, group[0].direction, group[0].dtype), []).append(group)
        parts += machines(files)
        for (op, direction, dtype), found in by_op.items():
            peers = impls_of(found)
            figures = ("us (MiB)>", "GB/s>", "TFLOP/s>", "of the roof>", "over eager>", "ratio>", "best baseline")
            columns = ("shape", *figures, *(f"{name}>" for name in peers))
            parts += [f"**`{op}` {direction}, {dtype}**", "", markdown(columns, (_cells(g, peers) for g in found)), ""]
            parts += [f"`{op}` {direction}, {dtype}, speedup over the best baseline, {closing(found)}.", ""]
            notes = dict.fromkeys(f"`{r.impl}` {r.message}." for g in found for r in g if r.us and r.message)
            parts += [part for note in notes for part in (note, "")]
    return "\n".join(parts).strip() or NO_RESULTS
