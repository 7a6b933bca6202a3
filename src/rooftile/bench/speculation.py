"""`rooftile bench speculation`: what speculative decoding gains, by how many of its proposals are accepted.

The tokens of a plain run are recorded. Then they are proposed again, each right with a given probability, so that a
model with random weights accepts as a trained one would. A proposal after a wrong one is never accepted: with a
probability of a, a step of T - 1 proposals yields 1 + a + a^2 + ... + a^(T - 1) tokens on average.

In 16 bits, steps of one token and of several round differently, and a model with random weights has near ties all the
time. Its embedding and lm_head are therefore set so that token t + 1 follows token t by a wide margin. Every weight is
read, and every kernel runs, as in any other model.

With `--text`, a trained model continues real text, and `rooftile.NGram` proposes its tokens, or with `--draft` a
smaller model. How many are accepted then depends on the text, and not on the machine.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from rooftile import runtime
from rooftile.bench.info import check_results, machine
from rooftile.bench.report import WIDTH, number, ratio
from rooftile.bench.rows import gpu_slug, write_whole
from rooftile.byte_model import library_text
from rooftile.engine.hub import folder_of

if TYPE_CHECKING:
    from rooftile.engine.runner import Sampling
    from rooftile.engine.speculation import Proposer

FOLDER = "e2e/speculation"
TEXT = "text-"  # the names of files of text begin so

K = TypeVar("K")


@dataclasses.dataclass
class Replay:
    """Proposes the tokens of a recorded run, each right with a probability; a wrong one is the token after it.

    Args:
        vocab: tokens of the vocabulary.
        tokens: proposals of a step.
        recorded: the tokens after the prompt.
        acceptance: the probability.
    """

    vocab: int
    tokens: int = 4
    recorded: Sequence[int] = ()
    acceptance: float = 1.0

    def begin(self, prompt: Sequence[int]) -> _Replayed:
        return _Replayed(self)


class _Replayed:
    def __init__(self, source: Replay) -> None:
        self._source, self._random = source, random.Random(0)

    def propose(self, generated: Sequence[int], n: int) -> list[int]:
        source = self._source
        return [
            token if self._random.random() < source.acceptance else (token + 1) % source.vocab
            for token in source.recorded[len(generated) : len(generated) + n]
        ]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure.

    Args:
        model: of `rooftile.bench.workloads.MODELS`; of text, as `rooftile generate` takes it.
        text: continue `TEXTS`, with proposals of `rooftile.NGram`, instead of a replay.
        draft: of text, the checkpoint that proposes instead, as `rooftile generate` takes it.
        acceptances: of a replay, probabilities that a proposal is right.
        tokens: proposals of a step; of text, the most: 1 and so on are measured.
        prompt: tokens of the prompt; of text, the most characters.
        new: tokens after it.
        rounds: runs of each, one after another; the median counts.
        engine: options of the engine.
        layers: of a replay, keep only the first ones.
    """

    model: str
    text: bool = False
    draft: str | None = None
    acceptances: Sequence[float] = (0.0, 0.5, 0.8, 1.0)
    tokens: int = 4
    prompt: int = 512
    new: int = 256
    rounds: int = 3
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    layers: int | None = None
    json: Path | None = None
    results: Path | None = None


class Run(NamedTuple):
    """One run: its tokens, the seconds after the first, and the counts of its loop."""

    tokens: list[int]
    seconds: float
    proposed: int
    accepted: int
    steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """One way to decode a text.

    Attributes:
        tokens_per_second: after the first token.
        speedup: over plain decoding.
        proposed, accepted: tokens.
        steps: forward passes.
        equal: whether the tokens are those of plain decoding.
    """

    tokens_per_second: float
    speedup: float
    proposed: int
    accepted: int
    steps: int
    equal: bool

    @staticmethod
    def figures(run: Run, plain: Run) -> dict[str, Any]:
        return {
            "tokens_per_second": (len(run.tokens) - 1) / run.seconds, "speedup": plain.seconds / run.seconds,
            "proposed": run.proposed, "accepted": run.accepted, "steps": run.steps, "equal": run.tokens == plain.tokens,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Speed):
    """Of a replay.

    Attributes:
        acceptance: the probability that a proposal is right; None for plain decoding.
    """

    acceptance: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRow(Speed):
    """Of a text.

    Attributes:
        text: its name in `TEXTS`.
        temperature: 0 takes the most likely token.
        tokens: proposals of a step.
    """

    text: str
    temperature: float
    tokens: int


