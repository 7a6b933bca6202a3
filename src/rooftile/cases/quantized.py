"""Ops with a quantized result, over formats and kinds of scales.

A point's options name the format and the elements that share a scale; the default is e4m3fn by row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile.cases import add_rms_norm, gated, rms_norm
from rooftile.cases.case import Direction, OpCase, Point, Tolerance
from rooftile.quantize import Quantize
from rooftile.reference.quantize import LARGEST, after, eager

# An element near the midpoint of two values of the format may round either way, and the values are a whole step apart:
# an eighth in e4m3fn, a quarter in e5m2. So errors are few and large, and weigh more in a small tensor.
_FP32 = "one element in 10^5 is so near a midpoint of the format that float32 and float64 round it differently"
_NARROW = "one element in {} rounds the other way, as the reference does not round {} first, as models do"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(3e-3, _FP32)},
    torch.float16: {"forward": Tolerance(2e-2, _NARROW.format(200, "to fp16"))},
    torch.bfloat16: {"forward": Tolerance(4e-2, _NARROW.format(30, "to bf16"))},
}
_SCALE = "a maximum and a quotient in float32; the reference does not round to {} first, as models do"
SCALE_TOLERANCES = {
    torch.float32: Tolerance(1e-6, "a maximum and a quotient in float32"),
    torch.float16: Tolerance(1e-3, _SCALE.format("fp16")),
    torch.bfloat16: Tolerance(8e-3, _SCALE.format("bf16")),
}


def _dtype(point: Point) -> str:
    return point.options.get("dtype", "float8_e4m3fn")


def _function(op: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        *,
        scale: Tensor | None = None,
        dtype: str = "float8_e4m3fn",
        per: Any = "row",
        group_size: int = 128,
        **given: Any,
    ) -> tuple[Tensor, ...]:
        return op(**given, quantize=Quantize(getattr(torch, dtype), per, scale, group_size))

    return run


def _case(plain: OpCase, sets: Mapping[str, Sequence[Point]]) -> OpCase:
    def inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
        drawn = plain.inputs(point, dtype, device, generator)
        if point.options.get("per") == "tensor":  # a few elements exceed 4 and saturate
            drawn["scale"] = torch.full((1,), 4 / LARGEST[_dtype(point)], device=device)
        return drawn

    def nbytes(point: Point, itemsize: int, direction: Direction) -> int:
        """y is written in one byte an element, and so are the scales in four."""
        rows, cols = point["rows"], point["cols"]
        group = point.options.get("group_size", 128)
        scales = {"row": rows, "group": rows * -(-cols // group), "tensor": 1}[point.options.get("per", "row")]
        return plain.nbytes(point, itemsize, "forward") - (itemsize - 1) * rows * cols + 4 * scales

    def flops(point: Point, direction: Direction) -> int:
        """The division, and the maximum unless the scale is given."""
        more = 1 if point.options.get("per") == "tensor" else 2
        return plain.flops(point, "forward") + more * point["rows"] * point["cols"]

    return dataclasses.replace(
        plain,
        name=f"{plain.name}_quantized",
        formula=f"y of {plain.name}; scale = max|y| / largest, y_q = round(y / scale)",
        function=_function(plain.function),
        reference=after(plain.reference),
        eager=after(plain.eager, eager),
        inputs=inputs,
        outputs=(*plain.outputs, "scale"),
        output_dtypes=lambda point: {"y": getattr(torch, _dtype(point)), "scale": torch.float32},
        grads=(),
        nbytes=nbytes,
        flops=flops,
        tolerances=TOLERANCES,
        output_tolerances={**plain.output_tolerances, "scale": SCALE_TOLERANCES},
        sets=sets,
        peers=(),
        spills=0,
        odd_spills=0,
    )


_Options = dict[str, Any]
_GROUP: _Options = {"per": "group"}
_TENSOR: _Options = {"per": "tensor"}
_INT8: _Options = {"dtype": "int8"}
_E5M2: _Options = {"dtype": "float8_e5m2"}


def _sets(point: Callable[..., Point], modes: Sequence[Point], llm: Sequence[Point]) -> dict[str, Sequence[Point]]:
    return {
        "tiny": (point(4, 128), point(33, 256), *modes),
        "edge": (
            point(1, 1),
            point(3, 7, **_GROUP),
            point(17, 127, **_INT8),
            point(2, 257, **_GROUP),
            point(1, 4099),
            point(0, 64, **_GROUP),
        ),
        "llm": llm,
        "decode": tuple(point(r, llm[0]["cols"]) for r in (1, 8, 32)),
    }


def _gated_point(rows: int, cols: int, **options: object) -> Point:
    return Point(f"{rows}x{cols}", {"rows": rows, "cols": cols}, options)


def _each(point: Callable[..., Point], *shape: int) -> tuple[Point, ...]:
    return tuple(point(*shape, **mode) for mode in ({}, _GROUP, _TENSOR, _INT8))


_point = rms_norm.point
_NORM = _sets(
    _point,
    (
        _point(5, 200, **_GROUP),
        _point(5, 64, **_TENSOR),
        _point(5, 64, **_INT8, rounding="none"),
        _point(5, 100, **_E5M2, **_GROUP, group_size=32, offset=1.0, rounding="gemma"),
    ),
    (*_each(_point, 16384, 4096), *_each(_point, 8192, 8192)),
)
# The kernels of rms_norm with the residual, at fewer sizes. A row of 32768 is too long for registers.
_ADD = _sets(
    _point,
    (_point(5, 200, **_GROUP, **_INT8), _point(5, 64, **_TENSOR, rounding="none")),
    (*_each(_point, 16384, 4096), _point(8192, 8192), _point(2048, 32768)),
)
_SILU = _sets(
    _gated_point,
    (_gated_point(5, 200, **_GROUP), _gated_point(5, 64, **_TENSOR, **_E5M2), _gated_point(5, 64, **_INT8)),
    (*_each(_gated_point, 8192, 14336), _gated_point(8192, 18944)),
)
# Of the same kernels: one size is enough.
_TANH: _Options = {"activation": "gelu_tanh"}
_GELU = {
    "tiny": (_gated_point(4, 128, activation="gelu"), _gated_point(5, 200, **_TANH, **_GROUP)),
    "edge": (_gated_point(17, 127, **_TANH, **_INT8),),
    "llm": (_gated_point(8192, 14336, **_TANH),),
    "decode": (_gated_point(1, 14336, **_TANH),),
}

CASES = (
    _case(rms_norm.CASES[0], _NORM),
    _case(add_rms_norm.CASES[0], _ADD),
    _case(gated.CASES[0], _SILU),
    _case(gated.CASES[2], _GELU),
)
