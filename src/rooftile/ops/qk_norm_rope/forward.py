"""The forward kernel: a program normalizes and rotates all heads of its tokens, in blocks of heads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.library import axis_strides
from rooftile.ops import rope
from rooftile.ops.rope import table_strides
from rooftile.primitives.rotation import load_angles, load_pairs, pair_columns, store_pairs

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _norm_and_rotate(
    x_ptr, weight_ptr, y_ptr,
    stride_xb, stride_xh, stride_xt, stride_yb, stride_yh, stride_yt,
    batch, tokens, token_mask, cos, sin,
    EPS: tl.constexpr, OFFSET: tl.constexpr, HEADS: tl.constexpr, HAS_WEIGHT: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr, PAIRS_X: tl.constexpr, PAIRS_Y: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    tokens = tokens[:, None, None]
    rest = R + tl.arange(0, BLOCK_REST)[None, None, :]
    weight_a, weight_b, weight_rest = load_weight(weight_ptr, OFFSET, HAS_WEIGHT, R, D, PAIRS_X, BLOCK_R, BLOCK_REST)

    for start in tl.range(0, HEADS, BLOCK_H, num_stages=1):
        heads = (start + tl.arange(0, BLOCK_H))[None, :, None]
        mask = token_mask[:, None, None] & (heads < HEADS)
        columns = pair_columns(mask, R, BLOCK_R)
        x_row = x_ptr + batch * stride_xb + tokens * stride_xt + heads.to(tl.int64) * stride_xh
        y_row = y_ptr + batch * stride_yb + tokens * stride_yt + heads.to(tl.int64) * stride_yh

        a, b = load_pairs(x_row, columns, R, PAIRS_X, BLOCK_T, BLOCK_H, BLOCK_R, ONCE=False)
        squares = tl.sum(a * a + b * b, axis=2, keep_dims=True)
        if R < D:
            c = tl.load(x_row + rest, mask=mask & (rest < D), other=0.0).to(tl.float32)
            squares += tl.sum(c * c, axis=2, keep_dims=True)

        rstd = tl.rsqrt(squares / D + EPS)
        a *= rstd * weight_a
        b *= rstd * weight_b

        turned_a = (a * cos - b * sin).to(DTYPE)
        turned_b = (b * cos + a * sin).to(DTYPE)
        store_pairs(y_row, turned_a, turned_b, columns, R, PAIRS_Y, BLOCK_T, BLOCK_H, BLOCK_R)
        if R < D:
            tl.store(y_row + rest, (c * (rstd * weight_rest)).to(DTYPE), mask=mask & (rest < D))


# stride_pb is the sequence length if position_ids are (B, T).
@triton.jit(do_not_specialize=["seq_len", "n_positions", "stride_pb"])
def _forward_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, position_ptr,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_qob, stride_qoh, stride_qot, stride_kob,
    stride_koh, stride_kot, stride_cb, stride_ct, stride_sb, stride_st, stride_pb, stride_pt,
    seq_len, n_positions,
    EPS: tl.constexpr, OFFSET: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HAS_Q_WEIGHT: tl.constexpr,
    HAS_K_WEIGHT: tl.constexpr, R: tl.constexpr, D: tl.constexpr, HAS_POSITIONS: tl.constexpr, ANGLE_STEP: tl.constexpr,
    PAIRS_X: tl.constexpr, PAIRS_Y: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    token_blocks = tl.cdiv(seq_len, BLOCK_T)
    batch = (tl.program_id(0) // token_blocks).to(tl.int64)
    tokens = ((tl.program_id(0) % token_blocks) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    token_mask = tokens < seq_len

    cos, sin = load_angles(
        cos_ptr, sin_ptr, position_ptr, batch, tokens, token_mask,
        stride_cb, stride_ct, stride_sb, stride_st, stride_pb, stride_pt, n_positions,
        R, HAS_POSITIONS, False, ANGLE_STEP, BLOCK_R,
    )  # fmt: skip

    _norm_and_rotate(
        q_ptr, q_weight_ptr, q_out_ptr, stride_qb, stride_qh, stride_qt, stride_qob, stride_qoh, stride_qot,
        batch, tokens, token_mask, cos, sin, EPS, OFFSET, Q_HEADS, HAS_Q_WEIGHT,
        R, D, PAIRS_X, PAIRS_Y, BLOCK_T, BLOCK_Q, BLOCK_R, BLOCK_REST,
    )  # fmt: skip
    _norm_and_rotate(
        k_ptr, k_weight_ptr, k_out_ptr, stride_kb, stride_kh, stride_kt, stride_kob, stride_koh, stride_kot,
        batch, tokens, token_mask, cos, sin, EPS, OFFSET, K_HEADS, HAS_K_WEIGHT,
        R, D, PAIRS_X, PAIRS_Y, BLOCK_T, BLOCK_K, BLOCK_R, BLOCK_REST,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)  # a cache key: hashed by identity
class QkNormRopeConfig:
    """Tokens of a program, the most heads that it holds at a time, and its warps."""

    tokens: int
    heads: int
    num_warps: int


@functools.cache
def config(heads: int, head_dim: int, target: runtime.Target) -> QkNormRopeConfig:
    """At least 2048 pairs a program and 16 a thread; `heads` is the larger of q's and k's.

    On an H200 (bf16, parts of a copy's speed): 32 and 8 heads of 128, 0.93 at 8192 tokens and 0.95 at 32768; 8 and 4 of
    256, 0.92, in blocks of 4 heads, so that none is half empty.
    """
    heads, pairs = library.power_of_two(max(1, heads)), library.power_of_two(head_dim) // 2
    if target is runtime.INTERPRETER:
        return QkNormRopeConfig(tokens=16, heads=16, num_warps=4)
    heads = min(heads, 2048 // pairs if pairs < 128 else max(1, 512 // pairs))
    tokens = max(1, 2048 // (heads * pairs))
    threads = tokens * heads * pairs // (16 if pairs < 128 else 32)
    return QkNormRopeConfig(tokens, heads, num_warps=max(1, threads // target.warp_size))


def prepare(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_out: Tensor,
    k_out: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    eps: float,
    offset: float,
    style: str,
    layout: str,
) -> Callable[..., None]:
    """The launch over q, k, q_weight, k_weight, q_out, k_out, cos, sin and position_ids."""
    if q.numel() + k.numel() == 0:
        return library.start_nothing
    copies: library.Copies = {}
    q, k = library.unit_last_of(q, copies, 0), library.unit_last_of(k, copies, 1)
    library.contiguous_of(q_weight, copies, 2)
    library.contiguous_of(k_weight, copies, 3)
    cos, sin = library.unit_last_of(cos, copies, 6), library.unit_last_of(sin, copies, 7)
    heads, time = layout.index("h"), layout.index("t")
    batch, seq_len, head_dim, rotary = q.shape[0], q.shape[time], int(q.shape[3]), int(cos.shape[-1])
    q_heads, k_heads = int(q.shape[heads]), int(k.shape[heads])
    c = config(max(q_heads, k_heads), head_dim, runtime.target(q.device))
    tensors = (q, k, q_weight, k_weight, q_out, k_out, cos, sin, position_ids)
    dtypes = tuple(None if t is None else t.dtype for t in tensors)
    launcher = _plan(dtypes, q_heads, k_heads, rotary, head_dim, style, eps, offset, c)
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
    start = launching.bind(launcher, programs, strides=strides, numbers=(seq_len, cos.shape[-2]))
    return library.copying(start, copies)


@functools.cache
def _plan(
    dtypes: tuple[torch.dtype | None, ...],
    q_heads: int,
    k_heads: int,
    rotary: int,
    head_dim: int,
    style: str,
    eps: float,
    offset: float,
    c: QkNormRopeConfig,
) -> launching.KernelLauncher:
    _, _, q_weight, k_weight, *_, position_ids = dtypes
    constants = {
        "EPS": eps,
        "OFFSET": offset,
        "Q_HEADS": q_heads,
        "K_HEADS": k_heads,
        "HAS_Q_WEIGHT": q_weight is not None,
        "HAS_K_WEIGHT": k_weight is not None,
        "R": rotary,
        "D": head_dim,
        "HAS_POSITIONS": position_ids is not None,
        **pairing(style),
        "BLOCK_T": c.tokens,
        "BLOCK_Q": min(c.heads, library.power_of_two(max(1, q_heads))),
        "BLOCK_K": min(c.heads, library.power_of_two(max(1, k_heads))),
        **sizes(rotary, head_dim),
    }
    return launching.KernelLauncher(_forward_kernel, constants, num_warps=c.num_warps)


LONGEST = 512  # elements of a head, which a program holds as a whole


@triton.jit
def load_weight(
    weight_ptr, OFFSET: tl.constexpr, HAS_WEIGHT: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    NEIGHBOURS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """weight + offset in the tiles of a head: both elements of the pairs, and the rest. 1 without a weight."""
    a = tl.full((1, 1, 1), 1.0, tl.float32)
    b = a
    rest = a
    if HAS_WEIGHT:
        columns = pair_columns(tl.full((1, 1, 1), True, tl.int1), R, BLOCK_R)
        a, b = load_pairs(weight_ptr, columns, R, NEIGHBOURS, 1, 1, BLOCK_R, ONCE=False)
        a += OFFSET
        b += OFFSET
        if R < D:
            cols = R + tl.arange(0, BLOCK_REST)[None, None, :]
            rest = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32) + OFFSET
    return a, b, rest


def check(
    op: str,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    eps: float,
    offset: float,
    style: str,
    layout: str,
) -> None:
    rope.check(op, q, k, cos, sin, position_ids, style, layout)
    library.check_floating(op, q_weight=q_weight, k_weight=k_weight)
    library.check_numbers(op, eps=eps, offset=offset)
    head_dim = q.shape[3]
    if head_dim > LONGEST:
        raise ValueError(f"{op}: q has a head_dim of {head_dim}, expected at most {LONGEST}")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and tuple(weight.shape) != (head_dim,):
            raise ValueError(
                f"{op}: {name} has shape {tuple(weight.shape)}, expected ({head_dim},) to match the head_dim"
            )
        if weight is None and offset != 0.0:
            raise ValueError(f"{op}: offset is {offset} and {name} is None, expected an offset of 0 without a weight")


def sizes(rotary: int, head_dim: int) -> dict[str, int]:
    """The block sizes of a head."""
    return {
        "BLOCK_R": library.power_of_two(rotary),
        "BLOCK_REST": library.power_of_two(max(1, head_dim - rotary)),
    }


def pairing(style: str) -> dict[str, int]:
    """The step between a style's angles, and whether its pairs are adjacent in x and in y."""
    return {
        "ANGLE_STEP": 2 if style == "interleaved" else 1,
        "PAIRS_X": style != "half",
        "PAIRS_Y": style == "interleaved",
    }
