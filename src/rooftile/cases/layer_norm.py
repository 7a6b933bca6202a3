from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Unsupported
from rooftile.cases.draw import normal
from rooftile.ops.layer_norm import layer_norm
from rooftile.reference import layer_norm as reference

_ROUNDED_ONCE = "float32 inside, rounded once: half a unit in the last place"
_FP32 = "float32 sums of a whole row, added as a tree"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(1e-6, _FP32), "backward": Tolerance(5e-6, f"{_FP32}, and over all rows")},
    torch.float16: {"forward": Tolerance(5e-4, _ROUNDED_ONCE), "backward": Tolerance(5e-4, _ROUNDED_ONCE)},
    torch.bfloat16: {"forward": Tolerance(4e-3, _ROUNDED_ONCE), "backward": Tolerance(4e-3, _ROUNDED_ONCE)},
}


def _point(rows: int, cols: int, weight: str = "own", bias: str = "own", **options: object) -> Point:
    """`weight` and `bias`: "own" (of x's dtype), "fp32" or "none"."""
    dims = {"rows": rows, "cols": cols}
    label = f"{rows}x{cols}"
    for name, kind in (("weight", weight), ("bias", bias)):
        dims |= {f"has_{name}": int(kind != "none"), f"{name}_fp32": int(kind == "fp32")}
        label += {"own": "", "fp32": f" {name} fp32", "none": f" no {name}"}[kind]
    return Point(label, dims, options)


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    drawn = {"x": normal((point["rows"], point["cols"]), dtype, device, generator)}
    for name in ("weight", "bias"):
        if point[f"has_{name}"]:
            vector_dtype = torch.float32 if point[f"{name}_fp32"] else dtype
            drawn[name] = normal((point["cols"],), vector_dtype, device, generator)
    return drawn


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Forward: x, y, the weight and the bias; backward: dy, x, dx, the weight, its gradient and that of the bias."""
    weight, bias = (point[f"has_{n}"] * (4 if point[f"{n}_fp32"] else itemsize) for n in ("weight", "bias"))
    if direction == "forward":
        return point["cols"] * (2 * point["rows"] * itemsize + weight + bias)
    return point["cols"] * (3 * point["rows"] * itemsize + 2 * weight + bias)


def _flops(point: Point, direction: Direction) -> int:
    """Forward: sum, centre, square, sum, scale, weight and bias; backward: the statistics again, and eleven more."""
    return (7 if direction == "forward" else 16) * point["rows"] * point["cols"]


def _liger(point: Point) -> Callable[..., Any]:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    if not (point["has_weight"] and point["has_bias"]):
        raise Unsupported("Liger's LayerNorm needs a weight and a bias")

    def run(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
        return LigerLayerNormFunction.apply(x, weight, bias, eps)

    return run


def _quack(point: Point) -> Callable[..., Any]:
    """quack has the two kernels, and nothing that joins them. Its `layernorm_fwd` takes float32 vectors alone, where
    the op under it takes any."""
    from quack.rmsnorm import _rmsnorm_fwd, layernorm_bwd

    if not point["has_weight"]:
        raise Unsupported("quack's LayerNorm needs a weight")

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
            y = torch.empty_like(x)
            mean = rstd = None
            if any(ctx.needs_input_grad):
                mean, rstd = (torch.empty(x.shape[0], dtype=torch.float32, device=x.device) for _ in range(2))
            _rmsnorm_fwd(x, weight, y, bias, rstd, mean, None, None, eps, True)
            ctx.save_for_backward(x, weight, rstd, mean)
            ctx.has_bias = bias is not None
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            x, weight, rstd, mean = ctx.saved_tensors
            return *layernorm_bwd(x, weight, dy, rstd, mean, ctx.has_bias), None

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
        return LayerNorm.apply(x, weight, bias, eps)

    return run


_MODES = (
    _point(5, 64, bias="none"),
    _point(5, 64, "none"),
    _point(5, 64, "none", "none"),
    _point(5, 64, "fp32", "fp32"),
    _point(5, 64, bias="fp32"),
    _point(5, 64, eps=0.5),
)
_AWKWARD = ((1, 1), (3, 7), (17, 127), (2, 257), (65, 1025), (0, 64))
_ROWWISE = ((32768, 1024), (16384, 4096), (8192, 8192), (4096, 16384), (2048, 65536), (1024, 131072), (8192, 3584))

CASES = (
    OpCase(
        name="layer_norm",
        formula="y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias",
        function=layer_norm,
        reference=reference.layer_norm,
        eager=reference.eager,
        inputs=_inputs,
        outputs=("y",),
        grads=("x", "weight", "bias"),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        sets={
            "tiny": (_point(4, 128), _point(33, 256), *_MODES),
            "edge": tuple(_point(r, c) for r, c in _AWKWARD),
            "llm": tuple(_point(r, c) for r, c in _ROWWISE),
            "sweep": tuple(_point(2048, c) for c in (896, 1536, 2048, 3072, 4096)),
            "prefill": tuple(_point(r, 4096) for r in (512, 2048, 8192)),
            "decode": tuple(_point(r, 4096) for r in (1, 2, 8, 32)),
        },
        # Split kernels have few registers, so that several programs fit an SM: 36 bytes, on sm_90.
        spills=96,
        peers=(Peer("liger", _liger), Peer("quack", _quack)),
    ),
)
