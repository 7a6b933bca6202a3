from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.attention import on_gpu
from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Unsupported
from rooftile.cases.draw import integers, normal
from rooftile.ops.decode_attention import decode_attention
from rooftile.reference import decode_attention as reference

_FP32 = "products, exponentials and sums in float32, in another order; a GPU's exp2 is good to two units"
_ROUNDED = "float32 sums; the weights are rounded before they multiply the values, and the result"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(3e-6, _FP32)},
    torch.float16: {"forward": Tolerance(1e-3, _ROUNDED)},
    torch.bfloat16: {"forward": Tolerance(6e-3, _ROUNDED)},
}
CACHES = ("own", "fp8", "int8")
SCALES = ("none", "tensor", "head", "token")


def _point(
    batch: int,
    seq_len: int,
    heads: tuple[int, int] = (32, 8),
    dims: tuple[int, int] = (128, 128),
    *,
    tokens: int = 1,
    page: int = 0,
    cache: str = "own",
    scales: str = "none",
    ragged: bool = False,
    shortest: int = 0,
    alibi: bool = False,
    sinks: bool = False,
    masked: bool = False,
    latent: bool = False,
    **options: object,
) -> Point:
    """`heads`: of queries and of the cache; `dims`: head_dim and the values'; `scales`: what shares one. Lengths are
    the cache's, or drawn from `shortest` on (ragged). Of several sequences the last is masked whole. `latent`: values
    are the first elements of keys."""
    sizes = {
        "batch": batch,
        "seq_len": seq_len,
        "tokens": tokens,
        "heads": heads[0],
        "kv_heads": heads[1],
        "head_dim": dims[0],
        "value_dim": dims[1],
        "page": page,
        "cache": CACHES.index(cache),
        "scales": SCALES.index(scales),
        "ragged": int(ragged),
        "shortest": shortest,
        "alibi": int(alibi),
        "sinks": int(sinks),
        "masked": int(masked),
        "latent": int(latent),
    }
    if latent:
        options |= {"v_cache": None, "head_dim_v": dims[1]}
    label = f"B{batch} T{seq_len} H{heads[0]}/{heads[1]} D{dims[0]}" + f"/{dims[1]}" * (dims[0] != dims[1])
    label += f" tokens {tokens}" * (tokens > 1) + f" page {page}" * (page > 0) + " ragged" * ragged
    label += f" from {shortest}" * (shortest > 0)
    label += (f" {cache} by {scales}" if cache != "own" else "") + " alibi" * alibi + " sinks" * sinks
    label += " masked" * masked + " latent" * latent
    return Point(label, sizes, options)


