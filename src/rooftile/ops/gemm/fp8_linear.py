"""A product with fp8 weights, `out = x @ weight.T`, where x is fp8 too or becomes it on the way.

    out[m, n] = sum over k of x[m, k] * x_scale * weight[n, k] * weight_scale + bias[n] + residual[m, n]

A scale belongs to a whole operand, to a row of it, or to 128 elements of the sum: of one row of x, and of 128 rows of
the weight. The sum is float32; scales that belong to all of it, bias and residual are applied at its end, those of 128
elements to each partial sum. Bytes: one for each element of x and of the weight, the result's own for each of its.

On Hopper the matrix unit adds fp8 products with some 14 bits. So every 128 elements what it has goes into float32
registers, unless `fast_accumulation` leaves it there for the whole sum.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops import quantize_tensor
from rooftile.ops.gemm import fp8_choose as choose
from rooftile.ops.gemm.config import MatmulConfig, Operands, Problem, decode, encode
from rooftile.ops.gemm.fp8_common import WScale, XScale
from rooftile.quantize import BLOCK

_FP8 = torch.float8_e4m3fn
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LIKE: dict[WScale, XScale] = {"tensor": "tensor", "row": "row", "block": "group"}


def _w_kind(weight: Tensor, scale: Tensor) -> WScale:
    n, k = weight.shape
    if scale.numel() == 1:
        return "tensor"
    if scale.shape == (n, 1):
        return "row"
    blocks = (library.cdiv(n, BLOCK), library.cdiv(k, BLOCK))
    if scale.shape == blocks:
        return "block"
    raise ValueError(
        f"fp8_linear: weight_scale has shape {tuple(scale.shape)}, expected one element, {(n, 1)} or {blocks} for a "
        f"weight of {tuple(weight.shape)}"
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
) -> tuple[XScale | None, WScale, Tensor]:
    """What shares a scale of x (None: x is to be quantised) and of the weight, and memory for the result."""
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
        raise ValueError(f"fp8_linear: x_scale is given, expected None for an x of {x.dtype}, which is quantised here")
    library.check_floating("fp8_linear", bias=bias, residual=residual)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"fp8_linear: bias has shape {tuple(bias.shape)}, expected ({weight.shape[0]},) to match the weight's rows"
        )
    shape, dtype = (*x.shape[:-1], weight.shape[0]), getattr(torch, out_dtype)
    if residual is not None:
        if residual.shape != shape:
            raise ValueError(
                f"fp8_linear: residual has shape {tuple(residual.shape)}, expected {shape} to match the result"
            )
        if residual.dtype != dtype:
            raise TypeError(f"fp8_linear: residual has dtype {residual.dtype}, expected {dtype} to match the result")
    return x_kind, w_kind, torch.empty(shape, dtype=dtype, device=x.device)


def _fake(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: str,
    fast: bool,
    config: str,
) -> Tensor:
    return _check(x, weight, weight_scale, x_scale, bias, residual, out_dtype)[2]


def _aligned(t: Tensor) -> bool:
    return t.stride(1) == 1 and t.stride(0) > 0 and (t.stride(0) | t.data_ptr()) % 16 == 0


def _launch(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: str,
    fast: bool,
    config: str,
) -> Tensor:
    if isinstance(x, FunctionalTensor):
        raise launching.Untraceable("the kernel depends on the number of rows")
    x_kind, w_kind, out = _check(x, weight, weight_scale, x_scale, bias, residual, out_dtype)
    n, k = weight.shape
    flat = x.reshape(-1, k) if k else x.new_empty((out.numel() // max(1, n), 0))
    m = flat.shape[0]
    target = runtime.target(x.device)
    given = decode(config)
    if x_kind is None:  # fresh, and so contiguous
        x_aligned, x_parts = k % 16 == 0, w_kind == "block"
    else:
        x_aligned, x_parts = _aligned(flat), x_kind == "group"
    problem = Problem(
        m, n, k, _FP8, x_aligned=x_aligned, w_aligned=_aligned(weight), weight="fp8",
        scaled_steps=x_parts or w_kind == "block", fast=fast, out_dtype=out.dtype,
    )  # fmt: skip
    c = choose.choose(problem, target) if given is None else choose.checked(problem, given, target)
    if out.numel() == 0:
        return out
    if k == 0:  # a sum of nothing
        out = out.zero_() if bias is None else out.copy_(bias.expand(out.shape))
        return out if residual is None else out.copy_(residual if bias is None else bias.float() + residual)
    if x_kind is None:
        x_kind = _LIKE[w_kind]
        flat, x_scale = quantize_tensor.launch(flat, None, "float8_e4m3fn", x_kind, BLOCK)
    assert x_scale is not None, "x has scales by now"
    x_scale = x_scale.reshape(1) if x_kind == "tensor" else x_scale.reshape(m, -1)
    if w_kind == "tensor":
        weight_scale = weight_scale.reshape(1)
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous().view(m, n)
    operands = Operands(
        flat, weight, out.view(m, n), bias, residual, x_scale=x_scale, weight_scale=weight_scale, x_kind=x_kind,
        w_kind=w_kind, fast=fast,
    )  # fmt: skip
    choose.launch(operands, c)
    return out


_SCHEMA = (
    "fp8_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? x_scale, Tensor? bias, "
    "Tensor? residual, str out_dtype, bool fast_accumulation, str config) -> Tensor"
)
_op = library.define(_SCHEMA, launch=_launch, fake=_fake)


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    *,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    fast_accumulation: bool = False,
    config: MatmulConfig | None = None,
) -> Tensor:
    """`out = (x * x_scale) @ (weight * weight_scale).T + bias + residual`, of fp8 numbers, for inference.

    Sums are float32, and rounded once.

    Args:
        x: `(..., K)`, float8_e4m3fn with its scales, as `quantize_tensor` and the option `quantize` of `rms_norm` and
            `silu_mul` give it; or float32, float16 or bfloat16, which is first quantised as the weight is: with a scale
            of its own where the weight has one, by row where the weight has one for each row, and by groups of 128
            where it has one for each block. Any strides; copied where the leading dimensions can't be taken as one.
        weight: `(N, K)`, float8_e4m3fn, as `quantize_tensor` gives it. Any strides.
        weight_scale: float32, of one element, `(N, 1)`, or `(ceil(N / 128), ceil(K / 128))` for blocks of 128 x 128.
        x_scale: float32, of one element, `(..., 1)`, or `(..., ceil(K / 128))`; it need not be of the weight's kind.
            Where two kinds have one shape they are one and the same.
        bias: `(N,)`, float32, float16 or bfloat16.
        residual: `(..., N)`, of the result's dtype, added in float32 before the sum is rounded; contiguous, else it is
            copied.
        out_dtype: bfloat16, float16 or float32; by default x's, and bfloat16 for an x that is fp8.
        fast_accumulation: leave a sum in the matrix unit, as torch._scaled_mm's use_fast_accum does: on Hopper it keeps
            some 14 bits there, and is quicker. It makes no difference where scales belong to 128 elements of the sum,
            nor on other chips.
        config: how the product's kernel is launched (`rooftile.MatmulConfig`, of kernel `"skinny"`, `"tiled"` or
            `"hopper"`), in place of the choice by shape.

    Returns:
        out, `(..., N)`, contiguous. The values of scales are not looked at, for that would wait for the device: what
        shares a scale that is NaN is NaN in the result, and an infinite one gives infinities, and NaN where it meets
        a zero. A scale of zero or less is taken as it is.

    Raises:
        ValueError: shapes do not fit, x is fp8 without scales or has some that it should not have, an input requires
            grad, the configuration can't do this product, a device is the CPU without the interpreter, or devices
            differ.
        TypeError: a dtype is not one of those.
    """
    if out_dtype is None:
        out_dtype = x.dtype if isinstance(x, Tensor) and x.dtype in _OUT_DTYPES else torch.bfloat16
    if out_dtype not in _OUT_DTYPES:
        raise TypeError(f"fp8_linear: out_dtype is {out_dtype}, expected one of {', '.join(map(str, _OUT_DTYPES))}")
    if config is not None and not isinstance(config, MatmulConfig):
        raise TypeError(f"fp8_linear: config is {config!r}, expected a rooftile.MatmulConfig")
    name = str(out_dtype).removeprefix("torch.")
    return _op(x, weight, weight_scale, x_scale, bias, residual, name, fast_accumulation, encode(config))
