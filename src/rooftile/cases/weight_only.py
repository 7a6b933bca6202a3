from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Unsupported
from rooftile.cases.draw import integers, normal
from rooftile.ops.gemm.weight_only import fp8_weight_linear, int4_linear, int8_linear, unpack_int4
from rooftile.reference import weight_only as reference

_ROUNDED_ONCE = "float32 sums of products that are exact, or of x to 2^-22, rounded once: half a unit in the last place"
_ROUNDED_TWICE = f"{_ROUNDED_ONCE}; of many rows of x the weight is rounded, too"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(2e-6, "float32 sums over K in another order")},
    torch.float16: {"forward": Tolerance(5e-4, _ROUNDED_ONCE)},
    torch.bfloat16: {"forward": Tolerance(4e-3, _ROUNDED_TWICE)},
}


def _point(
    rows: int,
    n: int,
    k: int,
    *,
    group: int = 0,
    bias: str = "own",
    scale: str = "own",
    batch: int = 0,
    residual: bool = False,
    fp8: bool = False,
    offsets: bool = False,
) -> Point:
    """`bias` and `scale`: "own" (of x's dtype), "fp32", and for the bias "none". Group 0 is int8, or fp8. `offsets`:
    beside the scales of groups."""
    dims = {
        "rows": rows,
        "n": n,
        "k": k,
        "group": group,
        "batch": batch,
        "has_bias": int(bias != "none"),
        "bias_fp32": int(bias == "fp32"),
        "scale_fp32": int(scale == "fp32"),
        "has_residual": int(residual),
        "fp8": int(fp8),
        **({"offsets": 1} if offsets else {}),
    }
    label = f"{batch}x{rows}" if batch else str(rows)
    label += f" {k}→{n}" + f" group {group}" * bool(group)
    notes = {"own": "", "fp32": " bias fp32", "none": " no bias"}[bias] + {"own": "", "fp32": " scale fp32"}[scale]
    return Point(label + notes + " offsets" * offsets + " residual" * residual, dims)


