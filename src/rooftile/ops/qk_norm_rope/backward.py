"""The backward op: which gradients there are to compute, and of what."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import launching, library, runtime
from rooftile.library import axis_strides, unit_last
from rooftile.ops.qk_norm_rope import backward_kernel as kernel
from rooftile.ops.qk_norm_rope.common import check
from rooftile.ops.rope import dense, table_strides
from rooftile.primitives.partials import sum_partials


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
    """q's side of the kernel, or k's: its tensors, their strides, and whether dx and dweight are computed."""
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
    """dq, dk, and the gradients of their weights; one that is not needed comes back empty."""
    asked = (needs_dq, needs_dk, needs_dqw, needs_dkw)
    dq, dk, dqw, dkw = results = fake(
        q, k, q_dy, k_dy, q_weight, k_weight, cos, sin, position_ids, eps, offset, style, layout, *asked
    )
    cos, sin = unit_last(cos), unit_last(sin)
    batch, seq_len, head_dim = q.shape[0], q.shape[layout.index("t")], int(q.shape[3])
    heads = int(q.shape[layout.index("h")]), int(k.shape[layout.index("h")])
    target = runtime.target(q.device)
    c = kernel.config(head_dim, q.element_size(), target)
    # As many for one gradient as for all, so that each is the same sum in the same order.
    most = max(batch * library.cdiv(seq_len, t) * library.cdiv(n, h) for n in heads for t, h in (c.block(n),))
    programs = min(most, target.multiprocessors * c.per_multiprocessor)
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
    plan = kernel.plan(dtypes, heads, q_needs, k_needs, int(cos.shape[-1]), head_dim, style, eps, offset, c)
    launching.launch(plan, programs, tensors, strides, (batch, seq_len, cos.shape[-2]))
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
