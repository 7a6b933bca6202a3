from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Training
from rooftile.cases.draw import normal
from rooftile.ops.gemm.linear import linear
from rooftile.ops.gemm.lora_linear import lora_linear
from rooftile.reference import lora_linear as reference

_FP32 = "a chain of float32 sums, as linear's, and one of as many again for u"
_FORWARD = "half a unit in the last place each of u, the scaled lora_b and the result"
_BACKWARD = "the same of scale * dy @ lora_b and of each gradient; that of lora_b is rounded before its scale too"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(5e-6, _FP32), "backward": Tolerance(1e-5, _FP32)},
    torch.float16: {"forward": Tolerance(5e-4, _FORWARD), "backward": Tolerance(1e-3, _BACKWARD)},
    torch.bfloat16: {"forward": Tolerance(4e-3, _FORWARD), "backward": Tolerance(8e-3, _BACKWARD)},
}
_SCALE = 0.5  # lora_alpha / rank


def _point(
    rows: int, k: int, n: int, rank: int, *, bias: bool = False, dropped: bool = False, scale: float | None = _SCALE
) -> Point:
    """`dropped`: the adapter's input is not x."""
    dims = {"rows": rows, "k": k, "n": n, "rank": rank, "has_bias": int(bias), "dropped": int(dropped)}
    label = f"{rows}x{k}->{n} rank {rank}"
    return Point(label + " bias" * bias + " dropped" * dropped, dims, {} if scale is None else {"scale": scale})


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    """Factors of a size that leaves the adapter a result as large as the layer's."""
    rows, k, n, rank = point["rows"], point["k"], point["n"], point["rank"]

    def drawn(*shape: int, sums: int = 1) -> Tensor:
        return (normal(shape, torch.float32, device, generator) * max(1, sums) ** -0.5).to(dtype)

    found = {
        "x": drawn(rows, k),
        "weight": drawn(n, k, sums=k),
        "lora_a": drawn(rank, k, sums=k),
        "lora_b": drawn(n, rank, sums=rank),
    }
    if point["has_bias"]:
        found["bias"] = drawn(n)
    if point["dropped"]:
        found["lora_input"] = drawn(rows, k)
    return found


def _sizes(point: Point) -> tuple[int, int, int, int, int]:
    """Elements of x, the weight, both factors, the result and u."""
    rows, k, n, rank = point["rows"], point["k"], point["n"], point["rank"]
    return rows * k, n * k, rank * (k + n), rows * n, rows * rank


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Forward: x, the weight, the factors, the bias and the result; backward: dy and those, u, and their gradients."""
    x, weight, factors, out, u = _sizes(point)
    inputs = x * (1 + point["dropped"]) + weight + factors + point["n"] * point["has_bias"]
    return itemsize * (inputs + out if direction == "forward" else 2 * inputs + out + u)


def _flops(point: Point, direction: Direction) -> int:
    """Two for each product and its sum; backward two GEMMs for each of the forward's three."""
    x, _, factors, _, _ = _sizes(point)
    forward = 2 * (x * point["n"] + point["rows"] * factors)
    return forward if direction == "forward" else 2 * forward


def _trained_nbytes(point: Point, itemsize: int) -> int:
    """Of a frozen weight: x, the weight and the factors twice, dy, u, the result and the gradients."""
    x, weight, factors, out, u = _sizes(point)
    return itemsize * (3 * x + 2 * weight + 3 * factors + 2 * out + 2 * u)


def _trained_flops(point: Point) -> int:
    """Without the weight's gradient."""
    x, _, factors, _, _ = _sizes(point)
    return 4 * x * point["n"] + 6 * point["rows"] * factors


def _three(point: Point) -> Callable[..., Any]:
    """Rooftile's GEMMs one by one, the last of which adds the layer's result."""

    def run(
        x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, bias: Tensor | None = None, *, scale: float = 1.0,
        lora_input: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        u = linear(x if lora_input is None else lora_input, lora_a)
        return linear(u, lora_b * scale, residual=linear(x, weight, bias))

    return run


# Llama-3-8B, (K, N): q and o, k and v, gate and up, down.
_LLAMA = ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096))
_EDGE = ((1, 1, 1, 1), (65, 33, 17, 3), (16, 130, 31, 5), (7, 64, 127, 20), (0, 64, 32, 8), (5, 0, 8, 2), (5, 64, 0, 4))

CASES = (
    OpCase(
        name="lora_linear",
        formula="y = x · weightᵀ + scale · (x · lora_aᵀ) · lora_bᵀ + bias",
        function=lora_linear,
        reference=reference.lora_linear,
        eager=reference.lora_linear_eager,
        inputs=_inputs,
        outputs=("y",),
        grads=("x", "weight", "lora_a", "lora_b", "bias", "lora_input"),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        training=Training(("x", "lora_a", "lora_b"), _trained_nbytes, _trained_flops),
        roof="gemm",
        sets={
            "tiny": (
                _point(4, 64, 48, 8, bias=True, scale=None),
                _point(33, 128, 96, 16),
                _point(17, 72, 40, 4, dropped=True, scale=1.7),
            ),
            "edge": tuple(_point(m, k, n, r, bias=n % 2 == 1) for m, k, n, r in _EDGE),
            "llm": tuple(_point(8192, k, n, r) for k, n in _LLAMA for r in (16, 64)),
        },
        peers=(Peer("three", _three),),
    ),
)
