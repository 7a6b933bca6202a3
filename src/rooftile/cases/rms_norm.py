from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance
from rooftile.cases.draw import normal
from rooftile.ops.rms_norm import rms_norm
from rooftile.reference import rms_norm as reference

# One rounding to the dtype costs a relative error of about 2^-12.3 (fp16) or 2^-9.3 (bf16), as a root mean square, and
# at most 2^-11 or 2^-8; Llama's order rounds twice, before the weight and after it.
_FORWARD = "float32 inside; rounded at most twice (the row, the output)"
_BACKWARD = "float32 inside, each gradient rounded once; the reference does not round the row in the forward"
_FP32 = "float32 sums of a whole row, added as a tree"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(1e-6, _FP32), "backward": Tolerance(5e-6, f"{_FP32}, and over all rows")},
    torch.float16: {"forward": Tolerance(1e-3, _FORWARD), "backward": Tolerance(2e-3, _BACKWARD)},
    torch.bfloat16: {"forward": Tolerance(8e-3, _FORWARD), "backward": Tolerance(1e-2, _BACKWARD)},
}


def point(rows: int, cols: int, weight: str = "own", **options: object) -> Point:
    """`weight`: "own" (of x's dtype), "fp32" or "none"."""
    dims = {"rows": rows, "cols": cols, "has_weight": int(weight != "none"), "weight_fp32": int(weight == "fp32")}
    label = {"own": "", "fp32": " weight fp32", "none": " no weight"}[weight]
    return Point(f"{rows}x{cols}{label}", dims, options)


def inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    drawn = {"x": normal((point["rows"], point["cols"]), dtype, device, generator)}
    if point["has_weight"]:
        weight_dtype = torch.float32 if point["weight_fp32"] else dtype
        drawn["weight"] = normal((point["cols"],), weight_dtype, device, generator)
    return drawn


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Forward: x, y and the weight; backward: dy, x, dx, the weight and its gradient."""
    tensors = 2 if direction == "forward" else 3
    vectors = 1 if direction == "forward" else 2
    weight_size = 4 if point["weight_fp32"] else itemsize
    return point["cols"] * (tensors * point["rows"] * itemsize + vectors * point["has_weight"] * weight_size)


def flops(point: Point, direction: Direction) -> int:
    """Forward: square, sum, scale and weight; backward: those of the statistics again, and seven more."""
    return (4 if direction == "forward" else 9) * point["rows"] * point["cols"]


def _torch(point: Point) -> Callable[..., Any]:
    def run(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0, **_: object) -> Tensor:
        weight = weight if weight is None or offset == 0.0 else weight + offset
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

    return run


def _liger(point: Point) -> Callable[..., Any]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def run(
        x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0, rounding: str = "llama"
    ) -> Tensor:
        return LigerRMSNormFunction.apply(x, weight, eps, offset, rounding, False)

    return run


def _quack(point: Point) -> Callable[..., Any]:
    from quack import rmsnorm

    def run(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0, **_: object) -> Tensor:
        return rmsnorm(x, weight, eps=eps, weight_offset=offset)

    return run


_MODES = (
    point(5, 64, offset=1.0),
    point(5, 64, rounding="gemma", offset=1.0),
    point(5, 64, rounding="none"),
    point(5, 64, "none"),
    point(5, 64, "none", rounding="gemma"),
    point(5, 64, "fp32"),
    point(5, 64, eps=0.5),
)
_AWKWARD = ((3, 7), (17, 127), (2, 257), (65, 1025), (1, 4099), (0, 64))
_ROWWISE = ((32768, 1024), (16384, 4096), (8192, 8192), (4096, 16384), (2048, 65536), (1024, 131072), (8192, 3584))

CASES = (
    OpCase(
        name="rms_norm",
        formula="y = x / sqrt(mean(x²) + eps) · (weight + offset)",
        function=rms_norm,
        reference=reference.rms_norm,
        eager=reference.eager,
        inputs=inputs,
        outputs=("y",),
        grads=("x", "weight"),
        nbytes=_nbytes,
        flops=flops,
        tolerances=TOLERANCES,
        sets={
            "tiny": (point(4, 128), point(33, 256), *_MODES),
            # A row of one element has almost no derivative unless eps is large; only then is it a fair test.
            "edge": (point(1, 1, eps=100.0), *(point(r, c) for r, c in _AWKWARD)),
            "llm": tuple(point(r, c) for r, c in _ROWWISE),
            "sweep": tuple(point(2048, c) for c in (896, 1536, 2048, 3072, 3584, 4096)),
            "prefill": tuple(point(r, 4096) for r in (512, 2048, 8192)),
            "decode": tuple(point(r, 4096) for r in (1, 2, 8, 32)),
            "softmax": tuple(point(256, c) for c in (16384, 16385, 32768, 65536, 65537, 131072)),
        },
        # Split kernels have few registers, so that several programs fit an SM: 68 bytes, on sm_86.
        spills=96,
        # Numbers of a row of 65537 are loaded one at a time, each into a register of its own: 384 bytes on sm_120.
        odd_spills=384,
        peers=(Peer("torch", _torch), Peer("liger", _liger), Peer("quack", _quack)),
    ),
)
