"""The activation of a gated MLP: `y = act(gate) * up` (Shazeer 2020, https://arxiv.org/abs/2002.05202).

    silu_mul    act(g) = g * sigmoid(g)                     SwiGLU: Llama, Qwen, Mistral, Phi-3
    gelu_mul    act(g) = g * Phi(g), or its tanh form       GeGLU: Gemma (tanh), T5 1.1 (tanh), ModernBERT

gate and up are two tensors, or the two halves of one packed tensor `[gate | up]`, as a fused gate-and-up projection
writes it. Bytes: two tensors read, one written; the backward reads dy, gate and up, recomputes the activation and
writes two:

    dup = dy * act(gate)
    dgate = dy * up * act'(gate)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.gated import quantized
from rooftile.ops.gated.kernel import backward, forward
from rooftile.primitives.activations import Approximate, gelu_name
from rooftile.primitives.quantize import refuse_gradient
from rooftile.quantize import Quantize, check_quantize

__all__ = ["Approximate", "gelu_mul", "gelu_mul_packed", "silu_mul", "silu_mul_packed"]


# Separate gate and up


def _check(op: str, gate: Tensor, up: Tensor) -> None:
    library.check_floating(op, gate=gate)
    if gate.dim() == 0:
        raise ValueError(f"{op}: gate has shape (), expected at least one dimension")
    library.check_same(op, "up", up, "gate", gate)


def _output(op: str, gate: Tensor, up: Tensor) -> Tensor:
    _check(op, gate, up)
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


def _prepare(op: str, activation: str, gate: Tensor, up: Tensor) -> Callable[..., Tensor]:
    _check(op, gate, up)
    shape, strides, dtype, device = gate.shape, library.contiguous_strides(gate.shape), gate.dtype, gate.device
    start = library.start_nothing
    if gate.numel():
        copies: library.Copies = {}
        rows = library.rows_of(gate, copies, 0), library.rows_of(up, copies, 1)
        start = library.copying(forward(activation, *rows), copies)

    def run(gate: Tensor, up: Tensor, *_: object) -> Tensor:
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        start(gate, up, y)
        return y

    return run


def _gradients(
    op: str, dy: Tensor, gate: Tensor, up: Tensor, needs_dgate: bool, needs_dup: bool
) -> tuple[Tensor, Tensor]:
    """Memory for them; one that is not needed is empty."""
    _check(op, gate, up)
    library.check_same(op, "dy", dy, "gate", gate)
    return (
        torch.empty(gate.shape if needs_dgate else (0,), dtype=gate.dtype, device=gate.device),
        torch.empty(gate.shape if needs_dup else (0,), dtype=gate.dtype, device=gate.device),
    )


def _prepare_backward(
    op: str, activation: str, dy: Tensor, gate: Tensor, up: Tensor, needs_dgate: bool, needs_dup: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    _gradients(op, dy, gate, up, needs_dgate, needs_dup)
    shapes = tuple(gate.shape if needed else (0,) for needed in (needs_dgate, needs_dup))
    strides = tuple(map(library.contiguous_strides, shapes))
    dtype, device = gate.dtype, gate.device
    start = library.start_nothing
    if gate.numel():
        copies: library.Copies = {}
        rows = (library.rows_of(dy, copies, 0), library.rows_of(gate, copies, 1), library.rows_of(up, copies, 2))
        start = backward(activation, *rows, gate.shape[-1], needs_dgate, needs_dup)
        start = library.copying(start, copies)

    def run(dy: Tensor, gate: Tensor, up: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        dgate = torch.empty_strided(shapes[0], strides[0], dtype=dtype, device=device)
        dup = torch.empty_strided(shapes[1], strides[1], dtype=dtype, device=device)
        start(dy, gate, up, dgate if needs_dgate else None, dup if needs_dup else None)
        return dgate, dup

    return run


_silu_backward_op = library.define(
    "silu_mul_backward(Tensor dy, Tensor gate, Tensor up, bool needs_dgate, bool needs_dup) -> (Tensor, Tensor)",
    prepare=lambda *args: _prepare_backward("silu_mul_backward", "silu", *args),
    fake=lambda *args: _gradients("silu_mul_backward", *args),
)


def _silu_gradients(ctx, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None
    needs_dgate, needs_dup = ctx.needs_input_grad[1:3]
    dgate, dup = _silu_backward_op(dy, *ctx.saved_tensors, needs_dgate, needs_dup)
    return dgate if needs_dgate else None, dup if needs_dup else None


_silu_op = library.define(
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    prepare=lambda gate, up: _prepare("silu_mul", "silu", gate, up),
    fake=lambda gate, up: _output("silu_mul", gate, up),
    autograd=library.Autograd(lambda ctx, inputs, output: ctx.save_for_backward(*inputs), _silu_gradients),
)


@overload
def silu_mul(gate: Tensor, up: Tensor, *, quantize: None = ...) -> Tensor: ...


@overload
def silu_mul(gate: Tensor, up: Tensor, *, quantize: Quantize) -> tuple[Tensor, Tensor]: ...


def silu_mul(gate: Tensor, up: Tensor, *, quantize: Quantize | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """`y = gate * sigmoid(gate) * up`, computed in float32 and rounded once.

    Args:
        gate: `(..., N)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one, or the last stride is not 1.
        up: the shape and dtype of gate.
        quantize: ask for y in 8 bits with its scales, as `rooftile.Quantize` says, and no gradients. What is quantised
            is the float32 result.

    Returns:
        y with the shape and dtype of gate, contiguous. With `quantize` `(y, scale)`, both contiguous: y in the
        quantised dtype, and the scales in float32.

    Raises:
        ValueError: shapes or devices differ, a device is the CPU without the interpreter, or a quantised result is
            asked for of an input that requires grad, in grad mode.
        TypeError: dtypes differ, or are not one of the three.
    """
    if quantize is not None:
        check_quantize("silu_mul", quantize)
        return quantized.silu_mul(gate, up, quantize)
    return _silu_op(gate, up)


def _fake_gelu(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    gelu_name("gelu_mul", approximate)
    return _output("gelu_mul", gate, up)


def _fake_gelu_backward(
    dy: Tensor, gate: Tensor, up: Tensor, approximate: str, needs_dgate: bool, needs_dup: bool
) -> tuple[Tensor, Tensor]:
    gelu_name("gelu_mul_backward", approximate)
    return _gradients("gelu_mul_backward", dy, gate, up, needs_dgate, needs_dup)


_gelu_backward_op = library.define(
    "gelu_mul_backward(Tensor dy, Tensor gate, Tensor up, str approximate, bool needs_dgate, bool needs_dup) "
    "-> (Tensor, Tensor)",
    prepare=lambda dy, gate, up, approximate, *needs: _prepare_backward(
        "gelu_mul_backward", gelu_name("gelu_mul_backward", approximate), dy, gate, up, *needs
    ),
    fake=_fake_gelu_backward,
)


def _save_gelu(ctx, inputs, output) -> None:
    *tensors, ctx.approximate = inputs
    ctx.save_for_backward(*tensors)


def _gelu_gradients(ctx, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None
    needs_dgate, needs_dup = ctx.needs_input_grad[1:3]
    dgate, dup = _gelu_backward_op(dy, *ctx.saved_tensors, ctx.approximate, needs_dgate, needs_dup)
    return dgate if needs_dgate else None, dup if needs_dup else None, None


_gelu_op = library.define(
    "gelu_mul(Tensor gate, Tensor up, str approximate) -> Tensor",
    prepare=lambda gate, up, approximate: _prepare("gelu_mul", gelu_name("gelu_mul", approximate), gate, up),
    fake=_fake_gelu,
    autograd=library.Autograd(_save_gelu, _gelu_gradients),
)


def gelu_mul(gate: Tensor, up: Tensor, *, approximate: Approximate = "none") -> Tensor:
    """`y = gelu(gate) * up`, computed in float32 and rounded once.

    Args:
        gate: `(..., N)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one, or the last stride is not 1.
        up: the shape and dtype of gate.
        approximate: as in `torch.nn.functional.gelu`. `"none"`: `gelu(g) = g * Phi(g)`, with Phi the distribution of a
            standard normal number. `"tanh"`: `g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g^3)))`, Gemma's.

    Returns:
        y with the shape and dtype of gate, contiguous.

    Raises:
        ValueError: shapes or devices differ, approximate is another word, or a device is the CPU without the
            interpreter.
        TypeError: dtypes differ, or are not one of the three.
    """
    return _gelu_op(gate, up, approximate)


# One packed tensor


def _check_packed(op: str, gate_up: Tensor) -> None:
    library.check_floating(op, gate_up=gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(f"{op}: gate_up has shape {tuple(gate_up.shape)}, expected an even last dimension [gate | up]")


def _packed_output(op: str, gate_up: Tensor) -> Tensor:
    _check_packed(op, gate_up)
    shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    return torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)


def _prepare_packed(op: str, activation: str, gate_up: Tensor) -> Callable[..., Tensor]:
    _check_packed(op, gate_up)
    half = gate_up.shape[-1] // 2
    shape = (*gate_up.shape[:-1], half)
    strides, dtype, device = library.contiguous_strides(shape), gate_up.dtype, gate_up.device
    copies: library.Copies = {}
    start = library.start_nothing
    if gate_up.numel():
        start = forward(activation, *library.rows_of(gate_up, copies, 0).chunk(2, dim=1))

    def run(gate_up: Tensor, *_: object) -> Tensor:
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if copies:
            gate_up = library.as_rows(gate_up)
        start(gate_up, gate_up.narrow(-1, half, half), y)
        return y

    return run


def _packed_gradient(op: str, dy: Tensor, gate_up: Tensor) -> Tensor:
    half = gate_up.narrow(-1, 0, gate_up.shape[-1] // 2)
    library.check_same(op, "dy", dy, "a half of gate_up", half)
    return torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)


def _prepare_packed_backward(op: str, activation: str, dy: Tensor, gate_up: Tensor) -> Callable[..., Tensor]:
    _packed_gradient(op, dy, gate_up)
    shape, strides = gate_up.shape, library.contiguous_strides(gate_up.shape)
    dtype, device, half = gate_up.dtype, gate_up.device, gate_up.shape[-1] // 2
    copies: library.Copies = {}
    start = library.start_nothing
    if gate_up.numel():
        gate, up = library.rows_of(gate_up, copies, 1).chunk(2, dim=1)
        start = backward(activation, library.rows_of(dy, copies, 0), gate, up, 2 * half, True, True)

    def run(dy: Tensor, gate_up: Tensor, *_: object) -> Tensor:
        grad = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if copies:
            dy, gate_up = library.as_rows(dy), library.as_rows(gate_up)
        start(dy, gate_up, gate_up.narrow(-1, half, half), grad, grad.narrow(-1, half, half))
        return grad

    return run


_packed_silu_backward_op = library.define(
    "silu_mul_packed_backward(Tensor dy, Tensor gate_up) -> Tensor",
    prepare=lambda dy, gate_up: _prepare_packed_backward("silu_mul_packed_backward", "silu", dy, gate_up),
    fake=lambda dy, gate_up: _packed_gradient("silu_mul_packed_backward", dy, gate_up),
)

_packed_silu_op = library.define(
    "silu_mul_packed(Tensor gate_up) -> Tensor",
    prepare=lambda gate_up: _prepare_packed("silu_mul_packed", "silu", gate_up),
    fake=lambda gate_up: _packed_output("silu_mul_packed", gate_up),
    autograd=library.Autograd(
        lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        lambda ctx, dy: (None if dy is None else _packed_silu_backward_op(dy, *ctx.saved_tensors),),
    ),
)


@overload
def silu_mul_packed(gate_up: Tensor, *, quantize: None = ...) -> Tensor: ...


@overload
def silu_mul_packed(gate_up: Tensor, *, quantize: Quantize) -> tuple[Tensor, Tensor]: ...


def silu_mul_packed(gate_up: Tensor, *, quantize: Quantize | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """`silu_mul(gate, up)` over one tensor that holds both: `gate_up = [gate | up]` along the last dimension.

    Args:
        gate_up: `(..., 2N)`, float32, float16 or bfloat16.
        quantize: as in `rooftile.silu_mul`.

    Returns:
        y of shape `(..., N)`, gate_up's dtype, contiguous. The gradient is one packed tensor. With `quantize`
        `(y, scale)`, as `rooftile.silu_mul`.

    Raises:
        ValueError: the last dimension is odd, the device is the CPU without the interpreter, or a quantised result is
            asked for of a tensor that requires grad, in grad mode.
        TypeError: the dtype is not one of the three.
    """
    if quantize is not None:
        check_quantize("silu_mul_packed", quantize)
        _check_packed("silu_mul_packed", gate_up)
        if torch.is_grad_enabled():
            refuse_gradient("silu_mul_packed", "gate_up", gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return quantized.silu_mul(gate, up, quantize)
    return _packed_silu_op(gate_up)


def _fake_packed_gelu(gate_up: Tensor, approximate: str) -> Tensor:
    gelu_name("gelu_mul_packed", approximate)
    return _packed_output("gelu_mul_packed", gate_up)


def _fake_packed_gelu_backward(dy: Tensor, gate_up: Tensor, approximate: str) -> Tensor:
    gelu_name("gelu_mul_packed_backward", approximate)
    return _packed_gradient("gelu_mul_packed_backward", dy, gate_up)


_packed_gelu_backward_op = library.define(
    "gelu_mul_packed_backward(Tensor dy, Tensor gate_up, str approximate) -> Tensor",
    prepare=lambda dy, gate_up, approximate: _prepare_packed_backward(
        "gelu_mul_packed_backward", gelu_name("gelu_mul_packed_backward", approximate), dy, gate_up
    ),
    fake=_fake_packed_gelu_backward,
)


def _packed_gelu_gradient(ctx, dy: Tensor | None) -> tuple[Tensor | None, None]:
    return None if dy is None else _packed_gelu_backward_op(dy, *ctx.saved_tensors, ctx.approximate), None


_packed_gelu_op = library.define(
    "gelu_mul_packed(Tensor gate_up, str approximate) -> Tensor",
    prepare=lambda gate_up, approximate: _prepare_packed(
        "gelu_mul_packed", gelu_name("gelu_mul_packed", approximate), gate_up
    ),
    fake=_fake_packed_gelu,
    autograd=library.Autograd(_save_gelu, _packed_gelu_gradient),
)


def gelu_mul_packed(gate_up: Tensor, *, approximate: Approximate = "none") -> Tensor:
    """`gelu_mul(gate, up)` over one tensor that holds both: `gate_up = [gate | up]` along the last dimension.

    Args:
        gate_up: `(..., 2N)`, float32, float16 or bfloat16.
        approximate: see `gelu_mul`.

    Returns:
        y of shape `(..., N)`, gate_up's dtype, contiguous. The gradient is one packed tensor.

    Raises:
        ValueError: the last dimension is odd, approximate is another word, or the device is the CPU without the
            interpreter.
        TypeError: the dtype is not one of the three.
    """
    return _packed_gelu_op(gate_up, approximate)
