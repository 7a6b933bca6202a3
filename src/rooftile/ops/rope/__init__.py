"""Rotary position embedding of q and k in one launch (Su et al. 2021, https://arxiv.org/abs/2104.09864, eq. 34).

Each pair (a, b) of a head's elements is turned by its token's angle:

    a' = a * cos - b * sin
    b' = b * cos + a * sin

Three styles say which elements make a pair, and where cos and sin keep the pair's angle, for a rotary dimension R:

    half          (x[i], x[i + R/2]),   angle at [i], the same at [i + R/2]: Llama, Qwen, Mistral, Gemma, GPT-NeoX
    interleaved   (x[2i], x[2i + 1]),   angle at [2i], the same at [2i + 1]: GPT-J, Cohere, GLM
    deepseek      read as (x[2i], x[2i + 1]), angle at [i], written as (y[i], y[i + R/2]): DeepSeek-V3

Elements past R are passed through. Bytes: q and k read and written once; of cos and sin one of each pair's two equal
entries. The backward is the same rotation by the opposite angle; nothing is saved but cos and sin.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.rope.kernel import rotate, unit_last

Style = Literal["half", "interleaved", "deepseek"]
STYLES = ("half", "interleaved", "deepseek")
Layout = Literal["bhtd", "bthd"]


def check(
    op: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, style: str, layout: str
) -> None:
    library.check_floating(op, q=q, k=k, cos=cos, sin=sin)
    library.check_layout(op, layout)
    if style not in STYLES:
        raise ValueError(f"{op}: style is {style!r}, expected one of {', '.join(STYLES)}")
    if q.dim() != 4:
        raise ValueError(f"{op}: q has shape {tuple(q.shape)}, expected 4 dimensions {layout}")
    t = layout.index("t")
    batch, seq_len, head_dim = q.shape[0], q.shape[t], q.shape[3]
    if k.dim() != 4 or (k.shape[0], k.shape[t], k.shape[3]) != (batch, seq_len, head_dim):
        expected = tuple("k_heads" if d == "h" else n for d, n in zip(layout, q.shape, strict=True))
        raise ValueError(f"{op}: k has shape {tuple(k.shape)}, expected {expected} to match q in {layout}")
    if k.dtype != q.dtype:
        raise TypeError(f"{op}: k has dtype {k.dtype}, expected {q.dtype} to match q")
    library.check_same(op, "sin", sin, "cos", cos)
    rotary = cos.shape[-1] if cos.dim() else 0
    if rotary == 0 or rotary % 2 or rotary > head_dim:
        raise ValueError(
            f"{op}: cos has a rotary dimension of {rotary}, expected an even one from 2 to the head_dim {head_dim}"
        )
    if position_ids is None:
        if tuple(cos.shape[:-1]) not in ((seq_len,), (1, seq_len), (batch, seq_len)):
            raise ValueError(
                f"{op}: cos has shape {tuple(cos.shape)}, expected ({seq_len}, R), (1, {seq_len}, R) or "
                f"({batch}, {seq_len}, R)"
            )
        return
    if cos.dim() != 2 and not (cos.dim() == 3 and cos.shape[0] == 1):
        raise ValueError(f"{op}: cos has shape {tuple(cos.shape)}, expected (positions, R) with position_ids")
    if tuple(position_ids.shape) not in ((seq_len,), (1, seq_len), (batch, seq_len)):
        raise ValueError(
            f"{op}: position_ids has shape {tuple(position_ids.shape)}, expected ({seq_len},), (1, {seq_len}) or "
            f"({batch}, {seq_len})"
        )
    if position_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: position_ids has dtype {position_ids.dtype}, expected int32 or int64")


def _launch(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    style: str,
    layout: str,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    q_out, k_out = _fake(q, k, cos, sin, position_ids, style, layout, inverse)
    rotate(unit_last(q), unit_last(k), q_out, k_out, cos, sin, position_ids, style, layout, inverse)
    return q_out, k_out


def dense(x: Tensor, layout: str) -> Tensor:
    """Memory for x rotated, in (B, T, H, D) order where x (a transposed view, say) has it so, else in x's own order."""
    batch, second, third, head_dim = x.shape
    if layout == "bhtd" and x.stride(1) <= x.stride(2):
        return torch.empty((batch, third, second, head_dim), dtype=x.dtype, device=x.device).transpose(1, 2)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    style: str,
    layout: str,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    check("rope", q, k, cos, sin, position_ids, style, layout)
    return dense(q, layout), dense(k, layout)


def check_tables(op: str, cos: Tensor, sin: Tensor) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        if table.requires_grad:
            raise ValueError(f"{op}: {name} requires grad, which is not supported; detach it")


