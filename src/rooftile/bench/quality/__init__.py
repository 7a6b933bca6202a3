"""`rooftile bench quality`: what a trained model makes of each attention kernel, in eager and compiled.

The model is the byte model (rooftile/byte_model), or another one, such as examples/train_bytes.py trains. The kernels
of prompts run in transformers' own code, each in turn as its attention; those that read a cache in Rooftile's engine.
Measured are:

- the loss on held-out text, and the log-probabilities of its tokens, compared with those of the same weights in float32
  in transformers' code with naive attention. The engine computes them from its cache, a token or a part at a time;
- continuations of that text, greedy and sampled, a token at a time: by a forward over the whole sequence, so that every
  length from the prompt's on occurs, or as the engine generates. All are drawn by `rooftile.sample` with the same seed
  for each prompt: where the logits are equal, so are the tokens. Their likelihood to the model in float32 says whether
  they are text, and how long they agree with its own how far the logits differ;
- logits at lengths that are not a multiple of any tile.

A kernel's text is coherent if the loss is off by at most `LOSS_OFF` and its continuations surprise the float32 model no
more than human text does, or than those do that it draws itself. Greedy continuations are far more likely than human
text, those of a broken kernel far less.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cross_entropy

from rooftile import byte_model, runtime
from rooftile.bench import report as reports
from rooftile.bench.info import machine, version
from rooftile.bench.quality.kernels import NAIVE, PART, Kernel, sentence
from rooftile.bench.quality.kernels import kernels as all_kernels
from rooftile.bench.quality.report import show
from rooftile.bench.quality.rows import Row, Text, write
from rooftile.bench.rows import gpu_slug
from rooftile.byte_model import library_text
from rooftile.cases.check import NAMES, relative_error
from rooftile.engine.async_engine import AsyncEngine
from rooftile.engine.engine import Engine
from rooftile.ops.sample import sample

LOSS_OFF = 0.01  # nats a byte; rounding to bfloat16 moves the loss by some 0.001
TEMPERATURE, SEED = 0.7, 1  # of sampled continuations; prompt i has seed SEED + i
BATCH = 16  # sequences at a time
BOUND = 2.0  # two right kernels may each be off by what the naive one is off, to either side


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to compare on; None is the mode's own choice."""

    model: Path | None = None
    name: str | None = None  # of the model; its folder's by default
    names: Sequence[str] | None = None
    files: Mapping[str, Path] | None = None
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
            name=self.name or (self.model or byte_model.folder()).resolve().name,
            new=self.new or (64 if measures else 4),
            windows=self.windows or (64 if measures else 1),
            prompts=self.prompts or ((17, 33, 65, 127, 200, 257) if measures else (5,)),
            lengths=self.lengths or ((1, 2, 17, 63, 65, 127, 129, 257, 511) if measures else (1, 17)),
            # Inductor makes kernels for a GPU; in the interpreter what is compiled is traced, and run as it is.
            backend=self.backend or ("inductor" if measures else "aot_eager"),
        )


class Writer(Protocol):
    """A model with one kernel in one way of running it."""

    def logits(self, ids: Tensor) -> Tensor:
        """Of ids `(B, T)`: `(B, T, V)`, float32."""

    def write(self, prompts: Sequence[list[int]], new: int, temperature: float) -> list[list[int]]:
        """The new tokens behind each prompt, without regard to end tokens."""


class Forwards:
    """A model of transformers, by forwards over whole sequences."""

    def __init__(self, model: Callable[..., Any], kernel: Kernel | None = None) -> None:
        self._model, self._kernel = model, kernel

    def logits(self, ids: Tensor) -> Tensor:
        options = {} if self._kernel is None else self._kernel.options(ids.shape[1], ids.device)
        return self._model(ids, use_cache=False, **options).logits.float()

    def write(self, prompts: Sequence[list[int]], new: int, temperature: float) -> list[list[int]]:
        device = runtime.default_device()
        found = []
        for i, prompt in enumerate(prompts):
            ids = torch.tensor([prompt], device=device)
            for _ in range(new):
                last = self.logits(ids)[:, -1]
                token, _ = sample(last, temperature=temperature, seeds=SEED + i, positions=ids.shape[1])
                ids = torch.cat((ids, token[:, None]), dim=1)
            found.append(ids[0, len(prompt) :].tolist())
        return found


