"""One row per implementation, the files that hold them, and what is derived from a group of rows."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rooftile.tuning import gpu_slug as gpu_slug  # a GPU's results folder has the name of its tables' folder

OURS = "rooftile"

# What a row times. Forward and backward together is a call that builds a new graph and asks for its gradients once.
Measured = Literal["forward", "backward", "forward+backward"]
TOGETHER: Measured = "forward+backward"
EACH: tuple[Measured, ...] = ("forward", "backward")


def is_ours(impl: str) -> bool:
    """Whether it is Rooftile's: "rooftile", or "rooftile " and the name of a kernel other than the chosen one."""
    return impl.partition(" ")[0] == OURS


# The states of a row. Only "ok" has times.
STATUSES = ("ok", "FAIL", "absent", "unsupported", "error")


@dataclasses.dataclass
class Row:
    """One implementation of one op, at one point, in one dtype and direction.

    Attributes:
        us, us_p20, us_p80: device time of one call, median and percentiles over the samples, in microseconds.
        host_us: median time that one call takes on the host, in microseconds.
        gbs, tflops: the least bytes and operations of the op (`OpCase.nbytes`, `.flops`) over `us`.
        roof_fraction: the least time that the roofs of this run allow, over `us`; for a memory-bound op this is
            `gbs / roof_gbs`.
        speedup_vs_eager: eager's `us` over this row's.
        ratio_to_best_peer: the `us` of the fastest correct baseline over this row's: above 1 is faster than every
            baseline.
        peak_bytes: the most memory that one call adds to what was allocated before it, its results included. Of a
            training step: all that is allocated.
        extra_bytes: what of `peak_bytes` is not the memory of its results: above its inputs and outputs.
        tokens_per_s: of a training step.
        max_error: the largest relative error of its outputs (or gradients) against the float64 reference.
        max_abs_error: the largest absolute error of an element of them.
        roof_gbs: a copy that moves the same number of bytes, measured among the row's samples; for a GEMM the
            streaming read of the run.
        method: how the device was timed: `"graph"`, `"events"`, or `"host clock"` (no measurement).
        samples, calls: the number of samples, and the calls in each.
        roof: the roof of `roof_fraction`, as in `OpCase.roof`.
        roof_tflops: for a GEMM, the run's GEMM roof in its dtype.
        dims: the point's sizes by name.
    """

    op: str
    direction: str
    shape: str
    dtype: str
    impl: str
    us: float | None = None
    us_p20: float | None = None
    us_p80: float | None = None
    host_us: float | None = None
    gbs: float | None = None
    tflops: float | None = None
    roof_fraction: float | None = None
    speedup_vs_eager: float | None = None
    ratio_to_best_peer: float | None = None
    peak_bytes: int | None = None
    max_error: float | None = None
    roof_gbs: float | None = None
    status: str = "ok"
    message: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    nbytes: int = 0
    method: str = ""
    samples: int = 0
    calls: int = 0
    roof: str = "copy"
    roof_tflops: float | None = None
    dims: Mapping[str, int] = dataclasses.field(default_factory=dict)
    extra_bytes: int | None = None
    tokens_per_s: float | None = None
    max_abs_error: float | None = None

    @property
    def place(self) -> str:
        """The shape, with the options it was called with."""
        return f"{self.shape} {' '.join(f'{k}={v}' for k, v in self.options.items())}".rstrip()

    @property
    def group(self) -> tuple[str, str, str, str]:
        """What it has in common with the rows that it is compared with: op, direction, dtype and place."""
        return self.op, self.direction, self.dtype, self.place

    @property
    def failed(self) -> bool:
        """Whether this row makes the command fail: ours, wrong or raising."""
        return self.impl == OURS and self.status != "ok"


