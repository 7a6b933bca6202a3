"""The problems to tune, from the settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rooftile.bench import workloads
from rooftile.bench.tune.space import TUNABLES, Tunable
from rooftile.bench.workloads import GemmShape

ROWS = tuple(1 << i for i in range(13))


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to tune. If `rows`, `dtypes` or `out` is None, the mode decides."""

    models: Sequence[str] = ()
    shapes: Sequence[tuple[int, int, int]] = ()
    rows: Sequence[int] | None = None
    dtypes: Sequence[torch.dtype] | None = None
    precision: str = "ieee"
    ops: Sequence[str] = ("linear",)
    budget: float | None = None
    exhaustive: bool = False
    out: Path | None = None
    again: bool = False
    jobs: int | None = None
    verbose: bool = False


@dataclasses.dataclass(frozen=True)
class Item:
    """One problem of an op, and the op."""

    tunable: Tunable
    problem: Any
    of: str

    @property
    def key(self) -> str:
        return self.tunable.key(self.problem)


def parse_shape(text: str) -> tuple[int, int, int]:
    """M, N and K, as "1,4096,4096" or "1x4096x4096".

    Raises:
        ValueError: it is neither.
    """
    sizes = text.replace("x", ",").split(",")
    if len(sizes) != 3 or not all(size.strip().isdigit() and int(size) > 0 for size in sizes):
        raise ValueError(f"{text!r}, expected three positive numbers M,N,K")
    return int(sizes[0]), int(sizes[1]), int(sizes[2])


def shapes_by_model(settings: Settings) -> dict[str, list[GemmShape]]:
    """The GEMMs by model.

    Raises:
        ValueError: a model is not known, or its configuration can't be read.
    """
    return dict(workloads.load(name) for name in settings.models)


def plan(settings: Settings) -> list[Item]:
    """The problems, each key once: few rows first, so that each result helps with the next problem.

    Raises:
        ValueError: an op or a model is not known, or there is nothing to tune.
    """
    if unknown := [op for op in settings.ops if op not in TUNABLES]:
        raise ValueError(f"unknown op {', '.join(unknown)}; known ops: {', '.join(TUNABLES)}")
    if settings.precision not in ("ieee", "tf32"):
        raise ValueError(f"precision is {settings.precision!r}, expected ieee or tf32")
    if not settings.models and not settings.shapes:
        raise ValueError("give --model or --shape: there is nothing to tune")
    assert settings.rows is not None
    assert settings.dtypes is not None
    models = shapes_by_model(settings)
    found: dict[tuple[str, str], Item] = {}
    for op in settings.ops:
        tunable = TUNABLES[op]
        for dtype in settings.dtypes:
            how = (dtype, settings.precision)
            items = [Item(tunable, tunable.problem(*s, *how), "x".join(map(str, s))) for s in settings.shapes]
            for model, some in models.items():
                for p, m in ((p, m) for p in some for m in settings.rows):
                    if (problem := tunable.problem_in(p, m, *how)) is not None:
                        items.append(Item(tunable, problem, f"{model} {p.name}"))
            for item in items:
                found.setdefault((tunable.table, item.key), item)
    return list(found.values())


def with_defaults(settings: Settings, measures: bool) -> Settings:
    return dataclasses.replace(
        settings,
        rows=settings.rows or (ROWS if measures else (1, 16)),
        dtypes=settings.dtypes or (torch.bfloat16,),
    )
