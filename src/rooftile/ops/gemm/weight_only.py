"""Linear layers whose weight alone is quantized, for decoding: reading the weight is nearly all that a step does.

    int8_linear          out = (x @ weight^T) * weight_scale + bias + residual    a scale for each row of the weight
    fp8_weight_linear    the same, of a weight in float8_e4m3fn
    int4_linear          out = x @ (q * weight_scale)^T + bias + residual         a scale for each group of a row,
                         q = unpack_int4(weight), plus an offset of its group if there is one

A weight of (N, K) is read at every decoding step, N * K bytes or half of them; x, the scales and the output are little
beside it. x is multiplied as it is by exact small numbers, and scales multiply the float32 sums, so that nothing is
rounded before the end. Two exceptions: one row of x in 16 bits may be multiplied in three digits on the integer tensor
cores (`gemv_imma.py`), and for many rows in bfloat16 the weight is dequantized first, where each element is rounded,
and a dense GEMM follows (`dequantize.py`). On sm_90 a GEMM of many rows dequantizes within its mainloop instead
(`hopper_dequantize.py`), where elements of 4 bits alone are rounded.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.gemm import dispatch
from rooftile.ops.gemm.config import GemmConfig, Invariant, Operands, Start
from rooftile.ops.gemm.packing import check_packed, pack_int4, quantize_int4, quantize_int8, unpack_int4

__all__ = [
    "fp8_weight_linear",
    "int4_linear",
    "int8_linear",
    "pack_int4",
    "quantize_int4",
    "quantize_int8",
    "unpack_int4",
]

_WEIGHTS = {"int8_linear": torch.int8, "fp8_weight_linear": torch.float8_e4m3fn, "int4_linear": torch.uint8}


def _check(
    op: str, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None
) -> tuple[int, ...]:
    """The shape of the result."""
    library.check_floating(op, x=x, weight_scale=scale, bias=bias, residual=residual)
    if weight.dtype != _WEIGHTS[op]:
        raise TypeError(f"{op}: weight has dtype {weight.dtype}, expected {_WEIGHTS[op]}")
    if op != "int4_linear" and scale.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"{op}: weight_scale has dtype {scale.dtype}, expected {library.or_float32(x)}")
    if x.dim() == 0:
        raise ValueError(f"{op}: x has shape (), expected at least one dimension")
    k = x.shape[-1]
    if op == "int4_linear":
        check_packed(op, weight, scale, k)
    elif weight.dim() != 2 or weight.shape[1] != k:
        raise ValueError(f"{op}: weight has shape {tuple(weight.shape)}, expected (N, {k}) to match x's last dimension")
    n = weight.shape[0]
    if op != "int4_linear" and scale.shape not in ((n,), (n, 1)):
        raise ValueError(
            f"{op}: weight_scale has shape {tuple(scale.shape)}, expected ({n},) or ({n}, 1) to match the weight's rows"
        )
    dispatch.check_bias(op, bias, x, n)
    shape = (*x.shape[:-1], n)
    dispatch.check_residual(op, residual, shape, x.dtype, "x")
    return shape


def _fake(
    op: str, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None,
    config: Sequence[int],
) -> Tensor:  # fmt: skip
    return torch.empty(_check(op, x, weight, scale, bias, residual), dtype=x.dtype, device=x.device)


def _prepare(
    op: str, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None,
    config: Sequence[int],
) -> Callable[..., Tensor]:  # fmt: skip
    shape = _check(op, x, weight, scale, bias, residual)
    n, k = shape[-1], x.shape[-1]
    dispatch.refuse_symbols(*x.shape, *weight.shape)
    if k == 0:
        return _nothing_to_sum
    strides, dtype, device = library.contiguous_strides(shape), x.dtype, x.device
    start: Start = library.start_nothing
    if math.prod(shape):
        copies: library.Copies = {}
        rows = library.rows_of(x, copies, 0)
        stored = weight
        if weight.stride(1) != 1:
            stored, copies[1] = weight.contiguous(), Tensor.contiguous
        whole = dispatch.contiguous(residual, copies, 4)
        o = Operands(
            rows, stored, dispatch.like(x, (rows.shape[0], n)), dispatch.contiguous(bias, copies, 3),
            None if whole is None else whole.view(-1, n), weight_scale=dispatch.contiguous(scale, copies, 7),
        )  # fmt: skip
        p = dispatch.problem_of(o)
        c = dispatch.chosen(op, p, device, config)
        assert c is not None, "there is no norm"
        if 1 in copies and c.kernel == "gemv_imma":  # it loads weights before the previous kernel, the copy, has ended
            c = dataclasses.replace(c, prefetch=-1)
        start = library.copying(dispatch.starter(p, o, c), copies)

    def run(
        x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, *_: object
    ) -> Tensor:
        out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        start(x, weight, out, bias, residual, None, None, scale)
        return out

    return run


def _nothing_to_sum(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, *_: object
) -> Tensor:
    """The result for a K of 0."""
    out = torch.zeros((*x.shape[:-1], weight.shape[0]), dtype=torch.float32, device=x.device)
    for term in (bias, residual):
        if term is not None:
            out += term
    return out.to(x.dtype)


def _define(op: str) -> Any:
    schema = (
        f"{op}(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, Tensor? residual, int[] config) -> Tensor"
    )
    return library.define(
        schema,
        prepare=functools.partial(_prepare, op),
        fake=functools.partial(_fake, op),
    )


_int8_op = _define("int8_linear")
_fp8_op = _define("fp8_weight_linear")
_int4_op = _define("int4_linear")


def int8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    config: GemmConfig | Invariant | None = None,
) -> Tensor:
    """`out = (x @ weight^T) * weight_scale + bias + residual`, for inference, of an int8 weight.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one, or the last stride is not 1.
        weight: `(N, K)` int8, as `quantize_int8` gives it; any stride between rows.
        weight_scale: `(N,)` or `(N, 1)`, float32 or of x's dtype.
        bias: `(N,)`, of x's dtype or float32.
        residual: `(..., N)`, of x's dtype, added in float32 before the sum is rounded; contiguous, else it is copied.
        config: how the kernel is launched; by default what was measured for these sizes, or is chosen by them. With
            "invariant" a row of out does not depend on the other rows of x: see `linear`.

    Returns:
        out, `(..., N)`, of x's dtype, contiguous. Sums are float32, and rounded once; of more than 128 rows in bfloat16
        the weight times its scale is rounded, too, in up to 128 MiB of memory, but on sm_90 only where K is no multiple
        of 16, N none of 8, or rows do not begin at multiples of 16 bytes. Of one row of x in 16 bits, K a multiple
        of 128 from 1024 to 8064, on sm_90 each number is rounded to 2^-22 of the largest of its 128 first, and where
        one is infinite the result is NaN.

    Raises:
        ValueError: shapes don't match, the configuration can't be used, an argument requires grad (there is no
            derivative), a device is the CPU without the interpreter, or devices differ.
        TypeError: a dtype is not one of those.
    """
    how = () if config is None else dispatch.encoded("int8_linear", config, invariant=True)
    return _int8_op(x, weight, weight_scale, bias, residual, how)


def fp8_weight_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    config: GemmConfig | None = None,
) -> Tensor:
    """`out = (x @ weight^T) * weight_scale + bias + residual`, for inference, of an fp8 weight.

    x is multiplied as it is. `fp8_linear` quantizes it first, which costs it all but three bits and lets the tensor
    cores multiply twice as much: that one is for many rows, this one for few, where reading the weight is all.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one, or the last stride is not 1.
        weight: `(N, K)` float8_e4m3fn, as `quantize_tensor(weight, Quantize())` gives it; any stride between rows.
        weight_scale: `(N,)` or `(N, 1)`, float32 or of x's dtype.
        bias: `(N,)`, of x's dtype or float32.
        residual: `(..., N)`, of x's dtype, added in float32 before the sum is rounded; contiguous, else it is copied.
        config: how the kernel is launched; by default what was measured for these sizes, or is chosen by them.

    Returns:
        out, `(..., N)`, of x's dtype, contiguous. Sums are float32, and rounded once; of more than 128 rows in bfloat16
        the weight times its scale is rounded, too, in up to 128 MiB of memory, but on sm_90 only where K is no multiple
        of 16, N none of 8, or rows do not begin at multiples of 16 bytes.

    Raises:
        ValueError: shapes don't match, the configuration can't be used, an argument requires grad (there is no
            derivative), a device is the CPU without the interpreter, or devices differ.
        TypeError: a dtype is not one of those.
    """
    how = () if config is None else dispatch.encoded("fp8_weight_linear", config)
    return _fp8_op(x, weight, weight_scale, bias, residual, how)


def int4_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    config: GemmConfig | Invariant | None = None,
) -> Tensor:
    """`out = x @ (q * weight_scale)^T + bias + residual`, for inference: 4 bits a weight.

        out[m, n] = sum over k of x[m, k] * q[n, k] * weight_scale[n, k // group] + bias[n] + residual[m, n]

    Args:
        x: `(..., K)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one, or the last stride is not 1.
        weight: `(N, K / 2)` uint8, as `quantize_int4` or `pack_int4` gives it for that group; any stride between rows.
        weight_scale: `(N, K / group)`, float32, float16 or bfloat16; contiguous, else it is copied. The group, 32, 64
            or 128, is what K over its columns is. Or `(N, K / group, 2)`, scales and offsets: q is then the number
            plus its group's offset, an integer from -15 to 15, and a nibble's zero point is 8 minus that.
        bias: `(N,)`, of x's dtype or float32.
        residual: `(..., N)`, of x's dtype, added in float32 before the sum is rounded; contiguous, else it is copied.
        config: how the kernel is launched; by default what was measured for these sizes, or is chosen by them. With
            "invariant" a row of out does not depend on the other rows of x: see `linear`.

    Returns:
        out, `(..., N)`, of x's dtype, contiguous. Sums are float32, scales multiply a group's sum, and what comes of it
        is rounded once; of more than 128 rows in bfloat16, or 64 on sm_90 with groups of 64 and 128, the weight is,
        too, and of one row of x those with groups of 128 and K a multiple of 256 from 1024 on as `int8_linear` says. On
        NVIDIA's GPUs, of one row of x in 16 bits that holds an infinity, what has a part in it is NaN.

    Raises:
        ValueError: K is no multiple of the group, shapes don't match, the configuration can't be used, an argument
            requires grad (there is no derivative), a device is the CPU without the interpreter, or devices differ.
        TypeError: a dtype is not one of those.
    """
    how = () if config is None else dispatch.encoded("int4_linear", config, invariant=True)
    return _int4_op(x, weight, weight_scale, bias, residual, how)
