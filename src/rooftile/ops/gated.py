"""The activation of a gated MLP: `y = act(gate) * up` (Shazeer 2020, https://arxiv.org/abs/2002.05202).

    silu_mul    act(g) = g * sigmoid(g)                     SwiGLU: Llama, Qwen, Mistral, Phi-3
    gelu_mul    act(g) = g * Phi(g), or its tanh form       GeGLU: Gemma (tanh), T5 1.1 (tanh), ModernBERT

gate and up are two tensors, or the two halves of one packed tensor `[gate | up]`, as a fused gate-and-up projection
writes it. Bytes: the forward reads two tensors and writes one; the backward reads dy, gate and up, recomputes the
activation and writes two:

    dup = dy * act(gate)
    dgate = dy * up * act'(gate)

The forward can quantize its result for the GEMM that follows. A row with one scale then stays whole in a tile. A row
too long for registers is computed twice, the second time from the L2, once its scale is known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.primitives import quantize as results
from rooftile.primitives.activations import GELUS, Gelu, activate, activate_with_slope, check_activation
from rooftile.primitives.quantize import divide, magnitude, rounded, scale_of
from rooftile.primitives.rows import RowConfig, row_launcher
from rooftile.primitives.tiles import tile_of, tiles
from rooftile.quantize import Quantize, check_quantize

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    scale_ptr,
    stride_gm,
    stride_um,
    n_rows,
    ACTIVATION: tl.constexpr,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    OTHER: tl.constexpr = None if FORMAT is None else 0.0  # the largest element must be one of the row
    rows, first, cols = tile_of(tl.program_id(0), N, ROWS, BLOCK_N)
    mask = (rows < n_rows) & (cols < N)

    gate = tl.load(gate_ptr + rows * stride_gm + cols, mask=mask, other=OTHER).to(tl.float32)
    up = tl.load(up_ptr + rows * stride_um + cols, mask=mask, other=OTHER).to(tl.float32)

    y = divide(activate(gate, ACTIVATION) * up, scale_ptr, rows, rows < n_rows, first, None, N, SPAN, FORMAT)

    tl.store(y_ptr + rows * N + cols, rounded(y, FORMAT, SPAN > 0, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _part(gate_ptr, up_ptr, cols, ACTIVATION: tl.constexpr, N: tl.constexpr, EVICTION: tl.constexpr):
    """The float32 result of a row at those columns."""
    gate = tl.load(gate_ptr + cols, mask=cols < N, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    up = tl.load(up_ptr + cols, mask=cols < N, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    return activate(gate, ACTIVATION) * up


@triton.jit(do_not_specialize=["n_rows"])
def _loop_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    scale_ptr,
    stride_gm,
    stride_um,
    n_rows,
    ACTIVATION: tl.constexpr,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A program quantizes one row."""
    row = tl.program_id(0).to(tl.int64)
    gate_ptr += row * stride_gm
    up_ptr += row * stride_um
    block = tl.arange(0, BLOCK_N)

    most = tl.zeros((BLOCK_N,), tl.int32)
    for start in tl.range(0, N, BLOCK_N, num_stages=1):
        most = tl.maximum(most, magnitude(_part(gate_ptr, up_ptr, start + block, ACTIVATION, N, "evict_last")))
    scale = scale_of(tl.max(most, axis=0), FORMAT)
    tl.store(scale_ptr + row, scale)

    inverse = 1.0 / scale
    for start in tl.range(0, N, BLOCK_N, num_stages=1):
        cols = start + block
        y = _part(gate_ptr, up_ptr, cols, ACTIVATION, N, "evict_first") * inverse
        tl.store(y_ptr + row * N + cols, rounded(y, FORMAT, True, y_ptr.dtype.element_ty), mask=cols < N)


