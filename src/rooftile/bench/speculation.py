"""`rooftile bench speculation`: what speculative decoding gains, by how many of its proposals are accepted.

The tokens of a plain run are recorded. Then they are proposed again, each right with a given probability, so that a
model with random weights accepts as a trained one would. A proposal after a wrong one is never accepted: with a
probability of a, a step of T - 1 proposals yields 1 + a + a^2 + ... + a^(T - 1) tokens on average.

In 16 bits, steps of one token and of several round differently, and a model with random weights has near ties all the
time. Its embedding and lm_head are therefore set so that token t + 1 follows token t by a wide margin. Every weight is
read, and every kernel runs, as in any other model.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from rooftile import runtime
from rooftile.bench.info import check_results, machine
from rooftile.bench.rows import gpu_slug, write_whole

FOLDER = "e2e/speculation"


class Replay:
    """Proposes the tokens of a recorded run, each right with a probability; a wrong one is the token after it.

    Args:
        vocab: tokens of the vocabulary.
        tokens: proposals of a step.

    Attributes:
        recorded: the tokens after the prompt.
        acceptance: the probability.
    """

    def __init__(self, vocab: int, tokens: int = 4) -> None:
        self.vocab, self.tokens = vocab, tokens
        self.recorded: Sequence[int] = ()
        self.acceptance = 1.0

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
        model: of `rooftile.bench.workloads.MODELS`.
        acceptances: probabilities that a proposal is right.
        tokens: proposals of a step.
        prompt, new: tokens of the prompt, and after it.
        rounds: runs of each, one after another; the median counts.
        engine: options of `Engine.from_config`.
        layers: keep only the first ones.
    """

    model: str
    acceptances: Sequence[float] = (0.0, 0.5, 0.8, 1.0)
    tokens: int = 4
    prompt: int = 512
    new: int = 256
    rounds: int = 3
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    layers: int | None = None
    json: Path | None = None
    results: Path | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to decode a text.

    Attributes:
        acceptance: the probability that a proposal is right; None for plain decoding.
        tokens_per_second: after the first token.
        speedup: over plain decoding.
        proposed, accepted: tokens.
        steps: forward passes.
        equal: whether the tokens are those of plain decoding.
    """

    acceptance: float | None
    tokens_per_second: float
    speedup: float
    proposed: int
    accepted: int
    steps: int
    equal: bool


def _run(engine: Any, prompt: list[int], new: int, source: Replay | None) -> tuple[list[int], float, int, int, int]:
    """The tokens, the seconds after the first, and the counts of one run; `source` None decodes plainly."""
    from rooftile.engine.loop import Loop
    from rooftile.engine.runner import Sampling
    from rooftile.engine.speculation import Speculation

    loop = Loop(
        engine.runner, engine._scheduler(), None if source is None else Speculation(source, engine.config.vocab)
    )
    request = engine._request(0, prompt, new, (), False, True, Sampling())
    loop.add(request)
    begun = 0.0
    while loop.busy:
        events = loop.step()
        if events and not begun:
            begun = time.perf_counter()
    return request.tokens, time.perf_counter() - begun, loop.proposed_tokens, loop.accepted_tokens, loop.steps


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
    numbers = torch.Generator().manual_seed(0)
    prompt = torch.randint(engine.config.vocab, (s.prompt,), generator=numbers).tolist()
    source.recorded, *_ = _run(engine, prompt, s.new, None)
    ways: list[float | None] = [None, *s.acceptances]
    seconds: dict[float | None, list[float]] = {way: [] for way in ways}
    found: dict[float | None, tuple[list[int], float, int, int, int]] = {}
    for turn in range(s.rounds + 1):  # the first compiles and records
        for way in ways:
            source.acceptance = 1.0 if way is None else way
            found[way] = _run(engine, prompt, s.new, None if way is None else source)
            if turn:
                seconds[way].append(found[way][1])
    each = {way: statistics.median(times) for way, times in seconds.items()}
    return [
        Row(way, (s.new - 1) / each[way], each[None] / each[way], *found[way][2:], found[way][0] == source.recorded)
        for way in ways
    ]


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("proposals right", "tokens/s", "over plain", "accepted", "steps", "equal tokens"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            "plain" if row.acceptance is None else f"{row.acceptance:.0%}",
            f"{row.tokens_per_second:.1f}",
            f"{row.speedup:.2f}",
            "" if row.acceptance is None else f"{row.accepted} of {row.proposed}",
            str(row.steps),
            "yes" if row.equal else "no",
        )
    return table


def run(s: Settings, console: Console) -> int:
    """Measure, print a table, write the rows. Returns 0, or 1 if tokens differ from plain decoding's.

    Raises:
        ValueError: an option is not valid.
    """
    import rooftile
    from rooftile.bench.workloads import MODELS

    measures = runtime.MODE is runtime.Mode.GPU
    check_results(s.results, measures)
    config = dict(MODELS[s.model])
    if s.layers is not None:
        config["num_hidden_layers"] = s.layers
    source = Replay(config["vocab_size"], s.tokens)
    engine = rooftile.Engine.from_config(
        config, max_batch=1, max_seq_len=s.prompt + s.new + s.tokens + 1, speculate=source, **s.engine
    )
    make_predictable(engine)
    rows = measure(engine, source, s)
    console.print(table_of(rows))
    if not measures:
        console.print("in Triton's interpreter, on the CPU: no measurement", style="dim")
    meta = {
        **machine(), "suite": "speculation", "model": s.model, "tokens": s.tokens, "prompt": s.prompt, "new": s.new,
        "layers": s.layers, **{name: str(value) for name, value in s.engine.items()},
    }  # fmt: skip
    text = json.dumps({"meta": meta, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1) + "\n"
    files = [s.json] if s.json is not None else []
    if s.results is not None:
        files.append(s.results / gpu_slug(str(meta["gpu"])) / FOLDER / f"{s.model}.json")
    for file in files:
        write_whole(file, text)
    return int(not all(row.equal for row in rows))
