"""The kernel that turns q and k, its configuration and its launch."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.rotation import load_angles, load_pairs, pair_columns, store_pairs

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _rotate_tile(
    x_ptr,
    y_ptr,
    stride_xb,
    stride_xh,
    stride_xt,
    stride_yb,
    stride_yh,
    stride_yt,
    n_heads,
    batch,
    tokens,
    token_mask,
    cos,
    sin,
    R: tl.constexpr,
    D: tl.constexpr,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    COPY_REST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
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


# stride_pb is the length where position_ids are (B, T).
@triton.jit(do_not_specialize=["seq_len", "n_positions", "stride_pb"])
def _rope_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_qob,
    stride_qoh,
    stride_qot,
    stride_kob,
    stride_koh,
    stride_kot,
    stride_cb,
    stride_ct,
    stride_sb,
    stride_st,
    stride_pb,
    stride_pt,
    seq_len,
    n_positions,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    INVERSE: tl.constexpr,
    ANGLE_STEP: tl.constexpr,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    COPY_REST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
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


@dataclasses.dataclass(frozen=True, eq=False)  # a key of caches on every call: by identity
class Config:
    """Tokens that a program turns all heads of, and its warps."""

    tokens: int
    num_warps: int


@functools.cache
def config(heads: int, rotary: int, target: runtime.Target) -> Config:
    """For the heads of q or k, whichever has more: tiles of 2048 pairs where a token has fewer, 8 pairs a thread.

    On an H200 (bf16, 32 and 8 heads of 128) all heads of a token in one program were the fastest or within 1 % of it
    from 512 to 32768 tokens, forward and backward; blocks of 16 heads lost 11 % backward.
    """
    pairs = library.power_of_two(max(1, heads)) * library.power_of_two(rotary) // 2
    if target is runtime.INTERPRETER:
        return Config(tokens=16, num_warps=4)
    tokens = max(1, 2048 // pairs)
    return Config(tokens, num_warps=min(1024 // target.warp_size, max(1, tokens * pairs // (8 * target.warp_size))))


def unit_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def axis_strides(x: Tensor, layout: str) -> tuple[int, int, int]:
    """Batch, head and token strides."""
    batch, second, third, _ = x.stride()
    return (batch, second, third) if layout == "bhtd" else (batch, third, second)


def table_strides(x: Tensor, rows: int) -> tuple[int, int]:
    """Batch and row strides of a (T, ...), (1, T, ...) or (B, T, ...) tensor; T is dimension `rows`."""
    strides = x.stride()
    return (strides[0] if rows == 1 and x.shape[0] > 1 else 0), strides[rows]


def rotate(
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
) -> None:
    if q.numel() + k.numel() == 0:
        return
    cos, sin = unit_last(cos), unit_last(sin)
    heads, time = layout.index("h"), layout.index("t")
    batch, seq_len, head_dim, rotary = q.shape[0], q.shape[time], int(q.shape[3]), int(cos.shape[-1])
    q_heads, k_heads = int(q.shape[heads]), int(k.shape[heads])
    c = config(max(q_heads, k_heads), rotary, runtime.target(q.device))
    dtypes = (q.dtype, cos.dtype, None if position_ids is None else position_ids.dtype)
    plan = _plan(dtypes, q_heads, k_heads, rotary, head_dim, style, inverse, q_out is q, c)
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
    tensors = (q, k, q_out, k_out, cos, sin, position_ids)
    launching.launch(plan, programs, tensors, strides, (seq_len, cos.shape[-2]))


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
    c: Config,
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
