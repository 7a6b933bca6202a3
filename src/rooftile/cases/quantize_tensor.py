from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Point, Tolerance
from rooftile.cases.draw import normal
from rooftile.ops.quantize_tensor import quantize_tensor
from rooftile.quantize import BLOCK, Quantize
from rooftile.reference import quantize_tensor as reference
from rooftile.reference.quantize import LARGEST

_FEW = "a number in 10^4 lies so near to the middle of two of the format's that float32 and float64 round it apart"
_TIES = f"{_FEW}; of a {{}} input with few digits more lie there"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(3e-3, _FEW)},
    torch.float16: {"forward": Tolerance(2e-2, _TIES.format("fp16"))},
    torch.bfloat16: {"forward": Tolerance(4e-2, _TIES.format("bf16"))},
}
_SCALE = Tolerance(1e-6, "a maximum and a quotient in float32")


def _format(point: Point) -> str:
    return point.options.get("dtype", "float8_e4m3fn")


def _run(
    x: Tensor,
    *,
    scale: Tensor | None = None,
    dtype: str = "float8_e4m3fn",
    per: Any = "row",
    group_size: int = 128,
) -> tuple[Tensor, Tensor]:
    return quantize_tensor(x, Quantize(getattr(torch, dtype), per, scale, group_size))


def _point(rows: int, cols: int, *, given: bool = False, **options: object) -> Point:
    """`given`: the tensor's scale is an input."""
    label = f"{rows}x{cols}" + (" scale given" if given else "")
    return Point(label, {"rows": rows, "cols": cols, "given": int(given)}, options)


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    drawn = {"x": normal((point["rows"], point["cols"]), dtype, device, generator)}
    if point["given"]:  # a few numbers are past 4, and become the largest
        drawn["scale"] = torch.full((1,), 4 / LARGEST[_format(point)], device=device)
    return drawn


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """x, a byte for each element, and the scales."""
    rows, cols = point["rows"], point["cols"]
    groups = -(-cols // point.options.get("group_size", BLOCK))
    blocks = -(-rows // BLOCK) * -(-cols // BLOCK)
    scales = {"row": rows, "group": rows * groups, "block": blocks, "tensor": 1}[point.options.get("per", "row")]
    return (itemsize + 1) * rows * cols + 4 * scales


def _flops(point: Point, direction: Direction) -> int:
    """The quotient, and the maximum where one is taken."""
    return (1 if point["given"] else 2) * point["rows"] * point["cols"]


_KINDS: tuple[dict[str, Any], ...] = ({}, {"per": "group"}, {"per": "block"}, {"per": "tensor"})

CASES = (
    OpCase(
        name="quantize_tensor",
        formula="scale = max|x| / largest, q = round(x / scale)",
        function=_run,
        reference=reference.quantize_tensor,
        eager=reference.quantize_tensor_eager,
        inputs=_inputs,
        outputs=("q", "scale"),
        output_dtypes=lambda point: {"q": getattr(torch, _format(point)), "scale": torch.float32},
        grads=(),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        output_tolerances={"scale": dict.fromkeys(TOLERANCES, _SCALE)},
        sets={
            "tiny": (
                _point(4, 128),
                _point(33, 256),
                _point(5, 200, per="group"),
                _point(130, 200, per="block"),
                _point(5, 200, per="tensor"),
                _point(5, 64, given=True, per="tensor", dtype="int8"),
                _point(5, 100, per="group", group_size=32, dtype="float8_e5m2"),
            ),
            "edge": (
                _point(1, 1),
                _point(3, 7, per="tensor"),
                _point(129, 127, per="block", dtype="int8"),
                _point(1, 4099),
                _point(0, 64, per="block"),
                _point(5, 0, per="tensor"),
            ),
            "llm": tuple(_point(r, c, **k) for r, c in ((8192, 4096), (4096, 14336)) for k in _KINDS),
            "decode": tuple(_point(r, 4096, **k) for r in (1, 16) for k in _KINDS if k.get("per") != "block"),
        },
    ),
)
