"""`lora_linear`: a linear layer with a LoRA adapter (Hu et al. 2021, https://arxiv.org/abs/2106.09685), and gradients.

    u = x @ lora_a^T,   out = x @ weight^T + u @ (scale * lora_b)^T + bias

    du = dy @ (scale * lora_b),   dx = dy @ weight + du @ lora_a
    dlora_a = du^T @ x,   dlora_b = scale * dy^T @ u,   dweight = dy^T @ x,   dbias = sum over rows of dy

The small GEMMs u and du have as many columns as the adapter has ranks, R. What they are multiplied by next is no GEMM
of its own: the kernel of `x @ weight^T` continues its sum over R more elements, and so does that of `dy @ weight`. With
K = 4096 and R up to 64, a tile then has 65 steps instead of 64. As separate operations, u @ lora_b^T, its scaling and
the addition write three tensors of the result's size, and read four.

The kernels that continue a sum are "tiled" and "hopper" (`dispatch.continues`). For the few rows of decoding, and for
operands that TMA can't load in the same tiles, u @ lora_b^T is a GEMM whose result the layer's adds as a residual.

u, du and scale * lora_b are rounded to x's dtype. R is padded in memory to rows of 16 bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.gemm import dispatch
from rooftile.ops.gemm.column_sum import column_sum
from rooftile.ops.gemm.config import GemmConfig, Operands, Precision, Start
from rooftile.ops.gemm.dispatch import View, as_rows, transposed

_PADDED = 8  # elements, of which rows of R are a multiple: 16 bytes of 16-bit elements, as TMA needs


def _check(
    op: str, x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, bias: Tensor | None, lora_input: Tensor | None,
    precision: str,
) -> tuple[int, ...]:  # fmt: skip
    """The shape of the result."""
    library.check_floating(op, x=x, weight=weight, lora_a=lora_a, lora_b=lora_b, bias=bias, lora_input=lora_input)
    dispatch.check_precision(op, precision)
    if x.dim() == 0:
        raise ValueError(f"{op}: x has shape (), expected at least one dimension")
    k = x.shape[-1]
    for name, tensor in (("weight", weight), ("lora_a", lora_a), ("lora_b", lora_b)):
        dispatch.check_dtype(op, name, tensor, "x", x)
    for name, tensor, rows in (("weight", weight, "N"), ("lora_a", lora_a, "R")):
        if tensor.dim() != 2 or tensor.shape[1] != k or (rows == "R" and tensor.shape[0] == 0):
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)}, expected ({rows}, {k}) to match x's last dimension"
            )
    n, rank = weight.shape[0], lora_a.shape[0]
    if lora_b.shape != (n, rank):
        raise ValueError(
            f"{op}: lora_b has shape {tuple(lora_b.shape)}, expected ({n}, {rank}) to match weight and lora_a"
        )
    dispatch.check_bias(op, bias, x, n)
    if lora_input is not None:
        library.check_same(op, "lora_input", lora_input, "x", x)
    return (*x.shape[:-1], n)


def _padded_strides(rank: int) -> tuple[int, int]:
    return (rank + -rank % _PADDED, 1)


def _padded(like: Tensor, rows: int, rank: int) -> Tensor:
    """Memory for u or du; the scaled lora_b has such strides too."""
    return torch.empty_strided((rows, rank), _padded_strides(rank), dtype=like.dtype, device=like.device)


def _scaled(lora_b: Tensor, scale: float) -> Tensor:
    """`scale * lora_b` in rows of 16 bytes; lora_b itself where it is that."""
    n, rank = lora_b.shape
    strides = _padded_strides(rank)
    if scale == 1.0 and lora_b.stride() == strides and dispatch.aligned(lora_b):
        return lora_b
    # A slice, not strides: torch.compile replaces an `out` by a result with strides of its own.
    rows = torch.empty((n, strides[0]), dtype=lora_b.dtype, device=lora_b.device)
    return torch.mul(lora_b, scale, out=rows[:, :rank])


def _bind_sum(
    op: str, x: Tensor, w: Tensor, views: tuple[View, View], more: tuple[Tensor, Tensor], shape: Sequence[int],
    bias: Tensor | None, precision: str, config: Sequence[int] = (),
) -> Callable[..., None]:  # fmt: skip
    """The start of `out = x' @ w'^T + more_x @ more_w^T + bias` for calls with x, w, out, bias, more_x and more_w.

    x' and w' are `views` of x and w. The configuration is that of `x' @ w'^T`.
    """
    copies: library.Copies = {}
    o = Operands(
        dispatch.viewed(x, views[0], copies, 0), dispatch.viewed(w, views[1], copies, 1), dispatch.like(x, shape),
        dispatch.contiguous(bias, copies, 3), precision=precision,
    )  # fmt: skip
    p = dispatch.problem_of(o)
    c = dispatch.chosen(op, p, w.device, config)
    assert c is not None, "there is no norm"
    if dispatch.continues(o, *more, c):
        with_more = dataclasses.replace(o, more_x=more[0], more_w=more[1])
        start = library.copying(dispatch.starter(p, with_more, c), copies)

        def run(x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, more_x: Tensor, more_w: Tensor) -> None:
            start(x, w, out, bias, None, None, None, None, more_x, more_w)

        return run
    small = dispatch.bind(op, Operands(*more, o.out, precision=precision))
    large = library.copying(dispatch.starter(p, dataclasses.replace(o, residual=o.out), c), copies)

    def run_apart(x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, more_x: Tensor, more_w: Tensor) -> None:
        low = torch.empty_like(out)
        small(more_x, more_w, low, None, None, None, None, None)
        large(x, w, out, bias, low, None, None, None)

    return run_apart


def _prepare(
    x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, bias: Tensor | None, lora_input: Tensor | None,
    scale: float, precision: str, config: Sequence[int],
) -> Callable[..., tuple[Tensor, Tensor]]:  # fmt: skip
    op = "lora_linear"
    dispatch.refuse_symbols(*x.shape, *weight.shape, *lora_a.shape)
    shape = _check(op, x, weight, lora_a, lora_b, bias, lora_input, precision)
    strides, dtype, device = library.contiguous_strides(shape), x.dtype, x.device
    rows, rank = math.prod(shape[:-1]), lora_a.shape[0]
    of_u: Start = library.start_nothing
    of_out: Callable[..., None] = library.start_nothing
    if rows:
        copies: library.Copies = {}
        u = _padded(x, rows, rank)
        small = Operands(
            dispatch.rows_of(x if lora_input is None else lora_input, copies, 0), lora_a, u, precision=precision
        )
        of_u = library.copying(dispatch.bind(op, small), copies)
        if shape[-1]:
            more = u, _padded(lora_b, *lora_b.shape)
            size = rows, shape[-1]
            of_out = _bind_sum(op, x, weight, (as_rows, lambda w: w), more, size, bias, precision, config)

    def run(
        x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, bias: Tensor | None, lora_input: Tensor | None,
        *_: object,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        u = _padded(x, rows, rank)
        of_u(x if lora_input is None else lora_input, lora_a, u, None, None, None, None, None)
        of_out(x, weight, out, bias, u, _scaled(lora_b, scale))
        return out, u

    return run


def _fake(
    x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, bias: Tensor | None, lora_input: Tensor | None,
    scale: float, precision: str, config: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = _check("lora_linear", x, weight, lora_a, lora_b, bias, lora_input, precision)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    return out, _padded(x, math.prod(shape[:-1]), lora_a.shape[0])


def _gradients(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None, u: Tensor | None,
    bias: Tensor | None, lora_input: Tensor | None, scale: float, precision: str, apart: bool, needs: Sequence[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Memory for them; one that is not asked for is empty."""
    op = "lora_linear_backward"
    library.check_floating(
        op, dy=dy, x=x, weight=weight, lora_a=lora_a, lora_b=lora_b, u=u, bias=bias, lora_input=lora_input
    )
    rows, n = dy.shape[:-1], dy.shape[-1]
    source = lora_input if apart else x
    k = next((t.shape[-1] for t in (x, weight, lora_a, lora_input) if t is not None), 0)
    for name, tensor, shape in (
        ("x", x, (*rows, k)), ("lora_input", lora_input, (*rows, k)), ("weight", weight, (n, k)), ("bias", bias, (n,)),
    ):  # fmt: skip
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {tuple(shape)} to match dy")
    needs_dx, needs_dw, needs_da, needs_db, needs_dbias, needs_dinput = needs
    needs_du = needs_da or needs_dinput or (needs_dx and not apart)
    for name, tensor, needed in (
        ("x", x, needs_dw), ("weight", weight, needs_dx), ("lora_a", lora_a, needs_dinput or (needs_dx and not apart)),
        ("lora_b", lora_b, needs_du), ("u", u, needs_db), ("bias", bias, needs_dbias),
        ("lora_input" if apart else "x", source, needs_da),
    ):  # fmt: skip
        if needed and tensor is None:
            raise ValueError(f"{op}: {name} is None, expected a tensor: a gradient that is asked for needs it")

    def memory(needed: bool, *shape: int, dtype: torch.dtype = dy.dtype) -> Tensor:
        return torch.empty(shape if needed else (0,), dtype=dtype, device=dy.device)

    return (
        memory(needs_dx, *rows, k),
        memory(needs_dw, n, k),
        memory(needs_da, 0 if lora_b is None else lora_b.shape[1], k),
        memory(needs_db, n, 0 if u is None else u.shape[1]),
        memory(needs_dbias, n, dtype=dy.dtype if bias is None else bias.dtype),
        memory(needs_dinput, *rows, k),
    )


