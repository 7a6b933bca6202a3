"""`fp8_linear`: a GEMM with an fp8 weight, where x is fp8 too or is quantized on the way.

    out[m, n] = sum over k of x[m, k] * x_scale * weight[n, k] * weight_scale + bias[n] + residual[m, n]

A scale belongs to a whole operand, to a row of it, or to 128 elements of the sum: of one row of x, and of 128 rows of
the weight. The sum is float32; scales that belong to all of it, bias and residual are applied at its end, those of 128
elements to each partial sum. Bytes: one for each element of x and of the weight, the result's own for each of its.

Hopper's tensor cores add fp8 products with some 14 bits. So every 128 elements the sum moves to float32 registers,
unless `fast_accumulation` leaves it in the tensor core throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library  # before Triton: runtime fixes the mode of the process
from rooftile.ops import quantize_tensor
from rooftile.ops.gemm import dispatch
from rooftile.ops.gemm.config import GemmConfig, Invariant, Operands, Problem
from rooftile.quantize import BLOCK

_FP8 = torch.float8_e4m3fn
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
XScale = Literal["tensor", "row", "group"]
WScale = Literal["tensor", "row", "block"]
_LIKE: dict[WScale, XScale] = {"tensor": "tensor", "row": "row", "block": "group"}


def _w_kind(weight: Tensor, scale: Tensor) -> WScale:
    n, k = weight.shape
    if scale.numel() == 1:
        return "tensor"
    if scale.shape in ((n, 1), (n,)):
        return "row"
    blocks = (library.cdiv(n, BLOCK), library.cdiv(k, BLOCK))
    if scale.shape == blocks:
        return "block"
    raise ValueError(
        f"fp8_linear: weight_scale has shape {tuple(scale.shape)}, expected one element, {(n,)}, {(n, 1)} or "
        f"{blocks} for a weight of {tuple(weight.shape)}"
    )


def _x_kind(x: Tensor, scale: Tensor, w_kind: WScale) -> XScale:
    leading = tuple(x.shape[:-1])
    groups = (*leading, library.cdiv(x.shape[-1], BLOCK))
    if scale.numel() == 1 and w_kind == "tensor":
        return "tensor"
    if scale.shape == (*leading, 1):  # of a single row too: one kernel serves all
        return "row"
    if scale.shape == groups:
        return "group"
    if scale.numel() == 1:
        return "tensor"
    raise ValueError(
        f"fp8_linear: x_scale has shape {tuple(scale.shape)}, expected one element, {(*leading, 1)} or {groups} for an "
        f"x of {tuple(x.shape)}"
    )


def _check_scale(name: str, scale: Tensor) -> None:
    if scale.dtype != torch.float32:
        raise TypeError(f"fp8_linear: {name} has dtype {scale.dtype}, expected torch.float32")


def _check(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: str,
) -> tuple[XScale | None, WScale, tuple[int, ...]]:
    """What shares a scale of x (None: x is to be quantized) and of the weight, and the result's shape."""
    if x.dtype not in (_FP8, *library.FLOATS):
        raise TypeError(
            f"fp8_linear: x has dtype {x.dtype}, expected torch.float8_e4m3fn, float32, float16 or bfloat16"
        )
    if weight.dtype != _FP8:
        raise TypeError(f"fp8_linear: weight has dtype {weight.dtype}, expected {_FP8}")
    if weight.dim() != 2:
        raise ValueError(f"fp8_linear: weight has shape {tuple(weight.shape)}, expected two dimensions")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"fp8_linear: x has shape {tuple(x.shape)}, expected (..., {weight.shape[1]}) to match a weight of "
            f"{tuple(weight.shape)}"
        )
    _check_scale("weight_scale", weight_scale)
    w_kind = _w_kind(weight, weight_scale)
    x_kind: XScale | None = None
    if x.dtype == _FP8:
        if x_scale is None:
            raise ValueError(f"fp8_linear: x_scale is None, expected the float32 scales of x, which is {_FP8}")
        _check_scale("x_scale", x_scale)
        x_kind = _x_kind(x, x_scale, w_kind)
    elif x_scale is not None:
        raise ValueError(f"fp8_linear: x_scale is given, expected None for an x of {x.dtype}, which is quantized here")
    library.check_floating("fp8_linear", bias=bias, residual=residual)
    dispatch.check_bias("fp8_linear", bias, x, weight.shape[0], *library.FLOATS)
    shape, dtype = (*x.shape[:-1], weight.shape[0]), getattr(torch, out_dtype)
    dispatch.check_residual("fp8_linear", residual, shape, dtype, "the result")
    return x_kind, w_kind, shape


