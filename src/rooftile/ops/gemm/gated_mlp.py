"""`gated_mlp`: the MLP of a Llama and its gradients, with the gate in the epilogues of GEMMs in both directions.

    [g | u] = x @ gate_up_weight^T + gate_up_bias,   h = act(g) * u,   y = h @ down_weight^T + down_bias

    dh = dy @ down_weight,   dg = dh * u * act'(g),   du = dh * act(g),   ddown_weight = dy^T @ h
    dx = [dg | du] @ gate_up_weight,   dgate_up_weight = [dg | du]^T @ x

g and u are kept for the backward, in x's dtype. h is not: the GEMM that computes dh reads g and u in its epilogue, and
recomputes h from them. So g and u, the largest tensors of a layer, are written once and read once, and dh is never
written. In training, where the kernels of `hopper_gates` do not run, the gate and its backward are kernels of their own
(`ops/gated.py`). Where the gate is in the epilogue, the forward computes h from g and u before they are rounded,
and the backward from the rounded ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile import library, runtime
from rooftile.ops.gemm import dispatch, hopper_gates
from rooftile.ops.gemm.column_sum import column_sum
from rooftile.ops.gemm.config import Activation, Operands, Precision, Start
from rooftile.ops.gemm.dispatch import View, as_rows, transposed
from rooftile.ops.gemm.linear import gate
from rooftile.primitives.activations import check_activation

_OP = "gated_mlp"


def _check(
    x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None,
    activation: str, precision: str,
) -> tuple[tuple[int, ...], int]:  # fmt: skip
    """The shape of y, and N."""
    library.check_floating(
        _OP, x=x, gate_up_weight=gate_up_weight, down_weight=down_weight, gate_up_bias=gate_up_bias, down_bias=down_bias
    )
    dispatch.check_precision(_OP, precision)
    check_activation(_OP, activation)
    if x.dim() == 0:
        raise ValueError(f"{_OP}: x has shape (), expected at least one dimension")
    for name, weight in (("gate_up_weight", gate_up_weight), ("down_weight", down_weight)):
        dispatch.check_dtype(_OP, name, weight, "x", x)
    k = x.shape[-1]
    if gate_up_weight.dim() != 2 or gate_up_weight.shape[1] != k or gate_up_weight.shape[0] % 2:
        raise ValueError(
            f"{_OP}: gate_up_weight has shape {tuple(gate_up_weight.shape)}, expected (2N, {k}), [gate | up], to match "
            "x's last dimension"
        )
    n = gate_up_weight.shape[0] // 2
    if down_weight.dim() != 2 or down_weight.shape[1] != n:
        raise ValueError(
            f"{_OP}: down_weight has shape {tuple(down_weight.shape)}, expected (R, {n}) to match gate_up_weight: its "
            f"{2 * n} rows are [gate | up]"
        )
    for name, bias, rows in (("gate_up_bias", gate_up_bias, 2 * n), ("down_bias", down_bias, down_weight.shape[0])):
        dispatch.check_bias(_OP, bias, x, rows, name=name)
    return (*x.shape[:-1], down_weight.shape[0]), n


def _bind_gates(
    x: Tensor, weight: Tensor, bias: Tensor | None, n: int, activation: str, precision: str, keeps: bool
) -> Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]:
    """The launches for x, gate_up_weight and gate_up_bias; they return h `(M, N)` and gate_up `(M, 2N)`.

    Without `keeps` gate_up is empty.
    """
    copies: library.Copies = {}
    rows, bias = dispatch.rows_of(x, copies, 0), dispatch.contiguous(bias, copies, 3)
    m, dtype, device = rows.shape[0], x.dtype, x.device
    o = Operands(rows, weight, dispatch.like(x, (m, n)), bias, activation=activation, gated=True, precision=precision)
    c = dispatch.chosen(_OP, dispatch.problem_of(o), weight.device)
    fused = c is not None and c.kernel == "hopper"
    if not keeps:
        start = dispatch.bind(_OP, o)
    elif fused:
        start = hopper_gates.prepare_forward(o, c)  # type: ignore[arg-type]
    else:
        start = dispatch.bind(_OP, dataclasses.replace(o, out=dispatch.like(x, (m, 2 * n)), activation="", gated=False))
    start = library.copying(start, copies)
    rest = (None,) * 4

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        gate_up = torch.empty((m, 2 * n) if keeps else (0,), dtype=dtype, device=device)
        if keeps and not fused:
            start(x, weight, gate_up, bias, *rest)
            return gate(gate_up, activation), gate_up
        h = torch.empty((m, n), dtype=dtype, device=device)
        start(x, weight, h, bias, *((gate_up,) if keeps else rest))
        return h, gate_up

    return run


def _prepare(
    x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None,
    activation: str, precision: str, keeps: bool,
) -> Callable[..., tuple[Tensor, Tensor]]:  # fmt: skip
    dispatch.refuse_symbols(*x.shape, *gate_up_weight.shape, *down_weight.shape)
    shape, n = _check(x, gate_up_weight, down_weight, gate_up_bias, down_bias, activation, precision)
    strides, dtype, device, m = library.contiguous_strides(shape), x.dtype, x.device, math.prod(shape[:-1])
    gates = _bind_gates(x, gate_up_weight, gate_up_bias, n, activation, precision, keeps) if m and n else None
    kept_shape = (m, 2 * n) if keeps else (0,)
    of_y: Start = library.start_nothing
    if m and shape[-1]:
        copies: library.Copies = {}
        bias = dispatch.contiguous(down_bias, copies, 3)
        o = Operands(dispatch.like(x, (m, n)), down_weight, dispatch.like(x, (m, shape[-1])), bias, precision=precision)
        of_y = library.copying(dispatch.bind(_OP, o), copies)

    def run(
        x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None,
        *_: object,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if gates is None:
            h, gate_up = (torch.empty(shape, dtype=dtype, device=device) for shape in ((m, n), kept_shape))
        else:
            h, gate_up = gates(x, gate_up_weight, gate_up_bias)
        y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        of_y(h, down_weight, y, down_bias, None, None, None, None)
        return y, gate_up

    return run


def _fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *given, keeps = rest
    shape, n = _check(x, *given)
    gate_up = (math.prod(shape[:-1]), 2 * n) if keeps else (0,)
    return torch.empty(shape, dtype=x.dtype, device=x.device), torch.empty(gate_up, dtype=x.dtype, device=x.device)


def _needs_dgate_up(needs: Sequence[bool]) -> bool:
    """Whether any gradient asked for is computed from those of g and u."""
    return needs[0] or needs[1] or needs[3]


def _gradients(
    dy: Tensor, x: Tensor | None, gate_up_weight: Tensor | None, down_weight: Tensor | None, gate_up: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, activation: str, precision: str, needs: Sequence[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Memory for the five gradients; one that is not asked for is empty."""
    op = f"{_OP}_backward"
    library.check_floating(
        op, dy=dy, x=x, gate_up_weight=gate_up_weight, down_weight=down_weight, gate_up=gate_up,
        gate_up_bias=gate_up_bias, down_bias=down_bias,
    )  # fmt: skip
    check_activation(op, activation)
    rows, k, n = dy.shape[:-1], dy.shape[-1], gate_up.shape[-1] // 2
    columns = next((t.shape[-1] for t in (x, gate_up_weight) if t is not None and t.dim()), 0)
    needs_dx, needs_dgate_up_weight, needs_ddown_weight, needs_dgate_up_bias, needs_ddown_bias = needs
    for name, tensor in (
        ("x", x),
        ("gate_up_weight", gate_up_weight),
        ("down_weight", down_weight),
        ("gate_up", gate_up),
    ):
        if tensor is not None:
            dispatch.check_dtype(op, name, tensor, "dy", dy)
    for name, tensor, shape, needed in (
        ("x", x, (*rows, columns), needs_dgate_up_weight),
        ("gate_up_weight", gate_up_weight, (2 * n, columns), needs_dx),
        ("down_weight", down_weight, (k, n), _needs_dgate_up(needs)),
        ("gate_up", gate_up, (math.prod(rows), 2 * n), True),
        ("gate_up_bias", gate_up_bias, (2 * n,), needs_dgate_up_bias),
        ("down_bias", down_bias, (k,), needs_ddown_bias),
    ):
        if tensor is None and needed:
            raise ValueError(f"{op}: {name} is None, expected a tensor: a gradient that is asked for needs it")
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")

    def memory(needed: bool, *shape: int, dtype: torch.dtype = dy.dtype) -> Tensor:
        return torch.empty(shape if needed else (0,), dtype=dtype, device=dy.device)

    return (
        memory(needs_dx, *rows, columns),
        memory(needs_dgate_up_weight, 2 * n, columns),
        memory(needs_ddown_weight, k, n),
        memory(needs_dgate_up_bias, 2 * n, dtype=dy.dtype if gate_up_bias is None else gate_up_bias.dtype),
        memory(needs_ddown_bias, k, dtype=dy.dtype if down_bias is None else down_bias.dtype),
    )


