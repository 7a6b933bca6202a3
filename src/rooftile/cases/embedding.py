from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Unsupported
from rooftile.cases.draw import integers, normal
from rooftile.ops.embedding import embedding
from rooftile.reference import embedding as reference

_SCALED = "copied unchanged; with a scale rounded once: half a unit in the last place"
_SUM = "a sum in float32, rounded once"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(1e-7, _SCALED), "backward": Tolerance(1e-6, _SUM)},
    torch.float16: {"forward": Tolerance(5e-4, _SCALED), "backward": Tolerance(5e-4, _SUM)},
    torch.bfloat16: {"forward": Tolerance(4e-3, _SCALED), "backward": Tolerance(4e-3, _SUM)},
}


def _point(rows: int, vocabulary: int, cols: int, *, int32: bool = False, **options: object) -> Point:
    """`rows` tokens, out of a table of `vocabulary` by `cols`."""
    label = f"T{rows} V{vocabulary} H{cols}" + (" int32" if int32 else "")
    return Point(label, {"rows": rows, "vocabulary": vocabulary, "cols": cols, "int32": int(int32)}, options)


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    """Where there are tokens enough, each row of the table is named, in any order; else they are drawn."""
    rows, vocabulary = point["rows"], point["vocabulary"]
    if device.type != "meta" and rows >= vocabulary:
        ids = torch.randperm(rows, device=device, generator=generator) % max(1, vocabulary)
    else:
        ids = integers(vocabulary, (rows,), device, generator)
    ids = ids.to(torch.int32) if point["int32"] else ids
    return {"ids": ids, "weight": normal((vocabulary, point["cols"]), dtype, device, generator)}


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """The ids, each row of the table that is named, and every output; backward: dy, and the whole table's gradient."""
    rows, vocabulary = point["rows"], point["vocabulary"]
    named = vocabulary if direction == "backward" else min(rows, vocabulary)
    return (4 if point["int32"] else 8) * rows + itemsize * (named + rows) * point["cols"]


def _flops(point: Point, direction: Direction) -> int:
    """A copy has none; we count the product with the scale. Backward: the sum."""
    return point["rows"] * point["cols"]


def _torch(point: Point) -> Callable[..., Any]:
    if point.options.get("scale", 1.0) != 1.0:
        raise Unsupported("F.embedding has no scale")
    return lambda ids, weight, **options: torch.nn.functional.embedding(ids, weight, options.get("padding_idx"))


_TABLES = ((128256, 4096), (152064, 3584))

CASES = (
    OpCase(
        name="embedding",
        formula="y = scale · weight[ids]",
        function=embedding,
        reference=reference.embedding,
        eager=reference.eager,
        inputs=_inputs,
        outputs=("y",),
        grads=("weight",),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        sets={
            "tiny": (
                _point(7, 40, 64),
                _point(5, 33, 200, int32=True, scale=12.0),
                _point(50, 4, 24, padding_idx=0),
            ),
            "edge": (
                _point(1, 1, 1),
                _point(3, 5, 7),
                _point(17, 129, 127, scale=0.125),
                _point(2, 3, 4099),
                _point(0, 8, 64),
                _point(4, 3, 0),
            ),
            # As many tokens as the tables of Llama 2 and of Granite have rows: all of the table is read.
            "llm": (_point(32768, 32000, 4096), _point(49152, 49152, 4096, scale=12.0)),
            "prefill": tuple(_point(t, v, h) for v, h in _TABLES for t in (512, 2048, 8192)),
            "decode": tuple(_point(t, v, h) for v, h in _TABLES for t in (1, 8, 64)),
        },
        peers=(Peer("torch", _torch),),
    ),
)
