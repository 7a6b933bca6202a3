"""The ops as PyTorch knows them: schemas, prepared launches, fakes and derivatives.

Dense and packed attention have a schema each: `_dense` and `_packed` turn their arguments into `_Arguments`, and the
rest is shared, with one backward op for both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime
from rooftile.ops.attention import arguments, parts, problem, row_sums
from rooftile.ops.attention.problem import AttentionConfig, Inputs


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """What either schema says of a call, with tensors in the caller's layout ("thd" is packed)."""

    op: str
    layout: str
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    starts_q: Tensor | None
    starts_k: Tensor | None
    longest: tuple[int, int]
    scoring: tuple[float | None, float, int, int]  # scale, softcap, left, right
    config: str = ""

    def check(self) -> None:
        """Raise unless shapes and dtypes fit together."""
        tensors = (self.q, self.k, self.v, self.layout, self.mask, self.alibi_slopes, self.sinks)
        arguments.check_tensors(self.op, *tensors)
        if (self.layout == "thd") != (self.starts_q is not None):
            raise ValueError(f"{self.op}: layout is {self.layout!r}, expected 'thd' with cu_seqlens_q and no other")
        if self.starts_q is not None:
            arguments.check_starts(self.op, self.starts_q, self.starts_k)
        sequences = self.q.shape[0] if self.starts_q is None else self.starts_q.shape[0] - 1
        arguments.check_slopes(self.op, self.alibi_slopes, sequences, self.q.shape[self.layout.index("h")])

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Memory for out and lse."""
        q, v = arguments.as_bhtd(self.q, self.layout), arguments.as_bhtd(self.v, self.layout)
        lse = torch.empty(q.shape[1 if self.layout == "thd" else 0 : 3], dtype=torch.float32, device=q.device)
        return arguments.from_bhtd(arguments.dense(q, v.shape[3]), self.layout), lse

    def inputs(self) -> Inputs:
        """What kernels read, as (batch, heads, tokens, dim)."""
        q, k, v = (arguments.as_bhtd(t, self.layout) for t in (self.q, self.k, self.v))
        s = arguments.scoring(q.shape[3], *self.scoring)
        vectors = (self.alibi_slopes, self.sinks, self.starts_q, self.starts_k)
        return arguments.inputs(q, k, v, s, self.mask, *vectors, *self.longest)


def _dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, alibi_slopes: Any, sinks: Any, scale: float | None, softcap: float,
    left: int, right: int, layout: str, config: str, deterministic: bool,
) -> _Arguments:  # fmt: skip
    scoring = (scale, softcap, left, right)
    return _Arguments("attention", layout, q, k, v, mask, alibi_slopes, sinks, None, None, (0, 0), scoring, config)


def _packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Any, alibi_slopes: Any, sinks: Any,
    longest_q: int, longest_k: int, scale: float | None, softcap: float, left: int, right: int, config: str,
    deterministic: bool,
) -> _Arguments:  # fmt: skip
    scoring, longest = (scale, softcap, left, right), (longest_q, longest_k)
    op, vectors = "attention_varlen", (alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k)
    return _Arguments(op, "thd", q, k, v, None, *vectors, longest, scoring, config)


def _clone(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _usable(x: Inputs, accepts: Callable[[Tensor], bool]) -> tuple[Inputs, list[str]]:
    """x with copies of what a kernel can't read as it is, and the names of those."""
    copied = [name for name in ("q", "k", "v") if not accepts(getattr(x, name))]
    vectors = ("alibi_slopes", "sinks", "starts_q", "starts_k")
    copied += [name for name in vectors if getattr(x, name) is not None and not getattr(x, name).is_contiguous()]
    copies: dict[str, Any] = {name: _clone(getattr(x, name)) for name in copied}
    return dataclasses.replace(x, **copies), copied


def _with_copies(
    start: Callable[..., None], copied: list[str], names: tuple[str, ...], layout: str
) -> Callable[..., None]:
    """`start`, called with dense copies of the tensors of those names; `layout` is that of the ones with heads."""

    def copy(t: Tensor) -> Tensor:
        return _clone(arguments.as_bhtd(t, layout) if t.dim() == len(layout) else t)

    return library.copying(start, {names.index(name): copy for name in copied})


# The forward

_READ = ("q", "k", "v", "out", "lse", "mask", "alibi_slopes", "sinks", "starts_q", "starts_k")