def _run(engine: Any, prompt: list[int], new: int, source: Proposer | None, sampling: Sampling) -> Run:
    """`source` None decodes plainly."""
    from rooftile.engine.loop import Loop
    from rooftile.engine.speculation import Speculation

    loop = Loop(
        engine.runner, engine._scheduler(), None if source is None else Speculation(source, engine.config.vocab)
    )
    request = engine._request(0, prompt, new, (), False, True, sampling)
    loop.add(request)
    begun = 0.0
    while loop.busy:
        events = loop.step()
        if events and not begun:
            begun = time.perf_counter()
    loop.clear()  # the next run finds no pages of this one
    return Run(request.tokens, time.perf_counter() - begun, loop.proposed_tokens, loop.accepted_tokens, loop.steps)


def _in_turns(
    engine: Any, prompt: list[int], s: Settings, sources: Mapping[K, Proposer | None], sampling: Sampling
) -> dict[K, Run]:
    """A run of each source, with the median time of `s.rounds`, which take turns."""
    warm_up = runtime.MODE is runtime.Mode.GPU  # the first turn compiles and records
    runs: dict[K, list[Run]] = {way: [] for way in sources}
    for _ in range(s.rounds + warm_up):
        for way, source in sources.items():
            runs[way].append(_run(engine, prompt, s.new, source, sampling))
    first = next(iter(runs.values()))[0].tokens
    return {
        way: each[-1]._replace(
            seconds=statistics.median(run.seconds for run in each[warm_up:]),
            tokens=next((run.tokens for run in each if run.tokens != first), first),  # of a turn that differs, if any
        )
        for way, each in runs.items()
    }


LOUD = 1024.0  # the embedding's factor: what 32 layers add to it is smaller


def make_predictable(engine: Any) -> None:
    """Let token t + 1 follow token t.

    Raises:
        ValueError: the embedding and lm_head are one tensor.
    """
    if engine.config.tied:
        raise ValueError("the model's lm_head is its embedding, expected a model with one of its own")
    embedding = engine.weights.embedding
    engine.weights.lm_head.fill(0, embedding.roll(1, 0))
    embedding.mul_(LOUD)


def measure(engine: Any, source: Replay, s: Settings) -> list[Row]:
    """Rows of plain decoding and of each acceptance, with runs of all in turns."""
    from rooftile.engine.runner import Sampling

    numbers = torch.Generator().manual_seed(0)
    prompt = torch.randint(engine.config.vocab, (s.prompt,), generator=numbers).tolist()
    recorded = _run(engine, prompt, s.new, None, Sampling()).tokens
    sources: dict[float | None, Proposer | None] = {None: None}
    sources |= {a: dataclasses.replace(source, recorded=recorded, acceptance=a) for a in s.acceptances}
    runs = _in_turns(engine, prompt, s, sources, Sampling())
    return [Row(acceptance=way, **Row.figures(run, runs[None])) for way, run in runs.items()]


@dataclasses.dataclass(frozen=True)
class Text:
    """A part of Python's standard library that the byte model was not trained on: whole lines from a place on.

    Args:
        file: of `rooftile.byte_model.library_text.HELD_OUT`.
        begins: where the text begins.
        again: the text stands there twice, and its first line a third time.
    """

    file: str
    begins: str
    again: bool = False

    def prompt(self, size: int) -> str:
        """At most that many characters.

        Raises:
            ValueError: the running Python's file has no such text, or the first line is longer.
        """
        path = library_text.library() / self.file
        _, found, rest = path.read_text(encoding="utf-8").partition(self.begins)
        if not found:
            raise ValueError(f"{path} has no {self.begins!r}")
        text = found + rest
        first = text[: text.index("\n") + 1]
        room = (size - len(first)) // 2 if self.again else size
        text = text[: text.rfind("\n", 0, max(0, room)) + 1]
        if not text:
            raise ValueError(f"--prompt is {size}, expected more characters, for lines such as {first!r}")
        return text + text + first if self.again else text


TEXTS = {
    "code, again": Text("heapq.py", "def heappush(", again=True),
    "list": Text("statistics.py", "__all__ = ["),
    "new code": Text("sched.py", "    def cancel("),
    "prose": Text("heapq.py", "[explanation by"),
}
TEMPERATURES = (0.0, 0.8)  # a small model that takes the most likely byte soon repeats itself


def measure_text(engine: Any, s: Settings) -> list[TextRow]:
    """A row of each text and temperature, by an engine whose `speculate` is an `NGram` or a `Draft`."""
    from rooftile.engine.generation import encoded
    from rooftile.engine.runner import Sampling

    source, rows = engine.speculate, []
    for name, text in TEXTS.items():
        (prompt,) = encoded(text.prompt(s.prompt), engine.tokenizer, engine.config.vocab)
        for temperature in TEMPERATURES:
            runs = _in_turns(engine, prompt, s, {False: None, True: source}, Sampling(temperature))
            figures = TextRow.figures(runs[True], runs[False])
            rows.append(TextRow(text=name, temperature=temperature, tokens=source.tokens, **figures))
    return rows


