"""New keys and values written into a cache, by one launch; with the rotation of q and k in it, where that is wanted.

    position = lengths[b] + t                                           of new token t of sequence b
    cache[b, position] = x[b, t]                                        contiguous
    cache[page_table[b, position // page_size], position % page_size] = x[b, t]     paged

`rope_and_cache` turns q and k by the angles of their positions first (`rooftile.ops.rope` has the formula): k goes
from the projection to its place in the cache without a round trip through memory. Bytes: k and v read and written once,
q read and written once, and of cos and sin one of each pair's two equal entries; the rest of the cache is not touched.

A cache has the dtype of k, or is float8_e4m3fn or int8: `stored = round(x / scale)`. The scales are given (one for the
tensor or for each head), or there is one for each token and head, `max(|x|) / largest`, which the kernel writes, too.

Nothing outside of the cache is ever written: where the device holds a length or a page that leads out of it, the kernel
leaves that token out. Lengths and pages that are on the CPU are looked at before, and raise.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.kv_cache import launch
from rooftile.ops.kv_cache.checks import check, check_indices, check_rope, check_values
from rooftile.ops.rope import Style, check_rotary_dim, dense

Layout = Literal["bthd", "bhtd"]


def _cache(
    op: str,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    counts: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_token_scale: Tensor,
    v_token_scale: Tensor,
    layout: str,
) -> launch.Cache:
    """The cache, after all checks."""
    if k_token_scale.dim() == 3:  # where there is none it is (0,)
        k_scale = k_token_scale
    if v_token_scale.dim() == 3:
        v_scale = v_token_scale
    scales = "" if k_scale is None else "token" if k_scale.dim() == 3 else "given"
    check(op, k, v, k_cache, v_cache, lengths, page_table, counts, k_scale, v_scale, layout)
    return launch.Cache(k_cache, v_cache, lengths, page_table, counts, k_scale, v_scale, scales, layout)


def _check_memory(op: str, k: Tensor, cache: launch.Cache) -> None:
    """What can be said of tensors that hold something."""
    written = [("k_cache", cache.k, "v_cache", cache.v)]
    if cache.scales == "token":
        written.append(("k_scale", cache.k_scale, "v_scale", cache.v_scale))  # type: ignore[arg-type]
    for first, x, second, y in written:
        if x.numel() and y.numel() and x.data_ptr() == y.data_ptr() != 0:  # all meta tensors lie at 0
            raise ValueError(f"{op}: {second} is the same memory as {first}, expected memory of its own")
    check_values(op, k, cache.k, cache.lengths, cache.page_table, cache.counts, cache.layout)


def _launch_append(k: Tensor, v: Tensor, *of_cache: Any) -> None:
    cache = _cache("append_kv", k, v, *of_cache)
    _check_memory("append_kv", k, cache)
    launch.append(k, v, cache)


def _fake_append(k: Tensor, v: Tensor, *of_cache: Any) -> None:
    _cache("append_kv", k, v, *of_cache)


def _rope_checked(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> tuple[launch.Cache, str]:
    *of_cache, style = rest
    cache = _cache("rope_and_cache", k, v, *of_cache)
    check_rope("rope_and_cache", q, k, cos, sin, style, cache.layout)
    return cache, style


def _launch_rope(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> Tensor:
    cache, style = _rope_checked(q, k, v, cos, sin, *rest)
    _check_memory("rope_and_cache", k, cache)
    q_out = dense(q, cache.layout)
    launch.rotate_and_append(q, k, v, q_out, cos, sin, style, cache)
    return q_out


def _fake_rope(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> Tensor:
    cache, _ = _rope_checked(q, k, v, cos, sin, *rest)
    return dense(q, cache.layout)


# A scale for each token is written, one that is given is not: two arguments, of which the first two may be absent.
_OF_CACHE = (
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor lengths, Tensor? page_table, Tensor? counts, Tensor? k_scale, "
    "Tensor? v_scale, Tensor(c!) k_token_scale, Tensor(d!) v_token_scale, str layout"
)

_append = library.define(
    f"append_kv(Tensor k, Tensor v, {_OF_CACHE}) -> ()",
    launch=_launch_append,
    fake=_fake_append,
)
_rope = library.define(
    f"rope_and_cache(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, {_OF_CACHE}, str style) -> Tensor",
    launch=_launch_rope,
    fake=_fake_rope,
)


def _here(x: Tensor | None, device: torch.device) -> Tensor | None:
    return x if x is None or x.device.type != "cpu" else x.to(device)


def _rest(
    op: str,
    k: Tensor,
    k_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    counts: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    layout: str,
) -> tuple[Any, ...]:
    """The arguments behind the caches, as the schemas have them: what is on the CPU is looked at and sent over."""
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    library.check_tensors(op, k=k, lengths=lengths, **{n: s for n, s in scales.items() if s is not None})
    if k.device.type == "cuda" and lengths.device.type == "cpu":
        # Where these are wrong the op says so; what is being compiled has no values yet.
        if k.dim() == k_cache.dim() == 4 and layout in library.LAYOUTS and not torch.compiler.is_compiling():
            check_indices(op, k.shape[0], lengths, page_table, counts)
            check_values(op, k, k_cache, lengths, page_table, counts, layout)
        lengths = lengths.to(k.device)
        page_table, counts = _here(page_table, k.device), _here(counts, k.device)
    none = [torch.empty((0,), dtype=torch.float32, device=k.device) for _ in range(2)]
    given = [None if s is None or s.dim() == 3 else s for s in scales.values()]
    token = [n if s is None or s.dim() != 3 else s for s, n in zip(scales.values(), none, strict=True)]
    return lengths, page_table, counts, *given, *token, layout


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    page_table: Tensor | None = None,
    counts: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: Layout = "bthd",
) -> None:
    """Write new keys and values behind those that a cache has, in one launch.

    Token t of sequence b goes to position `lengths[b] + t`. The lengths are not advanced.

    Args:
        k: `(B, T, H, D)` (or `(B, H, T, D)` with `layout="bhtd"`), float32, float16 or bfloat16, of any strides.
        v: the same, but for a head dimension of its own.
        k_cache, v_cache: `(B, S, H, D)`, or `(pages, page_size, H, D)` with a page table, in the order of the layout;
            in k's dtype, float8_e4m3fn or int8. A last stride of 1. Written in place.
        lengths: `(B,)`, int32 or int64: the tokens that each sequence has already. A negative one: the sequence gets
            none of the new.
        page_table: `(B, max_pages)`, int32 or int64: the pages of each sequence, in order. The page size is a power
            of two.
        counts: `(B,)`, int32 or int64: how many of the T tokens are the sequence's; all by default.
        k_scale, v_scale: float32, for a float8 or int8 cache: `()` or `(H,)`, by which the stored numbers are to be
            multiplied; or one for each token, of the caches' first three dimensions, which is written, too. A float8
            cache without any has a scale of 1.
        layout: the order of the dimensions of k, v and the caches.

    A token whose position or page lies outside of the cache is left out; where the lengths are on the CPU, that is an
    error. Lengths on the CPU, with page table and counts, are sent to the device, which a CUDA graph can't have.

    Raises:
        ValueError: a shape, stride or layout does not fit; a scale is missing, or given where there is none; k or v
            requires grad; lengths, counts or a page table on the CPU lead out of the cache; devices differ or are the
            CPU without the interpreter.
        TypeError: a dtype is not one of those named.
    """
    rest = _rest("append_kv", k, k_cache, lengths, page_table, counts, k_scale, v_scale, layout)
    _append(k, v, k_cache, v_cache, *rest)


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    page_table: Tensor | None = None,
    counts: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    rotary_dim: int | None = None,
    style: Style = "half",
    layout: Layout = "bthd",
) -> Tensor:
    """`append_kv` of k turned by its positions, and of v as it is; q turned is returned. One launch.

    Takes what `append_kv` takes, and:

    Args:
        q: `(B, T, Hq, D)` (or `(B, Hq, T, D)`), of k's dtype.
        cos, sin: `(positions, R)`, of which the row at each token's position is taken; or, for each token, `(1, T, R)`
            or `(B, T, R)`, where R is `rotary_dim`. Each angle stands twice, as models build the tables. A position
            outside of the table gives NaN.
        rotary_dim: R, how many elements of a head are turned: even, D by default. Elements past it are not turned.
        style: which elements make a pair, as `rooftile.rope` has it: `"half"`, `"interleaved"` or `"deepseek"`.

    Returns:
        q turned, in new memory of the same order; zeros where `counts` or a negative length say that there is no token.
    """
    check_rotary_dim("rope_and_cache", q, cos, rotary_dim)
    rest = _rest("rope_and_cache", k, k_cache, lengths, page_table, counts, k_scale, v_scale, layout)
    return _rope(q, k, v, cos, sin, k_cache, v_cache, *rest, style)
