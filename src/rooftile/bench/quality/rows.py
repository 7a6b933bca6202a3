"""The rows of `rooftile bench quality`, and the file that holds them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rooftile.bench.info import may_join
from rooftile.bench.rows import write_whole

# What two runs must have in common, that their rows may stand in one file.
SAME = (
    "transformers", "suite", "model", "dtype", "text_bytes", "window", "prompts", "new", "lengths", "backend",
    "loss_off", "temperature", "seed", "part",
)  # fmt: skip


@dataclasses.dataclass
class Text:
    """What came of one kernel in one way of running it.

    Attributes:
        loss: nats a token, on text that was held out.
        surprise: nats a token of the greedy continuations, to the model in float32 with naive attention.
        same: the greedy continuations' share of tokens before the first that is not that model's own.
        sample: the greedy continuation of the last prompt, decoded.
        logprob_off: the mean distance of the held-out tokens' log-probabilities from that model's; None in files that
            are older than the field, like the next ones.
        sampled_surprise, sampled_same, sampled: surprise, same and sample of the sampled continuations.
    """

    loss: float | None
    surprise: float | None
    same: float
    sample: str
    coherent: bool
    logprob_off: float | None = None
    sampled_surprise: float | None = None
    sampled_same: float | None = None
    sampled: str = ""


@dataclasses.dataclass
class Row:
    """One kernel. `status` is "ok", "FAIL" (not coherent, or a length is wrong), "absent" or "error".

    Attributes:
        compiles: "whole" (one graph), "with breaks", "CUDA graphs" (the engine), "no", or nothing where it was not
            asked.
        lengths: the relative error of the logits at each, against the naive kernel in float32.
        wrong_lengths: those at which it is over the bound.
    """

    kernel: str
    title: str
    dtype: str
    eager: Text | None = None
    compiled: Text | None = None
    compiles: str = ""
    lengths: dict[str, float | None] = dataclasses.field(default_factory=dict)
    wrong_lengths: list[int] = dataclasses.field(default_factory=list)
    status: str = "ok"
    message: str = ""

    @property
    def failed(self) -> bool:
        """Whether it makes the command fail: ours, and wrong or raising."""
        return self.kernel.startswith("rooftile") and self.status in ("FAIL", "error")


def to_json(meta: Mapping[str, Any], rows: Iterable[Row]) -> str:
    """As the other suites' files: what it was run on, then a row on each line."""
    lines = [json.dumps(_finite(dataclasses.asdict(row)), ensure_ascii=False) for row in rows]
    head = json.dumps(_finite(meta), indent=1, ensure_ascii=False)
    return '{"meta": ' + head + ',\n"rows": [\n' + ",\n".join(lines) + "\n]}\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return {k: _finite(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def rows_of(data: Mapping[str, Any]) -> list[Row]:
    """The rows of what `to_json` wrote."""

    def row(fields: dict[str, Any]) -> Row:
        texts = {how: None if fields[how] is None else Text(**fields[how]) for how in ("eager", "compiled")}
        return Row(**{**fields, **texts})

    return [row(fields) for fields in data["rows"]]


def earlier(path: Path, meta: Mapping[str, Any]) -> list[Row]:
    """The rows of the file, if a run with this meta data may add to them: the same machine, versions, commit and
    settings."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        before, rows = data["meta"], rows_of(data)
        meta = json.loads(to_json(meta, ()))["meta"]  # as in a file
        same = may_join(meta, before, SAME)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # there is none, or it is no such file
        return []
    return rows if same else []


def write(path: Path, meta: Mapping[str, Any], rows: Iterable[Row], order: Sequence[str]) -> None:
    """Write a run's rows, and those of other kernels that the file has of runs like it, by the order of kernels.

    The file is read anew, and replaced whole: runs of different kernels may share it.
    """
    found = {row.kernel: row for row in (*earlier(path, meta), *rows)}
    write_whole(path, to_json(meta, [found[name] for name in order if name in found]))