def _fake(
    x: Tensor, weight: Tensor, weight_scale: Tensor, x_scale: Tensor | None, bias: Tensor | None,
    residual: Tensor | None, out_dtype: str, fast: bool, config: Sequence[int],
) -> Tensor:  # fmt: skip
    shape = _check(x, weight, weight_scale, x_scale, bias, residual, out_dtype)[2]
    return torch.empty(shape, dtype=getattr(torch, out_dtype), device=x.device)


def _aligned(t: Tensor) -> bool:
    return t.stride(1) == 1 and t.stride(0) > 0 and (t.stride(0) | t.data_ptr()) % 16 == 0


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _prepare(
    x: Tensor, weight: Tensor, weight_scale: Tensor, x_scale: Tensor | None, bias: Tensor | None,
    residual: Tensor | None, out_dtype: str, fast: bool, config: Sequence[int],
) -> Callable[..., Tensor]:  # fmt: skip
    if isinstance(x, FunctionalTensor):
        raise launching.Untraceable("the kernel depends on the number of rows")
    x_kind, w_kind, shape = _check(x, weight, weight_scale, x_scale, bias, residual, out_dtype)
    n, k = weight.shape
    m = math.prod(shape[:-1])
    strides, dtype, device = library.contiguous_strides(shape), getattr(torch, out_dtype), x.device
    copies: library.Copies = {}
    quantizes = x_kind is None
    kind = _LIKE[w_kind] if x_kind is None else x_kind
    rows = dispatch.like(x, (m, k), weight.dtype) if quantizes or k == 0 else dispatch.viewed(x, _as_rows, copies, 0)
    p = Problem(
        m, n, k, _FP8, x_aligned=_aligned(rows), w_aligned=_aligned(weight), weight="fp8",
        scaled_steps=kind == "group" or w_kind == "block", fast=fast, out_dtype=dtype,
    )  # fmt: skip
    c = dispatch.chosen("fp8_linear", p, device, config)
    assert c is not None, "there is no norm"
    if not math.prod(shape):
        return lambda *_: torch.empty_strided(shape, strides, dtype=dtype, device=device)
    if k == 0:
        return _nothing_to_sum
    columns = {"tensor": 0, "row": 1, "group": library.cdiv(k, BLOCK)}[kind]
    if x_scale is None:
        x_rows = dispatch.like(x, (m, columns) if columns else (1,), torch.float32)
    elif kind == "tensor":
        x_rows = x_scale.reshape(1)
    else:
        x_rows = dispatch.viewed(x_scale, lambda s: s.reshape(m, -1), copies, 6)
    w_scale = weight_scale.reshape(1) if w_kind == "tensor" else weight_scale.reshape(weight_scale.shape[0], -1)
    whole = dispatch.contiguous(residual, copies, 4)
    o = Operands(
        rows, weight, dispatch.like(x, (m, n), dtype), dispatch.contiguous(bias, copies, 3),
        None if whole is None else whole.view(m, n), x_scale=x_rows, weight_scale=w_scale,
        x_kind=kind, w_kind=w_kind, fast=fast,
    )  # fmt: skip
    start = library.copying(dispatch.starter(p, o, c), copies)

    def run(
        x: Tensor, weight: Tensor, weight_scale: Tensor, x_scale: Tensor | None, bias: Tensor | None,
        residual: Tensor | None, *_: object,
    ) -> Tensor:  # fmt: skip
        out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if quantizes:
            x, x_scale = quantize_tensor.launch(_as_rows(x), None, "float8_e4m3fn", kind, BLOCK)
        start(x, weight, out, bias, residual, None, x_scale, weight_scale)
        return out

    return run