def _prepare_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None, u: Tensor | None,
    bias: Tensor | None, lora_input: Tensor | None, scale: float, precision: str, apart: bool, needs: Sequence[bool],
) -> Callable[..., tuple[Tensor, ...]]:  # fmt: skip
    op = "lora_linear_backward"
    dispatch.refuse_symbols(*dy.shape)
    found = _gradients(dy, x, weight, lora_a, lora_b, u, bias, lora_input, scale, precision, apart, needs)
    memory = [(g.shape, library.contiguous_strides(g.shape), g.dtype) for g in found]
    dx, dw, da, db, _, dinput = (g.shape for g in found)
    device, dtype = dy.device, dy.dtype
    rows, rank = math.prod(dy.shape[:-1]), 0 if lora_b is None else lora_b.shape[1]
    du = _padded(dy, rows, rank)
    needs_du = lora_b is not None and bool(rows)

    def bound(x: Tensor | None, w: Tensor | None, views: tuple[View, View], shape: Sequence[int]) -> Start:
        if x is None or w is None or not math.prod(shape):
            return library.start_nothing
        return dispatch.bind_views(op, x, w, views, shape, dtype, precision)

    of_du: Start = library.start_nothing
    of_dx: Callable[..., None] = library.start_nothing
    if needs_du and lora_b is not None:
        copies: library.Copies = {}
        b = _padded(lora_b, *lora_b.shape)
        small = Operands(dispatch.rows_of(dy, copies, 0), b.mT, du, precision=precision)
        of_du = library.copying(dispatch.bind(op, small), copies)
    if weight is not None and dx.numel():
        views: tuple[View, View] = (as_rows, lambda w: w.mT)
        if apart:
            plain = bound(dy, weight, views, (rows, dx[-1]))
            of_dx = lambda dy, w, dx, *_: plain(dy, w, dx, None, None, None, None, None)  # noqa: E731
        else:
            assert lora_a is not None, "_gradients says so"
            of_dx = _bind_sum(op, dy, weight, views, (du, lora_a.mT), (rows, dx[-1]), None, precision)
    of_dw = bound(dy, x, (transposed, transposed), dw if needs[1] else (0,))
    of_da = bound(du, lora_input if apart else x, (transposed, transposed), da if needs[2] else (0,))
    of_db = bound(dy, u, (transposed, transposed), db)
    of_dinput = bound(du, lora_a, (as_rows, lambda a: a.mT), (rows, dinput[-1]) if needs[5] else (0,))

    def run(
        dy: Tensor, x: Tensor | None, weight: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None,
        u: Tensor | None, bias: Tensor | None, lora_input: Tensor | None, *_: object,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        rest = (None,) * 5
        found = tuple(torch.empty_strided(s, t, dtype=kind, device=device) for s, t, kind in memory)
        dx, dw, da, db, dbias, dinput = found
        du = None
        if lora_b is not None:
            du = _padded(dy, rows, rank)
            of_du(dy, _scaled(lora_b, scale), du, *rest)
        of_dx(dy, weight, dx, None, du, lora_a)
        of_dw(dy, x, dw, *rest)
        of_da(du, lora_input if apart else x, da, *rest)
        of_db(dy, u, db, *rest)
        of_dinput(du, lora_a, dinput, *rest)
        if scale != 1.0 and db.numel():
            db.mul_(scale)
        if bias is not None:
            column_sum(as_rows(dy), dbias)
        return found

    return run


_backward_op = library.define(
    "lora_linear_backward(Tensor dy, Tensor? x, Tensor? weight, Tensor? lora_a, Tensor? lora_b, Tensor? u, "
    "Tensor? bias, Tensor? lora_input, float scale, str precision, bool apart, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    prepare=_prepare_backward,
    fake=_gradients,
)


def _save(ctx, inputs, outputs) -> None:
    """Each tensor is kept where a gradient needs it: with a frozen weight u, and x for that of lora_a."""
    x, weight, lora_a, lora_b, bias, lora_input, ctx.scale, ctx.precision, _ = inputs
    ctx.apart = lora_input is not None
    needs_dx, needs_dw, needs_da, needs_db, needs_dbias, needs_dinput = ctx.needs_input_grad[1:7]
    multiplies_a = needs_dinput or (needs_dx and not ctx.apart)
    kept = (
        (x, needs_dw or (needs_da and not ctx.apart)),
        (weight, needs_dx),
        (lora_a, multiplies_a),
        (lora_b, multiplies_a or needs_da),
        (outputs[1], needs_db),
        (bias, needs_dbias),
        (lora_input, needs_da),
    )
    ctx.mark_non_differentiable(outputs[1])
    ctx.save_for_backward(*(t if needed else None for t, needed in kept))


def _backward(ctx, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[1:7]
    if dy is None:
        return (None,) * 9
    found = _backward_op(dy, *ctx.saved_tensors, ctx.scale, ctx.precision, ctx.apart, list(needs))
    return *(g if needed else None for g, needed in zip(found, needs, strict=True)), None, None, None


lora_linear_op = library.define(
    "lora_linear(Tensor x, Tensor weight, Tensor lora_a, Tensor lora_b, Tensor? bias, Tensor? lora_input, float scale, "
    "str precision, int[] config) -> (Tensor, Tensor)",
    prepare=_prepare,
    fake=_fake,
    autograd=library.Autograd(_save, _backward),
)


def lora_linear(
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    lora_input: Tensor | None = None,
    precision: Precision = "ieee",
    config: GemmConfig | None = None,
) -> Tensor:
    """`x @ weight^T + scale * (x @ lora_a^T) @ lora_b^T + bias`: a linear layer with a LoRA adapter, by two GEMMs.

    The sum of the large one continues over the adapter, and is rounded once. Rounded to x's dtype before it are
    `x @ lora_a^T`, `scale * lora_b` and, for the gradients, `scale * dy @ lora_b`. Each gradient is computed if it is
    asked for: a frozen weight costs nothing.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16.
        weight: `(N, K)` of x's dtype, as `torch.nn.Linear` keeps it.
        lora_a: `(R, K)` of x's dtype: `lora_A.weight` in PEFT.
        lora_b: `(N, R)` of x's dtype: `lora_B.weight`.
        bias: `(N,)`, of x's dtype or float32.
        scale: of the adapter: `scaling` in PEFT, lora_alpha / R.
        lora_input: what lora_a multiplies in the place of x, of its shape and dtype: x after dropout.
        precision: as in `matmul`.
        config: how the GEMM with the weight is launched, as in `matmul`; the others choose their own.

    Returns:
        `(..., N)` in x's dtype, contiguous. Under `torch.autocast` all tensors are cast to its dtype first.

    Raises:
        ValueError: a tensor does not have the shape above, precision is unknown, the configuration can't be launched
            (the message names the field and the reason), a tensor is on the CPU without the interpreter, or devices
            differ.
        TypeError: dtypes differ or are not one of the three, or scale is not a Python number.
    """
    if dispatch.autocast_dtype(x) is not None:
        x, weight, lora_a, lora_b, bias, lora_input = dispatch.autocast(  # type: ignore[assignment]
            x, weight, lora_a, lora_b, bias, lora_input
        )
    library.check_numbers("lora_linear", scale=scale)
    how = () if config is None else dispatch.encoded("lora_linear", config)
    return lora_linear_op(x, weight, lora_a, lora_b, bias, lora_input, float(scale), precision, how)[0]
