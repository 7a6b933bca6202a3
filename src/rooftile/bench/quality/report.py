"""What `rooftile bench quality` shows, and the documentation's table of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from rooftile.bench import report
from rooftile.bench.quality.rows import Row, Text

COLUMNS = (
    "attention", "coherent", "loss>", "log-prob. off>", "greedy: surprise>", "as float32>", "sampled: surprise>",
    "as float32>", "compiled", "any length",
)  # fmt: skip


def _of(text: Text | None, what: str) -> str:
    value = None if text is None else getattr(text, what)
    if value is None:  # not measured, or NaN, read again
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if what == "logprob_off":
        return f"{value:.2g}"
    return f"{value:.0%}" if what in ("same", "sampled_same") else f"{value:.4f}"


def cells(row: Row) -> list[str]:
    """A row under `COLUMNS`: each in eager and compiled."""
    if row.eager is None:
        return [row.title, row.status, *["–"] * (len(COLUMNS) - 2)]
    shown = ("coherent", "loss", "logprob_off", "surprise", "same", "sampled_surprise", "sampled_same")
    pairs = [" / ".join(_of(text, what) for text in (row.eager, row.compiled)) for what in shown]
    lengths = f"no: {', '.join(map(str, row.wrong_lengths))}" if row.wrong_lengths else "yes"
    return [row.title, *pairs, row.compiles or "–", lengths]


def caption(meta: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """What the columns are."""
    lengths = next((", ".join(row.lengths) for row in rows if row.lengths), "none")
    unit = meta.get("unit", "byte")
    sampled = "" if "temperature" not in meta else (
        f"; of those that it draws at temperature {meta['temperature']}, {meta['sampled_surprise_fp32']:.4f}"
    )  # fmt: skip
    return (
        f"The model {meta['model']} in {meta['dtype']}, in eager / compiled, with each kernel as its attention. Loss: "
        f"nats a {unit} on {meta['text_bytes']:,} held-out {unit}s, in windows of {meta['window']}; in float32 it is "
        f"{meta['loss_fp32']:.4f}. Log-prob. off: the mean distance of their log-probabilities from those in float32. "
        f"Surprise: nats a {unit}, to the model in float32, of {meta['new']} {unit}s that continue prompts of "
        f"{', '.join(map(str, meta['prompts']))}; of its own greedy ones it is {meta['surprise_fp32']:.4f}{sampled}. "
        f"As float32: the share of them before the first that is not its own, all drawn with the same seeds. "
        f"Coherent: a loss off by at most {meta['loss_off']}, and surprises of at most the loss, or of its own. "
        f"Compiled by {meta['backend']}, with dynamic shapes; whole: in one graph. Any length: logits at {lengths}."
    )


def show(console: Console, meta: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """The table, then what each kernel wrote, and why one is absent or failed."""
    note = f" ({report.NO_MEASUREMENT})" if "note" in meta else ""
    table = Table(
        title=f"attention and the text that comes of it{note}", title_justify="left", caption=caption(meta, rows),
        caption_justify="left",
    )  # fmt: skip
    for name in COLUMNS:
        justify: Literal["left", "right"] = "right" if name.endswith(">") else "left"
        table.add_column(name.rstrip(">"), justify=justify, no_wrap=name == COLUMNS[0])
    for row in rows:
        table.add_row(*cells(row))
    wide = console if console.is_terminal else Console(file=console.file, width=report.WIDTH)
    wide.print(report.without_dashes(table))
    own = {"greedy": meta["sample_fp32"], "sampled": meta["sampled_fp32"]}
    for which, text in own.items():
        wide.print(f"float32, {which}: {text!r}", markup=False, highlight=False)
    for row in rows:
        for how, text in (("eager", row.eager), ("compiled", row.compiled)):
            for which, said in () if text is None else (("greedy", text.sample), ("sampled", text.sampled)):
                if said != own[which]:
                    wide.print(f"{row.title}, {how}, {which}: {said!r}", markup=False, highlight=False)
        if row.message:
            wide.print(f"{row.title}: {row.status}: {row.message}", markup=False, highlight=False)
