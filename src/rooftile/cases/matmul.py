from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance
from rooftile.cases.draw import normal
from rooftile.ops.gated import gelu_mul_packed, silu_mul_packed
from rooftile.ops.gemm.linear import gated_linear, linear
from rooftile.ops.gemm.matmul import matmul
from rooftile.reference import matmul as reference

# A chain of K float32 sums, each as large as the root of the terms before it, loses 0.4 * 2^-24 * sqrt(K / 2): 1.1e-6
# at 4096 and 2.4e-6 at 18944. A gradient's chain is as long as there are rows of the weight, or tokens.
_FP32 = "a chain of float32 sums loses 2.4e-6 at the longest K, 18944"
_FP32_BACKWARD = "the same over as many rows as the weight has, or tokens"
_ROUNDED_ONCE = "float32 sums, rounded once: half a unit in the last place"
_BACKWARD = "float32 sums; with an activation, its argument and gradient are rounded too, each gradient once"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(5e-6, _FP32), "backward": Tolerance(1e-5, _FP32_BACKWARD)},
    torch.float16: {"forward": Tolerance(5e-4, _ROUNDED_ONCE), "backward": Tolerance(1e-3, _BACKWARD)},
    torch.bfloat16: {"forward": Tolerance(4e-3, _ROUNDED_ONCE), "backward": Tolerance(8e-3, _BACKWARD)},
}


def _weight(
    shape: tuple[int, ...], k: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Of a size that leaves sums of k products with numbers of order 1."""
    return (normal(shape, torch.float32, device, generator) * max(1, k) ** -0.5).to(dtype)


# linear and gated_linear


def _point(
    rows: int, k: int, n: int, *, bias: bool = False, residual: bool = False, gated: bool = False, **options: object
) -> Point:
    """`n` counts rows of the weight."""
    dims = {
        "rows": rows,
        "k": k,
        "n": n,
        "out": n // 2 if gated else n,
        "has_bias": int(bias),
        "has_residual": int(residual),
    }
    label = f"{rows}x{k}->{f'2x{n // 2}' if gated else n}"
    return Point(label + " bias" * bias + " residual" * residual, dims, options)


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    rows, k, n = point["rows"], point["k"], point["n"]
    drawn = {
        "x": normal((rows, k), dtype, device, generator),
        "weight": _weight((n, k), k, dtype, device, generator),
    }
    if point["has_bias"]:
        drawn["bias"] = normal((n,), dtype, device, generator)
    if point["has_residual"]:
        drawn["residual"] = normal((rows, n), dtype, device, generator)
    return drawn


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Forward: x, weight, bias, residual and the output; backward: dy, x, weight, what is kept, and the gradients."""
    x, weight, out = point["rows"] * point["k"], point["n"] * point["k"], point["rows"] * point["out"]
    bias = point["has_bias"] * point["n"]
    if direction == "forward":
        return itemsize * (x + weight + bias + (1 + point["has_residual"]) * out)
    kept = point["rows"] * point["n"] if point.options.get("activation") else 0
    return itemsize * (out + kept + 2 * x + 2 * weight + bias)


def _flops(point: Point, direction: Direction) -> int:
    """Two for each product and its sum; two such GEMMs backward."""
    return (2 if direction == "forward" else 4) * point["rows"] * point["n"] * point["k"]


_DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64)
_PREFILL_ROWS = (256, 1024, 2048, 4096, 8192)
# (K, N, bias): qkv, o, gate and up, down; and the vocabulary's.
_LLAMA = ((4096, 6144, False), (4096, 4096, False), (4096, 28672, False), (14336, 4096, False))
_LM_HEAD = ((4096, 128256, False),)
_SMALL = ((2048, 2048), (8192, 2048), (2048, 1024), (3072, 1024))  # (K, N) of o and down: Llama-3.2-1B, Qwen3-0.6B
_QWEN = ((3584, 4608, True), (3584, 3584, False), (3584, 37888, False), (18944, 3584, False))
_EDGE = ((1, 1, 1), (1, 64, 127), (65, 33, 17), (16, 130, 31), (0, 64, 32), (5, 0, 8), (5, 64, 0))

_LINEAR_SETS = {
    "tiny": (
        _point(4, 64, 48, bias=True),
        _point(33, 128, 96),
        _point(5, 70, 65, bias=True, activation="gelu"),
        _point(17, 40, 64, residual=True, activation="silu"),
    ),
    "edge": tuple(_point(m, k, n, bias=n % 2 == 1) for m, k, n in _EDGE),
    "llm": (
        _point(2048, 4096, 4096),
        _point(2048, 4096, 14336, bias=True, activation="gelu_tanh"),
        _point(16, 4096, 6144),
        _point(1, 4096, 4096, residual=True),
    ),
    "decode": (
        *(_point(m, k, n, bias=b) for k, n, b in (*_LLAMA, *_LM_HEAD, *_QWEN) for m in _DECODE_ROWS),
        *(_point(1, k, n) for k, n in _SMALL),
    ),
    "prefill": tuple(_point(m, k, n, bias=b) for k, n, b in (*_LLAMA, *_QWEN) for m in _PREFILL_ROWS),
}


