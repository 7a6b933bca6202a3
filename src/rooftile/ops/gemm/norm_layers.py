"""`rms_norm_linear`: its checks, its launch, and its gradients; the gated op shares the first two.

The backward normalises x again where the weight's gradient needs it; beside the inputs nothing is kept:

    dbias = sum over rows of dy,  dweight = dy^T @ rms_norm(x),  dx, dnorm_weight from dy @ weight as of rms_norm alone
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library
from rooftile.ops.gemm import adapters
from rooftile.ops.gemm.column_sum import column_sum
from rooftile.ops.gemm.common import as_rows, check_dtype, product, refuse_symbols
from rooftile.ops.gemm.config import Operands
from rooftile.ops.gemm.norm_choose import chosen, module
from rooftile.ops.gemm.packing import check_packed
from rooftile.ops.rms_norm import backward as norm_backward
from rooftile.ops.rms_norm import forward as norm

_OP = "rms_norm_linear"
_QUANTIZED = (torch.int8, torch.float8_e4m3fn, torch.uint8)


def check(
    op: str, x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float,
    gated: bool = False, scale: Tensor | None = None,
) -> tuple[int, ...]:  # fmt: skip
    """The shape of the result. With a scale the weight has 8 bits, or is packed int4."""
    library.check_floating(op, x=x, norm_weight=norm_weight, bias=bias)
    if scale is None:
        library.check_floating(op, weight=weight)
    elif weight.dtype not in _QUANTIZED:
        raise TypeError(
            f"{op}: weight has dtype {weight.dtype}, expected {', '.join(map(str, _QUANTIZED[:-1]))} or "
            f"{_QUANTIZED[-1]} (int4, packed) where it has a scale"
        )
    for name, number in (("eps", eps), ("offset", offset)):
        if not isinstance(number, (float, int)):
            raise TypeError(f"{op}: {name} is a {type(number).__name__}, expected a number")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, expected at least one dimension, the last of 1 or more")
    k = x.shape[-1]
    if norm_weight.shape != (k,):
        raise ValueError(
            f"{op}: norm_weight has shape {tuple(norm_weight.shape)}, expected ({k},) to match x's last dimension"
        )
    if scale is None:
        check_dtype(op, "weight", weight, "x", x)
    if scale is not None and weight.dtype == torch.uint8:
        check_packed(op, "weight", weight, "weight_scale", scale, k)
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
    if bias is not None:
        if bias.shape != (n,):
            raise ValueError(f"{op}: bias has shape {tuple(bias.shape)}, expected ({n},) to match the weight's rows")
        if bias.dtype not in (x.dtype, torch.float32):
            raise TypeError(f"{op}: bias has dtype {bias.dtype}, expected {x.dtype} to match x, or torch.float32")
    return (*x.shape[:-1], n // 2 if gated else n)


def _check_scale(op: str, x: Tensor, weight: Tensor, scale: Tensor) -> None:
    """The dtype, and but for int4 the shape."""
    n, packed = weight.shape[0], weight.dtype == torch.uint8
    if scale.dtype != torch.float32 and not (packed and scale.dtype == x.dtype):
        other = f"{x.dtype} to match x, or " if packed else ""
        raise TypeError(f"{op}: weight_scale has dtype {scale.dtype}, expected {other}torch.float32")
    if not packed and scale.shape not in ((n,), (n, 1)):
        raise ValueError(
            f"{op}: weight_scale has shape {tuple(scale.shape)}, expected ({n},) or ({n}, 1) to match the weight's rows"
        )


def launch(
    op: str, x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float,
    config: str, activation: str = "",
) -> Tensor:  # fmt: skip
    """The product behind the norm, in one kernel or two; with an activation it is gated."""
    gated = activation != ""
    shape = check(op, x, norm_weight, weight, bias, eps, offset, gated)
    refuse_symbols(*x.shape, *weight.shape)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    bias = None if bias is None else bias.contiguous()
    flat = out.view(-1, shape[-1])
    c = chosen(op, x, weight, activation, config)
    found = None if c is None else module(c)
    if c is None or found is None:
        normed, _ = norm.launch("rms_norm", x, None, norm_weight, eps, offset, "none")
        product(op, as_rows(normed), weight, flat, bias, activation=activation, gated=gated, config=config)
        return out
    if isinstance(x, FunctionalTensor):
        raise launching.Untraceable("an early launch, descriptors, or counters")
    o = Operands(
        library.as_rows(x), weight, flat, bias, norm_weight=norm_weight.contiguous(), eps=eps, offset=offset,
        activation=activation, gated=gated,
    )  # fmt: skip
    adapters.start(found.launch, o, c)
    return out


def _launch(
    x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, config: str
) -> Tensor:
    return launch(_OP, x, norm_weight, weight, bias, eps, offset, config)


def _fake(
    x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, config: str
) -> Tensor:
    return torch.empty(check(_OP, x, norm_weight, weight, bias, eps, offset), dtype=x.dtype, device=x.device)


def gradients(
    op: str, dy: Tensor, x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float,
    needs_dx: bool, needs_dnorm: bool, needs_dw: bool, gated: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Memory for them; one that is not asked for is empty."""
    shape = check(op, x, norm_weight, weight, bias, eps, offset, gated)
    if dy.shape != shape or dy.dtype != x.dtype:
        raise ValueError(f"{op}: dy is {dy.dtype} of shape {tuple(dy.shape)}, expected {x.dtype} of {tuple(shape)}")

    def memory(like: Tensor | None, needed: bool) -> Tensor:
        dtype = dy.dtype if like is None else like.dtype
        return torch.empty(like.shape if needed and like is not None else (0,), dtype=dtype, device=dy.device)

    return (
        memory(x, needs_dx), memory(norm_weight, needs_dnorm), memory(weight, needs_dw), memory(bias, bias is not None)
    )  # fmt: skip


