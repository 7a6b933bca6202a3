"""Rotary position embedding of q and k in one launch (Su et al. 2021, https://arxiv.org/abs/2104.09864, eq. 34).

Each pair (a, b) of a head's elements is rotated by its token's angle:

    a' = a * cos - b * sin
    b' = b * cos + a * sin

The style says which elements make a pair, and where cos and sin hold the pair's angle, for a rotary dimension R:

    half          (x[i], x[i + R/2]),   angle at [i], the same at [i + R/2]: Llama, Qwen, Mistral, Gemma, GPT-NeoX
    interleaved   (x[2i], x[2i + 1]),   angle at [2i], the same at [2i + 1]: GPT-J, Cohere, GLM
    deepseek      read as (x[2i], x[2i + 1]), angle at [i], written as (y[i], y[i + R/2]): DeepSeek-V3

Elements past R are copied. Bytes: q and k are read and written once; of cos and sin one of each pair's two equal
entries is read. The backward is the same rotation by the opposite angle; it saves cos and sin only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.library import axis_strides
from rooftile.primitives.rotation import load_angles, load_pairs, pair_columns, store_pairs

import triton  # isort: skip
import triton.language as tl  # isort: skip

Style = Literal["half", "interleaved", "deepseek"]
STYLES = ("half", "interleaved", "deepseek")
Layout = Literal["bhtd", "bthd"]


@triton.jit
def _rotate_tile(
    x_ptr, y_ptr, stride_xb, stride_xh, stride_xt, stride_yb, stride_yh, stride_yt, n_heads, batch, tokens, token_mask,
    cos, sin, R: tl.constexpr, D: tl.constexpr, PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr,
    COPY_REST: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):  # fmt: skip
    heads = tl.arange(0, BLOCK_H)[None, :, None]
    tokens = tokens[:, None, None]
    x_ptr += batch * stride_xb + tokens * stride_xt + heads.to(tl.int64) * stride_xh
    y_ptr += batch * stride_yb + tokens * stride_yt + heads.to(tl.int64) * stride_yh
    row_mask = token_mask[:, None, None] & (heads < n_heads)
    pairs = pair_columns(row_mask, R, BLOCK_R)

    a, b = load_pairs(x_ptr, pairs, R, PAIRS_IN, BLOCK_T, BLOCK_H, BLOCK_R, ONCE=False)
    if COPY_REST:
        rest = R + tl.arange(0, BLOCK_REST)[None, None, :]
        rest_mask = row_mask & (rest < D)
        tl.store(y_ptr + rest, tl.load(x_ptr + rest, mask=rest_mask), mask=rest_mask)

    turned_a = (a * cos - b * sin).to(y_ptr.dtype.element_ty)
    turned_b = (b * cos + a * sin).to(y_ptr.dtype.element_ty)

    store_pairs(y_ptr, turned_a, turned_b, pairs, R, PAIRS_OUT, BLOCK_T, BLOCK_H, BLOCK_R)


# stride_pb is the sequence length if position_ids are (B, T).
@triton.jit(do_not_specialize=["seq_len", "n_positions", "stride_pb"])
def _rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, position_ptr,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_qob, stride_qoh, stride_qot, stride_kob,
    stride_koh, stride_kot, stride_cb, stride_ct, stride_sb, stride_st, stride_pb, stride_pt,
    seq_len, n_positions,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, R: tl.constexpr, D: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    INVERSE: tl.constexpr, ANGLE_STEP: tl.constexpr, PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr,
    COPY_REST: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):  # fmt: skip
    token_blocks = tl.cdiv(seq_len, BLOCK_T)
    batch = (tl.program_id(0) // token_blocks).to(tl.int64)
    tokens = ((tl.program_id(0) % token_blocks) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    token_mask = tokens < seq_len

    cos, sin = load_angles(
        cos_ptr, sin_ptr, position_ptr, batch, tokens, token_mask,
        stride_cb, stride_ct, stride_sb, stride_st, stride_pb, stride_pt, n_positions,
        R, HAS_POSITIONS, INVERSE, ANGLE_STEP, BLOCK_R,
    )  # fmt: skip

    _rotate_tile(
        q_ptr, q_out_ptr, stride_qb, stride_qh, stride_qt, stride_qob, stride_qoh, stride_qot, Q_HEADS,
        batch, tokens, token_mask, cos, sin,
        R, D, PAIRS_IN, PAIRS_OUT, COPY_REST, BLOCK_T, BLOCK_Q, BLOCK_R, BLOCK_REST,
    )  # fmt: skip
    _rotate_tile(
        k_ptr, k_out_ptr, stride_kb, stride_kh, stride_kt, stride_kob, stride_koh, stride_kot, K_HEADS,
        batch, tokens, token_mask, cos, sin,
        R, D, PAIRS_IN, PAIRS_OUT, COPY_REST, BLOCK_T, BLOCK_K, BLOCK_R, BLOCK_REST,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)  # a cache key: hashed by identity
class RopeConfig:
    """Tokens and warps of a program, which rotates all heads of its tokens."""

    tokens: int
    num_warps: int


@functools.cache
def config(heads: int, rotary: int, target: runtime.Target) -> RopeConfig:
    """At least 2048 pairs a program and 8 pairs a thread; `heads` is the larger of q's and k's.

    On an H200 (bf16, 32 and 8 heads of 128) all heads of a token in one program were the fastest or within 1 % of it
    from 512 to 32768 tokens, forward and backward; blocks of 16 heads lost 11 % backward.
    """
    pairs = library.power_of_two(max(1, heads)) * library.power_of_two(rotary) // 2
    if target is runtime.INTERPRETER:
        return RopeConfig(tokens=16, num_warps=4)
    tokens = max(1, 2048 // pairs)
    return RopeConfig(tokens, num_warps=min(1024 // target.warp_size, max(1, tokens * pairs // (8 * target.warp_size))))


def check_style(op: str, style: str) -> None:
    """Raise ValueError unless it is one of `STYLES`."""
    if style not in STYLES:
        raise ValueError(f"{op}: style is {style!r}, expected one of {', '.join(STYLES)}")


def check_rotary_dim(op: str, q: Tensor, cos: Tensor, rotary_dim: int | None) -> None:
    """Raise unless cos has `rotary_dim` columns, or head_dim columns if it is None.

    Other libraries have tables of half that width, one column for each pair. Without this check they would silently
    rotate half of each head.
    """
    if not (isinstance(q, Tensor) and isinstance(cos, Tensor) and q.dim() and cos.dim()):
        return  # the op reports it
    width, head_dim = cos.shape[-1], q.shape[-1]
    if rotary_dim is not None:
        if width != rotary_dim:
            raise ValueError(f"{op}: cos has a last dimension of {width}, expected rotary_dim={rotary_dim}")
    elif 0 < width < head_dim and width % 2 == 0:  # the op rejects any other width
        raise ValueError(
            f"{op}: cos has a last dimension of {width}, expected head_dim={head_dim}; rotary_dim={width} rotates "
            "a part of each head"
        )


def table_strides(x: Tensor, rows: int) -> tuple[int, int]:
    """Batch and row strides of a (T, ...), (1, T, ...) or (B, T, ...) tensor; T is dimension `rows`."""
    strides = x.stride()
    return (strides[0] if rows == 1 and x.shape[0] > 1 else 0), strides[rows]


def _prepare_rotation(
    q: Tensor,
    k: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    style: str,
    layout: str,
    inverse: bool,
) -> Callable[..., None]:
    """The launch over q, k, q_out, k_out, cos, sin and position_ids."""
    if q.numel() + k.numel() == 0:
        return library.start_nothing
    in_place, copies = q_out is q, library.Copies()
    if not in_place:
        q, k = library.unit_last_of(q, copies, 0), library.unit_last_of(k, copies, 1)
    cos, sin = library.unit_last_of(cos, copies, 4), library.unit_last_of(sin, copies, 5)
    heads, time = layout.index("h"), layout.index("t")
    batch, seq_len, head_dim, rotary = q.shape[0], q.shape[time], int(q.shape[3]), int(cos.shape[-1])
    q_heads, k_heads = int(q.shape[heads]), int(k.shape[heads])
    c = config(max(q_heads, k_heads), rotary, runtime.target(q.device))
    dtypes = (q.dtype, cos.dtype, None if position_ids is None else position_ids.dtype)
    launcher = _plan(dtypes, q_heads, k_heads, rotary, head_dim, style, inverse, in_place, c)
    strides = (
        *axis_strides(q, layout),
        *axis_strides(k, layout),
        *axis_strides(q_out, layout),
        *axis_strides(k_out, layout),
        *table_strides(cos, cos.dim() - 2),
        *table_strides(sin, sin.dim() - 2),
        *((0, 0) if position_ids is None else table_strides(position_ids, position_ids.dim() - 1)),
    )
    programs = batch * library.cdiv(seq_len, c.tokens)
    return library.copying(
        launching.bind(launcher, programs, strides=strides, numbers=(seq_len, cos.shape[-2])), copies
    )


@functools.cache
def _plan(
    dtypes: tuple[torch.dtype | None, ...],
    q_heads: int,
    k_heads: int,
    rotary: int,
    head_dim: int,
    style: str,
    inverse: bool,
    in_place: bool,
    c: RopeConfig,
) -> launching.KernelLauncher:
    pairs_in, pairs_out = style != "half", style == "interleaved"
    if inverse:
        pairs_in, pairs_out = pairs_out, pairs_in
    constants = {
        "Q_HEADS": q_heads,
        "K_HEADS": k_heads,
        "R": rotary,
        "D": head_dim,
        "HAS_POSITIONS": dtypes[2] is not None,
        "INVERSE": inverse,
        "ANGLE_STEP": 2 if style == "interleaved" else 1,
        "PAIRS_IN": pairs_in,
        "PAIRS_OUT": pairs_out,
        "COPY_REST": rotary < head_dim and not in_place,
        "BLOCK_T": c.tokens,
        "BLOCK_Q": library.power_of_two(max(1, q_heads)),
        "BLOCK_K": library.power_of_two(max(1, k_heads)),
        "BLOCK_R": library.power_of_two(rotary),
        "BLOCK_REST": library.power_of_two(max(1, head_dim - rotary)),
    }
    return launching.KernelLauncher(_rope_kernel, constants, num_warps=c.num_warps)


def _either(*options: str) -> str:
    """ "a, b or c", each once."""
    *first, last = dict.fromkeys(options)
    return f"{', '.join(first)} or {last}"


def check(
    op: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, style: str, layout: str
) -> None:
    library.check_floating(op, q=q, k=k, cos=cos, sin=sin)
    library.check_layout(op, layout)
    check_style(op, style)
    if q.dim() != 4:
        raise ValueError(f"{op}: q has shape {tuple(q.shape)}, expected 4 dimensions {layout}")
    t = layout.index("t")
    batch, seq_len, head_dim = q.shape[0], q.shape[t], q.shape[3]
    if k.dim() != 4 or (k.shape[0], k.shape[t], k.shape[3]) != (batch, seq_len, head_dim):
        expected = tuple("k_heads" if d == "h" else n for d, n in zip(layout, q.shape, strict=True))
        raise ValueError(
            f"{op}: k has shape {tuple(k.shape)}, expected {library.shown(expected)} to match q in {layout}"
        )
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
            accepted = _either(f"({seq_len}, R)", f"(1, {seq_len}, R)", f"({batch}, {seq_len}, R)")
            longer = cos.dim() in (2, 3) and cos.shape[-2] > seq_len
            rows = f"[:{seq_len}]" if cos.dim() == 2 else f"[:, :{seq_len}]"
            hint = f"; of a longer table, pass cos{rows} and sin{rows}, or position_ids=" if longer else ""
            raise ValueError(f"{op}: cos has shape {tuple(cos.shape)}, expected {accepted}{hint}")
        return
    if cos.dim() != 2 and not (cos.dim() == 3 and cos.shape[0] == 1):
        raise ValueError(f"{op}: cos has shape {tuple(cos.shape)}, expected (positions, R) with position_ids")
    if tuple(position_ids.shape) not in ((seq_len,), (1, seq_len), (batch, seq_len)):
        accepted = _either(f"({seq_len},)", f"(1, {seq_len})", f"({batch}, {seq_len})")
        raise ValueError(f"{op}: position_ids has shape {tuple(position_ids.shape)}, expected {accepted}")
    if position_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: position_ids has dtype {position_ids.dtype}, expected int32 or int64")


def _prepare(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    style: str,
    layout: str,
    inverse: bool,
) -> Callable[..., tuple[Tensor, Tensor]]:
    q_out, k_out = _fake(q, k, cos, sin, position_ids, style, layout, inverse)
    start = _prepare_rotation(q, k, q_out, k_out, cos, sin, position_ids, style, layout, inverse)
    q_shape, q_strides, k_shape, k_strides = q_out.shape, q_out.stride(), k_out.shape, k_out.stride()
    dtype, device = q.dtype, q.device

    def run(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, *_: object
    ) -> tuple[Tensor, Tensor]:
        q_out = torch.empty_strided(q_shape, q_strides, dtype=dtype, device=device)
        k_out = torch.empty_strided(k_shape, k_strides, dtype=dtype, device=device)
        start(q, k, q_out, k_out, cos, sin, position_ids)
        return q_out, k_out

    return run


def dense(x: Tensor, layout: str) -> Tensor:
    """Memory for the rotated x: in (B, T, H, D) order if x is a transposed view of it, else in x's order."""
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
    # A gradient that is not needed takes part with no heads.
    nothing = next(d for d in (dq, dk) if d is not None).narrow(layout.index("h"), 0, 0)
    q, k = _op(
        nothing if dq is None else dq, nothing if dk is None else dk, cos, sin, position_ids, style, layout, not inverse
    )
    return None if dq is None else q, None if dk is None else k, *none