def _bind_dgate_up(
    dy: Tensor, down_weight: Tensor, n: int, activation: str, precision: str, needs_h: bool
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]:
    """The launches for dy, down_weight and gate_up; they return its gradient, and h if it is needed."""
    copies: library.Copies = {}
    rows = dispatch.rows_of(dy, copies, 0)
    m, dtype, device = rows.shape[0], dy.dtype, dy.device
    o = Operands(rows, down_weight.mT, dispatch.like(dy, (m, n)), precision=precision)
    c = hopper_gates.backward_config(dispatch.problem_of(o), runtime.target(device))
    if c is not None:
        half = dispatch.like(dy, (m, 2 * n))[:, :n]
        fused = dataclasses.replace(o, out=half, activation=activation)
        start = library.copying(hopper_gates.prepare_backward(fused, needs_h, c), copies)

        def run(dy: Tensor, down_weight: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor | None]:
            grad = torch.empty((m, 2 * n), dtype=dtype, device=device)
            h = torch.empty((m, n), dtype=dtype, device=device) if needs_h else None
            start(dy, down_weight, h, gate_up.contiguous(), grad)
            return grad, h

        return run
    ops = torch.ops.rooftile
    of_gate = ops.silu_mul_packed_backward if activation == "silu" else ops.gelu_mul_packed_backward
    of_dh = dispatch.bind_views(f"{_OP}_backward", dy, down_weight, (as_rows, lambda w: w.mT), (m, n), dtype, precision)

    def run_apart(dy: Tensor, down_weight: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor | None]:
        dh = torch.empty((m, n), dtype=dtype, device=device)
        of_dh(dy, down_weight, dh, None, None, None, None, None)
        return of_gate(dh, gate_up, activation, needs_h)

    return run_apart


