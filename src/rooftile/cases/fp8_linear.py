from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Unsupported
from rooftile.cases.draw import normal
from rooftile.ops.gemm.fp8_linear import fp8_linear
from rooftile.quantize import BLOCK
from rooftile.reference import fp8_linear as reference

# The result is bfloat16 but where a point says otherwise, whatever x's dtype: Hopper's fp8 sums have too few bits to be
# held to float32's.
_REASON = (
    "of an x that is quantised here e4m3 keeps three bits, which costs up to 6 % of a number and 3 % of many, in eager "
    "as here; of one that is fp8 nothing is lost but the result's rounding, to which twice eager's error holds it"
)
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    dtype: {"forward": Tolerance(6.5e-2, _REASON)} for dtype in (torch.float32, torch.float16, torch.bfloat16)
}
_KINDS = ("tensor", "row", "block")


def _run(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out_dtype: str = "bfloat16",
    fast_accumulation: bool = False,
) -> Tensor:
    return fp8_linear(
        x,
        weight,
        weight_scale,
        x_scale=x_scale,
        bias=bias,
        residual=residual,
        out_dtype=getattr(torch, out_dtype),
        fast_accumulation=fast_accumulation,
    )


def _point(
    rows: int, k: int, n: int, kind: str, *, wide: bool = False, bias: bool = False, residual: bool = False,
    **options: object,
) -> Point:  # fmt: skip
    """`kind`: what shares a scale; `wide`: x is of the point's dtype, and is quantised in the op."""
    dims = {"rows": rows, "k": k, "n": n, "kind": _KINDS.index(kind), "wide": int(wide)}
    dims |= {"bias": int(bias), "residual": int(residual)}
    label = f"{rows} {k}->{n} {kind}" + " wide x" * wide + " bias" * bias + " residual" * residual
    return Point(label, dims, options)


def _out_dtype(point: Point) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, point.options.get("out_dtype", "bfloat16"))
    return dtype


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    rows, k, n, kind = point["rows"], point["k"], point["n"], _KINDS[point["kind"]]
    x = normal((rows, k), dtype, device, generator)
    weight, weight_scale = reference.quantize_weight(normal((n, k), torch.float32, device, generator), kind)
    drawn = {"x": x, "weight": weight, "weight_scale": weight_scale}
    if not point["wide"]:
        drawn["x"], scale = reference.quantize_x(x, kind)
        # One after another along the rows, as cuBLAS wants them for blocks.
        drawn["x_scale"] = scale.T.contiguous().T if kind == "block" else scale
    if point["bias"]:
        drawn["bias"] = normal((n,), dtype, device, generator)
    if point["residual"]:
        drawn["residual"] = normal((rows, n), _out_dtype(point), device, generator)
    return drawn


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """x, the weight and the result, scales, bias and residual."""
    rows, k, n, kind = point["rows"], point["k"], point["n"], _KINDS[point["kind"]]
    groups = -(-k // BLOCK)
    scales = {"tensor": 2, "row": rows + n, "block": (rows + -(-n // BLOCK)) * groups}[kind]
    x_size = itemsize if point["wide"] else 1
    out = _out_dtype(point).itemsize * rows * n * (1 + point["residual"])
    return x_size * rows * k + n * k + out + 4 * scales + itemsize * n * point["bias"]


def _flops(point: Point, direction: Direction) -> int:
    return 2 * point["rows"] * point["k"] * point["n"]


def _scaled_mm(point: Point) -> Callable[..., Tensor]:
    """torch._scaled_mm: cuBLAS, and CUTLASS where scales belong to rows."""
    from torch import _scaled_mm

    if point["wide"]:
        raise Unsupported("torch._scaled_mm takes an x that is quantised")
    if point["residual"]:
        raise Unsupported("torch._scaled_mm adds no residual")
    if point["k"] % 16 or point["n"] % 16:
        raise Unsupported("torch._scaled_mm takes sizes that are multiples of 16")
    if point["kind"] == 2 and (not torch.cuda.is_available() or point["k"] % 512 or point["n"] % BLOCK):
        raise Unsupported("torch._scaled_mm takes blocks on Hopper alone, and whole ones, by four along the sum")

    def multiply(
        x: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        x_scale: Tensor,
        bias: Tensor | None = None,
        *,
        out_dtype: str = "bfloat16",
        fast_accumulation: bool = False,
    ) -> Tensor:
        if weight_scale.numel() == 1:
            x_scale, weight_scale = x_scale.reshape(()), weight_scale.reshape(())
        else:
            weight_scale = weight_scale.T
        dtype: torch.dtype = getattr(torch, out_dtype)
        return _scaled_mm(x, weight.T, x_scale, weight_scale, bias, out_dtype=dtype, use_fast_accum=fast_accumulation)

    return multiply


_LLAMA = ((4096, 6144), (4096, 28672), (14336, 4096))

CASES = (
    OpCase(
        name="fp8_linear",
        formula="out = (x · x_scale) · (weight · weight_scale)ᵀ + bias + residual, both in e4m3",
        function=_run,
        reference=reference.fp8_linear,
        eager=reference.fp8_linear_eager,
        inputs=_inputs,
        outputs=("out",),
        output_dtypes=lambda point: {"out": _out_dtype(point)},
        grads=(),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        roof="gemm fp8",
        sets={
            "tiny": (
                _point(5, 128, 48, "row"),
                _point(70, 128, 64, "tensor"),
                _point(5, 200, 140, "block"),
                _point(5, 128, 40, "row", wide=True, bias=True, residual=True, out_dtype="float16"),
                _point(5, 130, 130, "block", wide=True),
                _point(5, 64, 16, "tensor", wide=True, fast_accumulation=True),
            ),
            "edge": (
                _point(1, 1, 1, "row"),
                _point(3, 7, 5, "tensor", wide=True, bias=True),
                _point(65, 129, 129, "block"),
                _point(17, 33, 127, "row", bias=True),
                _point(0, 64, 8, "row", wide=True),
                _point(5, 0, 8, "row", bias=True),
            ),
            "llm": tuple(_point(2048, *shape, kind) for kind in _KINDS for shape in _LLAMA),
            "prefill": tuple(_point(8192, *shape, kind) for kind in _KINDS for shape in _LLAMA),
            "gemm": tuple(_point(s, s, s, kind) for kind in _KINDS for s in (2048, 4096, 8192)),
            "decode": tuple(_point(m, *shape, kind) for kind in _KINDS for m in (1, 16) for shape in _LLAMA),
        },
        peers=(Peer("torch", _scaled_mm),),
    ),
)
