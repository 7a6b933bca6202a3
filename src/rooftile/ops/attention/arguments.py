"""The arguments of attention: how the public functions pass them to the ops, and the checks of the tensors."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import torch
from torch import Tensor

from rooftile import library, runtime
from rooftile.ops.attention.problem import INVARIANT, AttentionConfig, Inputs, Invariant, Scoring, encode

Layout = Literal["bhtd", "bthd"]
LONGEST_HEAD = 256
Window = int | tuple[int | None, int | None]


# The arguments of the public functions


def scoring_arguments(
    op: str, causal: bool, scale: float | None, window: Window | None, softcap: float | None, return_lse: bool
) -> tuple[float | None, float, int, int]:
    """scale, softcap, left and right as the schemas take them; return_lse is checked alone."""
    if window is None and softcap is None and scale is None and type(causal) is type(return_lse) is bool:
        return None, 0.0, -1, 0 if causal else -1
    library.check_flags(op, causal=causal, return_lse=return_lse)
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None and (not isinstance(number, (float, int)) or isinstance(number, bool)):
            raise TypeError(f"{op}: {name} is {library.named(number)}, expected a number or None")
    if scale is not None and not abs(scale) < 2.0**127:
        raise ValueError(f"{op}: scale is {scale}, expected a finite number below 2^127")
    if softcap and not 2.0**-64 <= softcap < 2.0**64:
        raise ValueError(
            f"{op}: softcap is {softcap}, expected a positive number from 2^-64 to 2^64, or None or 0 for none"
        )
    left, right = _window(op, window, causal)
    return None if scale is None else float(scale), float(softcap or 0.0), left, right


def _window(op: str, window: Window | None, causal: bool) -> tuple[int, int]:
    """How many keys before and after its own position a query sees; -1 is no limit."""
    if window is None:
        return -1, 0 if causal else -1
    library.check_window(op, *(window if isinstance(window, (tuple, list)) else (window,)))
    wrong = TypeError(f"{op}: window is {window!r}, expected an int, (left, right) of ints or None, or None")
    if isinstance(window, int) and not isinstance(window, bool):
        if window < 1:
            raise ValueError(f"{op}: window is {window}, expected at least 1: the query's own position")
        return window - 1, 0 if causal else window - 1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise wrong
    sides = []
    for side in window:
        if side is not None and (not isinstance(side, int) or isinstance(side, bool)):
            raise wrong
        if side is not None and side < -1:
            raise ValueError(f"{op}: window is {window!r}, expected sides of 0 or more, or None (or -1) for no limit")
        sides.append(-1 if side is None else side)
    return sides[0], 0 if causal else sides[1]


def encoded(op: str, config: AttentionConfig | Invariant, *, invariant: bool = False) -> str:
    """The configuration as the schema of an op takes it. `invariant`: whether the op takes "invariant"."""
    if invariant and config == INVARIANT:
        return INVARIANT
    if type(config) is not AttentionConfig:  # a BackwardConfig is not one of the forward
        accepted = (
            f"rooftile.AttentionConfig, {INVARIANT!r} or None" if invariant else "rooftile.AttentionConfig or None"
        )
        raise TypeError(f"{op}: config is {library.named(config)}, expected {accepted}")
    # Dynamo traces the function itself, and warns of a cache around it.
    return (encode.__wrapped__ if torch.compiler.is_compiling() else encode)(config)


def is_deterministic(op: str, asked: bool | None) -> bool:
    """Whether gradients have to be bit-identical on every run."""
    if asked is None:
        return torch.are_deterministic_algorithms_enabled()
    if not isinstance(asked, bool):
        raise TypeError(f"{op}: deterministic is {asked!r}, expected True, False or None")
    return asked


def checked_starts(op: str, side: str, starts: Any, like: Tensor, longest: int | None) -> tuple[Tensor, int]:
    """Where packed sequences begin, on the device of `like`, and the length of the longest.

    A list, or a tensor on the CPU, is checked and copied. The kernels clamp a tensor on the device, for which the host
    would have to wait. A longest of 0 is not known.
    """
    name, longest_name, total = f"cu_seqlens_{side}", f"max_seqlen_{side}", like.shape[0] if like.dim() else 0
    check_longest(op, longest_name, longest)
    if isinstance(starts, (list, tuple)):
        if not all(isinstance(n, int) for n in starts):
            raise TypeError(f"{op}: {name} is a {type(starts).__name__} with elements that are not ints")
        values: list[int] | None = list(starts)
        if any(abs(n) >= 2**31 for n in starts):
            raise ValueError(f"{op}: {name} has an element of 2^31 or more")
        starts = torch.tensor(values, dtype=torch.int32, device="cpu")
    elif isinstance(starts, Tensor):
        known = type(starts) is Tensor and starts.device.type == "cpu" and not torch.compiler.is_compiling()
        values = starts.tolist() if known and starts.dim() == 1 and starts.dtype == torch.int32 else None
    else:
        raise TypeError(f"{op}: {name} is {library.named(starts)}, expected an int32 tensor or a list of ints")
    check_dimensions(op, side, like, "thd")
    if starts.device.type == "cpu" and like.device.type != "cpu" and starts.dtype == torch.int32:
        starts = _to_device(starts, like.device)
    if values is None:
        return starts, longest or 0
    if not values or values[0] != 0:
        raise ValueError(f"{op}: {name} begins with {values[:1]}, expected 0")
    for i, (a, b) in enumerate(itertools.pairwise(values)):
        if b < a:
            raise ValueError(f"{op}: {name} decreases from {a} to {b} at {i + 1}, expected numbers that don't")
    if values[-1] != total:
        raise ValueError(f"{op}: {name} ends with {values[-1]}, expected {total}, the number of packed tokens")
    found = max([0, *(b - a for a, b in itertools.pairwise(values))])
    if longest is not None and longest < found:
        raise ValueError(
            f"{op}: {longest_name} is {longest}, expected {found} at least, the longest sequence of {name}"
        )
    return starts, found


def _to_device(starts: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, for which the host does not wait."""
    if runtime.MODE is not runtime.Mode.GPU or device.type != "cuda" or torch.compiler.is_compiling():
        return starts.to(device)
    if torch.cuda.is_current_stream_capturing():  # PyTorch raises: a replay would read the host's memory again
        return starts.to(device)
    return starts.pin_memory().to(device, non_blocking=True)