def _prepare_backward(
    dy: Tensor, x: Tensor | None, gate_up_weight: Tensor | None, down_weight: Tensor | None, gate_up: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, activation: str, precision: str, needs: Sequence[bool],
) -> Callable[..., tuple[Tensor, ...]]:  # fmt: skip
    op = f"{_OP}_backward"
    dispatch.refuse_symbols(*dy.shape)
    found = _gradients(
        dy, x, gate_up_weight, down_weight, gate_up, gate_up_bias, down_bias, activation, precision, needs
    )
    memory = [(g.shape, library.contiguous_strides(g.shape), g.dtype) for g in found]
    device, dtype, m, n = dy.device, dy.dtype, math.prod(dy.shape[:-1]), gate_up.shape[-1] // 2
    needs_h = needs[2]
    of_dgate_up = None
    if down_weight is not None and _needs_dgate_up(needs) and gate_up.numel():
        of_dgate_up = _bind_dgate_up(dy, down_weight, n, activation, precision, needs_h)

    def bound(x: Tensor | None, w: Tensor | None, views: tuple[View, View], shape: Sequence[int]) -> Start:
        if x is None or w is None or not math.prod(shape):
            return library.start_nothing
        return dispatch.bind_views(op, x, w, views, shape, dtype, precision)

    grad = gate_up.contiguous()  # stands for its gradient here, and the first half of its memory for h
    h = grad.view(-1)[: m * n].view(m, n)
    dx_rows = (m, *found[0].shape[-1:]) if needs[0] else (0,)
    of_dx = bound(grad, gate_up_weight, (as_rows, lambda w: w.mT), dx_rows)
    of_dgate_up_weight = bound(grad, x, (transposed, transposed), found[1].shape)
    of_ddown_weight = bound(dy, h, (transposed, transposed), found[2].shape)

    def run(
        dy: Tensor, x: Tensor | None, gate_up_weight: Tensor | None, down_weight: Tensor | None, gate_up: Tensor,
        *_: object,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        def new(i: int) -> Tensor:
            shape, strides, dtype = memory[i]
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)

        rest = (None,) * 5
        if of_dgate_up is None or down_weight is None:
            dgate_up, h = gate_up, None  # no gradient is computed from dgate_up
        else:
            dgate_up, h = of_dgate_up(dy, down_weight, gate_up)
        if h is None and needs_h:
            h = gate(gate_up, activation)
        ddown_weight = new(2)
        of_ddown_weight(dy, h, ddown_weight, *rest)
        del h  # before the memory of the other gradients is needed
        dx, dgate_up_weight, dgate_up_bias, ddown_bias = new(0), new(1), new(3), new(4)
        of_dx(dgate_up, gate_up_weight, dx, *rest)
        of_dgate_up_weight(dgate_up, x, dgate_up_weight, *rest)
        if needs[3]:
            column_sum(dgate_up, dgate_up_bias)
        if needs[4]:
            column_sum(as_rows(dy), ddown_bias)
        return dx, dgate_up_weight, ddown_weight, dgate_up_bias, ddown_bias

    return run


