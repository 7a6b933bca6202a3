"""RMSNorm and the linear layer after it, plain or gated, with dense or quantized weights.

    rms_norm_linear          y = rms_norm(x) @ weight^T + bias
    rms_norm_gated_linear    y = act(g) * u,   [g | u] = rms_norm(x) @ weight^T + bias

    rms_norm(x) = x * rstd * (norm_weight + offset),   rstd = 1 / sqrt(mean(x^2) + eps)
    (rms_norm(x) @ weight^T)[m, n] = rstd[m] * (sum over k of x[m, k] * (norm_weight[k] + offset) * weight[n, k])

rstd is one factor a row, so it can wait for the end of the sums. Up to 32 rows one kernel adds up the squares beside
the products and reads x once; with more rows, where every tile would scale the same x again, the norm is a kernel of
its own and the GEMM follows.

Elements that move, of x (M, K) and weight (N, K):

    two kernels        3MK + K + NK + MN    the norm reads x and writes the normalised x, the GEMM reads that
    one, x read twice  2MK + K + NK + MN    first for the mean of squares, then for the GEMM
    one, as here        MK + K + NK + MN

from memory; gated, of a weight (2N, K), 2NK in place of NK. Every CTA of the one kernel reads the parts of x and of
the norm's weight that it needs, out of the L2: MK + K for each tile of the weight's rows, 64 of them perhaps, beside
their 64 K.

A quantized weight has 8 bits and a scale for each of its rows, or 4 bits and a scale for each group of a row; for
inference. One row of x is one kernel, which multiplies x as it is, or in three digits on the integer tensor cores
(`gemv_imma.py`). More rows are the norm and a GEMM: of int8 and int4 `int8_linear` and `int4_linear`; of float8_e4m3fn
`fp8_linear`, for which the norm writes x in that dtype, too, with a scale for each row.

The backward normalises x again where the weight's gradient needs it; beside the inputs nothing is kept:

    dbias = sum over rows of dy,  dweight = dy^T @ rms_norm(x),  dx, dnorm_weight from dy @ weight as of rms_norm alone
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.gemm import dispatch
from rooftile.ops.gemm.column_sum import column_sum
from rooftile.ops.gemm.config import Activation, GemmConfig, Operands, Start, decode
from rooftile.ops.gemm.dispatch import as_rows
from rooftile.ops.gemm.fp8_linear import fp8_linear
from rooftile.ops.gemm.linear import gate, gated_linear, gated_op, linear, linear_op
from rooftile.ops.gemm.packing import check_packed
from rooftile.ops.gemm.weight_only import int4_linear, int8_linear
from rooftile.ops.rms_norm import backward as norm_backward
from rooftile.ops.rms_norm import rms_norm
from rooftile.primitives.activations import check_activation
from rooftile.quantize import Quantize

__all__ = ["rms_norm_gated_linear", "rms_norm_linear"]

_QUANTIZED = (torch.int8, torch.float8_e4m3fn, torch.uint8)


def check(
    op: str, x: Tensor, norm_weight: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, eps: float,
    offset: float, gated: bool = False,
) -> tuple[int, ...]:  # fmt: skip
    """The shape of the result. With a scale the weight has 8 bits, or is packed int4."""
    library.check_floating(op, x=x, norm_weight=norm_weight, bias=bias)
    if scale is None:
        if weight.dtype in _QUANTIZED:
            raise TypeError(f"{op}: weight has dtype {weight.dtype} and no scale, expected weight_scale= for it")
        library.check_floating(op, weight=weight)
    elif weight.dtype not in _QUANTIZED:
        raise TypeError(
            f"{op}: weight has dtype {weight.dtype}, expected {', '.join(map(str, _QUANTIZED[:-1]))} or "
            f"{_QUANTIZED[-1]} (int4, packed) where it has a scale"
        )
    library.check_numbers(op, eps=eps, offset=offset)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, expected at least one dimension, the last of 1 or more")
    k = x.shape[-1]
    if norm_weight.shape != (k,):
        raise ValueError(
            f"{op}: norm_weight has shape {tuple(norm_weight.shape)}, expected ({k},) to match x's last dimension"
        )
    if scale is None:
        dispatch.check_dtype(op, "weight", weight, "x", x)
    if scale is not None and weight.dtype == torch.uint8:
        check_packed(op, weight, scale, k)
    elif weight.dim() != 2 or weight.shape[1] != k:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected ({'2N' if gated else 'N'}, {k}) to match x's last "
            "dimension"
        )
    n = weight.shape[0]
    if gated and n % 2:
        raise ValueError(f"{op}: weight has {n} rows, expected an even number: [gate | up]")
    if scale is not None:
        _check_scale(op, x, weight, scale)
    dispatch.check_bias(op, bias, x, n)
    return (*x.shape[:-1], n // 2 if gated else n)


def _check_scale(op: str, x: Tensor, weight: Tensor, scale: Tensor) -> None:
    """The dtype, and but for int4 the shape."""
    n = weight.shape[0]
    if weight.dtype == torch.uint8:
        library.check_floating(op, weight_scale=scale)
        return
    if scale.dtype != torch.float32:
        raise TypeError(f"{op}: weight_scale has dtype {scale.dtype}, expected torch.float32")
    if scale.shape not in ((n,), (n, 1)):
        raise ValueError(
            f"{op}: weight_scale has shape {tuple(scale.shape)}, expected ({n},) or ({n}, 1) to match the weight's rows"
        )


def prepare(
    op: str, x: Tensor, norm_weight: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, eps: float,
    offset: float, activation: str, config: Sequence[int],
) -> Callable[..., Tensor]:  # fmt: skip
    """The norm and the GEMM, one kernel or two: called with x, norm_weight, weight, scale and bias.

    With an activation it is gated.
    """
    gated = activation != ""
    dispatch.refuse_symbols(*x.shape, *weight.shape)
    shape = check(op, x, norm_weight, weight, scale, bias, eps, offset, gated)
    strides, dtype, device = library.contiguous_strides(shape), x.dtype, x.device
    start: Start = library.start_nothing
    if math.prod(shape):
        copies: library.Copies = {}
        rows = library.rows_of(x, copies, 0)
        of_bias = dispatch.contiguous(bias, copies, 3)
        out, asked = dispatch.like(x, (rows.shape[0], shape[-1])), decode(config)
        if asked is not None and scale is None and asked.kernel in ("tiled", "hopper"):
            o = Operands(dispatch.like(x, rows.shape), weight, out, of_bias, activation=activation, gated=gated)
            dispatch.bind(op, o, config)  # raises for one that can't be launched
            return _two_kernels(weight.dtype, eps, offset, activation, config)
        o = Operands(
                rows, weight, out, of_bias, norm_weight=dispatch.contiguous(norm_weight, copies, 5),
                weight_scale=dispatch.contiguous(scale, copies, 7), eps=eps, offset=offset,
                activation=activation, gated=gated,
            )  # fmt: skip
        p = dispatch.problem_of(o)
        c = dispatch.chosen(op, p, device, config)
        if c is None:
            return _two_kernels(weight.dtype, eps, offset, activation, config)
        start = library.copying(dispatch.starter(p, o, c), copies)

    def run(
        x: Tensor, norm_weight: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, *_: object
    ) -> Tensor:
        out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        start(x, weight, out, bias, None, norm_weight, None, scale)
        return out

    return run


def _two_kernels(
    kind: torch.dtype, eps: float, offset: float, activation: str, config: Sequence[int]
) -> Callable[..., Tensor]:
    """The norm as an op of its own, then the GEMM with a weight of that dtype; called as what `prepare` returns."""

    def run(
        x: Tensor, norm_weight: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, *_: object
    ) -> Tensor:
        norm: dict[str, Any] = {"eps": eps, "offset": offset, "rounding": "none"}
        if scale is not None and kind == torch.float8_e4m3fn:
            y, x_scale = rms_norm(x, norm_weight, quantize=Quantize(kind, "row"), **norm)
            z = fp8_linear(y, weight, scale, bias, x_scale=x_scale, out_dtype=x.dtype)
        elif scale is not None:
            by = int8_linear if kind == torch.int8 else int4_linear
            z = by(rms_norm(x, norm_weight, **norm), weight, scale, bias)
        elif activation:
            return gated_op(rms_norm(x, norm_weight, **norm), weight, bias, activation, "ieee", config)
        else:
            return linear_op(rms_norm(x, norm_weight, **norm), weight, bias, None, "", "ieee", config)
        return gate(z, activation) if activation else z

    return run


def _fake(
    op: str, x: Tensor, norm_weight: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, eps: float,
    offset: float, activation: str, config: Sequence[int],
) -> Tensor:  # fmt: skip
    if "gated" in op:
        check_activation(op, activation)
    shape = check(op, x, norm_weight, weight, scale, bias, eps, offset, gated=activation != "")
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _gradients(
    dy: Tensor, x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float,
    needs_dx: bool, needs_dnorm: bool, needs_dw: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Memory for them; one that is not asked for is empty."""
    op = "rms_norm_linear_backward"
    shape = check(op, x, norm_weight, weight, None, bias, eps, offset)
    if dy.shape != shape or dy.dtype != x.dtype:
        raise ValueError(f"{op}: dy is {dy.dtype} of shape {tuple(dy.shape)}, expected {x.dtype} of {tuple(shape)}")

    def memory(like: Tensor | None, needed: bool) -> Tensor:
        dtype = dy.dtype if like is None else like.dtype
        return torch.empty(like.shape if needed and like is not None else (0,), dtype=dtype, device=dy.device)

    return (
        memory(x, needs_dx), memory(norm_weight, needs_dnorm), memory(weight, needs_dw), memory(bias, bias is not None)
    )  # fmt: skip