def _nothing_to_sum(
    x: Tensor, weight: Tensor, weight_scale: Tensor, x_scale: Tensor | None, bias: Tensor | None,
    residual: Tensor | None, out_dtype: str, *_: object,
) -> Tensor:  # fmt: skip
    """The result for a K of 0."""
    out = torch.zeros((*x.shape[:-1], weight.shape[0]), dtype=torch.float32, device=x.device)
    for term in (bias, residual):
        if term is not None:
            out += term
    return out.to(getattr(torch, out_dtype))


_SCHEMA = (
    "fp8_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? x_scale, Tensor? bias, "
    "Tensor? residual, str out_dtype, bool fast_accumulation, int[] config) -> Tensor"
)
_op = library.define(_SCHEMA, prepare=_prepare, fake=_fake)


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    x_scale: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    fast_accumulation: bool = False,
    config: GemmConfig | Invariant | None = None,
) -> Tensor:
    """`out = (x * x_scale) @ (weight * weight_scale).T + bias + residual`, of fp8 operands, for inference.

    Sums are float32, and rounded once.

    Args:
        x: `(..., K)`, float8_e4m3fn with its scales, as `quantize_tensor` and the option `quantize` of `rms_norm` and
            `silu_mul` give it; or float32, float16 or bfloat16, which is first quantized as the weight is: with a scale
            of its own where the weight has one, by row where the weight has one for each row, and by groups of 128
            where it has one for each block. Any strides; copied where the leading dimensions can't be taken as one.
        weight: `(N, K)`, float8_e4m3fn, as `quantize_tensor` gives it. Any strides.
        weight_scale: float32, of one element, `(N,)` or `(N, 1)`, or `(ceil(N / 128), ceil(K / 128))` for blocks of
            128 x 128.
        x_scale: float32, of one element, `(..., 1)`, or `(..., ceil(K / 128))`; it need not be of the weight's kind.
            Where two kinds have one shape they are one and the same.
        bias: `(N,)`, float32, float16 or bfloat16.
        residual: `(..., N)`, of the result's dtype, added in float32 before the sum is rounded; contiguous, else it is
            copied.
        out_dtype: bfloat16, float16 or float32; by default x's, and bfloat16 for an x that is fp8.
        fast_accumulation: leave a sum in the tensor core, as torch._scaled_mm's use_fast_accum does: on Hopper it keeps
            some 14 bits there, and is quicker. It makes no difference where scales belong to 128 elements of the sum,
            nor on other chips.
        config: how the kernel is launched (`rooftile.GemmConfig`, of kernel `"skinny"`, `"tiled"` or
            `"hopper"`), in place of the choice by shape; or "invariant", as in `linear`.

    Returns:
        out, `(..., N)`, contiguous. The values of scales are not looked at, for that would wait for the device: what
        shares a scale that is NaN is NaN in the result, and an infinite one gives infinities, and NaN where it meets
        a zero. A scale of zero or less is taken as it is.

    Raises:
        ValueError: shapes do not fit, x is fp8 without scales or has some that it should not have, an input requires
            grad, the configuration can't be launched, a device is the CPU without the interpreter, or devices
            differ.
        TypeError: a dtype is not one of those.
    """
    if out_dtype is None:
        out_dtype = x.dtype if isinstance(x, Tensor) and x.dtype in _OUT_DTYPES else torch.bfloat16
    if out_dtype not in _OUT_DTYPES:
        raise TypeError(f"fp8_linear: out_dtype is {out_dtype}, expected one of {', '.join(map(str, _OUT_DTYPES))}")
    how = () if config is None else dispatch.encoded("fp8_linear", config, invariant=True)
    name = str(out_dtype).removeprefix("torch.")
    return _op(x, weight, weight_scale, x_scale, bias, residual, name, fast_accumulation, how)
