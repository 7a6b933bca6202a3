"""`rooftile bench quality`: what a trained model makes of each attention kernel, in eager and under torch.compile.

The model is the byte model (rooftile/byte_model), or another of bytes, in transformers' own code, with each kernel
in turn as its attention. Measured are:

- the loss on held-out text, compared with that of the same weights in float32;
- continuations of that text, a byte at a time, each by a forward over the whole sequence, so that every length from the
  prompt's on occurs. Their likelihood to the model in float32 says whether they are text;
- logits at lengths that are not a multiple of any tile.

A kernel's text is coherent if the loss is off by at most `LOSS_OFF` and its continuations surprise the float32 model no
more than human text does. Greedy continuations are far more likely than that, those of a broken kernel far less.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cross_entropy

from rooftile import byte_model, runtime
from rooftile.bench import report as reports
from rooftile.bench.info import machine, version
from rooftile.bench.quality.kernels import NAIVE, Kernel
from rooftile.bench.quality.kernels import kernels as all_kernels
from rooftile.bench.quality.report import show
from rooftile.bench.quality.rows import Row, Text, write
from rooftile.bench.rows import gpu_slug
from rooftile.byte_model import library_text
from rooftile.cases.check import NAMES, relative_error

Logits = Callable[[Tensor], Tensor]  # ids (B, T) to (B, T, V), float32

LOSS_OFF = 0.01  # nats a byte; rounding to bfloat16 moves the loss by some 0.001
BOUND = 2.0  # two right kernels may each be off by what the naive one is off, to either side


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to compare on; None is the mode's own choice."""

    model: Path | None = None
    names: Sequence[str] | None = None
    dtype: torch.dtype = torch.bfloat16
    new: int | None = None
    windows: int | None = None
    prompts: Sequence[int] | None = None
    lengths: Sequence[int] | None = None
    backend: str | None = None
    json: Path | None = None
    results: Path | None = None

    def filled(self, measures: bool) -> Settings:
        """With the mode's choices instead of None."""
        return dataclasses.replace(
            self,
            model=self.model or byte_model.folder(),
            new=self.new or (64 if measures else 4),
            windows=self.windows or (64 if measures else 1),
            prompts=self.prompts or ((17, 33, 65, 127, 200, 257) if measures else (5,)),
            lengths=self.lengths or ((1, 2, 17, 63, 65, 127, 129, 257, 511) if measures else (1, 17)),
            # Inductor makes kernels for a GPU; in the interpreter what is compiled is traced, and run as it is.
            backend=self.backend or ("inductor" if measures else "aot_eager"),
        )