def prepare_forward(
    op: str, x: Inputs, out: Tensor, config: AttentionConfig | None = None, layout: str = "bhtd"
) -> Callable[..., None]:
    """The forward's launches for inputs like x, to be called with `q, k, v, out, lse, *x.tensors`.

    x and out are (batch, heads, tokens, dim) by strides; calls give tensors of `layout`. What the kernel can't read as
    it is, is copied at each call.
    """
    p, target = x.problem, runtime.target(x.q.device)
    if config is None:
        config = problem.choose_forward(p, target)
    else:
        reason = problem.can_implement_forward(p, config, target)
        if reason is not None:
            raise ValueError(f"{op}: config can't be launched: {reason}")
    if out.numel() == 0:
        return library.start_nothing
    module = problem.forward_module(config.kernel)
    assert module is not None
    x, copied = _usable(x, module.accepts)
    start = module.prepare(x, out, config)
    if x.starts_q is None:
        return _with_copies(start, copied, _READ, layout)
    clear = parts.prepare_zero_uncovered(out, True, x.starts_q, x.longest_q)

    def run(*tensors: Any) -> None:
        clear(tensors[3], tensors[4], tensors[8])
        start(*tensors)

    return _with_copies(run, copied, _READ, layout)


def _prepared(a: _Arguments) -> tuple[Callable[..., None], Callable[[], Tensor], Callable[[], Tensor]]:
    """For calls like that one: the launches, and what allocates out and lse."""
    if isinstance(a.q, FunctionalTensor):  # the choice of a kernel needs sizes: in a compiled graph the op stays whole
        raise launching.Untraceable("a kernel that is chosen by all sizes")
    a.check()
    out, lse = a.outputs()
    config = problem.decode(a.config)
    start = prepare_forward(a.op, a.inputs(), arguments.as_bhtd(out, a.layout), config, a.layout)
    return start, _allocator(out), _allocator(lse)


def _allocator(t: Tensor) -> Callable[[], Tensor]:
    """Memory for tensors like t. A partial of a function in C costs a call no Python function."""
    return functools.partial(torch.empty_strided, t.shape, t.stride(), dtype=t.dtype, device=t.device)


def _prepare_dense(*args: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    start, new_out, new_lse = _prepared(_dense(*args))

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Any, slopes: Any, sinks: Any, *_: Any) -> tuple[Tensor, Tensor]:
        out, lse = new_out(), new_lse()
        start(q, k, v, out, lse, mask, slopes, sinks, None, None)
        return out, lse

    return run