def splits(cos: Tensor, position_ids: Tensor | None, layout: str) -> tuple[int, ...]:
    """The dimensions of q and k that may be split over ranks: heads, and the batch where its rows share a table."""
    shared = all(t is None or t.dim() < n or t.shape[0] == 1 for t, n in ((cos, 3), (position_ids, 2)))
    return (*((0,) if shared else ()), layout.index("h"))


_op = library.define(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? position_ids, str style, str layout, bool inverse) "
    "-> (Tensor, Tensor)",
    prepare=_prepare,
    fake=_fake,
    autograd=library.Autograd(_save, _backward, lambda inputs: check_tables("rope", *inputs[2:4])),
    rows=library.Rows(("q", "k"), lambda q, k, cos, sin, ids, style, layout, _: splits(cos, ids, layout)),
)


def _prepare_in_place(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    style: str,
    layout: str,
) -> Callable[..., None]:
    _fake_in_place(q, k, cos, sin, position_ids, style, layout)
    start = _prepare_rotation(q, k, q, k, cos, sin, position_ids, style, layout, False)
    both = q.numel() and k.numel()

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, *_: object) -> None:
        if both and q.data_ptr() == k.data_ptr() != 0:  # 0: meta tensors
            raise ValueError("rope_: k is the same memory as q, expected memory of its own to be written in place")
        start(q, k, q, k, cos, sin, position_ids)

    return run


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
    prepare=_prepare_in_place,
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
    rotary_dim: int | None = None,
    style: Style = "half",
    layout: Layout = "bhtd",
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of q and k, in one launch: `x * cos + rotate(x) * sin`, in float32, rounded once.

    Args:
        q: `(B, H, T, D)` (or `(B, T, H, D)` with `layout="bthd"`), float32, float16 or bfloat16, of any strides.
        k: the same but for the number of heads.
        cos, sin: `(T, R)`, `(1, T, R)` or `(B, T, R)`, where R is `rotary_dim`. Each angle is stored twice, as
            models build the tables; one of the two is read.
        rotary_dim: R, the number of elements of a head that are rotated: even, D by default. The others are copied.
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
    check_rotary_dim("rope", q, cos, rotary_dim)
    return _op(q, k, cos, sin, position_ids, style, layout, False)


def rope_(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    position_ids: Tensor | None = None,
    rotary_dim: int | None = None,
    style: Style = "half",
    layout: Layout = "bhtd",
) -> tuple[Tensor, Tensor]:
    """`rope`, written over q and k, which are returned.

    Takes what `rope` takes, but for the style `"deepseek"`. q and k need a last stride of 1 and an address for each
    element. Gradients flow through, unless q or k is a leaf that requires grad, or a view: then it raises ValueError.
    """
    check_rotary_dim("rope_", q, cos, rotary_dim)
    _op_in_place(q, k, cos, sin, position_ids, style, layout)
    return q, k
