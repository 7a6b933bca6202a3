"""RMSNorm and then RoPE of each head of q and k, in one launch, as in the attention of Qwen3 and Gemma 3.

For a head h of D elements, with q's weight or with k's:

    n = h * rstd * (weight + offset),   rstd = 1 / sqrt(mean(h^2) + eps)
    y = n, its first R elements rotated by their token's angles

The norm of heads is from Henry et al. 2020, https://arxiv.org/abs/2010.04245; `rooftile.ops.rope` describes the
rotation and its styles. Bytes: q and k are read and written once; of cos and sin one of each pair's two equal entries
is read.

The backward reads dy and h, rotates dy back, recomputes rstd (so only the inputs are saved) and writes dh:

    g = dy, its first R elements rotated by the opposite angles,   xhat = h * rstd
    dh = rstd * (g * (weight + offset) - xhat * mean(g * (weight + offset) * xhat))
    dweight = sum over batches, tokens and heads of g * xhat

A persistent grid accumulates dweight in float32 registers and reduces it in a fixed order, so the result is
bit-identical on every run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.qk_norm_rope import backward, forward
from rooftile.ops.qk_norm_rope.forward import check
from rooftile.ops.rope import Layout, Style, check_rotary_dim, check_tables, dense, splits

__all__ = ["qk_norm_rope"]


def _prepare(
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
) -> Callable[..., tuple[Tensor, Tensor]]:
    q_out, k_out = _fake(q, k, q_weight, k_weight, cos, sin, position_ids, eps, offset, style, layout)
    start = forward.prepare(
        q, k, q_weight, k_weight, q_out, k_out, cos, sin, position_ids, eps, offset, style, layout
    )  # fmt: skip
    q_shape, q_strides, k_shape, k_strides = q_out.shape, q_out.stride(), k_out.shape, k_out.stride()
    dtype, device = q.dtype, q.device

    def run(
        q: Tensor,
        k: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor | None,
        *_: object,
    ) -> tuple[Tensor, Tensor]:
        q_out = torch.empty_strided(q_shape, q_strides, dtype=dtype, device=device)
        k_out = torch.empty_strided(k_shape, k_strides, dtype=dtype, device=device)
        start(q, k, q_weight, k_weight, q_out, k_out, cos, sin, position_ids)
        return q_out, k_out

    return run


def _fake(
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
) -> tuple[Tensor, Tensor]:
    check("qk_norm_rope", q, k, q_weight, k_weight, cos, sin, position_ids, eps, offset, style, layout)
    return dense(q, layout), dense(k, layout)


def _save(ctx, inputs, outputs) -> None:
    *tensors, eps, offset, style, layout = inputs
    ctx.save_for_backward(*tensors)
    ctx.mode = eps, offset, style, layout


def _backward(ctx, q_dy: Tensor | None, k_dy: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, *others = ctx.saved_tensors
    needs_dq, needs_dk, needs_dqw, needs_dkw = ctx.needs_input_grad[1:5]
    if q_dy is None:
        needs_dq = needs_dqw = False
    if k_dy is None:
        needs_dk = needs_dkw = False
    needs = (needs_dq, needs_dk, needs_dqw, needs_dkw)
    if not any(needs):
        return (None,) * 11
    grads = backward.op(q, k, q_dy, k_dy, *others, *ctx.mode, *needs)
    return *(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), *(None,) * 7


_op = library.define(
    "qk_norm_rope(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, "
    "Tensor? position_ids, float eps, float offset, str style, str layout) -> (Tensor, Tensor)",
    prepare=_prepare,
    fake=_fake,
    autograd=library.Autograd(_save, _backward, lambda inputs: check_tables("qk_norm_rope", *inputs[4:6])),
    rows=library.Rows(("q", "k"), lambda *args: splits(args[4], args[6], args[-1])),
)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    position_ids: Tensor | None = None,
    rotary_dim: int | None = None,
    style: Style = "half",
    layout: Layout = "bhtd",
) -> tuple[Tensor, Tensor]:
    """RMSNorm of each head of q and k, then rotary position embedding, in one launch.

    `rope(h / sqrt(mean(h^2) + eps) * (weight + offset))` for each head h, in float32 from end to end, and rounded once.
    Models also round after the norm (Qwen3 also before the weight) and after each multiplication of the rotation, so in
    float16 and bfloat16 their results differ by these roundings.

    Args:
        q: `(B, H, T, D)` (or `(B, T, H, D)` with `layout="bthd"`), float32, float16 or bfloat16, of any strides; D is
            at most 512.
        k: the same but for the number of heads.
        q_weight, k_weight: `(D,)`, of any of the three dtypes, or None for no weight; then `offset` must be 0.
        cos, sin: `(T, R)`, `(1, T, R)` or `(B, T, R)`, where R is `rotary_dim`. Each angle is stored twice, as
            models build the tables; one of the two is read.
        rotary_dim: R, the number of elements of a head that are rotated: even, D by default. Others are only normed.
        eps: added to the mean of squares.
        offset: added to the weights in float32; 1.0 for Gemma and Qwen3-Next.
        position_ids: `(T,)`, `(1, T)` or `(B, T)`, int32 or int64: rows of cos and sin, then `(positions, R)`.
            A position outside the table gives NaN.
        style: which elements make a pair, as in `rope`: `"half"`, `"interleaved"` or `"deepseek"`.
        layout: the order of q's and k's dimensions.

    Returns:
        `(q, k)` normed and rotated, in new memory of the same order. cos and sin get no gradient.

    Raises:
        ValueError: a shape, style or layout does not fit; there is an offset and a weight is None; cos or sin requires
            grad; devices differ or are the CPU without the interpreter.
        TypeError: a dtype is not one of those named; eps or offset is not a number.
    """
    check_rotary_dim("qk_norm_rope", q, cos, rotary_dim)
    return _op(q, k, q_weight, k_weight, cos, sin, position_ids, eps, offset, style, layout)