_backward_op = library.define(
    f"{_OP}_backward(Tensor dy, Tensor? x, Tensor? gate_up_weight, Tensor? down_weight, Tensor gate_up, "
    "Tensor? gate_up_bias, Tensor? down_bias, str activation, str precision, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    prepare=_prepare_backward,
    fake=_gradients,
)


def _check_derivative(inputs: tuple[Any, ...]) -> None:
    if not inputs[-1]:
        raise ValueError(f"{_OP}: keeps is False, expected True where a gradient is wanted; call rooftile.{_OP}")


def _save(ctx, inputs, outputs) -> None:
    """Each tensor is kept where a gradient needs it; gate_up always."""
    x, gate_up_weight, down_weight, gate_up_bias, down_bias, ctx.activation, ctx.precision, _ = inputs
    ctx.mark_non_differentiable(outputs[1])
    needs = ctx.needs_input_grad[1:6]
    ctx.save_for_backward(
        x if needs[1] else None, gate_up_weight if needs[0] else None, down_weight if _needs_dgate_up(needs) else None,
        outputs[1], gate_up_bias if needs[3] else None, down_bias if needs[4] else None,
    )  # fmt: skip


def _backward(ctx, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[1:6]
    if dy is None:
        return (None,) * 8
    found = _backward_op(dy, *ctx.saved_tensors, ctx.activation, ctx.precision, list(needs))
    return *(g if needed else None for g, needed in zip(found, needs, strict=True)), None, None, None


gated_mlp_op = library.define(
    f"{_OP}(Tensor x, Tensor gate_up_weight, Tensor down_weight, Tensor? gate_up_bias, Tensor? down_bias, "
    "str activation, str precision, bool keeps) -> (Tensor, Tensor)",
    prepare=_prepare,
    fake=_fake,
    autograd=library.Autograd(_save, _backward, _check_derivative),
)


def gated_mlp(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: Activation = "silu",
    precision: Precision = "ieee",
) -> Tensor:
    """`(act(g) * u) @ down_weight^T + down_bias` of `[g | u] = x @ gate_up_weight^T + gate_up_bias`.

    The MLP of Llama and its kin (Shazeer 2020, https://arxiv.org/abs/2002.05202).
    For a backward g and u are kept in x's dtype, whichever gradients are wanted, and `h = act(g) * u` is recomputed
    from them. h is rounded to x's dtype before it is multiplied, in both directions.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16.
        gate_up_weight: `(2N, K)` of x's dtype: the rows of the gate first, as in `gated_linear`.
        down_weight: `(R, N)` of x's dtype.
        gate_up_bias: `(2N,)`, of x's dtype or float32.
        down_bias: `(R,)`, of x's dtype or float32.
        activation: `"silu"`, `"gelu"` or `"gelu_tanh"`.
        precision: as in `matmul`.

    Returns:
        `(..., R)` in x's dtype, contiguous. Under `torch.autocast` all tensors are cast to its dtype first.

    Raises:
        ValueError: a tensor does not have the shape above, activation or precision is unknown, a tensor is on the CPU
            without the interpreter, or devices differ.
        TypeError: dtypes differ, or are not one of the three.
    """
    tensors = (x, gate_up_weight, down_weight, gate_up_bias, down_bias)
    if dispatch.autocast_dtype(x) is not None:
        tensors = dispatch.autocast(*tensors)  # type: ignore[assignment]
    return gated_mlp_op(*tensors, activation, precision, dispatch.will_differentiate(*tensors))[0]
