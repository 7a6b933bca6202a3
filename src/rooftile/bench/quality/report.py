"""What `rooftile bench quality` shows, and the documentation's table of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from rooftile.bench import report
from rooftile.bench.quality.rows import Row, Text

COLUMNS = (
    "attention", "coherent, eager", "compiled", "loss, eager>", "compiled>", "surprise, eager>", "compiled>",
    "as float32>", "torch.compile", "any length",
)  # fmt: skip


def _of(text: Text | None, what: str) -> str:
    if text is None:
        return "–"
    value = getattr(text, what)
    if value is None:  # NaN, read again
        return "–"
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:.4f}"


def cells(row: Row) -> list[str]:
    """A row under `COLUMNS`."""
    if row.eager is None:
        return [row.title, row.status, *["–"] * (len(COLUMNS) - 2)]
    texts = [_of(text, what) for what in ("coherent", "loss", "surprise") for text in (row.eager, row.compiled)]
    lengths = f"no: {', '.join(map(str, row.wrong_lengths))}" if row.wrong_lengths else "yes"
    return [row.title, *texts, f"{row.eager.same:.0%}", row.compiles, lengths]


def caption(meta: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """What the columns are."""
    lengths = next((", ".join(row.lengths) for row in rows if row.lengths), "none")
    return (
        f"The byte model in {meta['dtype']}, by transformers, with each kernel as its attention. Loss: nats a byte on "
        f"{meta['text_bytes']:,} held-out bytes, in windows of {meta['window']}; in float32 it is "
        f"{meta['loss_fp32']:.4f}. Surprise: nats a byte, to the model in float32, of {meta['new']} bytes that were "
        f"continued greedily after prompts of {', '.join(map(str, meta['prompts']))} bytes; of its own it is "
        f"{meta['surprise_fp32']:.4f}. As float32: the share of them, in eager, before the first that differs. "
        f"Coherent: a loss off by at most {meta['loss_off']}, and a surprise below the loss. Compiled by "
        f"{meta['backend']}, with dynamic shapes; whole: in one graph. Lengths: {lengths}."
    )


def show(console: Console, meta: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """The table, then what each kernel wrote, and why one is absent or failed."""
    note = f" ({report.NO_MEASUREMENT})" if "note" in meta else ""
    table = Table(
        title=f"attention and the text that comes of it{note}", title_justify="left", caption=caption(meta, rows),
        caption_justify="left",
    )  # fmt: skip
    for name in COLUMNS:
        table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left")
    for row in rows:
        table.add_row(*cells(row))
    wide = console if console.is_terminal else Console(file=console.file, width=report.WIDTH)
    wide.print(table)
    wide.print(f"float32: {meta['sample_fp32']!r}", markup=False, highlight=False)
    for row in rows:
        for how, text in (("eager", row.eager), ("compiled", row.compiled)):
            if text is not None and not (text.coherent and text.sample == meta["sample_fp32"]):
                wide.print(f"{row.title}, {how}: {text.sample!r}", markup=False, highlight=False)
        if row.message:
            wide.print(f"{row.title}: {row.status}: {row.message}", markup=False, highlight=False)