class Served:
    """Rooftile's engine, by its cache: `part` tokens of a sequence at a time."""

    def __init__(self, engine: Engine, part: int) -> None:
        self._engine, self._part = engine, part

    def logits(self, ids: Tensor) -> Tensor:
        return torch.stack(self._engine.logits(ids.tolist(), part=self._part))

    def write(self, prompts: Sequence[list[int]], new: int, temperature: float) -> list[list[int]]:
        how: dict[str, Any] = {"max_new_tokens": new, "temperature": temperature, "ignore_eos": True}
        if self._part == 1:  # prompts at once, then steps of decoding
            seeds = [SEED + i for i in range(len(prompts))]
            return [c.tokens for c in self._engine.generate(prompts, seed=seeds, **how)]
        # Steps that mix parts of prompts with tokens of sequences that decode.
        with AsyncEngine(self._engine, prefix_cache=False, step_tokens=self._engine.max_batch + self._part) as serving:
            streams = [serving.add(prompt, seed=SEED + i, **how) for i, prompt in enumerate(prompts)]
            return [stream.result().tokens for stream in streams]


class Corpus:
    """Held-out text in a model's tokens: bytes for a model of bytes, else by its tokenizer."""

    def __init__(self, folder: Path) -> None:
        files, file = library_text.held_out_files(), folder / "tokenizer.json"
        self._tokenizer = None
        if file.exists():
            from tokenizers import Tokenizer

            found = Tokenizer.from_file(str(file))
            self._tokenizer = found if found.get_vocab_size() > library_text.END + 1 else None
        self.unit = "byte" if self._tokenizer is None else "token"
        if self._tokenizer is None:
            self.tokens = library_text.tokens(files)
        else:
            text = "".join(path.read_text(encoding="utf-8") for path in files)
            self.tokens = torch.tensor(self._tokenizer.encode(text).ids)

    def decoded(self, tokens: Iterable[int]) -> str:
        if self._tokenizer is not None:
            return str(self._tokenizer.decode(list(tokens)))
        return bytes(t for t in tokens if t < 256).decode(errors="replace")


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
        known = {k.name: k for k in all_kernels(s.files)}
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
        longest = self.model.config.max_position_embeddings
        window = min(longest, 512 if measures else 48)
        self.corpus = Corpus(path)
        text = self.corpus.tokens
        assert s.windows is not None
        assert s.prompts is not None
        assert s.lengths is not None
        assert s.new is not None
        self.new = s.new
        self.longest = max(window, max(s.prompts) + s.new, *s.lengths)
        if self.longest > longest:
            raise ValueError(
                f"prompts with new tokens, and lengths, are up to {self.longest} tokens, the model's {longest}"
            )
        self.rows_of_text = library_text.windows(text, window, s.windows).to(self.device)
        # Each prompt from a place of its own.
        starts = range(1000, 1000 + 1000 * len(s.prompts), 1000)
        self.prompts = [text[at : at + n].tolist() for at, n in zip(starts, s.prompts, strict=True)]
        self.at_lengths = {n: text[5000 : 5000 + n][None].to(self.device) for n in s.lengths}
        self.reference = Forwards(self.exact)
        with torch.no_grad():
            self.own_logprobs = self.logprobs(self.reference)
            self.own_loss = -float(self.own_logprobs.mean())
            self.own = {t: self.reference.write(self.prompts, s.new, t) for t in (0.0, TEMPERATURE)}
            self.own_surprise = {t: self.surprise(own) for t, own in self.own.items()}
            self.expected = {n: self.reference.logits(ids) for n, ids in self.at_lengths.items()}
        self.bounds: dict[int, float] = {}
        self.rows: list[Row] = []
        self.meta: dict[str, Any] = {
            **machine(),
            "transformers": version("transformers"),
            "suite": "quality",
            "model": s.name,
            "dtype": NAMES[s.dtype],
            "loss_fp32": self.own_loss,
            "surprise_fp32": self.own_surprise[0.0],
            "sample_fp32": self.corpus.decoded(self.own[0.0][-1]),
            "sampled_surprise_fp32": self.own_surprise[TEMPERATURE],
            "sampled_fp32": self.corpus.decoded(self.own[TEMPERATURE][-1]),
            "temperature": TEMPERATURE,
            "seed": SEED,
            "part": PART,
            "unit": self.corpus.unit,
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

    def logprobs(self, writer: Writer) -> Tensor:
        """Of the tokens of the held-out text, each window's first excepted."""
        found = []
        for some in self.rows_of_text.split(BATCH):
            logits = writer.logits(some)[:, :-1]
            found.append(-cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten(), reduction="none"))
        return torch.cat(found)

    def surprise(self, continuations: Sequence[list[int]]) -> float:
        """Nats a token of those continuations, to the model in float32."""
        total, count = 0.0, 0
        for prompt, new in zip(self.prompts, continuations, strict=True):
            ids = torch.tensor([prompt + new], device=self.device)
            found = self.reference.logits(ids)[0, len(prompt) - 1 : -1]
            total += float(cross_entropy(found, ids[0, len(prompt) :], reduction="sum"))
            count += len(new)
        return total / count

    def text(self, writer: Writer) -> Text:
        logprobs = self.logprobs(writer)
        loss, off = -float(logprobs.mean()), float((logprobs - self.own_logprobs).abs().mean())
        found = {t: writer.write(self.prompts, self.new, t) for t in self.own}
        surprise = {t: self.surprise(texts) for t, texts in found.items()}
        same = {
            t: sum(_common(a, b) for a, b in zip(found[t], own, strict=True)) / (self.new * len(own))
            for t, own in self.own.items()
        }
        coherent = abs(loss - self.own_loss) <= LOSS_OFF and all(  # not where one is NaN
            surprise[t] <= max(self.own_loss, own) for t, own in self.own_surprise.items()
        )
        greedy, sampled = (self.corpus.decoded(found[t][-1]) for t in (0.0, TEMPERATURE))
        return Text(
            loss, surprise[0.0], same[0.0], greedy, coherent, off, surprise[TEMPERATURE], same[TEMPERATURE], sampled
        )

    def writer(self, kernel: Kernel) -> Writer:
        """The model with that kernel, in eager."""
        if kernel.part is not None:
            return Served(self.engine(False), kernel.part)
        self.model.set_attn_implementation(kernel.register())
        return Forwards(self.model, kernel)

    def engine(self, cuda_graphs: bool) -> Engine:
        assert self.settings.model is not None
        return Engine.from_pretrained(
            self.settings.model, dtype=self.settings.dtype, max_batch=BATCH, max_seq_len=self.longest,
            cuda_graphs=cuda_graphs, progress=False,
        )  # fmt: skip

    def compiled(self, kernel: Kernel, row: Row) -> None:
        """The same compiled: in one graph, or else with breaks. The engine captures CUDA graphs instead."""
        if kernel.part is not None:
            if self.device.type == "cuda":
                row.compiled, row.compiles = self.text(Served(self.engine(True), kernel.part)), "CUDA graphs"
            return
        backend = self.settings.backend or "inductor"
        for whole, said in ((True, "whole"), (False, "with breaks")):
            torch._dynamo.reset()
            try:
                forward = torch.compile(self.model, fullgraph=whole, dynamic=True, backend=backend)
                row.compiled = self.text(Forwards(forward, kernel))
            except Exception as error:
                row.message = row.message or f"compiled: {sentence(error)}"
                row.compiles = "no"
            else:
                row.compiles = said
                return

    def check_lengths(self, row: Row, writer: Writer) -> None:
        """The logits at each length; one at which the kernel raises is a wrong one."""
        for n, ids in self.at_lengths.items():
            try:
                off = relative_error(writer.logits(ids), self.expected[n])
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
            writer = self.writer(kernel)
            row.eager = self.text(writer)
            self.check_lengths(row, writer)
        except Exception as error:
            row.status, row.message = "error", sentence(error)
            return row
        self.compiled(kernel, row)
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
        if s.json is not None:
            found.append(s.json)
        if s.results is not None:
            found.append(s.results / gpu_slug(str(self.meta["gpu"])) / "quality" / f"{s.name}.json")
        return found


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many stand before the first difference."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True)))


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