def _differentiate(
    dy: Tensor, x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float,
    needs_dx: bool, needs_dnorm: bool, needs_dw: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Those of the GEMM and the norm."""
    op = "rms_norm_linear_backward"
    dispatch.refuse_symbols(*dy.shape, *weight.shape)
    dx, dnorm, dw, db = _gradients(dy, x, norm_weight, weight, bias, eps, offset, needs_dx, needs_dnorm, needs_dw)
    rows = as_rows(dy)
    if bias is not None:
        column_sum(rows, db)
    if dw.numel():
        normed = rms_norm(x, norm_weight, eps=eps, offset=offset, rounding="none")
        dispatch.gemm(op, rows.mT, as_rows(normed).mT, dw)
    if needs_dx or needs_dnorm:
        dnormed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dispatch.gemm(op, rows, weight.mT, as_rows(dnormed))
        dx, dnorm = norm_backward.launch(dnormed, None, x, norm_weight, eps, offset, "none", needs_dx, needs_dnorm)
    return dx, dnorm, dw, db


_backward_op = library.define(
    "rms_norm_linear_backward(Tensor dy, Tensor x, Tensor norm_weight, Tensor weight, Tensor? bias, float eps, "
    "float offset, bool needs_dx, bool needs_dnorm, bool needs_dw) -> (Tensor, Tensor, Tensor, Tensor)",
    launch=_differentiate,
    fake=_gradients,
)


def _refuse_gradients(op: str, *tensors: Tensor | None) -> None:
    """Raise ValueError if one of the tensors of a call with a quantized weight requires grad."""
    for name, tensor in zip(("x", "norm_weight", "weight", "weight_scale", "bias"), tensors, strict=True):
        if isinstance(tensor, Tensor):
            library.refuse_gradient(op, name, tensor, f"{op} with a quantized weight")


def _check_derivative(inputs: tuple[Any, ...]) -> None:
    if inputs[3] is not None:
        _refuse_gradients("rms_norm_linear", *inputs[:5])


def _save(ctx, inputs, output) -> None:
    x, norm_weight, weight, _, bias, *ctx.mode = inputs[:7]
    ctx.save_for_backward(x, norm_weight, weight, bias if ctx.needs_input_grad[5] else None)


def _backward(ctx, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[1:]
    grads: list[Tensor | None] = [None] * len(needs)
    if dy is not None:
        found = _backward_op(dy, *ctx.saved_tensors, *ctx.mode, *needs[:3])
        for place, g in zip((0, 1, 2, 4), found, strict=True):
            grads[place] = g if needs[place] else None
    return tuple(grads)


_ARGUMENTS = "Tensor x, Tensor norm_weight, Tensor weight, Tensor? weight_scale, Tensor? bias, float eps, float offset"


def _prepare_linear(*args: Any) -> Callable[..., Tensor]:
    return prepare("rms_norm_linear", *args[:-1], "", args[-1])  # type: ignore[call-arg]


def _fake_linear(*args: Any) -> Tensor:
    return _fake("rms_norm_linear", *args[:-1], "", args[-1])  # type: ignore[call-arg]


_linear_op = library.define(
    f"rms_norm_linear({_ARGUMENTS}, int[] config) -> Tensor",
    prepare=_prepare_linear,
    fake=_fake_linear,
    autograd=library.Autograd(_save, _backward, _check_derivative),
)
_GATED = f"rms_norm_gated_linear({_ARGUMENTS}, str activation, int[] config) -> Tensor"


def _prepare_gated(*args: Any) -> Callable[..., Tensor]:
    check_activation("rms_norm_gated_linear", args[-2])
    return prepare("rms_norm_gated_linear", *args)


_gated_op = library.define(
    _GATED,
    prepare=_prepare_gated,
    fake=lambda *args: _fake("rms_norm_gated_linear", *args),
)


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_scale: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    config: GemmConfig | None = None,
) -> Tensor:
    """`rms_norm(x) @ weight^T + bias`, with `rms_norm(x) = x / sqrt(mean(x^2) + eps) * (norm_weight + offset)`.

    One kernel where x has few rows, as in decoding; else the norm, then the GEMM.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one, or the last stride is not 1.
        norm_weight: `(K,)`, of any of these dtypes.
        weight: `(N, K)` of x's dtype, as `torch.nn.Linear` keeps it. Any strides.
        bias: `(N,)`, of x's dtype or float32.
        weight_scale: float32, `(N,)` or `(N, 1)`, of a weight in int8 or float8_e4m3fn, which `quantize_int8` and
            `quantize_tensor` give: each row's sum is multiplied by its own. Or `(N, K / group)`, float32 or of x's
            dtype, of a weight that `quantize_int4` packed, uint8 `(N, K / 2)`. For inference. One row of x is one
            kernel and is not rounded, or in int8 and int4 as `int8_linear` and `int4_linear` say; with more rows norm
            and GEMM are two kernels, and what a weight in float8 multiplies is float8, too, as in `fp8_linear`. Under
            `torch.autocast` nothing is cast.
        eps: added to the mean of squares.
        offset: added to norm_weight in float32; 1.0 for Gemma.
        config: how the kernel is launched, in place of the choice that sizes and GPU make. `"gemv"`,
            `"gemv_persistent"` and `"skinny"` are the one kernel, for one row, for up to two, and for up to block_m;
            `"tiled"` and `"hopper"` the GEMM after the norm. Quantized weights take `"gemv"` and `"gemv_imma"`, for one
            row.

    Returns:
        `(..., N)` in x's dtype, contiguous. Sums are float32. x is rounded once between norm and GEMM: by the one
        kernel before rstd scales it (not at all by `"gemv"` and `"gemv_persistent"`), else after. Under
        `torch.autocast` the norm is taken of x as it is, and what is multiplied is cast.

    Raises:
        ValueError: norm_weight, weight, bias or weight_scale has not the shape above, the configuration can't be
            launched (the field and the reason are named), an argument requires grad beside a weight_scale, a device is
            the CPU without the interpreter, or devices differ.
        TypeError: dtypes differ, or are not one of those above.
    """
    how = () if config is None else dispatch.encoded("rms_norm_linear", config)
    if weight_scale is None and (wanted := dispatch.autocast_dtype(x)) is not None:
        if x.dtype != wanted:  # what is cast lies between norm and GEMM
            normed = _normed("rms_norm_linear", x, norm_weight, weight, bias, eps, offset)
            return linear(normed, weight, bias, config=config)
        weight, bias = dispatch.autocast(weight, bias)  # type: ignore[assignment]
    return _linear_op(x, norm_weight, weight, weight_scale, bias, eps, offset, how)


def rms_norm_gated_linear(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_scale: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    activation: Activation = "silu",
    config: GemmConfig | None = None,
) -> Tensor:
    """`act(g) * u` of `[g | u] = rms_norm(x) @ weight^T + bias`, with `rms_norm` as in `rms_norm_linear`.

    One kernel where x has few rows, as in decoding: neither the normalised x nor the 2N columns of g and u are written.
    Else the norm, then `gated_linear`.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one, or the last stride is not 1.
        norm_weight: `(K,)`, of any of these dtypes.
        weight: `(2N, K)` of x's dtype: the rows of the gate first, then those of up, as
            `torch.cat((gate_proj.weight, up_proj.weight))`. Any strides.
        bias: `(2N,)`, of x's dtype or float32.
        weight_scale: `(2N,)` or `(2N, 1)` of a weight of 8 bits, `(2N, K / group)` of one of 4, as in
            `rms_norm_linear`; with more rows of x than one, norm, GEMM and gate are a kernel each.
        eps: added to the mean of squares.
        offset: added to norm_weight in float32; 1.0 for Gemma.
        activation: the gate's, `"silu"`, `"gelu"` or `"gelu_tanh"`; where gradients will be asked for, g and u are
            rounded to x's dtype and kept.
        config: how the kernel is launched, as in `rms_norm_linear`; `block_n` counts columns of the output, for each of
            which there are two sums.


    Returns:
        `(..., N)` in x's dtype, contiguous. Sums are float32. x is rounded once between norm and GEMM: by the one
        kernel before rstd scales it (not at all by `"gemv"` and `"gemv_persistent"`), else after. Under
        `torch.autocast` as `rms_norm_linear`.

    Raises:
        ValueError: as `rms_norm_linear`, the weight has an odd number of rows, or the activation has another name.
        TypeError: as `rms_norm_linear`.
    """
    how = () if config is None else dispatch.encoded("rms_norm_gated_linear", config)
    if weight_scale is None:
        if (wanted := dispatch.autocast_dtype(x)) is not None:
            if x.dtype != wanted:  # what is cast lies between norm and GEMM
                normed = _normed("rms_norm_gated_linear", x, norm_weight, weight, bias, eps, offset)
                return gated_linear(normed, weight, bias, activation=activation, config=config)
            weight, bias = dispatch.autocast(weight, bias)  # type: ignore[assignment]
        if dispatch.will_differentiate(x, norm_weight, weight, bias):
            library.check_tensors("rms_norm_gated_linear", x=x, norm_weight=norm_weight, weight=weight)
            _fake("rms_norm_gated_linear", x, norm_weight, weight, None, bias, eps, offset, activation, how)
            return gate(_linear_op(x, norm_weight, weight, None, bias, eps, offset, how), activation)
    elif torch.is_grad_enabled():
        _refuse_gradients("rms_norm_gated_linear", x, norm_weight, weight, weight_scale, bias)
    return _gated_op(x, norm_weight, weight, weight_scale, bias, eps, offset, activation, how)


def _normed(
    op: str, x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float
) -> Tensor:
    """The norm as an op of its own. What is no tensor is named as the caller's argument, before that one runs."""
    library.check_tensors(op, norm_weight=norm_weight, weight=weight, **({} if bias is None else {"bias": bias}))
    return rms_norm(x, norm_weight, eps=eps, offset=offset, rounding="none")
