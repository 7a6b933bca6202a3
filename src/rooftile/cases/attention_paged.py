"""Attention of prompts, or parts of prompts, to a cache in pages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.attention import TOLERANCES, on_gpu, pairs
from rooftile.cases.case import Direction, OpCase, Peer, Point, Unsupported
from rooftile.cases.decode_attention import CACHES, SCALES, drawn_cache, flashinfer
from rooftile.cases.draw import integers, normal
from rooftile.library import cdiv
from rooftile.ops.attention import attention_paged, attention_varlen
from rooftile.reference import attention_paged as reference
from rooftile.reference.decode_attention import dequantized


def point(
    sequences: int,
    chunk: int,
    cached: int,
    heads: tuple[int, int] = (32, 8),
    dims: tuple[int, int] = (128, 128),
    *,
    singles: int = 0,
    page: int = 64,
    cache: str = "own",
    scales: str = "none",
    ragged: bool = False,
    sinks: bool = False,
    bounded: bool = False,
    latent: bool = False,
    **options: object,
) -> Point:
    """`sequences` with `chunk` queries each, the last of `cached` keys, and `singles` more with one query.

    `bounded`: the call says how many queries a sequence has at most. `latent`: values are the first elements of keys.

    Of `ragged` ones, both numbers differ: the queries, from sequence to sequence fewer, and the keys are drawn.
    """
    sizes = {
        "batch": sequences + singles,
        "singles": singles,
        "seq_len": chunk,
        "cached": cached,
        "heads": heads[0],
        "kv_heads": heads[1],
        "head_dim": dims[0],
        "value_dim": dims[1],
        "page": page,
        "cache": CACHES.index(cache),
        "scales": SCALES.index(scales),
        "ragged": int(ragged),
        "sinks": int(sinks),
        "latent": int(latent),
    }
    if latent:
        options |= {"v_cache": None, "head_dim_v": dims[1]}
    label = f"{sequences} x {chunk} of {cached} H{heads[0]}/{heads[1]} D{dims[0]}" + f"/{dims[1]}" * (
        dims[0] != dims[1]
    )
    label += f" page {page}" + f" and {singles} x 1" * (singles > 0) + " ragged" * ragged
    label += (f" {cache} by {scales}" if cache != "own" else "") + " sinks" * sinks + " latent" * latent
    return Point(label, sizes, {"max_seqlen_q": chunk, **options} if bounded else options)


def _jitter(point: Point) -> int:
    """By how many queries the drawn end of a ragged sequence is off."""
    return point["ragged"] * (point["seq_len"] // (3 * (point["batch"] - point["singles"])))


def _queries(point: Point) -> list[int]:
    """Of each sequence; drawn ones differ by up to twice `_jitter`."""
    n, chunk = point["batch"] - point["singles"], point["seq_len"]
    many = [chunk - (i * chunk // n if point["ragged"] else 0) for i in range(n)]
    return many + [1] * point["singles"]


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    n_q, batch = _queries(point), point["batch"]
    per = cdiv(point["cached"], point["page"])
    starts = torch.tensor([0, *n_q], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    off, inner = _jitter(point), batch - point["singles"] - 1
    starts[1 : 1 + inner] += (integers(2 * off + 1, (inner,), device, generator) - off).int()
    rows = batch * per, point["page"]
    drawn = {"q": normal((sum(n_q), point["heads"], point["head_dim"]), dtype, device, generator)}
    heads, kind, by = point["kv_heads"], CACHES[point["cache"]], SCALES[point["scales"]]
    layout = str(point.options.get("cache_layout", "bthd"))
    for name, dim in (("k", point["head_dim"]), ("v", point["value_dim"])):
        if f"{name}_cache" in point.options:  # None: values are in the keys
            continue
        shape = (rows[0], heads, rows[1], dim) if layout == "bhtd" else (*rows, heads, dim)
        drawn[f"{name}_cache"], scale = drawn_cache(shape, heads, kind, by, dtype, device, generator)
        if scale is not None:
            drawn[f"{name}_scale"] = scale
    shuffled = (
        torch.empty(rows[0], device=device)
        if device.type == "meta"
        else torch.randperm(rows[0], device=device, generator=generator)
    )
    lengths = torch.full((batch,), point["cached"], device=device)
    if point["ragged"]:
        lengths = integers(point["cached"] + 1, (batch,), device, generator)
    drawn |= {"page_table": shuffled.int().view(batch, per), "lengths": lengths.int(), "cu_seqlens_q": starts}
    if point["sinks"]:
        drawn["sinks"] = normal((point["heads"],), dtype, device, generator)
    return drawn


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """q, out and the cache with its scales and pages, which is read once. Drawn lengths count as whole."""
    batch, wide = point["batch"], point["head_dim"] + point["value_dim"]
    cached, per_cache = (point["head_dim"], 4) if point["latent"] else (wide, 8)
    keys = batch * cdiv(point["cached"], point["page"]) * point["page"] * point["kv_heads"]
    scales = {"none": 0, "tensor": 1, "head": point["kv_heads"], "token": keys}[SCALES[point["scales"]]]
    moved = itemsize * sum(_queries(point)) * point["heads"] * wide
    moved += keys * cached * (1 if point["cache"] else itemsize)
    return moved + per_cache * scales + 4 * batch * (2 + cdiv(point["cached"], point["page"]))


def _flops(point: Point, direction: Direction) -> int:
    options = {"causal": True, **point.options}
    seen = sum(pairs(n, point["cached"], options) for n in _queries(point))
    return int(2 * point["heads"] * (point["head_dim"] + point["value_dim"]) * seen)


# Peers

_PLAIN = {"max_seqlen_q", "cache_layout", "scale", "v_cache", "head_dim_v"}


def _plain(point: Point, name: str) -> None:
    on_gpu(name)
    if point["ragged"]:
        raise Unsupported(f"{name} is compared at full lengths")
    if point["sinks"] or set(point.options) - _PLAIN:
        raise Unsupported(f"{name} has only the plain form")


def _gathered(
    point: Point, k_cache: Tensor, v_cache: Tensor | None, page_table: Tensor, dtype: torch.dtype, scales: Any
) -> list[Tensor]:
    layout = str(point.options.get("cache_layout", "bthd"))
    if v_cache is None:
        k = dequantized(k_cache, scales[0], page_table, layout, dtype)[:, :, : point["cached"]]
        return [k, k[..., : point["value_dim"]]]
    return [
        dequantized(cache, scale, page_table, layout, dtype)[:, :, : point["cached"]]
        for cache, scale in zip((k_cache, v_cache), scales, strict=True)
    ]


def _sdpa(point: Point) -> Callable[..., Any]:
    """What a server without such a kernel does at every step: gather the pages, then SDPA with a mask."""
    from torch.nn.functional import scaled_dot_product_attention

    _plain(point, "SDPA over gathered pages")

    def run(
        q: Tensor, k_cache: Tensor, v_cache: Tensor | None, page_table: Tensor, lengths: Tensor, cu_seqlens_q: Tensor,
        k_scale: Tensor | None = None, v_scale: Tensor | None = None, scale: float | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        k, v = _gathered(point, k_cache, v_cache, page_table, q.dtype, (k_scale, v_scale))
        padded, at = reference.unpacked(q, cu_seqlens_q, point["seq_len"])
        n_q = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
        seen = reference.seen_keys(n_q, lengths, point["seq_len"], k.shape[2], True, None)[:, None]
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(
            padded.transpose(1, 2), k, v, attn_mask=seen, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2).flatten(0, 1)[at]

    return run


def _dense(point: Point) -> Callable[..., Any]:
    """`attention_varlen` over keys that lie together: gathered before the measurement, once for each set of inputs."""
    name = "attention_varlen over keys that lie together"
    _plain(point, name)
    if point["latent"]:
        raise Unsupported(f"{name} takes heads of up to 256")
    together: dict[int, tuple[Tensor, ...]] = {}
    attend: Any = attention_varlen

    def run(
        q: Tensor, k_cache: Tensor, v_cache: Tensor | None, page_table: Tensor, lengths: Tensor, cu_seqlens_q: Tensor,
        k_scale: Tensor | None = None, v_scale: Tensor | None = None, scale: float | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        key = k_cache.data_ptr()
        if key not in together:
            k, v = _gathered(point, k_cache, v_cache, page_table, q.dtype, (k_scale, v_scale))
            starts = torch.arange(point["batch"] + 1, device=q.device, dtype=torch.int32) * point["cached"]
            together[key] = (*(t.transpose(1, 2).flatten(0, 1).contiguous() for t in (k, v)), starts)
        k, v, starts = together[key]
        longest = {"max_seqlen_q": point["seq_len"], "max_seqlen_k": point["cached"]}
        return attend(q, k, v, cu_seqlens_q, starts, **longest, causal=True, scale=scale)

    return run


def _flashinfer(point: Point) -> Callable[..., Any]:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    _plain(point, "FlashInfer")
    return flashinfer(point, BatchPrefillWithPagedKVCacheWrapper, causal=True)


_SMALL: dict[str, Any] = {"heads": (4, 2), "dims": (32, 32)}
_TINY = (
    point(3, 20, 70, **_SMALL, page=16, ragged=True),
    point(2, 9, 40, (2, 2), (80, 48), page=32, singles=2, window=17, scale=0.2, cache_layout="bhtd"),
    point(1, 33, 33, (4, 1), (16, 16), page=128, softcap=2.0, sinks=True),
    point(2, 17, 40, (2, 1), (32, 64), page=64, cache="fp8", scales="head", causal=False, window=(9, 3)),
    point(2, 17, 70, **_SMALL, page=16, cache="int8", scales="token"),
    point(2, 5, 40, (2, 1), (20, 9), page=64, cache="fp8", scales="token", softcap=4.0, ragged=True),
    point(2, 20, 70, (4, 1), (48, 32), page=16, singles=1, ragged=True, latent=True),
    point(2, 9, 40, (2, 1), (32, 20), page=32, cache="int8", scales="token", latent=True),
    point(2, 9, 40, (2, 1), page=16, singles=1),  # FlashInfer takes it
)
_EDGE = (
    point(1, 1, 1, (1, 1), (1, 1), page=16),
    point(1, 129, 129, (1, 1), (24, 24), page=16),
    point(4, 7, 16, (6, 2), (16, 40), page=16, ragged=True),
    point(2, 40, 9, (2, 1), (16, 16), page=32),
    point(2, 3, 65, (2, 1), (94, 32), page=32, cache="int8", scales="tensor", cache_layout="bhtd"),
    point(2, 3, 65, (2, 1), (32, 32), page=16, cache="fp8"),
)
_served = functools.partial(point, bounded=True)
_LLM = (
    *(_served(8, n, 4096) for n in (16, 128, 512, 2048)),
    _served(4, 512, 8192),
    _served(1, 2048, 8192),
    _served(1, 8192, 8192),
    _served(4, 512, 4096, page=16),
    _served(4, 512, 4096, page=256),
    _served(2, 512, 4096, singles=32),
    _served(4, 512, 4096, cache="fp8", scales="head"),
    _served(4, 512, 4096, cache="int8", scales="token"),
    _served(4, 512, 4096, (16, 1), (576, 512), latent=True),  # also in `latent`: measured once
)
# DeepSeek-V3, all heads, or those of one of eight GPUs: a prompt, parts of prompts, and proposed tokens.
_LATENT = tuple(
    _served(n, t, cached, (h, 1), (576, 512), latent=True)
    for h in (16, 128)
    for n, t, cached in ((1, 4096, 4096), (4, 512, 4096), (16, 64, 8192), (1, 32, 32768))
)

CASES = (
    OpCase(
        name="attention_paged",
        formula="attention of each of several packed prompts, or parts of prompts, to its keys in a paged cache",
        function=attention_paged,
        reference=reference.attention_paged,
        eager=reference.eager,
        inputs=_inputs,
        outputs=("out",),
        grads=(),
        nbytes=_nbytes,
        flops=_flops,
        tolerances={dtype: {"forward": found["forward"]} for dtype, found in TOLERANCES.items()},
        roof="gemm",
        # As attention: the online softmax adds in the order of the keys, and eager's GEMMs add in a tree.
        float32_floor=1e-6,
        # What a program begins and ends with, and where its blocks of keys are: 20 bytes on NVIDIA's targets. On gfx942
        # scalar registers spill to lanes of vector registers, as in attention.
        spills=192,
        sets={"tiny": _TINY, "edge": _EDGE, "llm": _LLM, "latent": _LATENT},
        peers=(Peer("gather + sdpa", _sdpa), Peer("dense", _dense), Peer("flashinfer", _flashinfer)),
    ),
)
