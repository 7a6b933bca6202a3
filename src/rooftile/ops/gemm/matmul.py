"""`matmul`: a GEMM or a batch of them, and the gradients, `da = dy @ b^T` and `db = a^T @ dy`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.gemm import dispatch
from rooftile.ops.gemm.column_sum import column_sum
from rooftile.ops.gemm.config import GemmConfig, Operands, Precision, Start
from rooftile.ops.gemm.dispatch import as_rows, check_dtype, check_precision, mergeable


def _broadcast(op: str, a_shape: Sequence[int], b_shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of the result, and its batch dimensions."""
    for name, shape in (("a", a_shape), ("b", b_shape)):
        if len(shape) == 0:
            raise ValueError(f"{op}: {name} has shape (), expected at least one dimension")
    inner = b_shape[-2] if len(b_shape) > 1 else b_shape[0]
    if inner != a_shape[-1]:
        place = "second to last" if len(b_shape) > 1 else "only"
        raise ValueError(
            f"{op}: b has shape {tuple(b_shape)}, expected {a_shape[-1]} as its {place} dimension to match a's last"
        )
    try:
        batch = tuple(torch.broadcast_shapes(a_shape[:-2], b_shape[:-2]))
    except RuntimeError:
        raise ValueError(
            f"{op}: b has shape {tuple(b_shape)}, expected batch dimensions that broadcast with those of a, "
            f"{tuple(a_shape)}"
        ) from None
    return (*batch, *a_shape[-2:-1], *(b_shape[-1:] if len(b_shape) > 1 else ())), batch


