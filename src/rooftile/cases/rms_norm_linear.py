from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance
from rooftile.cases.draw import normal
from rooftile.ops.gemm.config import Activation
from rooftile.ops.gemm.linear import gated_linear
from rooftile.ops.gemm.norm_linear import rms_norm_gated_linear, rms_norm_linear
from rooftile.ops.rms_norm import rms_norm
from rooftile.reference import rms_norm_linear as reference

# A chain of K float32 sums loses 0.4 * 2^-24 * sqrt(K / 2): 1.0e-6 at 3584; the norm's own sum is shorter, a tree's.
_FP32 = "a chain of float32 sums loses 1.0e-6 at 3584, its rstd less"
_FP32_BACKWARD = "the same over as many rows as the weight has, or tokens, twice"
# x times the norm's weight is rounded (not by kernels "gemv" and "gemv_persistent"), and the output: together half a
# unit times the root of two, as a root mean square.
_FORWARD = "float32 sums; rounded twice: what is multiplied, and the output"
_BACKWARD = "float32 sums; the normalised x and its gradient are rounded, then each gradient once"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(5e-6, _FP32), "backward": Tolerance(1e-5, _FP32_BACKWARD)},
    torch.float16: {"forward": Tolerance(1e-3, _FORWARD), "backward": Tolerance(1.5e-3, _BACKWARD)},
    torch.bfloat16: {"forward": Tolerance(6e-3, _FORWARD), "backward": Tolerance(1e-2, _BACKWARD)},
}


class Traffic(NamedTuple):
    """Elements that norm and GEMM move between memory and the chip.

    Attributes:
        unfused: two kernels: x read, the normalised x written and read, the weights, the output.
        two_reads: one kernel that reads x for the mean of squares, then again for the GEMM.
        fused: one kernel that adds up the squares beside the products, as `rms_norm_linear` does up to 32 rows.
    """

    unfused: int
    two_reads: int
    fused: int


def traffic(m: int, n: int, k: int) -> Traffic:
    """For x (m, k) and a weight (n, k): the weights, what is multiplied by them and the output are always in it."""
    rest = k + n * k + m * n
    return Traffic(3 * m * k + rest, 2 * m * k + rest, m * k + rest)


def _point(
    rows: int, k: int, n: int, *, bias: bool = False, weight: str = "own", gated: bool = False, **options: object
) -> Point:
    """`n` counts rows of the weight; `weight`: the norm's, "own" (of x's dtype) or "fp32"."""
    out = n // 2 if gated else n
    dims = {"rows": rows, "k": k, "n": n, "out": out, "has_bias": int(bias), "weight_fp32": int(weight == "fp32")}
    label = f"{rows}x{k}->{f'2x{out}' if gated else n}"
    return Point(label + " bias" * bias + " norm weight fp32" * (weight == "fp32"), dims, options)


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    rows, k, n = point["rows"], point["k"], point["n"]
    drawn = {
        "x": normal((rows, k), dtype, device, generator),
        "norm_weight": normal((k,), torch.float32 if point["weight_fp32"] else dtype, device, generator),
        # Of a size that leaves sums of k products with numbers of order 1.
        "weight": (normal((n, k), torch.float32, device, generator) * k**-0.5).to(dtype),
    }
    if point["has_bias"]:
        drawn["bias"] = normal((n,), dtype, device, generator)
    return drawn


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Forward: x, both weights, bias and output once. Backward: dy, x and both weights, and all their gradients, and
    what a gate keeps."""
    x, weight, out = point["rows"] * point["k"], point["n"] * point["k"], point["rows"] * point["out"]
    bias = point["has_bias"] * point["n"] * itemsize
    norm_weight = point["k"] * (4 if point["weight_fp32"] else itemsize)
    once = itemsize * (x + weight) + norm_weight
    if direction == "forward":
        return once + bias + itemsize * out
    kept = point["rows"] * point["n"] if point["out"] < point["n"] else 0
    return itemsize * (out + kept) + 2 * once + bias


def _flops(point: Point, direction: Direction) -> int:
    """Two for each product and its sum, and the norm's four for each x; backward two such GEMMs, the norm's nine."""
    x = point["rows"] * point["k"]
    return x * (2 * point["n"] + 4 if direction == "forward" else 4 * point["n"] + 9)


def _cublas(point: Point) -> Callable[..., Any]:
    """Rooftile's norm, then PyTorch's GEMM."""

    def run(
        x: Tensor,
        norm_weight: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        eps: float = 1e-6,
        offset: float = 0.0,
    ) -> Tensor:
        normed = rms_norm(x, norm_weight, eps=eps, offset=offset, rounding="none")
        return torch.nn.functional.linear(normed, weight, bias)

    return run


def _apart(point: Point) -> Callable[..., Any]:
    """Rooftile's norm, then its gated GEMM: two kernels at every size."""

    def run(
        x: Tensor,
        norm_weight: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        eps: float = 1e-6,
        offset: float = 0.0,
        activation: Activation = "silu",
    ) -> Tensor:
        normed = rms_norm(x, norm_weight, eps=eps, offset=offset, rounding="none")
        return gated_linear(normed, weight, bias, activation=activation)

    return run


