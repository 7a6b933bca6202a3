"""The norm and a product, plain or gated, of weights in int8 and float8_e4m3fn.

Of several rows of x and a weight in fp8 the norm's result is rounded to fp8, too, which is `rms_norm_quantized` and
`fp8_linear`; all other points are held to what is rounded once or twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile.cases import rms_norm_linear as plain
from rooftile.cases.case import Direction, OpCase, Point
from rooftile.reference.quantize_tensor import quantize_tensor_eager


def _with_format(point: Point, fp8: bool) -> Point:
    label = point.label.replace("->", " fp8->" if fp8 else " int8->", 1)
    return dataclasses.replace(point, label=label, dims={**point.dims, "fp8": int(fp8)})


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    drawn = plain._inputs(point, dtype, device, generator)
    q = quantize_tensor_eager(drawn.pop("weight"), dtype="float8_e4m3fn" if point["fp8"] else "int8")
    return {**drawn, "weight": q[0], "weight_scale": q[1]}


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """A byte for each element of the weight, and four for each scale."""
    return plain._nbytes(point, itemsize, direction) - (itemsize - 1) * point["n"] * point["k"] + 4 * point["n"]


def _case(of: OpCase, point: Callable[..., Point], tiny: Sequence[Point], edge: Sequence[Point], *llm: Point) -> OpCase:
    def both(points: Sequence[Point]) -> tuple[Point, ...]:
        return tuple(_with_format(p, fp8) for p in points for fp8 in (False, True) if p["rows"] <= 1 or not fp8)

    return dataclasses.replace(
        of,
        name=f"{of.name}_8bit",
        formula=of.formula.replace("· weightᵀ", "· (weight · weight_scale)ᵀ") + ", weight in int8 or e4m3",
        inputs=_inputs,
        grads=(),
        nbytes=_nbytes,
        tolerances={dtype: {"forward": by["forward"]} for dtype, by in plain.TOLERANCES.items()},
        sets={"tiny": both(tiny), "edge": both(edge), "llm": both(llm), "decode": both(llm)},
        peers=(),
        spills=8,  # the gated one of a float32 x on sm_100
    )


_point, _gated = plain._point, plain._gated
_OFFSET: dict[str, Any] = {"eps": 0.5, "offset": 1.0}

CASES = (
    _case(
        plain.CASES[0],
        _point,
        (_point(1, 64, 48, bias=True), _point(4, 96, 40), _point(1, 70, 33, weight="fp32", **_OFFSET)),
        (_point(1, 1, 1, eps=100.0), _point(1, 127, 33), _point(17, 130, 31), _point(0, 64, 32), _point(1, 64, 0)),
        *(_point(1, k, n) for k, n in ((4096, 6144), (4096, 128256), (3584, 4608))),
    ),
    _case(
        plain.CASES[1],
        _gated,
        (
            _gated(1, 64, 96, bias=True),
            _gated(4, 96, 40, activation="gelu"),
            _gated(1, 70, 66, weight="fp32", activation="gelu_tanh", **_OFFSET),
        ),
        (_gated(1, 127, 66), _gated(17, 130, 62), _gated(0, 64, 32), _gated(1, 64, 0)),
        *(_gated(1, k, n) for k, n in plain._GATED_MODELS),
    ),
)