@triton.jit(do_not_specialize=["n_rows"])
def _backward_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    y_ptr,
    stride_dym,
    stride_gm,
    stride_um,
    stride_dm,
    n_rows,
    ACTIVATION: tl.constexpr,
    N: tl.constexpr,
    NEEDS_DGATE: tl.constexpr,
    NEEDS_DUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows, _, cols = tile_of(tl.program_id(0), N, ROWS, BLOCK_N)
    mask = (rows < n_rows) & (cols < N)

    dy = tl.load(dy_ptr + rows * stride_dym + cols, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptr + rows * stride_gm + cols, mask=mask).to(tl.float32)
    if NEEDS_DGATE or y_ptr is not None:
        up = tl.load(up_ptr + rows * stride_um + cols, mask=mask).to(tl.float32)

    activated, slope = activate_with_slope(gate, ACTIVATION)
    if NEEDS_DUP:
        dup = dy * activated
        tl.store(dup_ptr + rows * stride_dm + cols, dup.to(dup_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DGATE:
        dgate = dy * up * slope
        tl.store(dgate_ptr + rows * stride_dm + cols, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    if y_ptr is not None:
        tl.store(y_ptr + rows * N + cols, (activated * up).to(y_ptr.dtype.element_ty), mask=mask)


@functools.cache
def config(n_cols: int, target: runtime.Target) -> RowConfig:
    """On an H200 (bf16) within 1 % of the best of eighteen tiles at 2048 x 4096 and at 8192 x 14336, both ways."""
    if target is runtime.INTERPRETER:
        return RowConfig("tile", min(4096, library.power_of_two(n_cols)), num_warps=4, rows=16)
    block_n = min(1024, library.power_of_two(n_cols))
    return RowConfig("tile", block_n, num_warps=8, rows=2048 // block_n)


@functools.cache
def quantized_config(n_cols: int, itemsize: int, span: int, target: runtime.Target) -> RowConfig:
    """On an H200 (bf16) 1.01 to 1.04 of a copy's speed at 8192 x 14336 with each kind of scale: the whole row in a tile
    if it has a scale of its own, else tiles like those of the result that is not quantized. The loop has 0.71, at
    8192 x 18944.
    """
    whole = max(library.power_of_two(n_cols), span)
    if target is runtime.INTERPRETER:
        return RowConfig("tile", max(min(4096, whole), span), num_warps=4, rows=16)
    if span * itemsize > 32768:
        return RowConfig("loop", 4096, num_warps=16 * 32 // target.warp_size)
    block_n = max(min(2048, whole), span)
    warps = min(32, max(8, block_n // 512)) * 32 // target.warp_size
    return RowConfig("tile", block_n, warps, max(1, 2048 // block_n))


@functools.cache
def _launcher(
    activation: str, n_cols: int, dtype: torch.dtype, result_format: str | None, span: int, c: RowConfig
) -> launching.KernelLauncher:
    kernel = _loop_kernel if c.kernel == "loop" else _forward_kernel
    return row_launcher(kernel, c, ACTIVATION=activation, N=n_cols, FORMAT=result_format, SPAN=span)


@functools.cache
def _backward_launcher(
    activation: str, n_cols: int, dtype: torch.dtype, needs: tuple[bool, ...], c: RowConfig
) -> launching.KernelLauncher:
    more = {"NEEDS_DGATE": needs[0], "NEEDS_DUP": needs[1]}  # the third is a pointer that is None
    return row_launcher(_backward_kernel, c, ACTIVATION=activation, N=n_cols, **more)


def _forward(
    activation: str, gate: Tensor, up: Tensor, quantized: tuple[str, str, int] | None = None
) -> Callable[..., None]:
    """The launch over gate and up, `(rows, N)`, y, which is contiguous, and the scales, which are None without
    `quantized`: dtype, per and group_size."""
    n_rows, n_cols = gate.shape[0], int(gate.shape[1])
    target = runtime.target(gate.device)
    if quantized is None:
        result_format, span, c = None, 0, config(n_cols, target)
    else:
        result_format, span = quantized[0], results.span(n_cols, *quantized[1:])
        c = quantized_config(n_cols, gate.element_size(), span, target)
    launcher = _launcher(activation, n_cols, gate.dtype, result_format, span, c)
    programs = n_rows if c.kernel == "loop" else tiles(n_rows, n_cols, c.rows, c.block_n)
    return launching.bind(launcher, programs, strides=(gate.stride(0), up.stride(0)), numbers=(n_rows,))


def _backward(
    activation: str, dy: Tensor, gate: Tensor, up: Tensor, stride_d: int, needs: tuple[bool, bool, bool]
) -> Callable[..., None]:
    """The launch over dy, gate, up, dgate, dup and y, the forward's result; of the last three one that is not needed
    is None. The rows of dgate and dup are `stride_d` apart."""
    if not any(needs):
        return library.start_nothing
    n_rows, n_cols = gate.shape[0], int(gate.shape[1])
    c = config(n_cols, runtime.target(gate.device))
    launcher = _backward_launcher(activation, n_cols, gate.dtype, needs, c)
    strides = (dy.stride(0), gate.stride(0), up.stride(0), stride_d)
    return launching.bind(launcher, tiles(n_rows, n_cols, c.rows, c.block_n), strides=strides, numbers=(n_rows,))


# The ops of two tensors. `op` is their name, for errors.


def _check(op: str, activation: str, gate: Tensor, up: Tensor) -> None:
    check_activation(op, activation, ("silu",) if op.startswith("silu") else GELUS)
    library.check_floating(op, gate=gate)
    if gate.dim() == 0:
        raise ValueError(f"{op}: gate has shape (), expected at least one dimension")
    library.check_same(op, "up", up, "gate", gate)


def _fake(op: str, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    _check(op, activation, gate, up)
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


def _prepare(op: str, gate: Tensor, up: Tensor, activation: str) -> Callable[..., Tensor]:
    _check(op, activation, gate, up)
    shape, strides, dtype, device = gate.shape, library.contiguous_strides(gate.shape), gate.dtype, gate.device
    start = library.start_nothing
    if gate.numel():
        copies: library.Copies = {}
        rows = library.rows_of(gate, copies, 0), library.rows_of(up, copies, 1)
        start = library.copying(_forward(activation, *rows), copies)

    def run(gate: Tensor, up: Tensor, _: str) -> Tensor:
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        start(gate, up, y, None)
        return y

    return run


def _fake_backward(
    op: str, dy: Tensor, gate: Tensor, up: Tensor, activation: str, needs_dgate: bool, needs_dup: bool
) -> tuple[Tensor, Tensor]:
    """Memory for the gradients; one that is not needed is empty."""
    _check(op, activation, gate, up)
    library.check_same(op, "dy", dy, "gate", gate)
    return (
        torch.empty(gate.shape if needs_dgate else (0,), dtype=gate.dtype, device=gate.device),
        torch.empty(gate.shape if needs_dup else (0,), dtype=gate.dtype, device=gate.device),
    )


def _prepare_backward(
    op: str, dy: Tensor, gate: Tensor, up: Tensor, activation: str, needs_dgate: bool, needs_dup: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    shapes = tuple(grad.shape for grad in _fake_backward(op, dy, gate, up, activation, needs_dgate, needs_dup))
    strides = tuple(map(library.contiguous_strides, shapes))
    dtype, device = gate.dtype, gate.device
    start = library.start_nothing
    if gate.numel():
        copies: library.Copies = {}
        rows = (library.rows_of(dy, copies, 0), library.rows_of(gate, copies, 1), library.rows_of(up, copies, 2))
        start = _backward(activation, *rows, gate.shape[-1], (needs_dgate, needs_dup, False))
        start = library.copying(start, copies)

    def run(dy: Tensor, gate: Tensor, up: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        dgate = torch.empty_strided(shapes[0], strides[0], dtype=dtype, device=device)
        dup = torch.empty_strided(shapes[1], strides[1], dtype=dtype, device=device)
        start(dy, gate, up, dgate if needs_dgate else None, dup if needs_dup else None, None)
        return dgate, dup

    return run


def _fake_quantized(
    op: str, gate: Tensor, up: Tensor, scale: Tensor | None, activation: str, *quantized: Any
) -> tuple[Tensor, Tensor]:
    _check(op, activation, gate, up)
    return results.empty(gate, *quantized)


def _prepare_quantized(
    op: str, gate: Tensor, up: Tensor, scale: Tensor | None, activation: str, *quantized: Any
) -> Callable[..., tuple[Tensor, Tensor]]:
    _check(op, activation, gate, up)
    allocate = results.allocator(*results.empty(gate, *quantized))
    start = None
    if gate.numel():
        copies: library.Copies = {}
        rows = library.rows_of(gate, copies, 0), library.rows_of(up, copies, 1)
        start = library.copying(_forward(activation, *rows, quantized), copies)

    def run(gate: Tensor, up: Tensor, scale: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
        y, written, scales = allocate()
        if start is None:
            return y, scales.fill_(2.0**-126)  # rows of no elements have a scale all the same
        start(gate, up, written, scales if scale is None else scale)
        return y, scales

    return run


# The ops of one packed tensor


def _check_packed(op: str, activation: str, gate_up: Tensor) -> None:
    check_activation(op, activation, ("silu",) if op.startswith("silu") else GELUS)
    library.check_floating(op, gate_up=gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(f"{op}: gate_up has shape {tuple(gate_up.shape)}, expected an even last dimension [gate | up]")


def _fake_packed(op: str, gate_up: Tensor, activation: str) -> Tensor:
    _check_packed(op, activation, gate_up)
    shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    return torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)


def _prepare_packed(op: str, gate_up: Tensor, activation: str) -> Callable[..., Tensor]:
    _check_packed(op, activation, gate_up)
    half = gate_up.shape[-1] // 2
    shape = (*gate_up.shape[:-1], half)
    strides, dtype, device = library.contiguous_strides(shape), gate_up.dtype, gate_up.device
    copies: library.Copies = {}
    start = library.start_nothing
    if gate_up.numel():
        gate, up = library.rows_of(gate_up, copies, 0).chunk(2, dim=1)
        start = _forward(activation, gate, up)

    def run(gate_up: Tensor, _: str) -> Tensor:
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if copies:
            gate_up = library.as_rows(gate_up)
        start(gate_up, gate_up.narrow(-1, half, half), y, None)
        return y

    return run


def _fake_packed_backward(
    op: str, dy: Tensor, gate_up: Tensor, activation: str, needs_y: bool
) -> tuple[Tensor, Tensor]:
    """Memory for the gradient and the forward's result, which is empty unless it is needed."""
    _check_packed(op, activation, gate_up)
    half = gate_up.narrow(-1, 0, gate_up.shape[-1] // 2)
    library.check_same(op, "dy", dy, "a half of gate_up", half)
    return (
        torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device),
        torch.empty(dy.shape if needs_y else (0,), dtype=gate_up.dtype, device=gate_up.device),
    )


def _prepare_packed_backward(
    op: str, dy: Tensor, gate_up: Tensor, activation: str, needs_y: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    shapes = tuple(t.shape for t in _fake_packed_backward(op, dy, gate_up, activation, needs_y))
    strides = tuple(map(library.contiguous_strides, shapes))
    dtype, device, half = gate_up.dtype, gate_up.device, gate_up.shape[-1] // 2
    copies: library.Copies = {}
    start = library.start_nothing
    if gate_up.numel():
        gate, up = library.rows_of(gate_up, copies, 1).chunk(2, dim=1)
        start = _backward(activation, library.rows_of(dy, copies, 0), gate, up, 2 * half, (True, True, needs_y))

    def run(dy: Tensor, gate_up: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        grad, y = (torch.empty_strided(s, t, dtype=dtype, device=device) for s, t in zip(shapes, strides, strict=True))
        if copies:
            dy, gate_up = library.as_rows(dy), library.as_rows(gate_up)
        start(dy, gate_up, gate_up.narrow(-1, half, half), grad, grad.narrow(-1, half, half), y if needs_y else None)
        return grad, y

    return run


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _define(op: str) -> tuple[Callable[..., Any], ...]:
    """Register the ops of two tensors, of a packed one, and with a quantized result."""
    backward = library.define(
        f"{op}_backward(Tensor dy, Tensor gate, Tensor up, str activation, bool needs_dgate, bool needs_dup) "
        "-> (Tensor, Tensor)",
        prepare=functools.partial(_prepare_backward, f"{op}_backward"),
        fake=functools.partial(_fake_backward, f"{op}_backward"),
    )
    packed_backward = library.define(
        f"{op}_packed_backward(Tensor dy, Tensor gate_up, str activation, bool needs_y) -> (Tensor, Tensor)",
        prepare=functools.partial(_prepare_packed_backward, f"{op}_packed_backward"),
        fake=functools.partial(_fake_packed_backward, f"{op}_packed_backward"),
    )

    def gradients(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None
        needs_dgate, needs_dup = ctx.needs_input_grad[1:3]
        dgate, dup = backward(dy, *ctx.saved_tensors, ctx.activation, needs_dgate, needs_dup)
        return dgate if needs_dgate else None, dup if needs_dup else None, None

    def packed_gradient(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, None]:
        return None if dy is None else packed_backward(dy, *ctx.saved_tensors, ctx.activation, False)[0], None

    return (
        library.define(
            f"{op}(Tensor gate, Tensor up, str activation) -> Tensor",
            prepare=functools.partial(_prepare, op),
            fake=functools.partial(_fake, op),
            autograd=library.Autograd(_save, gradients),
            rows=library.Rows(("gate", "up")),
        ),
        library.define(
            f"{op}_packed(Tensor gate_up, str activation) -> Tensor",
            prepare=functools.partial(_prepare_packed, f"{op}_packed"),
            fake=functools.partial(_fake_packed, f"{op}_packed"),
            autograd=library.Autograd(_save, packed_gradient),
            rows=library.Rows(("gate_up",)),
        ),
        library.define(
            f"{op}_quantized(Tensor gate, Tensor up, Tensor? scale, str activation, str dtype, str per, "
            "int group_size) -> (Tensor, Tensor)",
            prepare=functools.partial(_prepare_quantized, op),
            fake=functools.partial(_fake_quantized, op),
            called=lambda args: op,
        ),
    )


_silu, _silu_packed, _silu_quantized = _define("silu_mul")
_gelu, _gelu_packed, _gelu_quantized = _define("gelu_mul")


def _quantized(op: str, gate: Tensor, up: Tensor, activation: str, q: Quantize) -> tuple[Tensor, Tensor]:
    check_quantize(op, q)
    quantized = _silu_quantized if activation == "silu" else _gelu_quantized
    y, scales = quantized(gate, up, q.scale, activation, q.dtype_name, q.per, q.group_size)
    return y, scales if q.scale is None else q.scale


def _quantized_packed(op: str, gate_up: Tensor, activation: str, q: Quantize) -> tuple[Tensor, Tensor]:
    _check_packed(op, activation, gate_up)
    if torch.is_grad_enabled():
        library.refuse_gradient(op, "gate_up", gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return _quantized(op, gate, up, activation, q)


@overload
def silu_mul(gate: Tensor, up: Tensor, *, quantize: None = ...) -> Tensor: ...


@overload
def silu_mul(gate: Tensor, up: Tensor, *, quantize: Quantize) -> tuple[Tensor, Tensor]: ...


def silu_mul(gate: Tensor, up: Tensor, *, quantize: Quantize | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """`y = gate * sigmoid(gate) * up`, computed in float32 and rounded once.

    Args:
        gate: `(..., N)`, float32, float16 or bfloat16. Any strides; copied only if the leading dimensions cannot be
            viewed as one, or if the last stride is not 1.
        up: the shape and dtype of gate.
        quantize: return y in 8 bits with its scales, see `rooftile.Quantize`; it has no gradients. The float32 result
            is quantized.

    Returns:
        y with the shape and dtype of gate, contiguous. With `quantize` `(y, scale)`, both contiguous: y in the
        quantized dtype, the scales in float32.

    Raises:
        ValueError: shapes or devices differ, a device is the CPU without the interpreter, or an input of a quantized
            result needs a gradient.
        TypeError: dtypes differ, or are not one of the three.
    """
    return _silu(gate, up, "silu") if quantize is None else _quantized("silu_mul", gate, up, "silu", quantize)


@overload
def gelu_mul(gate: Tensor, up: Tensor, *, activation: Gelu = ..., quantize: None = ...) -> Tensor: ...


@overload
def gelu_mul(gate: Tensor, up: Tensor, *, activation: Gelu = ..., quantize: Quantize) -> tuple[Tensor, Tensor]: ...


def gelu_mul(
    gate: Tensor, up: Tensor, *, activation: Gelu = "gelu", quantize: Quantize | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """`y = gelu(gate) * up`, computed in float32 and rounded once.

    Arguments, results and errors are those of `silu_mul`, and:

    Args:
        activation: `"gelu"`: `gelu(g) = g * Phi(g)`, with Phi the standard normal distribution. `"gelu_tanh"`:
            `g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g^3)))`, as in Gemma.

    Raises:
        ValueError: the activation is another word.
    """
    if quantize is None:
        return _gelu(gate, up, activation)
    return _quantized("gelu_mul", gate, up, activation, quantize)


@overload
def silu_mul_packed(gate_up: Tensor, *, quantize: None = ...) -> Tensor: ...


@overload
def silu_mul_packed(gate_up: Tensor, *, quantize: Quantize) -> tuple[Tensor, Tensor]: ...


def silu_mul_packed(gate_up: Tensor, *, quantize: Quantize | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """`silu_mul(gate, up)` of one tensor that holds both: `gate_up = [gate | up]` along the last dimension.

    Args:
        gate_up: `(..., 2N)`, float32, float16 or bfloat16.
        quantize: as in `silu_mul`.

    Returns:
        y of shape `(..., N)`, gate_up's dtype, contiguous. The gradient is one packed tensor. With `quantize`
        `(y, scale)`, as `silu_mul`.

    Raises:
        ValueError: the last dimension is odd, the device is the CPU without the interpreter, or gate_up needs a
            gradient and the result is quantized.
        TypeError: the dtype is not one of the three.
    """
    if quantize is None:
        return _silu_packed(gate_up, "silu")
    return _quantized_packed("silu_mul_packed", gate_up, "silu", quantize)


@overload
def gelu_mul_packed(gate_up: Tensor, *, activation: Gelu = ..., quantize: None = ...) -> Tensor: ...


@overload
def gelu_mul_packed(gate_up: Tensor, *, activation: Gelu = ..., quantize: Quantize) -> tuple[Tensor, Tensor]: ...


def gelu_mul_packed(
    gate_up: Tensor, *, activation: Gelu = "gelu", quantize: Quantize | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """`gelu_mul(gate, up)` of one tensor that holds both: `gate_up = [gate | up]` along the last dimension.

    Arguments, results and errors are those of `silu_mul_packed`; for `activation` see `gelu_mul`.
    """
    if quantize is None:
        return _gelu_packed(gate_up, activation)
    return _quantized_packed("gelu_mul_packed", gate_up, activation, quantize)
