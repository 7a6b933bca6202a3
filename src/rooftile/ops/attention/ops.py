"""The ops as PyTorch knows them: schemas, launchers, fakes and derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile import library, runtime
from rooftile.ops.attention import choose, common, gaps
from rooftile.ops.attention.problem import Extras, Scoring, decode


def _forward(
    op: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, x: Extras, s: Scoring, config: str
) -> None:
    """Choose a kernel and launch it, for tensors as (batch, heads, tokens, dim)."""
    if out.numel() == 0:
        return
    q, k, v = common.unit_last(q), common.unit_last(k), common.unit_last(v)
    target = runtime.target(q.device)
    p = common.problem(q, k, v, x, s)
    c = decode(config)
    if c is None:
        c = choose.choose_forward(p, target)
    else:
        reason = choose.refuses_forward(p, c, target)
        if reason is not None:
            raise ValueError(f"{op}: config can't be launched: {reason}")
    if x.starts_q is not None:
        gaps.clear(out, lse, x.starts_q, x.longest_q)
    found = choose.forward_module(c.kernel)
    assert found is not None
    found.launch(q, k, v, out, lse, x, s, c)


def _outputs(q: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Memory for out, and for lse, as (batch, heads, tokens, ...)."""
    q, v = common.as_bhtd(q, layout), common.as_bhtd(v, layout)
    return common.dense(q, v.shape[3]), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float,
    left: int,
    right: int,
    layout: str,
    config: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    common.refuse_tracing(q)
    common.check_tensors("attention", q, k, v, layout, mask, alibi_slopes, sinks)
    out, lse = _outputs(q, v, layout)
    s = common.scoring(q, scale, softcap, left, right)
    q, k, v = (common.as_bhtd(t, layout) for t in (q, k, v))
    _forward("attention", q, k, v, out, lse, common.extras(q, k, mask, alibi_slopes, sinks), s, config)
    return common.from_bhtd(out, layout), lse


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float,
    left: int,
    right: int,
    layout: str,
    config: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    common.check_tensors("attention", q, k, v, layout, mask, alibi_slopes, sinks)
    out, lse = _outputs(q, v, layout)
    return common.from_bhtd(out, layout), lse


def _launch_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    longest_q: int,
    longest_k: int,
    scale: float | None,
    softcap: float,
    left: int,
    right: int,
    config: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    op, layout = "attention_varlen", "thd"
    common.refuse_tracing(q)
    common.check_tensors(op, q, k, v, layout, None, alibi_slopes, sinks)
    common.check_starts(op, cu_seqlens_q, cu_seqlens_k)
    out, lse = _outputs(q, v, layout)
    s = common.scoring(q, scale, softcap, left, right)
    q, k, v = (common.as_bhtd(t, layout) for t in (q, k, v))
    x = common.extras(q, k, None, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k)
    _forward(op, q, k, v, out, lse, x, s, config)
    return common.from_bhtd(out, layout), lse[0]


def _fake_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    longest_q: int,
    longest_k: int,
    scale: float | None,
    softcap: float,
    left: int,
    right: int,
    config: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    common.check_tensors("attention_varlen", q, k, v, "thd", None, alibi_slopes, sinks)
    common.check_starts("attention_varlen", cu_seqlens_q, cu_seqlens_k)
    out, lse = _outputs(q, v, "thd")
    return common.from_bhtd(out, "thd"), lse[0]