def _scale(
    shape: tuple[int, ...], spread: float, k: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Scales of numbers of that spread, with which sums over k are nearly standard normal."""
    positive = normal(shape, torch.float32, device, generator).abs() + 0.2
    return (positive / (spread * max(1, k) ** 0.5)).to(dtype)


def draw_int4(
    n: int, k: int, group: int, scale_dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A packed weight, and the scales of its groups."""
    packed = integers(256, (n, k // 2), device, generator).to(torch.uint8)
    return packed, _scale((n, k // group), 4.6, k, scale_dtype, device, generator)


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    rows, n, k, group = (point[d] for d in ("rows", "n", "k", "group"))
    scale_dtype = torch.float32 if point["scale_fp32"] else dtype
    drawn = {"x": normal((point["batch"], rows, k) if point["batch"] else (rows, k), dtype, device, generator)}
    if group:
        drawn["weight"], drawn["weight_scale"] = draw_int4(n, k, group, scale_dtype, device, generator)
        if point.dims.get("offsets"):
            scale = drawn["weight_scale"] / 1.5  # q is up to twice as large
            offsets = integers(16, tuple(scale.shape), device, generator) - 8
            drawn["weight_scale"] = torch.stack((scale, offsets.to(scale.dtype)), -1)
    elif point["fp8"]:
        numbers = 74 * normal((n, k), torch.float32, device, generator)
        drawn["weight"] = numbers.clamp(-448, 448).to(torch.float8_e4m3fn)  # not every PyTorch stops at the largest
        drawn["weight_scale"] = _scale((n, 1), 74, k, scale_dtype, device, generator)
    else:
        drawn["weight"] = (integers(256, (n, k), device, generator) - 128).to(torch.int8)
        drawn["weight_scale"] = _scale((n,), 74, k, scale_dtype, device, generator)
    if point["has_bias"]:
        drawn["bias"] = normal((n,), torch.float32 if point["bias_fp32"] else dtype, device, generator)
    if point["has_residual"]:
        drawn["residual"] = normal((*drawn["x"].shape[:-1], n), dtype, device, generator)
    return drawn


def _elements(point: Point) -> tuple[int, int]:
    """Of x and of the output."""
    rows = max(1, point["batch"]) * point["rows"]
    return rows * point["k"], rows * point["n"]


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """The packed weight and its scales once, x, the bias, the residual and the output."""
    n, k, group = point["n"], point["k"], point["group"]
    weight, scales = (n * k // 2, n * k // group) if group else (n * k, n)
    scale_size = (4 if point["scale_fp32"] else itemsize) * (1 + point.dims.get("offsets", 0))
    bias_size = (4 if point["bias_fp32"] else itemsize) * point["has_bias"]
    x, out = _elements(point)
    return weight + scales * scale_size + bias_size * n + itemsize * (x + (1 + point["has_residual"]) * out)


def _flops(point: Point, direction: Direction) -> int:
    """A multiply and an add for each weight and row of x."""
    return 2 * _elements(point)[0] * point["n"]


def _plus(out: Tensor, *terms: Tensor | None) -> Tensor:
    """What PyTorch's kernels leave to others: each sum a kernel, and a rounding, of its own."""
    for term in terms:
        out = out if term is None else (out + term).to(out.dtype)
    return out


def _int8pack(point: Point) -> Callable[..., Any]:
    """PyTorch's own kernel; its scales are of x's dtype."""
    if not hasattr(torch, "_weight_int8pack_mm"):
        raise Unsupported("this PyTorch has no torch._weight_int8pack_mm")

    def run(
        x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        out = torch._weight_int8pack_mm(x.reshape(-1, x.shape[-1]), weight, weight_scale.to(x.dtype))
        return _plus(out.view(*x.shape[:-1], -1), bias, residual)

    return run


def _torchao(point: Point) -> Callable[..., Any]:
    """torchao's weight-only GEMM, compiled as its documentation says: Inductor's kernel over the same int8 weight.
    (In int4 torchao's kernel is PyTorch's own, below.)"""
    from torchao.quantization import Int8Tensor

    kept = WeakTensorKeyDictionary()
    product = torch.compile(torch.nn.functional.linear, fullgraph=True, dynamic=False)

    def run(
        x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        if weight not in kept:
            kept[weight] = Int8Tensor(weight, weight_scale.to(x.dtype)[:, None], [1, weight.shape[1]], x.dtype)
        return _plus(product(x, kept[weight]), bias, residual)

    return run


def _int4pack(point: Point) -> Callable[..., Any]:
    """PyTorch's tinygemm, in bfloat16 alone on a GPU; it wants its own order of the numbers, which is not timed."""
    if point["k"] % 64 or point["n"] % 16:
        raise Unsupported("torch._weight_int4pack_mm wants N a multiple of 16 and K of 64")
    if point.dims.get("offsets"):
        raise Unsupported("torch._weight_int4pack_mm has zero points of another kind")
    if not hasattr(torch, "_weight_int4pack_mm"):
        raise Unsupported("this PyTorch has no torch._weight_int4pack_mm")
    repacked = WeakTensorKeyDictionary()

    def repack(x: Tensor, weight: Tensor, weight_scale: Tensor) -> tuple[Tensor, Tensor]:
        nibbles = (unpack_int4(weight, point["group"]) + 8).to(torch.uint8)
        scales_and_zeros = torch.stack((weight_scale.to(x.dtype), torch.zeros_like(weight_scale, dtype=x.dtype)), -1)
        scales_and_zeros = scales_and_zeros.transpose(0, 1).contiguous()
        if x.device.type == "cpu":
            return torch._convert_weight_to_int4pack_for_cpu(nibbles.int(), 1), scales_and_zeros
        return torch._convert_weight_to_int4pack(nibbles[:, ::2] << 4 | nibbles[:, 1::2], 8), scales_and_zeros

    def run(
        x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        if x.device.type != "cpu" and x.dtype != torch.bfloat16:
            raise Unsupported("torch._weight_int4pack_mm takes bfloat16 alone")
        known = repacked.get(weight)
        if known is None:
            known = repacked[weight] = repack(x, weight, weight_scale)
        product = torch._weight_int4pack_mm_for_cpu if x.device.type == "cpu" else torch._weight_int4pack_mm
        out = product(x.reshape(-1, x.shape[-1]), known[0], point["group"], known[1]).view(*x.shape[:-1], -1)
        return _plus(out, bias, residual)

    return run


# Llama-3-8B: qkv, o, gate and up, down, lm_head, as (N, K).
_LLAMA = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))


def _sets(group: int, tiny: Sequence[Point], edge: Sequence[Point]) -> Mapping[str, Sequence[Point]]:
    def models(*rows: int) -> tuple[Point, ...]:
        return tuple(_point(m, n, k, group=group, bias="none") for n, k in _LLAMA for m in rows)

    return {
        "tiny": tiny,
        "edge": edge,
        "llm": models(1, 16),
        "decode": models(1, 4, 16),
        "prefill": tuple(_point(m, 28672, 4096, group=group, bias="none") for m in (64, 512, 2048)),
    }


_INT8 = _sets(
    0,
    (
        _point(4, 48, 96),
        _point(1, 48, 96),
        _point(3, 32, 64, bias="none", scale="fp32"),
        _point(1, 32, 80, bias="none", scale="fp32", residual=True),
        _point(2, 32, 64, bias="fp32", batch=2, residual=True),
    ),
    (
        _point(1, 1, 1),
        _point(1, 33, 131),
        _point(3, 17, 127),
        _point(17, 33, 129, bias="none"),
        _point(70, 16, 64),
        _point(130, 48, 96, residual=True),
        _point(0, 16, 64),
        _point(2, 16, 0),
        _point(1, 40, 1024, bias="fp32", scale="fp32", residual=True),
    ),
)
_INT4 = _sets(
    128,
    (
        _point(4, 48, 128, group=32),
        _point(3, 32, 128, group=64, bias="none", scale="fp32"),
        _point(2, 32, 128, group=128, bias="fp32", batch=2, residual=True),
        _point(1, 32, 128, group=32, bias="none", offsets=True),
    ),
    (
        _point(1, 1, 32, group=32),
        _point(3, 17, 96, group=32, bias="none"),
        _point(17, 33, 192, group=64),
        _point(70, 16, 64, group=32),
        _point(130, 40, 160, group=32, residual=True),
        _point(1, 33, 192, group=64, scale="fp32", offsets=True),
        _point(3, 17, 160, group=32, offsets=True),
        _point(130, 40, 96, group=32, bias="none", offsets=True),
        _point(0, 16, 64, group=64),
        _point(1, 40, 128, group=128),
        _point(1, 40, 1024, group=128, bias="fp32", scale="fp32", residual=True),
        _point(1, 33, 9216, group=128),
    ),
)


def _of_fp8(point: Point) -> Point:
    return dataclasses.replace(point, dims={**point.dims, "fp8": 1})


_INT8_CASE = OpCase(
    name="int8_linear",
    formula="out = (x · weightᵀ) · weight_scale + bias + residual, weight in int8",
    function=int8_linear,
    reference=reference.int8_linear,
    eager=reference.int8_linear_eager,
    inputs=_inputs,
    outputs=("out",),
    grads=(),
    nbytes=_nbytes,
    flops=_flops,
    tolerances=TOLERANCES,
    sets=_INT8,
    roof="gemm",
    peers=(Peer("torch int8pack", _int8pack), Peer("torchao", _torchao)),
)

CASES = (
    _INT8_CASE,
    dataclasses.replace(
        _INT8_CASE,
        name="fp8_weight_linear",
        formula="out = (x · weightᵀ) · weight_scale + bias + residual, weight in e4m3",
        function=fp8_weight_linear,
        reference=reference.fp8_weight_linear,
        eager=reference.fp8_weight_linear_eager,
        sets={name: tuple(map(_of_fp8, points)) for name, points in _INT8.items()},
        peers=(),
    ),
    dataclasses.replace(
        _INT8_CASE,
        name="int4_linear",
        formula="out = x · (q · weight_scale)ᵀ + bias + residual, q = 4 bits of weight, a scale for each group of K",
        function=int4_linear,
        reference=reference.int4_linear,
        eager=reference.int4_linear_eager,
        sets=_INT4,
        # float32 on sm_86, of 64 registers for two programs an SM.
        spills=8,
        peers=(Peer("torch int4pack", _int4pack),),
    ),
)