def _pages(point: Point) -> int:
    """Of a sequence."""
    return -(-point["seq_len"] // point["page"])


def _capacity(point: Point) -> int:
    """Keys that the cache of a sequence holds."""
    return _pages(point) * point["page"] if point["page"] else point["seq_len"]


def _cache_shape(point: Point, dim: int) -> tuple[int, ...]:
    heads = point["kv_heads"]
    outer, inner = point["batch"], point["seq_len"]
    if point["page"]:
        outer, inner = outer * _pages(point), point["page"]
    return (outer, heads, inner, dim) if point.options.get("cache_layout") == "bhtd" else (outer, inner, heads, dim)


def drawn_cache(
    shape: tuple[int, ...], heads: int, kind: str, by: str, dtype: torch.dtype, device: torch.device,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A cache whose numbers times their scales are of order 1; `by`: what shares a scale."""
    if kind == "own":
        return normal(shape, dtype, device, generator), None
    if kind == "int8":
        cache, size = (integers(255, shape, device, generator) - 127).to(torch.int8), 1 / 73
    else:
        cache, size = normal(shape, torch.float8_e4m3fn, device, generator), 1.0
    if by == "none":
        return cache, None
    scale_shape = {"tensor": (), "head": (heads,), "token": shape[:3]}[by]
    scale = normal(scale_shape, torch.float32, device, generator)
    return cache, (scale.abs() * 0.2 + 0.8) * size


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    batch, seq_len = point["batch"], point["seq_len"]
    drawn = {"q": normal((batch, point["tokens"], point["heads"], point["head_dim"]), dtype, device, generator)}
    drawing = point["kv_heads"], CACHES[point["cache"]], SCALES[point["scales"]], dtype, device, generator
    drawn["k_cache"], k_scale = drawn_cache(_cache_shape(point, point["head_dim"]), *drawing)
    v_scale = None
    if "v_cache" not in point.options:  # None: values are in the keys
        drawn["v_cache"], v_scale = drawn_cache(_cache_shape(point, point["value_dim"]), *drawing)
    lengths = torch.full((batch,), seq_len, device=device)
    if point["ragged"]:
        lengths = point["shortest"] + integers(seq_len + 1 - point["shortest"], (batch,), device, generator)
    drawn["lengths"] = lengths.to(torch.int32)
    if point["page"]:
        n = batch * _pages(point)
        shuffled = (
            torch.empty(n, device=device)
            if device.type == "meta"
            else torch.randperm(n, device=device, generator=generator)
        )
        drawn["page_table"] = shuffled.to(torch.int32).view(batch, -1)
    drawn |= {name: t for name, t in (("k_scale", k_scale), ("v_scale", v_scale)) if t is not None}
    if point["alibi"]:
        drawn["alibi_slopes"] = normal((point["heads"],), torch.float32, device, generator).abs() * 0.1
    if point["sinks"]:
        drawn["sinks"] = normal((point["heads"],), torch.float32, device, generator)
    if point["masked"]:
        drawn["mask"] = integers(3, (batch, _capacity(point)), device, generator) > 0
        if batch > 1:
            drawn["mask"][-1] = False
    return drawn


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """q and out, and the cache as far as it is seen, with its scales and pages. Drawn lengths count as whole, and from
    `shortest` on by their mean."""
    batch, tokens, heads = point["batch"], point["tokens"], point["heads"]
    wide = point["head_dim"] + point["value_dim"]
    cached = point["head_dim"] if point["latent"] else wide
    seen = point["seq_len"]
    if "window" in point.options:
        seen = min(seen, point.options["window"] + tokens - 1)
    elif point["page"]:
        seen = _pages(point) * point["page"]
    if point["shortest"]:
        seen = (point["shortest"] + point["seq_len"]) // 2
    numbers = batch * seen * point["kv_heads"]
    total = itemsize * batch * tokens * heads * wide + 4 * batch
    total += numbers * cached * (1 if point["cache"] else itemsize)
    total += 4 * batch * _pages(point) if point["page"] else 0
    total += batch * seen if point["masked"] else 0
    total += (
        (1 if point["latent"] else 2)
        * 4
        * {"none": 0, "tensor": 1, "head": point["kv_heads"], "token": numbers}[SCALES[point["scales"]]]
    )
    return total + 4 * heads * (point["alibi"] + point["sinks"])


def _flops(point: Point, direction: Direction) -> int:
    """Two GEMMs."""
    rows = point["batch"] * point["tokens"] * point["heads"]
    return 2 * rows * point["seq_len"] * (point["head_dim"] + point["value_dim"])


_PLAIN_OPTIONS = {"cache_layout", "scale", "v_cache", "head_dim_v"}


def _plain(point: Point, name: str) -> None:
    if point["page"]:
        raise Unsupported(f"{name} takes no pages")
    if point["cache"]:
        raise Unsupported(f"{name} takes no quantised cache")
    if point["ragged"]:
        raise Unsupported(f"{name} is compared at full lengths")
    if point["tokens"] > 1:
        raise Unsupported(f"{name} aligns causal to the first key")
    _plain_form(point, name)


def _plain_form(point: Point, name: str) -> None:
    if point["alibi"] or point["sinks"] or point["masked"] or set(point.options) - _PLAIN_OPTIONS:
        raise Unsupported(f"{name} has only the plain form")


def _heads_first(
    q: Tensor, k: Tensor, v: Tensor | None, head_dim_v: int | None, layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    v = k[..., :head_dim_v] if v is None else v
    if layout == "bthd":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    return q.transpose(1, 2), k, v


def _sdpa(backend: str, packed: bool) -> Callable[[Point], Callable[..., Any]]:
    """SDPA through one of its backends, on a GPU; on the CPU, whichever there is. `packed`: the query heads of a KV
    head as if they were tokens, for who knows no groups."""

    def build(point: Point) -> Callable[..., Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        _plain(point, f"SDPA ({backend})")
        chosen = getattr(SDPBackend, backend)

        def run(
            q: Tensor, k_cache: Tensor, v_cache: Tensor | None, lengths: Tensor, *, head_dim_v=None,
            cache_layout="bthd", scale=None,
        ) -> Tensor:  # fmt: skip
            if q.dtype == torch.float32 and backend != "EFFICIENT_ATTENTION":
                raise Unsupported(f"SDPA ({backend}) takes float16 and bfloat16")
            q, k, v = _heads_first(q, k_cache, v_cache, head_dim_v, cache_layout)
            if k.shape[3] != v.shape[3] and backend != "EFFICIENT_ATTENTION":
                raise Unsupported(f"SDPA ({backend}) takes keys and values of one size")
            shape = q.shape
            if packed:
                q = q.reshape(shape[0], k.shape[1], -1, shape[3])
            with sdpa_kernel(chosen) if q.is_cuda else contextlib.nullcontext():
                out = scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
            return out.reshape(*shape[:3], v.shape[3]).transpose(1, 2)

        return run

    return build


def _flex(point: Point) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    _plain(point, "FlexAttention")
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(
        q: Tensor, k_cache: Tensor, v_cache: Tensor | None, lengths: Tensor, *, head_dim_v=None, cache_layout="bthd",
        scale=None,
    ) -> Tensor:  # fmt: skip
        q, k, v = _heads_first(q, k_cache, v_cache, head_dim_v, cache_layout)
        attend = compiled if q.is_cuda else flex_attention
        return attend(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)

    return run


def page_runs(page_table: Tensor, lengths: Tensor, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's form of a page table: where each sequence's pages start, all pages, and the keys in its last one."""
    pages = (lengths + page - 1) // page
    starts = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
    used = torch.arange(page_table.shape[1], device=page_table.device) < pages[:, None]
    return starts, page_table[used], lengths - (pages - 1).clamp(min=0) * page


def flashinfer(point: Point, wrapper: Callable[[Tensor, str], Any], **planning: Any) -> Callable[..., Any]:
    """A call of one of FlashInfer's wrappers.

    Its `plan` lays out the launch and copies to the host. It is called at the first call with a set of inputs, which is
    before the measurement, as an engine calls it once for all layers.

    Args:
        wrapper: makes the wrapper of a workspace and a layout.
        planning: more arguments of `plan`.
    """
    name = "FlashInfer"
    on_gpu(name)
    if not point["page"]:
        raise Unsupported(f"{name} is compared with a cache in pages")
    if point["cache"]:
        raise Unsupported(f"{name} is compared with a cache in 16 bits")
    if point["latent"]:
        raise Unsupported(f"{name} has kernels of its own for a latent cache, which are not compared")
    if point["head_dim"] != point["value_dim"] or point["head_dim"] not in (64, 128, 256):
        raise Unsupported(f"{name} takes keys and values of one size: 64, 128 or 256")
    heads, dim = point["heads"], point["head_dim"]
    workspaces: list[Tensor] = []
    # By the table's address, which no other table has as long as this one is kept.
    planned: dict[int, tuple[Any, Tensor]] = {}

    def run(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, lengths: Tensor,
        cu_seqlens_q: Tensor | None = None, *, cache_layout="bthd", scale=None, **_: Any,
    ) -> Tensor:  # fmt: skip
        if q.dtype == torch.float32:
            raise Unsupported(f"{name} takes float16 and bfloat16")
        key = page_table.data_ptr()
        if key not in planned:
            if not workspaces:  # of the size that its documentation recommends
                workspaces.append(torch.zeros(128 << 20, dtype=torch.uint8, device=q.device))
            found = wrapper(workspaces[0], {"bthd": "NHD", "bhtd": "HND"}[cache_layout])
            starts_q = () if cu_seqlens_q is None else (cu_seqlens_q,)
            runs = page_runs(page_table, lengths, point["page"])
            shape = heads, point["kv_heads"], dim, point["page"]
            found.plan(*starts_q, *runs, *shape, q_data_type=q.dtype, sm_scale=scale, **planning)
            planned[key] = found, page_table
        return planned[key][0].run(q.view(-1, heads, dim), (k_cache, v_cache)).view(q.shape)

    return run


def _flashinfer(point: Point) -> Callable[..., Any]:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    _plain_form(point, "FlashInfer")
    # Its documentation has tensor cores faster for large groups, and names no size. Without them it takes one token.
    cores = point["heads"] >= 4 * point["kv_heads"] or point["tokens"] > 1
    wrapper = functools.partial(BatchDecodeWithPagedKVCacheWrapper, use_tensor_cores=cores)
    return flashinfer(point, wrapper, **({"q_len_per_req": point["tokens"]} if point["tokens"] > 1 else {}))


_SMALL = {"heads": (4, 2), "dims": (16, 16)}
_TINY = (
    _point(3, 40, **_SMALL, ragged=True),  # type: ignore[arg-type]
    _point(2, 33, (4, 2), (32, 32)),
    _point(2, 40, (4, 4), (24, 16), tokens=3, ragged=True, cache_layout="bhtd", window=9, softcap=4.0),
    _point(2, 40, (4, 1), (80, 48), page=16, ragged=True, scale=0.2, sinks=True, alibi=True),
    _point(2, 40, (4, 2), (32, 64), cache="fp8", scales="head"),
    _point(2, 40, (4, 2), (32, 32), page=32, cache="int8", scales="token"),
    _point(3, 70, (4, 2), (32, 32), masked=True),
    _point(2, 40, (4, 2), (16, 16), tokens=3, ragged=True, window=20, softcap=4.0, sinks=True, masked=True),
    _point(2, 70, (4, 1), (48, 32), tokens=2, page=16, ragged=True, latent=True),
    _point(3, 40, (4, 1), page=16, ragged=True),  # FlashInfer takes it
)
_EDGE = (
    _point(1, 1, (1, 1), (1, 1)),
    _point(1, 130, (8, 1), (32, 32), tokens=16),
    _point(5, 127, (6, 2), (16, 40), ragged=True),
    _point(0, 16, (2, 1), (16, 16)),
    _point(2, 0, (2, 1), (16, 16)),
    _point(2, 65, (2, 2), (16, 16), page=16, ragged=True, cache_layout="bhtd"),
    _point(2, 40, (2, 1), (16, 40), cache="fp8", scales="tensor"),
    _point(2, 70, (2, 1), (94, 32), tokens=2, cache="int8", scales="head"),
    _point(3, 70, (6, 2), (16, 40), tokens=2, page=32, ragged=True, alibi=True, masked=True),
    _point(2, 40, (2, 1), (32, 32), cache="fp8", scales="token", masked=True, cache_layout="bhtd"),
    _point(3, 70, (4, 2), (16, 24), tokens=5, page=16, ragged=True, sinks=True, causal=False),
)
_BATCHES, _LENGTHS = (1, 2, 8, 32, 64), (512, 2048, 8192, 32768)
# A token of one or two sequences: few enough for what is compiled anew for each shape, and for the naive form.
_SWEEP = (
    *(_point(b, t, (8, 8)) for b, t in ((1, 512), (1, 1024), (1, 2048), (2, 1024))),
    *(_point(1, t, (32, 32)) for t in (44, 512, 1024, 2048, 4096, 8192, 16384, 32768)),
)
# DeepSeek-V3: a latent of 512 and 64 elements rotated by RoPE. All 128 heads, or those of one of eight GPUs. With 128
# sequences of 32768 tokens the cache would be 4.8 GB.
_LATENT = (
    *(
        _point(b, t, (h, 1), (576, 512), page=64, latent=True)
        for h in (16, 128)
        for b in (1, 8, 32, 128)
        for t in (1024, 4096, 8192, 32768)
        if b * t <= 1 << 20
    ),
    *(_point(32, 8192, (h, 1), (576, 512), page=64, latent=True, tokens=t) for h in (16, 128) for t in (2, 4)),
)
_TOKENS = tuple(
    _point(b, n, tokens=t) for b, n in ((1, 2048), (1, 8192), (8, 2048), (8, 8192), (32, 2048)) for t in (1, 2, 3, 4)
)
_SHORT = ({"page": 64}, {"cache": "fp8", "scales": "head"}, {"cache": "fp8", "scales": "token", "page": 64})
_DECODE = (
    *(_point(b, t) for b in _BATCHES for t in _LENGTHS),
    *_SWEEP,
    *(_point(b, t, page=p) for b, t in ((1, 8192), (8, 8192), (32, 2048)) for p in (16, 64, 256)),
    *(_point(b, t, cache=c, scales="head") for b, t in ((1, 8192), (8, 8192)) for c in ("fp8", "int8")),
    *(_point(8, 512, **options) for options in _SHORT),
    *(_point(256, 640, page=64, ragged=r, shortest=512 * r) for r in (False, True)),  # a server's batch
)

CASES = (
    OpCase(
        name="decode_attention",
        formula="out = softmax(scale · q · kᵀ) · v, of the last tokens over a cache of keys and values",
        function=functools.partial(decode_attention, layout="bthd"),
        reference=functools.partial(reference.decode_attention, layout="bthd"),
        eager=functools.partial(reference.eager, layout="bthd"),
        inputs=_inputs,
        outputs=("out",),
        grads=(),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        sets={
            "tiny": _TINY,
            "edge": _EDGE,
            "llm": (
                _point(1, 2048),
                _point(8, 2048),
                _point(8, 2048, page=64),
                _point(1, 8192, (32, 32)),
                _point(1, 776, masked=True, cache_layout="bhtd"),  # a step of transformers with a static cache
                *(_point(8, 4096, (h, 1), (576, 512), page=64, latent=True) for h in (16, 128)),  # DeepSeek-V3's cache
            ),
            "decode": _DECODE,
            "sweep": _SWEEP,
            "latent": _LATENT,
            "tokens": _TOKENS,
        },
        # What a part begins and ends with, such as where its results go. The loop over keys has none; with 64 rows of a
        # latent cache it reads nine constants back.
        spills=384,
        roof="gemm",
        # The softmax as it goes adds in the order of the keys, where eager's GEMMs add in a tree; and the lse from
        # which the backward has the probabilities is rounded.
        float32_floor=1e-6,
        peers=(
            Peer("sdpa flash", _sdpa("FLASH_ATTENTION", False)),
            Peer("sdpa cudnn", _sdpa("CUDNN_ATTENTION", False)),
            Peer("sdpa efficient", _sdpa("EFFICIENT_ATTENTION", True)),
            Peer("flex", _flex),
            Peer("flashinfer", _flashinfer),
        ),
    ),
)