def differentiate(
    op: str, dz: Tensor, x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float,
    needs_dx: bool, needs_dnorm: bool, needs_dw: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Those of the product and the norm, from that of the product."""
    refuse_symbols(*dz.shape, *weight.shape)
    dx, dnorm, dw, db = gradients(op, dz, x, norm_weight, weight, bias, eps, offset, needs_dx, needs_dnorm, needs_dw)
    rows = as_rows(dz)
    if bias is not None:
        column_sum(rows, db)
    if dw.numel():
        normed, _ = norm.launch("rms_norm", x, None, norm_weight, eps, offset, "none")
        product(op, rows.mT, as_rows(normed).mT, dw)
    if needs_dx or needs_dnorm:
        dnormed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if dnormed.numel():
            product(op, rows, weight.mT, as_rows(dnormed))
        dx, dnorm = norm_backward.launch(dnormed, None, x, norm_weight, eps, offset, "none", needs_dx, needs_dnorm)
    return dx, dnorm, dw, db


backward_op = library.define(
    "rms_norm_linear_backward(Tensor dy, Tensor x, Tensor norm_weight, Tensor weight, Tensor? bias, float eps, "
    "float offset, bool needs_dx, bool needs_dnorm, bool needs_dw) -> (Tensor, Tensor, Tensor, Tensor)",
    launch=functools.partial(differentiate, f"{_OP}_backward"),
    fake=functools.partial(gradients, f"{_OP}_backward"),
)


def _save(ctx, inputs, output) -> None:
    x, norm_weight, weight, bias, *ctx.mode = inputs[:6]
    ctx.save_for_backward(x, norm_weight, weight, bias if ctx.needs_input_grad[4] else None)


def _backward(ctx, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[1:5]
    if dy is None:
        return (None,) * 7
    grads = backward_op(dy, *ctx.saved_tensors, *ctx.mode, *needs[:3])
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), None, None, None


linear_op = library.define(
    "rms_norm_linear(Tensor x, Tensor norm_weight, Tensor weight, Tensor? bias, float eps, float offset, str config) "
    "-> Tensor",
    launch=_launch,
    fake=_fake,
    autograd=library.Autograd(_save, _backward),
)