def _save(ctx, inputs, outputs) -> None:
    q, k, cos, sin, position_ids, *ctx.mode = inputs
    ctx.save_for_backward(cos, sin, position_ids)
    ctx.heads = q.shape[inputs[6].index("h")], k.shape[inputs[6].index("h")]


def _backward(ctx, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    cos, sin, position_ids = ctx.saved_tensors
    style, layout, inverse = ctx.mode
    none = (None,) * 6
    if not ctx.needs_input_grad[1]:
        dq = None
    if not ctx.needs_input_grad[2]:
        dk = None
    if dq is None and dk is None:
        return None, None, *none
    # One that nobody asked for takes part with no heads at all.
    nothing = next(d for d in (dq, dk) if d is not None).narrow(layout.index("h"), 0, 0)
    q, k = _op(
        nothing if dq is None else dq, nothing if dk is None else dk, cos, sin, position_ids, style, layout, not inverse
    )
    return None if dq is None else q, None if dk is None else k, *none


_op = library.define(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? position_ids, str style, str layout, bool inverse) "
    "-> (Tensor, Tensor)",
    launch=_launch,
    fake=_fake,
    autograd=library.Autograd(_save, _backward, lambda inputs: check_tables("rope", *inputs[2:4])),
)


def _launch_in_place(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    style: str,
    layout: str,
) -> None:
    _fake_in_place(q, k, cos, sin, position_ids, style, layout)
    if q.numel() and k.numel() and q.data_ptr() == k.data_ptr() != 0:  # all meta tensors lie at 0
        raise ValueError("rope_: k is the same memory as q, expected memory of its own to be written in place")
    rotate(q, k, q, k, cos, sin, position_ids, style, layout, False)


def _fake_in_place(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    style: str,
    layout: str,
) -> None:
    check("rope_", q, k, cos, sin, position_ids, style, layout)
    if style == "deepseek":
        raise ValueError("rope_: style is 'deepseek', which moves elements and can't be done in place; use rope")
    for name, x in (("q", q), ("k", k)):
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"rope_: {name} has a last stride of {x.stride(-1)}, expected 1 to be written in place")
        if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
            raise ValueError(f"rope_: {name} is expanded (strides {x.stride()}), expected an address for each element")


def _backward_in_place(ctx, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    return _backward(ctx, dq, dk)[:-1]


def _save_in_place(ctx, inputs, outputs) -> None:
    _save(ctx, (*inputs, False), outputs)


_op_in_place = library.define(
    "rope_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, Tensor? position_ids, str style, str layout) -> ()",
    launch=_launch_in_place,
    fake=_fake_in_place,
    autograd=library.Autograd(_save_in_place, _backward_in_place, lambda inputs: check_tables("rope_", *inputs[2:4])),
)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    position_ids: Tensor | None = None,
    style: Style = "half",
    layout: Layout = "bhtd",
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of q and k, in one launch: `x * cos + rotate(x) * sin`, in float32, rounded once.

    Args:
        q: `(B, H, T, D)` (or `(B, T, H, D)` with `layout="bthd"`), float32, float16 or bfloat16, of any strides.
        k: the same but for the number of heads.
        cos, sin: `(T, R)`, `(1, T, R)` or `(B, T, R)`, for an even rotary dimension R of at most D; elements past R are
            passed through. Each angle stands twice, as models build the tables; one of the two is read.
        position_ids: `(T,)`, `(1, T)` or `(B, T)`, int32 or int64: rows of cos and sin, then `(positions, R)`.
            A position outside the table gives NaN.
        style: which elements make a pair (see the top of this file): `"half"`, `"interleaved"` or `"deepseek"`.
        layout: the order of q's and k's dimensions.

    Returns:
        `(q, k)` rotated, in new memory of the same order. cos and sin get no gradient.

    Raises:
        ValueError: a shape, style or layout does not fit; cos or sin requires grad; devices differ or are the CPU
            without the interpreter.
        TypeError: a dtype is not one of those named.
    """
    return _op(q, k, cos, sin, position_ids, style, layout, False)


def rope_(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    position_ids: Tensor | None = None,
    style: Style = "half",
    layout: Layout = "bhtd",
) -> tuple[Tensor, Tensor]:
    """`rope`, written over q and k, which are returned.

    Takes what `rope` takes, but for the style `"deepseek"`. q and k need a last stride of 1 and an address for each
    element. Gradients flow through, unless q or k is a leaf that requires grad, or a view: then it raises ValueError.
    """
    _op_in_place(q, k, cos, sin, position_ids, style, layout)
    return q, k