def _check(op: str, a: Tensor, b: Tensor, precision: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of the result, and its batch dimensions."""
    library.check_floating(op, a=a, b=b)
    check_precision(op, precision)
    shapes = _broadcast(op, a.shape, b.shape)
    check_dtype(op, "b", b, "a", a)
    return shapes


def _row(a: Tensor) -> Tensor:
    """A vector a is a matrix of one row, and a vector b of one column."""
    return a.unsqueeze(0) if a.dim() == 1 else a


def _column(b: Tensor) -> Tensor:
    return b.unsqueeze(1) if b.dim() == 1 else b


def _operands(
    x: Tensor, w: Tensor, out_shape: Sequence[int], batch: Sequence[int], copies: library.Copies
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """x and w as a kernel takes them, in two dimensions or three, and the shape that out has for it.

    `out = x @ w.mT` over batches: x (..., M, K), w (..., N, K), out (*batch, M, N), contiguous.
    """
    m, n, count = x.shape[-2], w.shape[-2], math.prod(batch)
    if math.prod(w.shape[:-2]) == 1 and tuple(x.shape[:-2]) == tuple(batch) and mergeable(x):
        # One weight for all batches: their rows are those of one GEMM.
        rows = dispatch.rows_of(x, copies, 0)
        return rows, w[(0,) * (w.dim() - 2)], (rows.shape[0], n)

    def batched(t: Tensor) -> Tensor:
        t = t.expand(*batch, *t.shape[-2:]).reshape(count, *t.shape[-2:])
        return t[0] if count == 1 else t

    shape = (m, n) if count == 1 else (count, m, n)
    return dispatch.viewed(x, batched, copies, 0), dispatch.viewed(w, batched, copies, 1), shape


def _multiply(op: str, x: Tensor, w: Tensor, out: Tensor, batch: Sequence[int], precision: str) -> None:
    """The same, into memory that is there."""
    x, w, shape = _operands(x, w, out.shape, batch, {})
    dispatch.gemm(op, x, w, out.view(shape), precision=precision)


def _gradient(op: str, x: Tensor, w: Tensor, out: Tensor, batch: Sequence[int], precision: str) -> None:
    """`x @ w.mT`, summed over the batch dimensions that out, (..., M, N) and contiguous, was broadcast along."""
    own = (*(1 for _ in range(len(batch) - out.dim() + 2)), *out.shape[:-2])
    summed = [i for i, (mine, whole) in enumerate(zip(own, batch, strict=True)) if mine != whole]
    if not summed:
        _multiply(op, x, w, out.view(*batch, *out.shape[-2:]), batch, precision)
        return
    # Their GEMMs next to each other, in float32, and then the sum.
    order = [*summed, *(i for i in range(len(batch)) if i not in summed)]
    size = [batch[i] for i in order]
    x, w = (
        t.expand(*batch, *t.shape[-2:]).permute(*order, len(batch), len(batch) + 1).reshape(*size, *t.shape[-2:])
        for t in (x, w)
    )
    every = torch.empty((*size, *out.shape[-2:]), dtype=torch.float32, device=out.device)
    _multiply(op, x, w, every, size, precision)
    count = math.prod(size[: len(summed)])
    column_sum(every.view(count, out.numel()), out.view(-1))


def _prepare(a: Tensor, b: Tensor, precision: str, config: Sequence[int]) -> Callable[..., Tensor]:
    shape, batch = _check("matmul", a, b, precision)
    dispatch.refuse_symbols(*a.shape, *b.shape)
    strides, dtype, device = library.contiguous_strides(shape), a.dtype, a.device
    start: Start = library.start_nothing
    if math.prod(shape):
        copies: library.Copies = {}
        x, w, out_shape = _operands(_row(a), _column(b).mT, shape, batch, copies)
        # A copy is made of what the caller gives: of the vector, or before it is transposed.
        if 0 in copies:
            copies[0] = lambda a, view=copies[0]: view(_row(a))  # type: ignore[misc]
        if 1 in copies:
            copies[1] = lambda b, view=copies[1]: view(_column(b).mT)  # type: ignore[misc]
        o = Operands(x, w, dispatch.like(a, out_shape), precision=precision)
        start = dispatch.bind("matmul", o, config)
        start = library.copying(start, copies)

    def run(a: Tensor, b: Tensor, *_: object) -> Tensor:
        out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        start(a, b, out, None, None, None, None, None)
        return out

    return run


def _fake(a: Tensor, b: Tensor, precision: str, config: Sequence[int]) -> Tensor:
    shape, _ = _check("matmul", a, b, precision)
    return torch.empty(shape, dtype=a.dtype, device=a.device)


def _gradients(
    dy: Tensor, a: Tensor | None, b: Tensor | None, a_shape: Sequence[int], b_shape: Sequence[int], precision: str
) -> tuple[Tensor, Tensor]:
    """Memory for them: a is there for the gradient of b, and b for that of a; one that is not asked for is empty."""
    op = "matmul_backward"
    library.check_floating(op, dy=dy, a=a, b=b)
    check_precision(op, precision)
    shape, _ = _broadcast(op, a_shape, b_shape)
    if tuple(dy.shape) != tuple(shape):
        raise ValueError(f"{op}: dy has shape {tuple(dy.shape)}, expected {tuple(shape)} to match a @ b")
    for name, tensor, expected in (("a", a, a_shape), ("b", b, b_shape)):
        if tensor is None:
            continue
        if tuple(tensor.shape) != tuple(expected):
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)}, expected {tuple(expected)} to match {name}_shape"
            )
        check_dtype(op, name, tensor, "dy", dy)
    return (
        torch.empty((0,) if b is None else a_shape, dtype=dy.dtype, device=dy.device),
        torch.empty((0,) if a is None else b_shape, dtype=dy.dtype, device=dy.device),
    )


def _differentiate(
    dy: Tensor, a: Tensor | None, b: Tensor | None, a_shape: Sequence[int], b_shape: Sequence[int], precision: str
) -> tuple[Tensor, Tensor]:
    op = "matmul_backward"
    dispatch.refuse_symbols(*a_shape, *b_shape)
    da, db = _gradients(dy, a, b, a_shape, b_shape, precision)
    _, batch = _broadcast(op, a_shape, b_shape)
    dy = dy.unsqueeze(-2) if len(a_shape) == 1 and len(b_shape) > 1 else dy
    dy = dy.unsqueeze(-1) if len(b_shape) == 1 else dy
    dy = dy.unsqueeze(-2) if dy.dim() < 2 else dy
    if b is not None and da.numel():
        _gradient(op, dy, _column(b), _row(da), batch, precision)
    if a is not None and db.numel():
        if len(b_shape) <= 2 and dy.numel():  # the rows of all batches are one sum
            _gradient(op, as_rows(_row(a)).mT, as_rows(dy).mT, _column(db), (), precision)
        else:
            _gradient(op, _row(a).mT, dy.mT, _column(db), batch, precision)
    return da, db


_backward_op = library.define(
    "matmul_backward(Tensor dy, Tensor? a, Tensor? b, SymInt[] a_shape, SymInt[] b_shape, str precision) "
    "-> (Tensor, Tensor)",
    launch=_differentiate,
    fake=_gradients,
)


def _save(ctx, inputs, output) -> None:
    """Each operand is kept where the gradient of the other needs it."""
    a, b, ctx.precision, _ = inputs
    needs_da, needs_db = ctx.needs_input_grad[1:3]
    ctx.shapes = a.shape, b.shape
    ctx.save_for_backward(a if needs_db else None, b if needs_da else None)


def _backward(ctx, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None
    needs_da, needs_db = ctx.needs_input_grad[1:3]
    da, db = _backward_op(dy, *ctx.saved_tensors, *ctx.shapes, ctx.precision)
    return da if needs_da else None, db if needs_db else None, None, None


matmul_op = library.define(
    "matmul(Tensor a, Tensor b, str precision, int[] config) -> Tensor",
    prepare=_prepare,
    fake=_fake,
    autograd=library.Autograd(_save, _backward),
)


def matmul(a: Tensor, b: Tensor, *, precision: Precision = "ieee", config: GemmConfig | None = None) -> Tensor:
    """`a @ b` with float32 sums, rounded once.

    Args:
        a: `(..., M, K)`, float32, float16 or bfloat16, or a vector `(K,)`. Any strides; copied only where its batch
            dimensions, as they are broadcast, can't be taken as one.
        b: `(..., K, N)` of a's dtype, or a vector `(K,)`; batch dimensions broadcast, and vectors are taken, as in
            `torch.matmul`. One b for all batches multiplies all their rows at once.
        precision: of float32 operands. `"ieee"`: exact products, without tensor cores; `"tf32"`: operands with 10 bits
            of fraction, on tensor cores. Products of 16-bit operands are exact always.
        config: how the kernel is launched, in place of the choice that sizes and GPU make; gradients choose their own.

    Returns:
        the product in a's dtype, contiguous. Under `torch.autocast` a and b are cast to its dtype first, as
        `torch.matmul`'s are.

    Raises:
        ValueError: shapes don't multiply or broadcast, the configuration can't be launched (the field and the reason
            are named), a device is the CPU without the interpreter, or devices differ.
        TypeError: dtypes differ, or are not one of the three.
    """
    if dispatch.autocast_dtype(a) is not None:
        a, b = dispatch.autocast(a, b)  # type: ignore[assignment]
    how = () if config is None else dispatch.encoded("matmul", config)
    return matmul_op(a, b, precision, how)
