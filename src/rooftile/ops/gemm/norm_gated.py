"""`rms_norm_gated_linear`: the gated product behind a norm.

    z = [g | u] = rms_norm(x) @ weight^T + bias,   out = act(g) * u
    dz = [dy * u * act'(g) | dy * act(g)],   and from there on as of rms_norm_linear

Where a gradient will be asked for, z is written, in x's dtype, and the gate is a kernel of its own, as in gated_linear.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.gemm.linear import _activated as activated
from rooftile.ops.gemm.linear import _slopes as slopes
from rooftile.ops.gemm.norm_layers import backward_op, check, differentiate, gradients, launch
from rooftile.primitives.activations import check_activation

_OP = "rms_norm_gated_linear"


def _fake(
    x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, activation: str,
    config: str, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Memory for the result and for z, which is empty where it is not kept."""
    check_activation(_OP, activation)
    shape = check(_OP, x, norm_weight, weight, bias, eps, offset, gated=True)
    z_shape = (*x.shape[:-1], weight.shape[0]) if keep else (0,)
    return tuple(torch.empty(s, dtype=x.dtype, device=x.device) for s in (shape, z_shape))  # type: ignore[return-value]


def _launch(
    x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, activation: str,
    config: str, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_activation(_OP, activation)
    if not keep:
        out = launch(_OP, x, norm_weight, weight, bias, eps, offset, config, activation)
        return out, torch.empty((0,), dtype=x.dtype, device=x.device)
    check(_OP, x, norm_weight, weight, bias, eps, offset, gated=True)
    z = launch(_OP, x, norm_weight, weight, bias, eps, offset, config)
    return activated(z, activation, True), z


def _gradients(
    dy: Tensor, z: Tensor, x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float,
    offset: float, activation: str, needs_dx: bool, needs_dnorm: bool, needs_dw: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Memory for them; one that is not asked for is empty."""
    op = f"{_OP}_backward"
    check_activation(op, activation)
    found = gradients(
        op, dy, x, norm_weight, weight, bias, eps, offset, needs_dx, needs_dnorm, needs_dw, gated=True
    )  # fmt: skip
    expected = (*x.shape[:-1], weight.shape[0])
    if z.shape != expected or z.dtype != x.dtype:
        raise ValueError(f"{op}: z is {z.dtype} of shape {tuple(z.shape)}, expected {x.dtype} of {tuple(expected)}")
    return found


def _differentiate(
    dy: Tensor, z: Tensor, x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float,
    offset: float, activation: str, needs_dx: bool, needs_dnorm: bool, needs_dw: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dz = slopes(dy, z, activation, True)
    needs = needs_dx, needs_dnorm, needs_dw
    return differentiate(f"{_OP}_backward", dz, x, norm_weight, weight, bias, eps, offset, *needs)


_backward_op = library.define(
    "rms_norm_gated_linear_backward(Tensor dy, Tensor z, Tensor x, Tensor norm_weight, Tensor weight, Tensor? bias, "
    "float eps, float offset, str activation, bool needs_dx, bool needs_dnorm, bool needs_dw) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    launch=_differentiate,
    fake=_gradients,
)


def _save(ctx, inputs, outputs) -> None:
    x, norm_weight, weight, bias, *ctx.mode = inputs[:7]
    ctx.save_for_backward(x, norm_weight, weight, bias if ctx.needs_input_grad[4] else None, outputs[1])


def _backward(ctx, dy: Tensor | None, dz: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[1:5]
    *saved, z = ctx.saved_tensors
    found = []
    if dy is not None:
        found.append(_backward_op(dy, z, *saved, *ctx.mode, *needs[:3]))
    if dz is not None:  # the op's own callers may use z too
        found.append(backward_op(dz, *saved, *ctx.mode[:2], *needs[:3]))
    grads: list[Tensor | None] = [None] * 9
    if found:
        sums = found[0] if len(found) == 1 else [a + b for a, b in zip(*found, strict=True)]
        grads[:4] = (g if need else None for g, need in zip(sums, needs, strict=True))
    return tuple(grads)


def _check_kept(inputs: tuple[Any, ...]) -> None:
    if not inputs[8]:
        raise ValueError(f"{_OP}: keep is False, expected True where it is to be differentiated")


gated_op = library.define(
    "rms_norm_gated_linear(Tensor x, Tensor norm_weight, Tensor weight, Tensor? bias, float eps, float offset, "
    "str activation, str config, bool keep) -> (Tensor, Tensor)",
    launch=_launch,
    fake=_fake,
    autograd=library.Autograd(_save, _backward, _check_kept),
)
