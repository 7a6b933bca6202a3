from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Training
from rooftile.cases.draw import normal
from rooftile.ops.gemm.gated_mlp import gated_mlp
from rooftile.ops.gemm.linear import gate, linear
from rooftile.reference import gated_mlp as reference

_FP32 = "two chains of float32 sums, as linear's, one after the other"
_FORWARD = "h is rounded, then the result; where the gate is a kernel of its own, g and u too"
_BACKWARD = "g and u, h, their gradients and each result are rounded; where the gate is a kernel of its own, dh too"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(5e-6, _FP32), "backward": Tolerance(1e-5, _FP32)},
    torch.float16: {"forward": Tolerance(8e-4, _FORWARD), "backward": Tolerance(1e-3, _BACKWARD)},
    torch.bfloat16: {"forward": Tolerance(6e-3, _FORWARD), "backward": Tolerance(8e-3, _BACKWARD)},
}


def _point(rows: int, k: int, n: int, out: int | None = None, *, bias: bool = False, **options: object) -> Point:
    """`out`: columns of the result; as many as x has by default."""
    dims = {"rows": rows, "k": k, "n": n, "out": k if out is None else out, "has_bias": int(bias)}
    return Point(f"{rows}x{k}->2x{n}->{dims['out']}" + " bias" * bias, dims, options)


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    """Weights scaled so that the sums are of order 1."""
    rows, k, n, out = point["rows"], point["k"], point["n"], point["out"]

    def weight(rows: int, columns: int) -> Tensor:
        return (normal((rows, columns), torch.float32, device, generator) * max(1, columns) ** -0.5).to(dtype)

    drawn = {
        "x": normal((rows, k), dtype, device, generator),
        "gate_up_weight": weight(2 * n, k),
        "down_weight": weight(out, n),
    }
    if point["has_bias"]:
        drawn["gate_up_bias"] = normal((2 * n,), dtype, device, generator)
        drawn["down_bias"] = normal((out,), dtype, device, generator)
    return drawn


def _sizes(point: Point) -> tuple[int, int, int, int]:
    """Elements of x, the weights and biases, the result, and g and u."""
    rows, k, n, out = point["rows"], point["k"], point["n"], point["out"]
    return rows * k, 2 * n * k + n * out + point["has_bias"] * (2 * n + out), rows * out, 2 * rows * n


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Forward: x, the weights and the result; backward: dy, x, the weights, g and u, and the gradients."""
    x, weights, out, gates = _sizes(point)
    return itemsize * (x + weights + out if direction == "forward" else 2 * x + 2 * weights + out + gates)


def _flops(point: Point, direction: Direction) -> int:
    """Two for each product and its sum; backward two GEMMs for each of the forward's."""
    forward = 2 * point["rows"] * point["n"] * (2 * point["k"] + point["out"])
    return forward if direction == "forward" else 2 * forward


def _trained_nbytes(point: Point, itemsize: int) -> int:
    """Both, and g and u once more, which the forward writes."""
    return _nbytes(point, itemsize, "forward") + _nbytes(point, itemsize, "backward") + itemsize * _sizes(point)[3]


def _apart(point: Point) -> Callable[..., Any]:
    """Rooftile's GEMMs, with the gate as a kernel of its own."""

    def run(
        x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None, *, activation: str = "silu",
    ) -> Tensor:  # fmt: skip
        return linear(gate(linear(x, gate_up_weight, gate_up_bias), activation), down_weight, down_bias)

    return run


_EDGE = ((1, 1, 1, 1), (65, 33, 17, 31), (16, 130, 31, 8), (0, 64, 32, 16), (5, 0, 8, 4), (5, 64, 0, 8), (5, 8, 16, 0))
_GRADS = ("x", "gate_up_weight", "down_weight", "gate_up_bias", "down_bias")

CASES = (
    OpCase(
        name="gated_mlp",
        formula="y = (act(g) · u) · down_weightᵀ + down_bias, [g | u] = x · gate_up_weightᵀ + gate_up_bias",
        function=gated_mlp,
        reference=reference.gated_mlp,
        eager=reference.gated_mlp_eager,
        inputs=_inputs,
        outputs=("y",),
        grads=_GRADS,
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        training=Training(_GRADS, _trained_nbytes, lambda point: 3 * _flops(point, "forward")),
        roof="gemm",
        sets={
            "tiny": (
                _point(4, 64, 48, bias=True),
                _point(33, 64, 96, 40),
                _point(5, 70, 66, activation="gelu"),
                _point(5, 70, 66, activation="gelu_tanh"),
            ),
            "edge": tuple(_point(m, k, n, out, bias=m == 65) for m, k, n, out in _EDGE),
            "llm": (_point(2048, 4096, 14336),),
            # Qwen3-0.6B, Llama-3.2-1B, Gemma-3-1B and Llama-3-8B
            "training": (
                _point(16384, 1024, 3072),
                _point(16384, 2048, 8192),
                _point(8192, 1152, 6912, activation="gelu_tanh"),
                _point(8192, 4096, 14336),
            ),
        },
        peers=(Peer("linear+silu_mul", _apart),),
    ),
)
