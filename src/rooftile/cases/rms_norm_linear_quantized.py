"""The norm and a GEMM, plain or gated, of weights in int8, float8_e4m3fn and packed int4.

Of several rows of x and a weight in fp8 the norm's result is rounded to fp8, too, which is `rms_norm_quantized` and
`fp8_linear`; all other points have the tolerance of one or two roundings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile.cases import rms_norm_linear as plain
from rooftile.cases import weight_only
from rooftile.cases.case import Direction, OpCase, Point
from rooftile.reference.quantize_tensor import quantize_tensor_eager


def _of(point: Point, *, fp8: bool = False, group: int = 0) -> Point:
    """Of int8, of fp8, or of int4 with a scale for each group, which is of x's dtype but where the norm's weight is
    float32."""
    name = f" int4 group {group}->" if group else " fp8->" if fp8 else " int8->"
    dims = {**point.dims, "fp8": int(fp8), "group": group}
    return dataclasses.replace(point, label=point.label.replace("->", name, 1), dims=dims)


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    drawn = plain._inputs(point, dtype, device, generator)
    weight = drawn.pop("weight")
    if point["group"]:
        scale_dtype = torch.float32 if point["weight_fp32"] else dtype
        q = weight_only.draw_int4(point["n"], point["k"], point["group"], scale_dtype, device, generator)
    else:
        q = quantize_tensor_eager(weight, dtype="float8_e4m3fn" if point["fp8"] else "int8")
    return {**drawn, "weight": q[0], "weight_scale": q[1]}


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """A byte for each element of the weight, or half of one, and the scales."""
    n, k, group = (point[d] for d in ("n", "k", "group"))
    others = plain._nbytes(point, itemsize, direction) - itemsize * n * k
    if not group:
        return others + n * k + 4 * n
    return others + n * k // 2 + n * k // group * (4 if point["weight_fp32"] else itemsize)


def _case(of: OpCase, **sets: Sequence[Point]) -> OpCase:
    return dataclasses.replace(
        of,
        name=f"{of.name}_quantized",
        formula=of.formula.replace("· weightᵀ", "· (weight · weight_scale)ᵀ") + ", weight in int8, e4m3 or int4",
        inputs=_inputs,
        grads=(),
        nbytes=_nbytes,
        tolerances={dtype: {"forward": by["forward"]} for dtype, by in plain.TOLERANCES.items()},
        sets={**sets, "decode": sets["llm"]},
        peers=(),
        spills=16,  # of the gated ones of a float32 x on sm_100
    )


def _of_8_bits(points: Sequence[Point]) -> tuple[Point, ...]:
    return tuple(_of(p, fp8=fp8) for p in points for fp8 in (False, True) if p["rows"] <= 1 or not fp8)


_point, _gated = plain._point, plain._gated
_OFFSET: dict[str, Any] = {"eps": 0.5, "offset": 1.0}
_PLAIN, _GATED = plain.CASES
_MODELS = tuple(_point(1, k, n) for k, n in ((4096, 6144), (4096, 128256), (3584, 4608)))
_GATED_MODELS = tuple(_gated(1, k, n) for k, n in plain._GATED_MODELS)

CASES = (
    _case(
        _PLAIN,
        tiny=(
            *_of_8_bits(
                (_point(1, 64, 48, bias=True), _point(4, 96, 40), _point(1, 70, 33, weight="fp32", **_OFFSET)),
            ),
            *(
                _of(_point(1, 128, 48, bias=True), group=64),
                _of(_point(4, 96, 40), group=32),
                _of(_point(1, 160, 33, weight="fp32", **_OFFSET), group=32),
            ),
        ),
        edge=(
            *_of_8_bits(
                (
                    _point(1, 1, 1, eps=100.0),
                    _point(1, 127, 33),
                    _point(1, 1024, 33, **_OFFSET),
                    _point(17, 130, 31),
                    _point(0, 64, 32),
                    _point(1, 64, 0),
                ),
            ),
            *(
                _of(_point(1, 32, 1, eps=100.0), group=32),
                _of(_point(1, 384, 33), group=128),
                _of(_point(1, 1024, 33, weight="fp32", **_OFFSET), group=128),
                _of(_point(17, 192, 31), group=64),
                _of(_point(0, 64, 32), group=64),
                _of(_point(1, 64, 0), group=32),
            ),
        ),
        llm=(*_of_8_bits(_MODELS), *tuple(_of(p, group=128) for p in _MODELS)),
    ),
    _case(
        _GATED,
        tiny=(
            *_of_8_bits(
                (
                    _gated(1, 64, 96, bias=True),
                    _gated(4, 96, 40, activation="gelu"),
                    _gated(1, 70, 66, weight="fp32", activation="gelu_tanh", **_OFFSET),
                ),
            ),
            *(
                _of(_gated(1, 128, 96, bias=True), group=64),
                _of(_gated(4, 96, 40, activation="gelu"), group=32),
                _of(_gated(1, 160, 66, weight="fp32", activation="gelu_tanh", **_OFFSET), group=32),
            ),
        ),
        edge=(
            *_of_8_bits(
                (
                    _gated(1, 127, 66),
                    _gated(1, 1024, 66, **_OFFSET),
                    _gated(17, 130, 62),
                    _gated(0, 64, 32),
                    _gated(1, 64, 0),
                )
            ),
            *(
                _of(_gated(1, 384, 66), group=128),
                _of(_gated(1, 1024, 66, **_OFFSET), group=128),
                _of(_gated(17, 192, 62), group=64),
                _of(_gated(0, 64, 32), group=64),
                _of(_gated(1, 64, 0), group=32),
            ),
        ),
        llm=(*_of_8_bits(_GATED_MODELS), *tuple(_of(p, group=128) for p in _GATED_MODELS)),
    ),
)