def sentence(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"[:200]


class Quality:
    """One run: the model in float32, what it writes, and the rows so far."""

    def __init__(self, settings: Settings, console: Console) -> None:
        from transformers import AutoModelForCausalLM

        self.device = runtime.default_device()
        measures = runtime.MODE is runtime.Mode.GPU
        if not measures and settings.results is not None:
            raise ValueError("--results is for a GPU's kernels, and the interpreter has none of them; use --json")
        self.settings, self.console = settings.filled(measures), console
        s = self.settings
        known = {k.name: k for k in all_kernels()}
        if unknown := [name for name in s.names or () if name not in known]:
            raise ValueError(f"unknown kernel {', '.join(unknown)}; known kernels: {', '.join(known)}")
        self.order = list(known)
        self.kernels = [k for k in known.values() if s.names is None or k.name in s.names or k.name == NAIVE]

        assert s.model is not None
        path = s.model

        def load(dtype: torch.dtype) -> Any:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
            return model.eval().to(self.device)

        self.exact, self.model = load(torch.float32), load(s.dtype)
        window = min(self.model.config.max_position_embeddings, 512) if measures else 48
        text = library_text.tokens(library_text.held_out_files())
        self.rows_of_text = library_text.windows(text, window, s.windows).to(self.device)
        assert s.prompts is not None
        assert s.lengths is not None
        # Each prompt from a place of its own.
        starts = range(1000, 1000 + 1000 * len(s.prompts), 1000)
        self.prompts = [text[at : at + n].tolist() for at, n in zip(starts, s.prompts, strict=True)]
        self.at_lengths = {n: text[5000 : 5000 + n][None].to(self.device) for n in s.lengths}
        self.reference = self.logits_of(self.exact)
        with torch.no_grad():
            self.own_loss = self.loss(self.reference)
            self.own = [self.continue_(self.reference, prompt) for prompt in self.prompts]
            self.own_surprise = self.surprise(self.own)
            self.expected = {n: self.reference(ids) for n, ids in self.at_lengths.items()}
        self.bounds: dict[int, float] = {}
        self.rows: list[Row] = []
        self.meta: dict[str, Any] = {
            **machine(),
            "transformers": version("transformers"),
            "suite": "quality",
            "model": path.name,
            "dtype": NAMES[s.dtype],
            "loss_fp32": self.own_loss,
            "surprise_fp32": self.own_surprise,
            "sample_fp32": self.decoded(self.own[-1]),
            "text_bytes": self.rows_of_text.numel(),
            "window": window,
            "prompts": list(s.prompts),
            "new": s.new,
            "lengths": list(s.lengths),
            "backend": s.backend,
            "loss_off": LOSS_OFF,
        }
        if not measures:
            self.meta["note"] = reports.NO_MEASUREMENT

    @staticmethod
    def logits_of(model: Callable[..., Any]) -> Logits:
        def logits(ids: Tensor) -> Tensor:
            return model(ids, use_cache=False).logits.float()

        return logits

    def loss(self, logits: Logits) -> float:
        total = 0.0
        for some in self.rows_of_text.split(16):
            found = logits(some)[:, :-1]
            total += float(cross_entropy(found.flatten(0, 1), some[:, 1:].flatten(), reduction="sum"))
        return total / self.rows_of_text[:, 1:].numel()

    def continue_(self, logits: Logits, prompt: list[int]) -> list[int]:
        """The greedy continuation of a prompt, each byte by a forward over all before it, without end tokens."""
        assert self.settings.new is not None
        ids = torch.tensor([prompt], device=self.device)
        for _ in range(self.settings.new):
            ids = torch.cat((ids, logits(ids)[:, -1:].argmax(-1)), dim=1)
        return ids[0, len(prompt) :].tolist()

    def surprise(self, continuations: Sequence[list[int]]) -> float:
        """Nats a byte of those continuations, to the model in float32."""
        total, count = 0.0, 0
        for prompt, new in zip(self.prompts, continuations, strict=True):
            ids = torch.tensor([prompt + new], device=self.device)
            found = self.reference(ids)[0, len(prompt) - 1 : -1]
            total += float(cross_entropy(found, ids[0, len(prompt) :], reduction="sum"))
            count += len(new)
        return total / count

    def decoded(self, tokens: Iterable[int]) -> str:
        return bytes(t for t in tokens if t < 256).decode(errors="replace")

    def text(self, logits: Logits) -> Text:
        loss = self.loss(logits)
        found = [self.continue_(logits, prompt) for prompt in self.prompts]
        surprise = self.surprise(found)
        same = sum(_common(a, b) for a, b in zip(found, self.own, strict=True)) / sum(map(len, found))
        coherent = abs(loss - self.own_loss) <= LOSS_OFF and surprise <= self.own_loss  # not where one is NaN
        return Text(loss, surprise, same, self.decoded(found[-1]), coherent)

    def compiled(self, row: Row) -> None:
        """The same compiled: in one graph, or else with breaks."""
        backend = self.settings.backend or "inductor"
        for whole, said in ((True, "whole"), (False, "with breaks")):
            torch._dynamo.reset()
            try:
                forward = torch.compile(self.model, fullgraph=whole, dynamic=True, backend=backend)
                row.compiled = self.text(self.logits_of(forward))
            except Exception as error:
                row.message = row.message or f"compiled: {sentence(error)}"
                row.compiles = "no"
            else:
                row.compiles = said
                return

    def check_lengths(self, row: Row) -> None:
        """The logits at each length; one at which the kernel raises is a wrong one."""
        logits = self.logits_of(self.model)
        for n, ids in self.at_lengths.items():
            try:
                off = relative_error(logits(ids), self.expected[n])
            except Exception as error:
                row.message = row.message or f"length {n}: {sentence(error)}"
                off = math.inf
            row.lengths[str(n)] = off
            if row.kernel == NAIVE:  # in float32 it is off by nothing; others round some six times a layer
                layers = self.model.config.num_hidden_layers
                self.bounds[n] = max(BOUND * off, torch.finfo(torch.float32).eps * math.sqrt(6 * layers))
            if not off <= self.bounds[n]:
                row.wrong_lengths.append(n)

    def measure(self, kernel: Kernel) -> Row:
        row = Row(kernel.name, kernel.title, NAMES[self.settings.dtype])
        if reason := kernel.absent():
            row.status, row.message = "absent", reason
            return row
        try:
            self.model.set_attn_implementation(kernel.register())
            row.eager = self.text(self.logits_of(self.model))
            self.check_lengths(row)
        except Exception as error:
            row.status, row.message = "error", sentence(error)
            return row
        self.compiled(row)
        texts = [t for t in (row.eager, row.compiled) if t is not None]
        if row.wrong_lengths or not all(t.coherent for t in texts):
            row.status = "FAIL"
        elif row.compiles == "no" and kernel.ours:
            row.status = "error"
        return row

    def run(self) -> None:
        """Each kernel's row is written as it comes: a run that is stopped has those that it came to."""
        for kernel in self.kernels:
            self.console.print(f"{kernel.title} ...", markup=False, highlight=False)
            with torch.no_grad():
                self.rows.append(self.measure(kernel))
            for path in self.files():
                write(path, self.meta, self.rows, self.order)

    def files(self) -> list[Path]:
        """What to write the rows to."""
        s, found = self.settings, []
        assert s.model is not None
        if s.json is not None:
            found.append(s.json)
        if s.results is not None:
            found.append(s.results / gpu_slug(str(self.meta["gpu"])) / "quality" / f"{s.model.resolve().name}.json")
        return found


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many stand before the first difference."""
    for n, (x, y) in enumerate(zip(a, b, strict=True)):
        if x != y:
            return n
    return len(a)


def run(settings: Settings, console: Console) -> int:
    """Compare, show and write. 1 where a kernel of ours is wrong or raised, else 0.

    Raises:
        ValueError: a kernel's name is not known, or results are asked of the interpreter.
        FileNotFoundError: there is no text, or no model.
    """
    quality = Quality(settings, console)
    quality.run()
    show(console, quality.meta, quality.rows)
    return int(any(row.failed for row in quality.rows))
