"""The backward kernel: a persistent grid, each program with its part of dweight in registers.

A program loops over tiles of q's heads, then over tiles of k's heads, assigned from the grid's other end: a program
with one tile of q more than others has no more tiles of k.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.library import axis_strides, unit_last
from rooftile.ops.qk_norm_rope.forward import check, load_weight, pairing, sizes
from rooftile.ops.rope import dense, table_strides
from rooftile.primitives.partials import accumulate, sum_partials
from rooftile.primitives.rotation import load_angles, load_pairs, pair_columns, store_pairs

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _sum_tile(x):
    """The sum over tokens and heads."""
    return tl.sum(tl.sum(x, axis=1, keep_dims=True), axis=0, keep_dims=True)


@triton.jit
def _gradients(
    x_ptr, dy_ptr, weight_ptr, dx_ptr, partial_ptr, cos_ptr, sin_ptr, position_ptr,
    stride_xb, stride_xh, stride_xt, stride_yb, stride_yh, stride_yt, stride_db, stride_dh, stride_dt, stride_cb,
    stride_ct, stride_sb, stride_st, stride_pb, stride_pt,
    first, n_batches, seq_len, n_positions,
    EPS: tl.constexpr, OFFSET: tl.constexpr, HEADS: tl.constexpr, HAS_WEIGHT: tl.constexpr, NEEDS_DX: tl.constexpr,
    NEEDS_DW: tl.constexpr, R: tl.constexpr, D: tl.constexpr, HAS_POSITIONS: tl.constexpr, ANGLE_STEP: tl.constexpr,
    PAIRS_X: tl.constexpr, PAIRS_Y: tl.constexpr, COMPENSATED: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token_blocks = tl.cdiv(seq_len, BLOCK_T)
    half = tl.arange(0, BLOCK_R // 2)[None, None, :]
    rest = R + tl.arange(0, BLOCK_REST)[None, None, :]
    weight_a, weight_b, weight_rest = load_weight(weight_ptr, OFFSET, HAS_WEIGHT, R, D, PAIRS_X, BLOCK_R, BLOCK_REST)
    if NEEDS_DW:
        dw_a = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_R // 2), tl.float32)
        dw_b = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_R // 2), tl.float32)
        lost_a = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_R // 2), tl.float32)
        lost_b = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_R // 2), tl.float32)
        if R < D:
            dw_rest = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_REST), tl.float32)
            lost_rest = tl.zeros((BLOCK_T, BLOCK_H, BLOCK_REST), tl.float32)

    tiles = n_batches * token_blocks * HEAD_BLOCKS
    for tile in tl.range(first, tiles, tl.num_programs(0), num_stages=STAGES):
        heads = ((tile % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :, None]
        block = tile // HEAD_BLOCKS
        batch = (block // token_blocks).to(tl.int64)
        tokens = ((block % token_blocks) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        token_mask = tokens < seq_len
        mask = token_mask[:, None, None] & (heads < HEADS)
        columns = pair_columns(mask, R, BLOCK_R)

        cos, sin = load_angles(
            cos_ptr, sin_ptr, position_ptr, batch, tokens, token_mask,
            stride_cb, stride_ct, stride_sb, stride_st, stride_pb, stride_pt, n_positions,
            R, HAS_POSITIONS, True, ANGLE_STEP, BLOCK_R,
        )  # fmt: skip
        # Only positions outside the table give NaN: masked elements are part of the sums.
        real = token_mask[:, None, None] & (half < R // 2)
        cos = tl.where(real, cos, 0.0)
        sin = tl.where(real, sin, 0.0)
        tokens = tokens[:, None, None]
        x_row = x_ptr + batch * stride_xb + tokens * stride_xt + heads.to(tl.int64) * stride_xh
        dy_row = dy_ptr + batch * stride_yb + tokens * stride_yt + heads.to(tl.int64) * stride_yh
        a, b = load_pairs(x_row, columns, R, PAIRS_X, BLOCK_T, BLOCK_H, BLOCK_R, ONCE=True)
        dy_a, dy_b = load_pairs(dy_row, columns, R, PAIRS_Y, BLOCK_T, BLOCK_H, BLOCK_R, ONCE=True)
        g_a = dy_a * cos - dy_b * sin
        g_b = dy_b * cos + dy_a * sin
        squares = tl.sum(a * a + b * b, axis=2, keep_dims=True)
        if R < D:
            rest_mask = mask & (rest < D)
            c = tl.load(x_row + rest, mask=rest_mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            g_rest = tl.load(dy_row + rest, mask=rest_mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            squares += tl.sum(c * c, axis=2, keep_dims=True)

        # With an eps of 0 masked heads would give 0 * infinity.
        rstd = tl.where(mask, tl.rsqrt(squares / D + EPS), 0.0)
        if NEEDS_DW:
            dw_a, lost_a = accumulate(dw_a, lost_a, g_a * (a * rstd), COMPENSATED)
            dw_b, lost_b = accumulate(dw_b, lost_b, g_b * (b * rstd), COMPENSATED)
            if R < D:
                dw_rest, lost_rest = accumulate(dw_rest, lost_rest, g_rest * (c * rstd), COMPENSATED)

        if NEEDS_DX:
            g_a *= weight_a
            g_b *= weight_b
            along = tl.sum(g_a * a + g_b * b, axis=2, keep_dims=True)
            if R < D:
                g_rest *= weight_rest
                along += tl.sum(g_rest * c, axis=2, keep_dims=True)
            shift = along * rstd * rstd / D
            dx_row = dx_ptr + batch * stride_db + tokens * stride_dt + heads.to(tl.int64) * stride_dh
            dx_a = (rstd * (g_a - a * shift)).to(dx_ptr.dtype.element_ty)
            dx_b = (rstd * (g_b - b * shift)).to(dx_ptr.dtype.element_ty)
            store_pairs(dx_row, dx_a, dx_b, columns, R, PAIRS_X, BLOCK_T, BLOCK_H, BLOCK_R)
            if R < D:
                dx_rest = rstd * (g_rest - c * shift)
                tl.store(dx_row + rest, dx_rest.to(dx_ptr.dtype.element_ty), mask=rest_mask)

    if NEEDS_DW:
        partial_ptr += tl.program_id(0).to(tl.int64) * D
        columns = pair_columns(tl.full((1, 1, 1), True, tl.int1), R, BLOCK_R)
        store_pairs(partial_ptr, _sum_tile(dw_a), _sum_tile(dw_b), columns, R, PAIRS_X, 1, 1, BLOCK_R)
        if R < D:
            tl.store(partial_ptr + rest, _sum_tile(dw_rest), mask=rest < D)


# stride_pb is the sequence length if position_ids are (B, T).
@triton.jit(do_not_specialize=["n_batches", "seq_len", "n_positions", "stride_pb"])
def _backward_kernel(
    cos_ptr, sin_ptr, position_ptr, q_ptr, q_dy_ptr, q_weight_ptr, dq_ptr, q_partial_ptr, k_ptr, k_dy_ptr, k_weight_ptr,
    dk_ptr, k_partial_ptr,
    stride_cb, stride_ct, stride_sb, stride_st, stride_pb, stride_pt, stride_qb, stride_qh, stride_qt, stride_qyb,
    stride_qyh, stride_qyt, stride_qdb, stride_qdh, stride_qdt, stride_kb, stride_kh, stride_kt, stride_kyb, stride_kyh,
    stride_kyt, stride_kdb, stride_kdh, stride_kdt,
    n_batches, seq_len, n_positions,
    EPS: tl.constexpr, OFFSET: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HAS_Q_WEIGHT: tl.constexpr,
    HAS_K_WEIGHT: tl.constexpr, NEEDS_DQ: tl.constexpr, NEEDS_DQW: tl.constexpr, NEEDS_DK: tl.constexpr,
    NEEDS_DKW: tl.constexpr, R: tl.constexpr, D: tl.constexpr, HAS_POSITIONS: tl.constexpr, ANGLE_STEP: tl.constexpr,
    PAIRS_X: tl.constexpr, PAIRS_Y: tl.constexpr, COMPENSATED: tl.constexpr, BLOCK_QT: tl.constexpr,
    BLOCK_QH: tl.constexpr, BLOCK_KT: tl.constexpr, BLOCK_KH: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    if NEEDS_DQ or NEEDS_DQW:
        _gradients(
            q_ptr, q_dy_ptr, q_weight_ptr, dq_ptr, q_partial_ptr, cos_ptr, sin_ptr, position_ptr,
            stride_qb, stride_qh, stride_qt, stride_qyb, stride_qyh, stride_qyt, stride_qdb, stride_qdh, stride_qdt,
            stride_cb, stride_ct, stride_sb, stride_st, stride_pb, stride_pt,
            tl.program_id(0), n_batches, seq_len, n_positions,
            EPS, OFFSET, Q_HEADS, HAS_Q_WEIGHT, NEEDS_DQ, NEEDS_DQW, R, D, HAS_POSITIONS, ANGLE_STEP, PAIRS_X, PAIRS_Y,
            COMPENSATED, BLOCK_QT, BLOCK_QH, BLOCK_R, BLOCK_REST, STAGES,
        )  # fmt: skip
    if NEEDS_DK or NEEDS_DKW:
        _gradients(
            k_ptr, k_dy_ptr, k_weight_ptr, dk_ptr, k_partial_ptr, cos_ptr, sin_ptr, position_ptr,
            stride_kb, stride_kh, stride_kt, stride_kyb, stride_kyh, stride_kyt, stride_kdb, stride_kdh, stride_kdt,
            stride_cb, stride_ct, stride_sb, stride_st, stride_pb, stride_pt,
            tl.num_programs(0) - 1 - tl.program_id(0), n_batches, seq_len, n_positions,
            EPS, OFFSET, K_HEADS, HAS_K_WEIGHT, NEEDS_DK, NEEDS_DKW, R, D, HAS_POSITIONS, ANGLE_STEP, PAIRS_X, PAIRS_Y,
            COMPENSATED, BLOCK_KT, BLOCK_KH, BLOCK_R, BLOCK_REST, STAGES,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)  # a cache key: hashed by identity
class QkNormRopeBackwardConfig:
    """Rows of a tile (heads of one or more tokens), warps, programs of an SM, pipeline stages."""

    rows: int
    num_warps: int
    programs_per_sm: int
    stages: int

    def block(self, heads: int) -> tuple[int, int]:
        """Tokens and heads of a tile."""
        block_h = min(self.rows, library.power_of_two(max(1, heads)))
        return self.rows // block_h, block_h


@functools.cache
def config(head_dim: int, itemsize: int, target: runtime.Target) -> QkNormRopeBackwardConfig:
    """As in the norm's backward for short rows: tiles of 8 KiB of x and of dy, two of each in flight.

    On an H200 (bf16, parts of a copy's speed) four warps have 0.80 at 8192 tokens and 0.93 at 32768 for 32 and 8 heads
    of 128, where eight have 0.69 and 0.81; heads of 256 have 0.76 in tiles of 32 KiB, one program an SM, and
    0.55 as the others are. Elsewhere four warps spill, and on AMD eight do but for tiles of 4 KiB, one on its way.
    """
    if target is runtime.INTERPRETER:
        return QkNormRopeBackwardConfig(rows=16, num_warps=4, programs_per_sm=1, stages=1)
    width = library.power_of_two(head_dim)
    if target.warp_size != 32:
        return QkNormRopeBackwardConfig(max(1, 4096 // itemsize // width), num_warps=8, programs_per_sm=2, stages=2)
    tile, warps, programs = 8192, 8, 2
    if target.shared_memory >= 200 << 10:
        tile, warps, programs = (32768, 8, 1) if width > 128 else (8192, 4, 2)
    room = target.shared_memory // programs - 2048
    stages = 1 + min(2, room // (2 * tile + 4096))  # a tile of x, one of dy, and the angles of its tokens
    return QkNormRopeBackwardConfig(max(1, tile // itemsize // width), warps, programs, stages)


@functools.cache
def plan(
    dtypes: tuple[torch.dtype | None, ...],
    heads: tuple[int, int],
    q_needs: tuple[bool, bool],
    k_needs: tuple[bool, bool],
    rotary: int,
    head_dim: int,
    style: str,
    eps: float,
    offset: float,
    c: QkNormRopeBackwardConfig,
) -> launching.KernelLauncher:
    dtype, _, position_ids, q_weight, k_weight = dtypes
    (block_qt, block_qh), (block_kt, block_kh) = (c.block(h) for h in heads)
    constants = {
        "EPS": eps,
        "OFFSET": offset,
        "Q_HEADS": heads[0],
        "K_HEADS": heads[1],
        "HAS_Q_WEIGHT": q_weight is not None,
        "HAS_K_WEIGHT": k_weight is not None,
        "NEEDS_DQ": q_needs[0],
        "NEEDS_DQW": q_needs[1],
        "NEEDS_DK": k_needs[0],
        "NEEDS_DKW": k_needs[1],
        "R": rotary,
        "D": head_dim,
        "HAS_POSITIONS": position_ids is not None,
        **pairing(style),
        "COMPENSATED": dtype is torch.float32,
        "BLOCK_QT": block_qt,
        "BLOCK_QH": block_qh,
        "BLOCK_KT": block_kt,
        "BLOCK_KH": block_kh,
        **sizes(rotary, head_dim),
        "STAGES": c.stages,
    }
    return launching.KernelLauncher(_backward_kernel, constants, num_warps=c.num_warps)


def _side(
    x: Tensor,
    dy: Tensor | None,
    weight: Tensor | None,
    dx: Tensor,
    dw: Tensor,
    needs: tuple[bool, bool],
    programs: int,
    layout: str,
) -> tuple[tuple[Tensor | None, ...], tuple[int, ...], tuple[bool, bool]]:
    """The kernel's tensors for q or for k, their strides, and whether dx and dweight are computed."""
    if x.numel() == 0:
        dw.zero_()
        needs = (False, False)
    if dy is None or not any(needs):
        return (None,) * 5, (0,) * 9, (False, False)
    x, dy = unit_last(x), unit_last(dy)
    weight = None if weight is None else weight.contiguous()
    partial = torch.empty((programs, x.shape[3]), dtype=torch.float32, device=x.device) if needs[1] else None
    dx_strides = axis_strides(dx, layout) if needs[0] else (0, 0, 0)
    strides = (*axis_strides(x, layout), *axis_strides(dy, layout), *dx_strides)
    return (x, dy, weight, dx if needs[0] else None, partial), strides, needs


def launch(
    q: Tensor,
    k: Tensor,
    q_dy: Tensor | None,
    k_dy: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    eps: float,
    offset: float,
    style: str,
    layout: str,
    needs_dq: bool,
    needs_dk: bool,
    needs_dqw: bool,
    needs_dkw: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, and the gradients of their weights; those that are not needed are empty."""
    asked = (needs_dq, needs_dk, needs_dqw, needs_dkw)
    dq, dk, dqw, dkw = results = fake(
        q, k, q_dy, k_dy, q_weight, k_weight, cos, sin, position_ids, eps, offset, style, layout, *asked
    )
    cos, sin = unit_last(cos), unit_last(sin)
    batch, seq_len, head_dim = q.shape[0], q.shape[layout.index("t")], int(q.shape[3])
    heads = int(q.shape[layout.index("h")]), int(k.shape[layout.index("h")])
    target = runtime.target(q.device)
    c = config(head_dim, q.element_size(), target)
    # The number of programs does not depend on which gradients are needed, so each sum keeps its order.
    most = max(batch * library.cdiv(seq_len, t) * library.cdiv(n, h) for n in heads for t, h in (c.block(n),))
    programs = min(most, target.multiprocessors * c.programs_per_sm)
    q_tensors, q_strides, q_needs = _side(q, q_dy, q_weight, dq, dqw, (needs_dq, needs_dqw), programs, layout)
    k_tensors, k_strides, k_needs = _side(k, k_dy, k_weight, dk, dkw, (needs_dk, needs_dkw), programs, layout)
    if not any((*q_needs, *k_needs)):
        return results
    strides = (
        *table_strides(cos, cos.dim() - 2),
        *table_strides(sin, sin.dim() - 2),
        *((0, 0) if position_ids is None else table_strides(position_ids, position_ids.dim() - 1)),
        *q_strides,
        *k_strides,
    )
    tensors = (cos, sin, position_ids, *q_tensors, *k_tensors)
    dtypes = tuple(None if t is None else t.dtype for t in (q, cos, position_ids, q_tensors[2], k_tensors[2]))
    launcher = plan(dtypes, heads, q_needs, k_needs, int(cos.shape[-1]), head_dim, style, eps, offset, c)
    launching.launch(launcher, programs, tensors, strides, (batch, seq_len, cos.shape[-2]))
    for partial, dw in ((q_tensors[4], dqw), (k_tensors[4], dkw)):
        if partial is not None:
            sum_partials(partial, dw)
    return results


def fake(
    q: Tensor,
    k: Tensor,
    q_dy: Tensor | None,
    k_dy: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    eps: float,
    offset: float,
    style: str,
    layout: str,
    needs_dq: bool,
    needs_dk: bool,
    needs_dqw: bool,
    needs_dkw: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    op = "qk_norm_rope_backward"
    check(op, q, k, q_weight, k_weight, cos, sin, position_ids, eps, offset, style, layout)
    for name, dy, x_name, x, needed in (
        ("q_dy", q_dy, "q", q, needs_dq or needs_dqw),
        ("k_dy", k_dy, "k", k, needs_dk or needs_dkw),
    ):
        if dy is not None:
            library.check_same(op, name, dy, x_name, x)
        elif needed:
            raise ValueError(f"{op}: {name} is None, expected the gradient that others are to be computed from")

    def empty(weight: Tensor | None, needed: bool) -> Tensor:
        dtype = q.dtype if weight is None else weight.dtype
        return torch.empty(q.shape[3] if needed else 0, dtype=dtype, device=q.device)

    return (
        dense(q, layout) if needs_dq else empty(None, False),
        dense(k, layout) if needs_dk else empty(None, False),
        empty(q_weight, needs_dqw),
        empty(k_weight, needs_dkw),
    )


op = library.define(
    "qk_norm_rope_backward(Tensor q, Tensor k, Tensor? q_dy, Tensor? k_dy, Tensor? q_weight, Tensor? k_weight, "
    "Tensor cos, Tensor sin, Tensor? position_ids, float eps, float offset, str style, str layout, "
    "bool needs_dq, bool needs_dk, bool needs_dqw, bool needs_dkw) -> (Tensor, Tensor, Tensor, Tensor)",
    launch=launch,
    fake=fake,
)