REQUIRED = (
    "op", "direction", "shape", "dtype", "impl", "us", "us_p20", "us_p80", "host_us", "gbs", "tflops", "roof_fraction",
    "speedup_vs_eager", "ratio_to_best_peer", "peak_bytes", "max_error",
)  # fmt: skip
META = (
    "gpu",
    "driver",
    "torch",
    "triton",
    "rooftile",
    "commit",
    "date",
    "roof_copy_gbs",
    "roof_read_gbs",
    "roof_tflops",
)


def percentile(values: Sequence[float], fraction: float) -> float:
    """The percentile by linear interpolation between the two nearest values."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    return statistics.median(values), percentile(values, 0.2), percentile(values, 0.8)


def compare(group: Iterable[Row]) -> None:
    """Fill in the ratios within one group: the rows of one op, point, dtype and direction."""
    timed = {r.impl: r.us for r in group if r.status == "ok" and r.us}
    peers = [us for impl, us in timed.items() if not is_ours(impl)]
    for row in group:
        if row.impl not in timed or not row.us:
            continue
        row.speedup_vs_eager = timed["eager"] / row.us if "eager" in timed else None
        row.ratio_to_best_peer = min(peers) / row.us if peers else None


def best_peer(group: Iterable[Row]) -> Row | None:
    """The fastest correct baseline."""
    peers = [r for r in group if not is_ours(r.impl) and r.status == "ok" and r.us]
    return min(peers, key=lambda r: r.us or math.inf, default=None)


def groups(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows by op, direction, dtype and point, in the order in which they came."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(row.group, []).append(row)
    return list(found.values())


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))


def _tidy(value: Any) -> Any:
    """A value for JSON, which has no NaN, in five digits: more than any of these figures needs."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return {k: _tidy(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def to_json(meta: Mapping[str, Any], rows: Iterable[Row]) -> str:
    """The text of a result file: the metadata, then one row on each line, so that a diff shows which rows changed."""
    head = json.dumps({k: _tidy(v) for k, v in meta.items()}, indent=1)
    lines = [json.dumps({k: _tidy(v) for k, v in dataclasses.asdict(r).items()}, ensure_ascii=False) for r in rows]
    return '{"meta": ' + head + ',\n"rows": [\n' + ",\n".join(lines) + "\n]}\n"


def write_whole(path: Path, text: str) -> None:
    """Write another file and then rename it, so that an interrupted run leaves the old file intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    to = path
    if not path.is_symlink() and (path.is_file() or not path.exists()):  # not /dev/stdout
        to = path.with_name(f".{path.name}.{os.getpid()}.part")
    to.write_text(text, encoding="utf-8")
    if to != path:
        to.replace(path)


def write_json(path: Path, meta: Mapping[str, Any], rows: Iterable[Row]) -> None:
    write_whole(path, to_json(meta, rows))


def read_json(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """The metadata and rows of a result file.

    Raises:
        ValueError: the file lacks a key that every result has.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    names = {f.name for f in dataclasses.fields(Row)}
    missing = [k for k in META if k not in data["meta"]]
    missing += sorted({k for r in data["rows"] for k in REQUIRED if k not in r})
    if missing:
        raise ValueError(f"{path}: no {', '.join(missing)}, expected what `rooftile bench --json` writes")
    rows = [Row(**{k: v for k, v in r.items() if k in names}) for r in data["rows"]]
    for row in rows:
        row.options, row.roof = (
            _renamed(row.op, row.options),
            row.roof.replace("product", "gemm"),
        )  # its name before 1.0
    return data["meta"], rows


_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}


def _renamed(op: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by their current names. Before 1.0 gelu had `approximate` for `activation`, and the caches of
    decode_attention `layout` for `cache_layout`."""
    if op == "decode_attention":
        return {"cache_layout" if k == "layout" else k: v for k, v in options.items()}
    return {
        **{k: v for k, v in options.items() if k != "approximate"},
        **({"activation": _GELUS[options["approximate"]]} if "approximate" in options else {}),
    }