COLUMNS = ("proposals right", "tokens/s>", "of plain>", "proposed>", "accepted>", "steps>", "equal tokens>")
# Without tokens/s: so short runs compare with those beside them alone.
TEXT_COLUMNS = ("text", "sampling", "proposals>", "accepted>", "tokens a step>", "of plain>", "equal tokens>")


def _cells(row: Mapping[str, Any]) -> list[str]:
    of_plain, equal = ratio(row["speedup"]), "yes" if row["equal"] else "no"
    if "text" not in row:
        right = "plain decoding" if row["acceptance"] is None else f"{row['acceptance']:.0%}"
        speed = number(row["tokens_per_second"], 4)
        return [right, speed, of_plain, str(row["proposed"]), str(row["accepted"]), str(row["steps"]), equal]
    accepted = f"{row['accepted'] / row['proposed']:.0%}" if row["proposed"] else "–"
    a_step = 1 + row["accepted"] / (row["steps"] - 1)  # the first step is the prompt's
    sampling = f"temperature {row['temperature']:g}" if row["temperature"] else "greedy"
    return [row["text"], sampling, str(row["tokens"]), accepted, ratio(a_step), of_plain, equal]


def table(rows: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], list[list[str]]]:
    """The columns, those that end with ">" to the right, and the cells of a file's rows."""
    return TEXT_COLUMNS if "text" in rows[0] else COLUMNS, list(map(_cells, rows))


def _show(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    columns, cells = table(rows)
    shown = Table(box=None, pad_edge=False)
    for name in columns:
        shown.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left")
    for row in cells:
        shown.add_row(*row)
    out = console if console.is_terminal else Console(file=console.file, width=WIDTH)
    out.print(shown)


def _of_replay(s: Settings) -> list[Row]:
    from rooftile.bench.workloads import MODELS
    from rooftile.engine.engine import Engine

    config = dict(MODELS[s.model])
    if s.layers is not None:
        config["num_hidden_layers"] = s.layers
    source = Replay(config["vocab_size"], s.tokens)
    engine = Engine.from_config(
        config, max_batch=1, max_seq_len=s.prompt + s.new + s.tokens + 1, speculate=source, **s.engine
    )
    make_predictable(engine)
    return measure(engine, source, s)


def _of_text(s: Settings, folder: Path, draft: Path | None) -> list[TextRow]:
    from rooftile.engine.config import ModelConfig
    from rooftile.engine.engine import Engine
    from rooftile.engine.speculation import Draft, NGram

    # A token is of a byte or more, but for those that a tokenizer puts around a text.
    longest = max(len(text.prompt(s.prompt).encode()) for text in TEXTS.values()) + 8 + s.new + s.tokens
    room = min(ModelConfig.from_hf(each).max_positions for each in (folder, draft) if each is not None)
    options = {"max_batch": 1, "max_seq_len": min(longest, room), **s.engine}
    rows: list[TextRow] = []
    for n in range(1, s.tokens + 1):  # a step computes as many tokens as its engine's proposals, whatever it has
        source = NGram(n) if draft is None else Draft(draft, n)
        rows += measure_text(Engine.from_pretrained(folder, speculate=source, progress=False, **options), s)
    names = list(TEXTS)
    return sorted(rows, key=lambda row: (names.index(row.text), row.temperature))


def run(s: Settings, console: Console) -> int:
    """Measure, print a table, write the rows.

    Returns 0, or 1 if tokens differ from plain decoding's. Of a text they may, unless all of it is in float32.

    Raises:
        ValueError: an option is not valid.
        FileNotFoundError: there is no such checkpoint.
    """
    measures = runtime.MODE is runtime.Mode.GPU
    check_results(s.results, measures)
    name = file = s.model
    draft = None if s.draft is None else folder_of(s.draft)
    if s.text:
        folder = folder_of(s.model)
        name = folder.resolve().name
        file = f"{TEXT}{name}{'' if draft is None else f'-draft-{draft.resolve().name}'}"
    found: Sequence[Speed] = _of_text(s, folder, draft) if s.text else _of_replay(s)
    rows = [dataclasses.asdict(row) for row in found]
    _show(rows, console)
    if not measures:
        console.print("in Triton's interpreter, on the CPU: no measurement", style="dim")
    meta = {
        **machine(), "suite": "speculation", "model": name, "tokens": s.tokens, "prompt": s.prompt, "new": s.new,
        "layers": s.layers, "draft": None if draft is None else draft.resolve().name,
        **{option: str(value) for option, value in s.engine.items()},
    }  # fmt: skip
    text = json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n"
    files = [s.json] if s.json is not None else []
    if s.results is not None:
        files.append(s.results / gpu_slug(str(meta["gpu"])) / FOLDER / f"{file}.json")
    for path in files:
        write_whole(path, text)
    exact = not s.text or (s.engine["dtype"] is torch.float32 and s.engine["quantize"] is None)
    return int(exact and not all(row.equal for row in found))
