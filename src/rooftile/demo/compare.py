"""A model's loss and logits on the text, plain and patched, and the error of each relative to the model in float32."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Sequence
from importlib import resources

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import rooftile
from rooftile.cases.check import NAMES, relative_error, rounding_floor
from rooftile.huggingface import Left
from rooftile.huggingface.small_models import Model, inputs

# Two correct roundings of one sum may differ by as much as each is off, so a patched model may be off by twice what
# the plain one is. A model that is off by less than a rounding of its dtype is held to that.
BOUND = 2.0

# The table's counts, and the kinds of replacements that they are of.
COLUMNS = {
    "norms": ("RMSNorm", "LayerNorm"),
    "+ add": ("residual add + RMSNorm",),
    "GLU": ("SwiGLU", "GeGLU"),
    "bias + act": ("bias + activation",),
    "RoPE": ("RoPE", "QK-norm + RoPE"),
    "+ QK-norm": ("QK-norm + RoPE",),
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Losses in nats per byte, errors relative to float32 with the same weights, and the largest allowed error."""

    title: str
    size: str
    dtype: str
    replaced: dict[str, int]
    left: tuple[Left, ...]
    plain_loss: float
    patched_loss: float
    largest_difference: float
    plain_error: float
    patched_error: float
    bound: float
    undone: bool

    @property
    def passed(self) -> bool:
        return self.undone and self.patched_error <= self.bound


def text(length: int, device: torch.device) -> Tensor:
    """The first bytes of the shipped text, as token ids `(1, length)`."""
    raw = resources.files(__package__).joinpath("roof_tiles.txt").read_bytes()
    return torch.tensor(list(raw[:length]), device=device)[None]


def loss(logits: Tensor, labels: Tensor) -> float:
    """Cross-entropy in float32, where some models take it in their own dtype."""
    return float(torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten()))


@torch.no_grad()
def compare(model: Model, tokens: Tensor, *, dtype: torch.dtype) -> Comparison:
    """Build the model, run it plain, patched and plain again, and in float32."""
    built = model.build(dtype=dtype, device=tokens.device)
    given, predicted = inputs(built, tokens)
    plain = built(**given)
    with rooftile.patch(built) as handle:
        patched = built(**given)
    undone = torch.equal(built(**given).logits, plain.logits)
    size = f"{sum(p.numel() for p in built.parameters()) / 1e6:,.1f}M"

    exact = copy.deepcopy(built).float()
    if hasattr(exact.config, "_experts_implementation"):  # grouped GEMMs lack float32 on some devices
        exact.config._experts_implementation = "eager"
    truth = exact(**given).logits
    plain_error, patched_error = (relative_error(out.logits, truth) for out in (plain, patched))
    return Comparison(
        title=model.title,
        size=size,
        dtype=NAMES[dtype],
        replaced=handle.replaced,
        left=handle.left,
        plain_loss=loss(plain.logits[:, : predicted.shape[1]], predicted),
        patched_loss=loss(patched.logits[:, : predicted.shape[1]], predicted),
        largest_difference=float((plain.logits.float() - patched.logits.float()).abs().max()),
        plain_error=plain_error,
        patched_error=patched_error,
        bound=max(BOUND * plain_error, rounding_floor(dtype)),
        undone=undone,
    )


def show(results: Sequence[Comparison], tokens: int, console: Console) -> None:
    """The table, followed by what was left and why."""
    table = Table(
        title=f"Hugging Face models on {tokens} bytes of text, plain and patched, {results[0].dtype}",
        title_justify="left",
        caption="GLU: SwiGLU or GeGLU. Loss in nats a byte; error: relative, against the same weights in float32. "
        f"The patched model's may be {BOUND:g} times the plain one's. After undo() the logits are bit-identical.",
        caption_justify="left",
    )
    for name in ("model", "size"):
        table.add_column(name, no_wrap=True)
    for name in (*COLUMNS, "loss, plain", "patched", "largest logit difference"):
        table.add_column(name, justify="right")
    for name in ("error, plain", "patched", "bound", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        errors = (f"{e:.2e}" for e in (r.plain_error, r.patched_error, r.bound))
        verdict = "[green]PASS[/]" if r.passed else "[bold red]FAIL[/]"
        replaced = (str(sum(r.replaced[kind] for kind in kinds)) for kinds in COLUMNS.values())
        losses = (f"{r.plain_loss:.6f}", f"{r.patched_loss:.6f}", f"{r.largest_difference:.2e}")
        table.add_row(r.title, r.size, *replaced, *losses, *errors, verdict)
    console.print(table)
    reasons: dict[str, Counter[str]] = {}
    for r in results:
        for left in r.left:
            reasons.setdefault(f"{left.kind}: {left.reason}", Counter())[r.title] += left.count
    for reason, counts in reasons.items():
        where = ", ".join(f"{count} in {title}" for title, count in counts.items())
        console.print(f"left, {reason} ({where})", style="dim", markup=False, highlight=False)
    for r in results:
        if not r.undone:
            console.print(f"{r.title}: undo() did not give the plain logits back", style="bold red")


def show_short(results: Sequence[Comparison], tokens: int, console: Console) -> None:
    """A line for each model."""
    passed = sum(r.passed for r in results)
    console.print(
        f"\n[bold]Models[/]: {passed}/{len(results)} passed; transformers' models, random weights, "
        f"{tokens} bytes of text, {results[0].dtype}\n"
        f"  error: against float32, at most {BOUND:g} times the plain model's; undo() restores all bits",
        highlight=False,
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("  model", "replaced", "left", "loss, plain", "patched", "error, plain", "patched", ""):
        table.add_column(name, justify="right" if table.columns else "left", no_wrap=True)
    for r in results:
        parts = (str(sum(r.replaced.values())), str(sum(left.count for left in r.left)))
        figures = (f"{r.plain_loss:.5f}", f"{r.patched_loss:.5f}", f"{r.plain_error:.1e}", f"{r.patched_error:.1e}")
        verdict = "[green]PASS[/]" if r.passed else "[bold red]FAIL[/]"
        table.add_row(f"  {r.title}", *parts, *figures, verdict)
    console.print(table)