def _gated(rows: int, k: int, n: int, *, activation: str = "silu", **options: Any) -> Point:
    """`n` counts rows of the gate and of up together."""
    return _point(rows, k, n, gated=True, activation=activation, **options)


_QWEN = ((3584, 3584), (3584, 18944))
_GATED_MODELS = ((4096, 28672), (3584, 37888))  # Llama-3-8B, Qwen2.5-7B
_GATED_SMALL = (960, 5120)  # SmolLM2-360M, narrow enough to be one kernel of several rows
_DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64)
_PREFILL_ROWS = (128, 256, 512, 1024, 2048)

CASES = (
    OpCase(
        name="rms_norm_linear",
        formula="y = (x / sqrt(mean(x²) + eps) · (norm_weight + offset)) · weightᵀ + bias",
        function=rms_norm_linear,
        reference=reference.rms_norm_linear,
        eager=reference.eager,
        inputs=_inputs,
        outputs=("y",),
        grads=("x", "norm_weight", "weight", "bias"),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        roof="gemm",
        sets={
            "tiny": (
                _point(4, 64, 48, bias=True),
                _point(80, 96, 40),
                _point(3, 70, 33, weight="fp32", eps=0.5, offset=1.0),
            ),
            # A row of one element has almost no derivative unless eps is large; only then is it a fair test.
            "edge": (
                _point(1, 1, 1, eps=100.0),
                *(_point(m, k, n) for m, k, n in ((1, 127, 33), (17, 130, 31), (0, 64, 32), (5, 64, 0))),
                _point(65, 33, 17, bias=True),
            ),
            "llm": (_point(1, 3584, 3584), _point(16, 3584, 18944), _point(2048, 3584, 3584)),
            "decode": tuple(_point(m, k, n) for k, n in _QWEN for m in _DECODE_ROWS),
            "prefill": tuple(_point(m, k, n) for k, n in _QWEN for m in _PREFILL_ROWS),
        },
        float32_floor={
            "backward": 2.5e-6
        },  # of dx, a chain over 18944 rows of the weight: cuBLAS's GEMV adds in a tree
        peers=(Peer("rms_norm+cublas", _cublas),),
    ),
    OpCase(
        name="rms_norm_gated_linear",
        formula="y = act(g) · u, [g | u] = (x / sqrt(mean(x²) + eps) · (norm_weight + offset)) · weightᵀ + bias",
        function=rms_norm_gated_linear,
        reference=reference.rms_norm_gated_linear,
        eager=reference.gated_eager,
        inputs=_inputs,
        outputs=("y",),
        grads=("x", "norm_weight", "weight", "bias"),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        roof="gemm",
        spills=16,  # of a toy in kernel "gemv_persistent" on sm_86
        sets={
            "tiny": (
                _gated(1, 64, 96, bias=True),
                _gated(80, 96, 40, activation="gelu"),
                _gated(3, 70, 66, weight="fp32", activation="gelu_tanh", eps=0.5, offset=1.0),
            ),
            "edge": (
                *(_gated(m, k, n) for m, k, n in ((1, 127, 66), (17, 130, 62), (0, 64, 32), (5, 64, 0))),
                _gated(65, 33, 34, bias=True),
            ),
            "llm": (_gated(1, 4096, 28672), _gated(16, *_GATED_SMALL), _gated(2048, 4096, 28672)),
            "decode": tuple(_gated(m, k, n) for k, n in (*_GATED_MODELS, _GATED_SMALL) for m in _DECODE_ROWS),
            "prefill": tuple(_gated(m, k, n) for k, n in _GATED_MODELS for m in _PREFILL_ROWS),
        },
        float32_floor={"backward": 4e-6},  # the same chain, of 37888
        peers=(Peer("rms_norm+gated_linear", _apart),),
    ),
)