def _gated(rows: int, k: int, n: int, *, bias: bool = False, activation: str = "silu") -> Point:
    return _point(rows, k, n, bias=bias, gated=True, activation=activation)


_GATED_MODELS = ((4096, 28672), (3584, 37888))
_GATED_EDGE = ((1, 1, 2), (1, 64, 254), (65, 33, 34), (16, 130, 62), (0, 64, 32), (5, 0, 8), (5, 64, 0))
_GATED_SETS = {
    "tiny": (
        _gated(4, 64, 96, bias=True),
        _gated(33, 128, 64),
        _gated(5, 70, 66, activation="gelu"),
        _gated(5, 70, 66, activation="gelu_tanh"),
    ),
    "edge": tuple(_gated(m, k, n, bias=m == 65) for m, k, n in _GATED_EDGE),
    "llm": (_gated(2048, 4096, 28672), _gated(16, 4096, 28672)),
    "decode": tuple(_gated(m, k, n) for k, n in _GATED_MODELS for m in _DECODE_ROWS),
    "prefill": tuple(_gated(m, k, n) for k, n in _GATED_MODELS for m in _PREFILL_ROWS),
}


def _apart(point: Point) -> Callable[..., Any]:
    """PyTorch's GEMM, then Rooftile's kernel for the gate."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: Any = "silu") -> Tensor:
        gate_up = torch.nn.functional.linear(x, weight, bias)
        if activation == "silu":
            return silu_mul_packed(gate_up)
        return gelu_mul_packed(gate_up, activation=activation)

    return run


# matmul


def _matmul(
    rows: int, k: int, n: int, layout: str = "nn", *, batch: int = 0, shared: bool = False, **options: object
) -> Point:
    """`layout`: of a and b, "t" for one that lies in memory transposed. `shared`: one b for all batches."""
    dims = {
        "rows": rows,
        "k": k,
        "n": n,
        "batch": batch,
        "shared": int(shared),
        "a_transposed": int(layout[0] == "t"),
        "b_transposed": int(layout[1] == "t"),
    }
    label = f"{f'{batch}x' if batch else ''}{rows}x{k}x{n} {layout}"
    return Point(label + " shared" * shared, dims, options)


def _operands(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    rows, k, n = point["rows"], point["k"], point["n"]
    batch = (point["batch"],) if point["batch"] else ()

    def laid(shape: tuple[int, ...], transposed: int, k: int) -> Tensor:
        drawn = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
        t = _weight(drawn, k, dtype, device, generator)
        return t.mT if transposed else t

    return {
        "a": laid((*batch, rows, k), point["a_transposed"], 1),
        "b": laid((*(() if point["shared"] else batch), k, n), point["b_transposed"], k),
    }


def _matmul_nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Forward: a, b and the output; backward: dy, a, b and two gradients."""
    batch = max(1, point["batch"])
    b_batch = 1 if point["shared"] else batch
    operands = batch * point["rows"] * point["k"] + b_batch * point["k"] * point["n"]
    out = batch * point["rows"] * point["n"]
    return itemsize * (out + (operands if direction == "forward" else 2 * operands))


def _matmul_flops(point: Point, direction: Direction) -> int:
    batch = max(1, point["batch"])
    return (2 if direction == "forward" else 4) * batch * point["rows"] * point["n"] * point["k"]


_MATMUL_SETS = {
    "tiny": (
        _matmul(8, 64, 48),
        _matmul(33, 128, 40, "nt"),
        _matmul(17, 40, 24, "tn", batch=2),
        _matmul(5, 64, 16, batch=3, shared=True),
    ),
    "edge": tuple(_matmul(m, k, n) for m, k, n in _EDGE),
    "llm": (_matmul(2048, 2048, 2048), _matmul(4096, 4096, 4096, "nt")),
    "gemm": tuple(_matmul(n, n, n, layout) for n in (2048, 4096, 8192) for layout in ("nn", "nt", "tn")),
}

CASES = (
    OpCase(
        name="matmul",
        formula="y = a · b",
        function=matmul,
        reference=reference.matmul,
        eager=reference.matmul_eager,
        inputs=_operands,
        outputs=("y",),
        grads=("a", "b"),
        nbytes=_matmul_nbytes,
        flops=_matmul_flops,
        tolerances=TOLERANCES,
        roof="gemm",
        sets=_MATMUL_SETS,
    ),
    OpCase(
        name="linear",
        formula="y = act(x · weightᵀ + bias) + residual",
        function=linear,
        reference=reference.linear,
        eager=reference.linear_eager,
        inputs=_inputs,
        outputs=("y",),
        grads=("x", "weight", "bias"),  # the residual's is dy itself
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        roof="gemm",
        sets=_LINEAR_SETS,
    ),
    OpCase(
        name="gated_linear",
        formula="y = act(g) · u, [g | u] = x · weightᵀ + bias",
        function=gated_linear,
        reference=reference.gated_linear,
        eager=reference.gated_linear_eager,
        inputs=_inputs,
        outputs=("y",),
        grads=("x", "weight", "bias"),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        roof="gemm",
        sets=_GATED_SETS,
        float32_floor={"backward": 4e-6},  # of dx, a chain over 37888 rows of the weight
        peers=(Peer("cublas+silu_mul", _apart),),
    ),
)