def _prepare_packed(*args: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    start, new_out, new_lse = _prepared(_packed(*args))

    def run(
        q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Any, alibi_slopes: Any, sinks: Any, *_: Any
    ) -> tuple[Tensor, Tensor]:
        out, lse = new_out(), new_lse()
        start(q, k, v, out, lse, None, alibi_slopes, sinks, starts_q, starts_q if starts_k is None else starts_k)
        return out, lse

    return run


def _fake(a: _Arguments) -> tuple[Tensor, Tensor]:
    a.check()
    return a.outputs()


# The backward

_WRITTEN = ("dq", "dk", "dv", "dsinks")
_READ_BACKWARD = ("q", "k", "v", "out", "lse", "dout", "dlse", *_WRITTEN, *_READ[5:])


@dataclasses.dataclass(frozen=True)
class _BackwardArguments:
    """What the backward's schema says of a call."""

    forward: _Arguments
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    needs: tuple[bool, ...]  # of dq, dk, dv and dsinks
    deterministic: bool
    portable: bool

    def check(self) -> None:
        """Raise unless shapes and dtypes fit together."""
        a = self.forward
        a.check()
        if self.out.shape != (*a.q.shape[:-1], a.v.shape[-1]):
            expected = (*a.q.shape[:-1], a.v.shape[-1])
            raise ValueError(f"{a.op}: out has shape {tuple(self.out.shape)}, expected {expected} to match q and v")
        library.check_same(a.op, "dout", self.dout, "out", self.out)
        rows = arguments.as_bhtd(a.q, a.layout).shape[1 if a.layout == "thd" else 0 : 3]
        for name, t in (("lse", self.lse), ("dlse", self.dlse)):
            if t is not None and (t.shape != rows or t.dtype != torch.float32):
                raise ValueError(
                    f"{a.op}: {name} has shape {tuple(t.shape)} and dtype {t.dtype}, expected {tuple(rows)} in float32"
                )

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Memory for dq, dk, dv and dsinks; empty where nobody asks."""
        a = self.forward

        def memory(t: Tensor, needed: bool) -> Tensor:
            if not needed:
                return torch.empty(0, dtype=t.dtype, device=t.device)
            t = arguments.as_bhtd(t, a.layout)
            return arguments.from_bhtd(arguments.dense(t, t.shape[3]), a.layout)

        like = a.q if a.sinks is None else a.sinks
        dsinks = torch.empty(like.shape[0] if self.needs[3] else 0, dtype=like.dtype, device=a.q.device)
        dq, dk, dv = (memory(t, needed) for t, needed in zip((a.q, a.k, a.v), self.needs, strict=False))
        return dq, dk, dv, dsinks


def _backward_arguments(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Any, mask: Any, alibi_slopes: Any,
    sinks: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, longest_q: int, longest_k: int, scale: float | None,
    softcap: float, left: int, right: int, layout: str, needs_dq: bool, needs_dk: bool, needs_dv: bool,
    needs_dsinks: bool, deterministic: bool, portable: bool,
) -> _BackwardArguments:  # fmt: skip
    longest, scoring = (longest_q, longest_k), (scale, softcap, left, right)
    forward = _Arguments(
        "attention_backward", layout, q, k, v, mask, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, longest, scoring
    )
    needs = (needs_dq, needs_dk, needs_dv, needs_dsinks and sinks is not None)
    return _BackwardArguments(forward, out, lse, dout, dlse, needs, deterministic, portable)


def prepare_backward(
    x: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    gradients: tuple[Tensor | None, ...],
    *,
    config: AttentionConfig | None = None,
    deterministic: bool = False,
    portable: bool = False,
    layout: str = "bhtd",
) -> Callable[..., None]:
    """The backward's launches for tensors like these.

    To be called with `q, k, v, out, lse, dout, dlse, *gradients, *x.tensors`. The gradients are dq, dk, dv and dsinks,
    None where nobody asks. All are (batch, heads, tokens, dim) by strides; calls give tensors of `layout`. What the
    kernels can't read as it is, is copied at each call.
    """
    dq, dk, dv, dsinks = gradients
    if min(x.q.numel(), x.k.numel(), x.v.numel()) == 0:
        return _prepare_empty(x, out, dout, dlse, dsinks)
    p, target = x.problem, runtime.target(x.q.device)
    config = problem.choose_backward(p, target, portable) if config is None else config
    module = problem.backward_module(config.kernel)
    assert module is not None
    x, copied = _usable(x, module.accepts)
    if not parts.has_unit_rows(out):
        out, copied = _clone(out), [*copied, "out"]
    if not module.accepts(dout):
        dout, copied = _clone(dout), [*copied, "dout"]
    if not lse.is_contiguous():
        copied = [*copied, "lse"]
    start = module.prepare(x, out, dout, dlse, gradients, config, deterministic)
    if x.starts_q is None or x.starts_k is None:
        return _with_copies(start, copied, _READ_BACKWARD, layout)
    clears = []
    for name, d, starts, longest in (
        ("dq", dq, x.starts_q, x.longest_q), ("dk", dk, x.starts_k, x.longest_k), ("dv", dv, x.starts_k, x.longest_k)
    ):  # fmt: skip
        if d is not None:
            places = _READ_BACKWARD.index(name), _READ_BACKWARD.index("starts_q" if d is dq else "starts_k")
            clears.append((parts.prepare_zero_uncovered(d, False, starts, longest), *places))

    def run(*tensors: Any) -> None:
        for clear, at, starts_at in clears:
            clear(tensors[at], tensors[at], tensors[starts_at])
        start(*tensors)

    return _with_copies(run, copied, _READ_BACKWARD, layout)


def _prepare_empty(
    x: Inputs, out: Tensor, dout: Tensor, dlse: Tensor | None, dsinks: Tensor | None
) -> Callable[..., None]:
    """Where there are no queries or no keys: nothing is seen, but a sink still has its share of each row."""
    of_sinks = None if dsinks is None else row_sums.prepare_delta(out, dout, dlse, x.sinks, dsinks)

    def run(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, *rest: Any
    ) -> None:
        for t in rest[:3]:
            if t is not None:
                t.zero_()
        if of_sinks is not None:
            of_sinks(out, dout, dlse, torch.empty_like(lse), lse, rest[6], rest[3])

    return run


def _prepare_backward(*args: Any) -> Callable[..., tuple[Tensor, ...]]:
    if isinstance(args[0], FunctionalTensor):
        raise launching.Untraceable("a kernel that is chosen by all sizes")
    b = _backward_arguments(*args)
    b.check()
    a, memory = b.forward, b.gradients()
    views = [arguments.as_bhtd(t, a.layout) if t.dim() > 1 else t for t in memory]
    wanted = tuple(t if needed else None for t, needed in zip(views, b.needs, strict=True))
    out, dout = (arguments.as_bhtd(t, a.layout) for t in (b.out, b.dout))
    lse, dlse = (
        None if t is None else t.view(out.shape[:3]) if t.is_contiguous() else t.expand(out.shape[:3])
        for t in (b.lse, b.dlse)
    )
    assert lse is not None
    start = prepare_backward(
        a.inputs(), out, lse, dout, dlse, wanted,
        deterministic=b.deterministic, portable=b.portable, layout=a.layout,
    )  # fmt: skip
    new = tuple(map(_allocator, memory))
    needs_dq, needs_dk, needs_dv, needs_dsinks = b.needs

    def run(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Any, *rest: Any) -> Any:
        mask, slopes, sinks, starts_q, starts_k = rest[:5]
        dq, dk, dv, dsinks = new[0](), new[1](), new[2](), new[3]()
        start(
            q, k, v, out, lse, dout, dlse,
            dq if needs_dq else None, dk if needs_dk else None, dv if needs_dv else None,
            dsinks if needs_dsinks else None,
            mask, slopes, sinks, starts_q, starts_q if starts_k is None else starts_k,
        )  # fmt: skip
        return dq, dk, dv, dsinks

    return run


def _fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b = _backward_arguments(*args)
    b.check()
    return b.gradients()


_backward_op = library.define(
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, Tensor? mask, "
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt longest_q, "
    "SymInt longest_k, float? scale, float softcap, int left, int right, str layout, bool needs_dq, bool needs_dk, "
    "bool needs_dv, bool needs_dsinks, bool deterministic, bool portable) -> (Tensor, Tensor, Tensor, Tensor)",
    prepare=_prepare_backward,
    fake=_fake_backward,
)


# Derivatives


def _differentiated(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, sinks_at: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """dq, dk, dv and dsinks, of those that are asked for. `sinks_at` is the index of the sinks in the op's schema."""
    q, k, v, out, lse, mask, slopes, sinks, starts_q, starts_k = ctx.saved_tensors
    asked = ctx.needs_input_grad[1:]
    needs = (asked[0], asked[1], asked[2], asked[sinks_at])
    if (dout is None and dlse is None) or not any(needs):
        return None, None, None, None
    if dout is None:
        dout = torch.zeros_like(out)
    inputs = (q, k, v, out, lse, dout, dlse, mask, slopes, sinks, starts_q, starts_k)
    dq, dk, dv, dsinks = _backward_op(*inputs, *ctx.scoring, ctx.layout, *needs, ctx.deterministic, ctx.portable)
    return dq if needs[0] else None, dk if needs[1] else None, dv if needs[2] else None, dsinks if needs[3] else None


def _save_dense(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, alibi_slopes, sinks, scale, softcap, left, right, ctx.layout, config, ctx.deterministic = inputs
    ctx.portable = config.startswith("portable")  # the gradients are, too
    ctx.scoring = (0, 0, scale, softcap, left, right)
    ctx.save_for_backward(q, k, v, *outputs, mask, alibi_slopes, sinks, None, None)


def _save_packed(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts_q, starts_k, alibi_slopes, sinks, *scoring, config, ctx.deterministic = inputs
    ctx.portable = config.startswith("portable")
    ctx.scoring, ctx.layout = scoring, "thd"
    ctx.save_for_backward(q, k, v, *outputs, None, alibi_slopes, sinks, starts_q, starts_k)


def _backward_of_dense(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    dq, dk, dv, dsinks = _differentiated(ctx, dout, dlse, 5)
    return dq, dk, dv, None, None, dsinks, *(None,) * 7


def _backward_of_packed(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
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
    prepare=_prepare_dense,
    fake=lambda *args: _fake(_dense(*args)),
    autograd=library.Autograd(_save_dense, _backward_of_dense, _refuse_gradients("attention", mask=3, alibi_slopes=4)),
)

attention_varlen_op = library.define(
    "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? alibi_slopes, "
    "Tensor? sinks, SymInt longest_q, SymInt longest_k, float? scale, float softcap, int left, int right, str config, "
    "bool deterministic) -> (Tensor, Tensor)",
    prepare=_prepare_packed,
    fake=lambda *args: _fake(_packed(*args)),
    autograd=library.Autograd(_save_packed, _backward_of_packed, _refuse_gradients("attention_varlen", alibi_slopes=5)),
)
