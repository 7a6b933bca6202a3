"""`matmul`: a GEMM or a batch of them, and the gradients, `da = dy @ b^T` and `db = a^T @ dy`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.gemm import dispatch
from rooftile.ops.gemm.column_sum import column_sum
from rooftile.ops.gemm.config import GemmConfig, Precision, Start
from rooftile.ops.gemm.dispatch import View, as_rows, check_dtype, check_precision, mergeable


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


def _bind(
    op: str, x: Tensor, w: Tensor, views: tuple[View, View], batch: Sequence[int], dtype: torch.dtype, precision: str,
    config: Sequence[int] = (),
) -> Start:  # fmt: skip
    """The kernel for `out = x' @ w'.mT` over batches, out (*batch, M, N) and contiguous, bound to x and w as they are.

    x' (..., M, K) and w' (..., N, K) are `views` of x and w. What is no view of them is copied at each start.
    """
    seen_x, seen_w = (view(t) for view, t in zip(views, (x, w), strict=True))
    m, n, count = seen_x.shape[-2], seen_w.shape[-2], math.prod(batch)

    def batched(t: Tensor) -> Tensor:
        t = t.expand(*batch, *t.shape[-2:]).reshape(count, *t.shape[-2:])
        return t[0] if count == 1 else t

    def first(t: Tensor) -> Tensor:
        return t[(0,) * (t.dim() - 2)]

    of_x, of_w, shape = batched, batched, (m, n) if count == 1 else (count, m, n)
    if math.prod(seen_w.shape[:-2]) == 1 and tuple(seen_x.shape[:-2]) == tuple(batch) and mergeable(seen_x):
        # One weight for all batches: their rows are those of one GEMM.
        of_x, of_w, shape = as_rows, first, (count * m, n)
    whole = (lambda t: of_x(views[0](t)), lambda t: of_w(views[1](t)))
    return dispatch.bind_views(op, x, w, whole, shape, dtype, precision, config)


def _bind_gradient(
    x: Tensor, w: Tensor, views: tuple[View, View], shape: Sequence[int], batch: Sequence[int], precision: str
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """As `_bind`, but summed over the batch dimensions that the gradient, (..., M, N), was broadcast along."""
    op, dtype, device = "matmul_backward", x.dtype, x.device
    own = (*(1 for _ in range(len(batch) - len(shape) + 2)), *shape[:-2])
    summed = [i for i, (mine, whole) in enumerate(zip(own, batch, strict=True)) if mine != whole]
    if not summed:
        start = _bind(op, x, w, views, batch, dtype, precision)
        return lambda x, w, out: start(x, w, out, None, None, None, None, None)
    # Their GEMMs next to each other, in float32, and then the sum.
    order = [*summed, *(i for i in range(len(batch)) if i not in summed)]
    size = [batch[i] for i in order]

    def ordered(view: View) -> View:
        def of(t: Tensor) -> Tensor:
            t = view(t)
            t = t.expand(*batch, *t.shape[-2:]).permute(*order, len(batch), len(batch) + 1)
            return t.reshape(*size, *t.shape[-2:])

        return of

    start = _bind(op, x, w, (ordered(views[0]), ordered(views[1])), size, torch.float32, precision)
    parts = math.prod(size[: len(summed)]), math.prod(shape)

    def run(x: Tensor, w: Tensor, out: Tensor) -> None:
        every = torch.empty(parts, dtype=torch.float32, device=device)
        start(x, w, every, None, None, None, None, None)
        column_sum(every, out.view(-1))

    return run


def _prepare(a: Tensor, b: Tensor, precision: str, config: Sequence[int]) -> Callable[..., Tensor]:
    shape, batch = _check("matmul", a, b, precision)
    dispatch.refuse_symbols(*a.shape, *b.shape)
    strides, dtype, device = library.contiguous_strides(shape), a.dtype, a.device
    start: Start = library.start_nothing
    if math.prod(shape):
        start = _bind("matmul", a, b, (_row, lambda b: _column(b).mT), batch, dtype, precision, config)

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


def _prepare_backward(
    dy: Tensor, a: Tensor | None, b: Tensor | None, a_shape: Sequence[int], b_shape: Sequence[int], precision: str
) -> Callable[..., tuple[Tensor, Tensor]]:
    dispatch.refuse_symbols(*a_shape, *b_shape)
    da, db = _gradients(dy, a, b, a_shape, b_shape, precision)
    _, batch = _broadcast("matmul_backward", a_shape, b_shape)
    row, column = len(a_shape) == 1, len(b_shape) == 1
    shapes, dtype, device = (tuple(da.shape), tuple(db.shape)), dy.dtype, dy.device

    def matrices(dy: Tensor) -> Tensor:
        dy = dy.unsqueeze(-1) if column else dy
        return dy.unsqueeze(-2) if row else dy

    bind_da, bind_db = None, None
    if b is not None and da.numel():
        bind_da = _bind_gradient(dy, b, (matrices, _column), _row(da).shape, batch, precision)
    if a is not None and db.numel():
        views: tuple[View, View] = (lambda a: _row(a).mT, lambda dy: matrices(dy).mT)
        of: Sequence[int] = batch
        if len(b_shape) <= 2 and dy.numel():  # the rows of all batches are one sum
            views, of = (lambda a: as_rows(_row(a)).mT, lambda dy: as_rows(matrices(dy)).mT), ()
        bind_db = _bind_gradient(a, dy, views, _column(db).shape, of, precision)

    def run(dy: Tensor, a: Tensor | None, b: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
        da, db = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
        if bind_da is not None:
            bind_da(dy, b, da)  # type: ignore[arg-type]
        if bind_db is not None:
            bind_db(a, dy, db)  # type: ignore[arg-type]
        return da, db

    return run


_backward_op = library.define(
    "matmul_backward(Tensor dy, Tensor? a, Tensor? b, SymInt[] a_shape, SymInt[] b_shape, str precision) "
    "-> (Tensor, Tensor)",
    prepare=_prepare_backward,
    fake=_gradients,
)


def _save(ctx, inputs, output) -> None:
    """Each operand is kept where the gradient of the other needs it."""
    a, b, ctx.precision, _ = inputs
    needs_da, needs_db = ctx.needs_input_grad[1:3]
    ctx.shapes = tuple(a.shape), tuple(b.shape)
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
        `a @ b` in a's dtype, contiguous. Under `torch.autocast` a and b are cast to its dtype first, as
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
