from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Point, Tolerance
from rooftile.cases.draw import normal
from rooftile.ops.bias_activation import bias_gelu, bias_silu
from rooftile.reference import bias_activation as reference

_ROUNDED_ONCE = "float32 inside, rounded once: half a unit in the last place"
_FP32 = "an exponential in float32, a quotient or the normal distribution's tail to 1e-7"
_SUM = "dbias is a float32 sum over all rows"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(1e-6, _FP32), "backward": Tolerance(2e-6, f"{_FP32}; {_SUM}")},
    torch.float16: {
        "forward": Tolerance(5e-4, _ROUNDED_ONCE),
        "backward": Tolerance(5e-4, f"{_ROUNDED_ONCE}; {_SUM}"),
    },
    torch.bfloat16: {
        "forward": Tolerance(4e-3, _ROUNDED_ONCE),
        "backward": Tolerance(4e-3, f"{_ROUNDED_ONCE}; {_SUM}"),
    },
}


def _point(rows: int, cols: int, options: Mapping[str, str], *, bias: str = "own", batch: int = 0) -> Point:
    """`bias`: "own" (of x's dtype), "fp32" or "none". x is (batch, rows, cols) if there is a batch."""
    dims = {
        "rows": rows,
        "cols": cols,
        "batch": batch,
        "has_bias": int(bias != "none"),
        "bias_fp32": int(bias == "fp32"),
    }
    label = f"{batch}x{rows}x{cols}" if batch else f"{rows}x{cols}"
    return Point(label + {"own": "", "fp32": " bias fp32", "none": " no bias"}[bias], dims, options)


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    shape = (point["rows"], point["cols"])
    drawn = {"x": normal((point["batch"], *shape) if point["batch"] else shape, dtype, device, generator)}
    if point["has_bias"]:
        drawn["bias"] = normal(shape[1:], torch.float32 if point["bias_fp32"] else dtype, device, generator)
    return drawn


def _elements(point: Point) -> int:
    return max(1, point["batch"]) * point["rows"] * point["cols"]


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Forward: x, y and the bias; backward: dy, x, dx, the bias and its gradient."""
    tensors, vectors = (2, 1) if direction == "forward" else (3, 2)
    bias_size = 4 if point["bias_fp32"] else itemsize
    return tensors * itemsize * _elements(point) + vectors * point["has_bias"] * bias_size * point["cols"]


def _silu_flops(point: Point, direction: Direction) -> int:
    """The sum and silu; backward those of the derivative, its product with dy and the sum over rows."""
    return (5 if direction == "forward" else 10) * _elements(point)


def _gelu_flops(point: Point, direction: Direction) -> int:
    """As for `gelu_mul`: a polynomial of degree eight, an exponential and the rest."""
    forward, more = (9, 10) if point.options["activation"] == "gelu_tanh" else (22, 9)
    return (forward if direction == "forward" else forward + more) * _elements(point)


_AWKWARD = ((1, 1), (3, 7), (17, 127), (65, 1025), (1, 8209), (0, 64), (5, 0))
_SWEEP = ((256, 4096), (512, 4096), (1024, 4096), (1024, 16384))


def _sets(options: Mapping[str, str]) -> dict[str, tuple[Point, ...]]:
    return {
        "tiny": (
            _point(4, 128, options),
            _point(33, 256, options),
            _point(5, 64, options, bias="none"),
            _point(5, 64, options, bias="fp32"),
        ),
        "edge": tuple(_point(r, c, options) for r, c in _AWKWARD),
        "llm": (_point(8192, 14336, options), *(_point(t, n, options, batch=2) for t, n in _SWEEP)),
        "prefill": tuple(_point(r, 14336, options) for r in (512, 2048, 8192)),
        "decode": tuple(_point(r, 14336, options) for r in (1, 2, 8, 32)),
    }


_SILU_SETS = _sets({})
_EXACT = _sets({"activation": "gelu"})
_TANH = {"activation": "gelu_tanh"}
_GELU_SETS = {
    **_EXACT,
    "tiny": (*_EXACT["tiny"], _point(5, 64, _TANH)),
    "llm": (*_EXACT["llm"], _point(8192, 14336, _TANH)),
}

CASES = (
    OpCase(
        name="bias_gelu",
        formula="y = gelu(x + bias), gelu(z) = z · Φ(z) or its tanh form",
        function=bias_gelu,
        reference=reference.bias_gelu,
        eager=reference.bias_gelu_eager,
        inputs=_inputs,
        outputs=("y",),
        grads=("x", "bias"),
        nbytes=_nbytes,
        flops=_gelu_flops,
        tolerances=TOLERANCES,
        sets=_GELU_SETS,
    ),
    OpCase(
        name="bias_silu",
        formula="y = z · sigmoid(z), z = x + bias",
        function=bias_silu,
        reference=reference.bias_silu,
        eager=reference.bias_silu_eager,
        inputs=_inputs,
        outputs=("y",),
        grads=("x", "bias"),
        nbytes=_nbytes,
        flops=_silu_flops,
        tolerances=TOLERANCES,
        sets=_SILU_SETS,
    ),
)