# The backward, one op for both


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layout: str, needs: tuple[bool, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for dq, dk, dv (as (batch, heads, tokens, dim)) and dsinks; empty where nobody asks."""

    def memory(x: Tensor, needed: bool) -> Tensor:
        if not needed:
            return torch.empty(0, dtype=x.dtype, device=x.device)
        x = common.as_bhtd(x, layout)
        return common.dense(x, x.shape[3])

    like = q if sinks is None else sinks
    dsinks = torch.empty(like.shape[0] if needs[3] else 0, dtype=like.dtype, device=q.device)
    return memory(q, needs[0]), memory(k, needs[1]), memory(v, needs[2]), dsinks


def _as_given(results: tuple[Tensor, ...], layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (common.from_bhtd(t, layout) if t.dim() == 4 else t for t in results[:3])
    return dq, dk, dv, results[3]


def _check_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    layout: str,
) -> None:
    op = "attention_backward"
    common.check_tensors(op, q, k, v, layout, mask, alibi_slopes, sinks)
    if (layout == "thd") != (cu_seqlens_q is not None):
        raise ValueError(f"{op}: layout is {layout!r}, expected 'thd' with cu_seqlens_q and no other")
    if cu_seqlens_q is not None:
        common.check_starts(op, cu_seqlens_q, cu_seqlens_k)
    if out.shape != (*q.shape[:-1], v.shape[-1]):
        raise ValueError(
            f"{op}: out has shape {tuple(out.shape)}, expected {(*q.shape[:-1], v.shape[-1])} to match q and v"
        )
    library.check_same(op, "dout", dout, "out", out)
    rows = common.as_bhtd(q, layout).shape[1 if layout == "thd" else 0 : 3]
    for name, t in (("lse", lse), ("dlse", dlse)):
        if t is not None and (t.shape != rows or t.dtype != torch.float32):
            raise ValueError(
                f"{op}: {name} has shape {tuple(t.shape)} and dtype {t.dtype}, expected {tuple(rows)} in float32"
            )


def _launch_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    longest_q: int,
    longest_k: int,
    scale: float | None,
    softcap: float,
    left: int,
    right: int,
    layout: str,
    needs_dq: bool,
    needs_dk: bool,
    needs_dv: bool,
    needs_dsinks: bool,
    deterministic: bool,
    portable: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    common.refuse_tracing(q)
    _check_backward(q, k, v, out, lse, dout, dlse, mask, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, layout)
    needs = (needs_dq, needs_dk, needs_dv, needs_dsinks and sinks is not None)
    results = _gradients(q, k, v, sinks, layout, needs)
    s = common.scoring(q, scale, softcap, left, right)
    q, k, v, out, dout = (common.unit_last(common.as_bhtd(t, layout)) for t in (q, k, v, out, dout))
    x = common.extras(q, k, mask, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k)
    _backward(q, k, v, out, lse, dout, dlse, results, needs, x, s, deterministic, portable)
    return _as_given(results, layout)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    results: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    x: Extras,
    s: Scoring,
    deterministic: bool,
    portable: bool,
) -> None:
    if not any(needs):
        return
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:  # nothing is seen by anybody; but sinks stay
        for t in results[:3]:
            t.zero_()
        if not (needs[3] and q.numel()):
            results[3].zero_()
            return
        needs = (False, False, False, True)
    dq, dk, dv, dsinks = (t if n else None for t, n in zip(results, needs, strict=True))
    for d, starts, longest in (
        (dq, x.starts_q, x.longest_q),
        (dk, x.starts_k, x.longest_k),
        (dv, x.starts_k, x.longest_k),
    ):
        if d is not None and starts is not None:
            gaps.clear(d, None, starts, longest)
    target = runtime.target(q.device)
    p = common.problem(q, k, v, x, s)
    c = choose.choose_backward(p, target, portable)
    found = choose.backward_module(c.kernel)
    assert found is not None
    lse = lse.contiguous().view(q.shape[:3])
    dlse = None if dlse is None else dlse.contiguous().view(q.shape[:3])
    options = {"deterministic": deterministic} if c.kernel == "hopper" else {}  # the portable one always is
    found.launch(q, k, v, out, lse, dout, dlse, dq, dk, dv, dsinks, x, s, c, **options)


def _fake_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    longest_q: int,
    longest_k: int,
    scale: float | None,
    softcap: float,
    left: int,
    right: int,
    layout: str,
    needs_dq: bool,
    needs_dk: bool,
    needs_dv: bool,
    needs_dsinks: bool,
    deterministic: bool,
    portable: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_backward(q, k, v, out, lse, dout, dlse, mask, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, layout)
    needs = (needs_dq, needs_dk, needs_dv, needs_dsinks and sinks is not None)
    return _as_given(_gradients(q, k, v, sinks, layout, needs), layout)


_backward_op = library.define(
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, Tensor? mask, "
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt longest_q, "
    "SymInt longest_k, float? scale, float softcap, int left, int right, str layout, bool needs_dq, bool needs_dk, "
    "bool needs_dv, bool needs_dsinks, bool deterministic, bool portable) -> (Tensor, Tensor, Tensor, Tensor)",
    launch=_launch_backward,
    fake=_fake_backward,
)


def _differentiated(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, sinks_at: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk, dv and dsinks, of those that are asked for. `sinks_at` is the place of the sinks in the op's schema."""
    q, k, v, out, lse, mask, slopes, sinks, starts_q, starts_k = ctx.saved_tensors
    asked = ctx.needs_input_grad[1:]
    needs = (asked[0], asked[1], asked[2], asked[sinks_at])
    if (dout is None and dlse is None) or not any(needs):
        return None, None, None, None
    if dout is None:
        dout = torch.zeros_like(out)
    inputs = (q, k, v, out, lse, dout, dlse, mask, slopes, sinks, starts_q, starts_k)
    found = _backward_op(*inputs, *ctx.scoring, ctx.layout, *needs, ctx.deterministic, ctx.portable)
    return tuple(d if needed else None for d, needed in zip(found, needs, strict=True))  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, alibi_slopes, sinks, scale, softcap, left, right, layout, config, ctx.deterministic = inputs
    ctx.portable = common.is_portable(config)
    ctx.scoring, ctx.layout = (0, 0, scale, softcap, left, right), layout
    ctx.save_for_backward(q, k, v, *outputs, mask, alibi_slopes, sinks, None, None)


def _save_varlen(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts_q, starts_k, alibi_slopes, sinks, longest_q, longest_k, *scoring, config, ctx.deterministic = inputs
    ctx.portable = common.is_portable(config)
    ctx.scoring, ctx.layout = (longest_q, longest_k, *scoring), "thd"
    ctx.save_for_backward(q, k, v, *outputs, None, alibi_slopes, sinks, starts_q, starts_k)


def _backward_of_attention(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    dq, dk, dv, dsinks = _differentiated(ctx, dout, dlse, 5)
    return dq, dk, dv, None, None, dsinks, *(None,) * 7


def _backward_of_varlen(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    dq, dk, dv, dsinks = _differentiated(ctx, dout, dlse, 6)
    return dq, dk, dv, None, None, None, dsinks, *(None,) * 8


def _refuse_gradients(op: str, **places: int) -> Callable[[tuple[Any, ...]], None]:
    def check(inputs: tuple[Any, ...]) -> None:
        for name, place in places.items():
            if inputs[place] is not None and inputs[place].requires_grad:
                raise ValueError(f"{op}: {name} requires grad, which is not supported; detach it")

    return check


attention_op = library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? alibi_slopes, Tensor? sinks, float? scale, "
    "float softcap, int left, int right, str layout, str config, bool deterministic) -> (Tensor, Tensor)",
    launch=_launch,
    fake=_fake,
    autograd=library.Autograd(_save, _backward_of_attention, _refuse_gradients("attention", mask=3, alibi_slopes=4)),
)

attention_varlen_op = library.define(
    "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? alibi_slopes, "
    "Tensor? sinks, SymInt longest_q, SymInt longest_k, float? scale, float softcap, int left, int right, str config, "
    "bool deterministic) -> (Tensor, Tensor)",
    launch=_launch_varlen,
    fake=_fake_varlen,
    autograd=library.Autograd(_save_varlen, _backward_of_varlen, _refuse_gradients("attention_varlen", alibi_slopes=5)),
)