def check_alike(op: str, q: Tensor, k: Tensor, longest_q: int, longest_k: int | None) -> None:
    """Raise unless k can be packed as q is, without cu_seqlens_k."""
    if q.dim() and k.dim() and k.shape[0] != q.shape[0]:
        raise ValueError(
            f"{op}: cu_seqlens_k is None and k has {k.shape[0]} tokens, expected {q.shape[0]}, as many as q, or where "
            "its sequences begin"
        )
    check_longest(op, "max_seqlen_k", longest_k)
    if longest_k and longest_k < longest_q:
        raise ValueError(
            f"{op}: max_seqlen_k is {longest_k}, expected {longest_q} at least, the longest sequence of q, as "
            "cu_seqlens_k is None"
        )


def check_longest(op: str, name: str, longest: int | None) -> None:
    if longest is None or isinstance(longest, torch.SymInt):
        return
    if not isinstance(longest, int) or isinstance(longest, bool):
        raise TypeError(f"{op}: {name} is {library.named(longest)}, expected an int or None")
    if longest < 0:
        raise ValueError(f"{op}: {name} is {longest}, expected 0 or more")


# The tensors of the ops


def check_tensors(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Raise unless shapes and dtypes fit together. `layout` is "thd" for packed sequences."""
    library.check_floating(op, q=q, k=k, v=v, alibi_slopes=alibi_slopes, sinks=sinks)
    if layout != "thd":
        library.check_layout(op, layout)
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_dimensions(op, name, t, layout)
        if t.dtype != q.dtype:
            raise TypeError(f"{op}: {name} has dtype {t.dtype}, expected {q.dtype} to match q")
        if not 1 <= t.shape[-1] <= LONGEST_HEAD:
            raise ValueError(f"{op}: {name} has a head_dim of {t.shape[-1]}, expected 1 to {LONGEST_HEAD}")
    heads, tokens = layout.index("h"), layout.index("t")
    if k.shape[-1] != q.shape[-1] or ("b" in layout and k.shape[0] != q.shape[0]):
        expected = tuple(
            n if d in "bd" else {"h": "kv_heads", "t": "keys"}[d] for d, n in zip(layout, q.shape, strict=True)
        )
        raise ValueError(f"{op}: k has shape {tuple(k.shape)}, expected {library.shown(expected)} to match q")
    if v.shape[:-1] != k.shape[:-1]:
        expected = (*k.shape[:-1], "value_dim")
        raise ValueError(f"{op}: v has shape {tuple(v.shape)}, expected {library.shown(expected)} to match k")
    q_heads, kv_heads = q.shape[heads], k.shape[heads]
    if q_heads % kv_heads if kv_heads else q_heads:
        raise ValueError(f"{op}: q has {q_heads} heads, expected a multiple of the {kv_heads} heads of k and v")
    check_per_head(op, q_heads, sinks=sinks)
    if mask is None:
        return
    if mask.dtype is not torch.bool and mask.dtype not in library.FLOATS:
        raise TypeError(
            f"{op}: mask has dtype {mask.dtype}, expected torch.bool (True is seen), or float32, float16 or bfloat16 "
            "(added to the scores)"
        )
    scores = (q.shape[0], q_heads, q.shape[tokens], k.shape[tokens])
    trailing = scores[len(scores) - min(mask.dim(), 4) :]
    if mask.dim() > 4 or any(m not in (1, n) for m, n in zip(mask.shape, trailing, strict=True)):
        raise ValueError(
            f"{op}: mask has shape {tuple(mask.shape)}, expected one that broadcasts to {scores}, (batch, heads of q, "
            "queries, keys)"
        )


def check_dimensions(op: str, name: str, t: Tensor, layout: str) -> None:
    if t.dim() != len(layout):
        names = ", ".join({"b": "batch", "h": "heads", "t": "tokens", "d": "head_dim"}[d] for d in layout)
        raise ValueError(f"{op}: {name} has shape {tuple(t.shape)}, expected {len(layout)} dimensions ({names})")


def check_per_head(op: str, q_heads: int, **tensors: Tensor | None) -> None:
    for name, per_head in tensors.items():
        if per_head is not None and tuple(per_head.shape) != (q_heads,):
            raise ValueError(
                f"{op}: {name} has shape {tuple(per_head.shape)}, expected ({q_heads},), a number for each head of q"
            )


def check_slopes(op: str, slopes: Tensor | None, sequences: int, q_heads: int) -> None:
    if slopes is not None and tuple(slopes.shape) not in ((q_heads,), (sequences, q_heads)):
        raise ValueError(
            f"{op}: alibi_slopes has shape {tuple(slopes.shape)}, expected ({q_heads},), a number for each head of q, "
            f"or ({sequences}, {q_heads}), for each sequence and head"
        )


def check_starts(op: str, starts_q: Tensor, starts_k: Tensor | None) -> None:
    for name, starts in (("cu_seqlens_q", starts_q), ("cu_seqlens_k", starts_k)):
        if starts is None:
            continue
        if starts.dtype != torch.int32:
            raise TypeError(f"{op}: {name} has dtype {starts.dtype}, expected torch.int32")
        if starts.dim() != 1 or starts.shape[0] < 1 or starts.shape != starts_q.shape:
            expected = (
                "(sequences + 1,)" if name == "cu_seqlens_q" else f"{tuple(starts_q.shape)} to match cu_seqlens_q"
            )
            raise ValueError(f"{op}: {name} has shape {tuple(starts.shape)}, expected {expected}")


def as_bhtd(x: Tensor, layout: str) -> Tensor:
    """A view of x as (batch, heads, tokens, dim). Packed sequences are one batch entry."""
    if layout == "bthd":
        return x.transpose(1, 2)
    return x.transpose(0, 1)[None] if layout == "thd" else x


def from_bhtd(x: Tensor, layout: str) -> Tensor:
    """The inverse of `as_bhtd`."""
    if layout == "bthd":
        return x.transpose(1, 2)
    return x[0].transpose(0, 1) if layout == "thd" else x


def dense(x: Tensor, dim: int) -> Tensor:
    """Memory like x (batch, heads, tokens, ...) with another last dimension, in (B, T, H, D) order if x is."""
    batch, heads, tokens, _ = x.shape
    if x.stride(1) < x.stride(2):
        return torch.empty((batch, tokens, heads, dim), dtype=x.dtype, device=x.device).transpose(1, 2)
    return torch.empty((batch, heads, tokens, dim), dtype=x.dtype, device=x.device)


def inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    starts_q: Tensor | None = None,
    starts_k: Tensor | None = None,
    longest_q: int = 0,
    longest_k: int = 0,
) -> Inputs:
    """The inputs of the kernels, for q, k and v as (batch, heads, tokens, dim)."""
    batch, heads, n_q, _ = q.shape
    n_k = k.shape[2]
    packed = starts_q is not None
    return Inputs(
        q,
        k,
        v,
        scoring,
        mask=None if mask is None else mask.expand(batch, heads, n_q, n_k),
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        starts_q=starts_q,
        starts_k=starts_q if starts_k is None else starts_k,
        longest_q=min(longest_q, n_q) if longest_q and packed else n_q,
        longest_k=min(longest_k, n_k) if longest_k and packed else n_k,
    )


def scoring(head_dim: int, scale: float | None, softcap: float, left: int, right: int) -> Scoring:
    """The scoring of those arguments of a schema.

    A window of 2^30 or more is none: no sequence reaches it, and its sums with positions would pass 2^31.
    """
    left, right = (-1 if side >= 1 << 30 else side for side in (left, right))
    return Scoring(1.0 / math.sqrt(head_dim) if scale is None else scale, softcap, left, right)
