"""Attention of packed sequences."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.attention import TOLERANCES, on_gpu, pairs, without
from rooftile.cases.case import Direction, OpCase, Peer, Point, Unsupported
from rooftile.cases.draw import integers, normal
from rooftile.ops.attention import attention, attention_varlen
from rooftile.reference import attention as reference

# Growing: each sequence is longer than the previous one. One long: half of the tokens are one sequence, in the middle
# of others of one length.
LENGTHS = ("growing", "equal", "one long")


def point(
    sequences: int,
    heads: int,
    seq_len: int,
    dim: int,
    *,
    kv_heads: int | None = None,
    more_keys: int = 0,
    sinks: bool = False,
    lengths: str = "growing",
    bounded: bool = False,
    **options: object,
) -> Point:
    """`seq_len` queries in all; each sequence has `more_keys` more keys than queries.

    `lengths` is one of `LENGTHS`. `bounded`: the call says how many queries a sequence has at most.
    """
    dims = {
        "batch": sequences,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "seq_len": seq_len,
        "more_keys": more_keys,
        "head_dim": dim,
        "has_sinks": int(sinks),
        "lengths": LENGTHS.index(lengths),
    }
    label = f"{sequences} of {seq_len}"  # in all; "8 x 2048" is 2048 each
    if lengths == "equal":
        label = f"{sequences} x {seq_len // sequences}"
    elif lengths == "one long":
        label = f"1 x {seq_len // 2} and {sequences - 1} x {seq_len // 2 // (sequences - 1)}"
    label += f" H{heads}" + (f"/{kv_heads}" if kv_heads else "") + f" D{dim}"
    label += f" {more_keys} more keys" if more_keys else ""
    found = Point(label + " sinks" * sinks, dims, options)
    return dataclasses.replace(found, options={**options, "max_seqlen_q": _longest(found)}) if bounded else found


def starts_about(point: Point) -> list[int]:
    """Where sequences begin. Drawn starts differ by up to `_jitter`."""
    n, total, lengths = point["batch"], point["seq_len"], LENGTHS[point["lengths"]]
    if lengths == "growing":
        return [total * i * (i + 1) // (n * (n + 1)) for i in range(n + 1)]
    if lengths == "equal":
        return [total // n * i for i in range(n + 1)]
    short = total // 2 // (n - 1)
    return [short * i for i in range(n // 2 + 1)] + [total - short * i for i in reversed(range(n - n // 2))]


def _jitter(point: Point) -> int:
    growing = LENGTHS[point["lengths"]] == "growing"
    return growing * (point["seq_len"] // (2 * point["batch"] * (point["batch"] + 1)))


def _longest(point: Point) -> int:
    """An upper bound of the longest drawn sequence."""
    n, total = point["batch"], point["seq_len"]
    if LENGTHS[point["lengths"]] == "growing":
        return total * 2 // (n + 1) + total // (n * (n + 1)) + 1
    return max(b - a for a, b in itertools.pairwise(starts_about(point)))


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    heads, kv_heads, n_q, dim = point["heads"], point["kv_heads"], point["seq_len"], point["head_dim"]
    n_k = n_q + point["batch"] * point["more_keys"]
    off = _jitter(point)
    starts = torch.tensor(starts_about(point), dtype=torch.int32, device=device)
    starts[1:-1] += (integers(2 * off + 1, (point["batch"] - 1,), device, generator) - off).int()
    found = {
        "q": normal((n_q, heads, dim), dtype, device, generator),
        "k": normal((n_k, kv_heads, dim), dtype, device, generator),
        "v": normal((n_k, kv_heads, dim), dtype, device, generator),
        "cu_seqlens_q": starts,
    }
    if point["more_keys"]:
        more = torch.arange(point["batch"] + 1, dtype=torch.int32, device=device) * point["more_keys"]
        found["cu_seqlens_k"] = starts + more
    if point["has_sinks"]:
        found["sinks"] = normal((heads,), dtype, device, generator)
    return found


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    n_q, heads = point["seq_len"], point["heads"]
    n_k = n_q + point["batch"] * point["more_keys"]
    q, kv = heads * n_q, 2 * point["kv_heads"] * n_k
    starts = 4 * (point["batch"] + 1)
    return starts + itemsize * point["head_dim"] * (2 * q + kv if direction == "forward" else 4 * q + 2 * kv)


def _flops(point: Point, direction: Direction) -> int:
    starts = starts_about(point)
    lengths = (b - a for a, b in itertools.pairwise(starts))
    seen = sum(pairs(n, n + point["more_keys"], point.options) for n in lengths)
    forward = 4 * point["heads"] * point["head_dim"] * seen
    return int(forward if direction == "forward" else 2.5 * forward)


Packed = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, bool, float | None], Tensor]


def _packed(name: str, attend: Packed, point: Point) -> Callable[..., Any]:
    """`attend(q, k, v, starts_q, starts_k, longest_q, longest_k, causal, scale)`, as the case calls it."""
    on_gpu(name)
    without(point, name, "softcap", "window", "alibi", "sinks")
    longest = _longest(point)

    def run(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, **options: Any
    ) -> Tensor:
        if q.dtype == torch.float32:
            raise Unsupported(f"{name} takes float16 and bfloat16")
        ends = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        causal, scale = bool(options.get("causal")), options.get("scale")
        return attend(q, k, v, cu_seqlens_q, ends, longest, longest + point["more_keys"], causal, scale)

    return run


def _flash(point: Point) -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn

    def attend(
        q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, max_q: int, max_k: int, causal: bool,
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        window = (-1, 0 if causal else -1)
        out = varlen_attn(q, k, v, starts_q, starts_k, max_q, max_k, scale=scale, window_size=window)
        return out[0] if isinstance(out, tuple) else out

    if point["heads"] != point["kv_heads"]:
        raise Unsupported("PyTorch's varlen_attn takes as many heads of keys in every version")
    return _packed("PyTorch's varlen_attn", attend, point)


def _flash4(point: Point) -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_varlen_func

    def attend(
        q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, max_q: int, max_k: int, causal: bool,
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        out = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
            softmax_scale=scale, causal=causal,
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out

    return _packed("FlashAttention-4", attend, point)


def _dense(point: Point) -> Callable[..., Any]:
    """`attention` of the same tensors: sequences of one length are a batch."""
    if LENGTHS[point["lengths"]] != "equal" or point["more_keys"]:
        raise Unsupported("attention takes sequences of one length, with as many keys")
    attend: Any = attention

    def run(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int | None = None, **options: Any
    ) -> Tensor:  # fmt: skip
        batch = (t.unflatten(0, (point["batch"], -1)) for t in (q, k, v))
        return attend(*batch, layout="bthd", **options).flatten(0, 1)

    return run


_bounded = functools.partial(point, causal=True, bounded=True)
_SETS = {
    "tiny": (
        point(3, 4, 60, 32, sinks=True),
        point(3, 4, 48, 16, kv_heads=2, more_keys=5, causal=True),
        point(2, 2, 70, 40, causal=True, window=9),
    ),
    "edge": (
        point(1, 2, 65, 16),
        point(9, 2, 30, 24),
        point(3, 2, 0, 16),
        point(4, 2, 72, 16, lengths="one long", causal=True),
        point(18, 2, 72, 16, kv_heads=1, lengths="equal", causal=True),
    ),
    "llm": (
        *(_bounded(n, h, total, d) for n, total in ((4, 8192), (16, 16384)) for h, d in ((16, 128), (32, 64))),
        _bounded(65, 32, 16384, 128, kv_heads=8, lengths="one long"),
        _bounded(4096, 32, 16384, 128, kv_heads=8, lengths="equal"),
        _bounded(8, 16, 16384, 128, lengths="equal"),
        _bounded(4, 32, 16384, 64, lengths="equal"),
    ),
}

CASES = (
    OpCase(
        name="attention_varlen",
        formula="attention of each of several packed sequences",
        function=attention_varlen,
        reference=reference.attention_varlen,
        eager=reference.eager_varlen,
        inputs=_inputs,
        outputs=("out",),
        grads=("q", "k", "v", "sinks"),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        roof="gemm",
        # The online softmax adds in the order of the keys, and eager's GEMMs add in a tree. The lse from which the
        # backward computes the probabilities is rounded.
        float32_floor=1e-6,
        # As attention, and whole rows in the float32 backward on GPUs with 99 KB of shared memory.
        spills=512,
        sets=_SETS,
        peers=(Peer("flash", _flash), Peer("fa4", _flash4), Peer("dense", _dense)),
    ),
)
