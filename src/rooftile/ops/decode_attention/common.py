"""The arguments of decode_attention: what they may be, and how a cache is seen, whatever its layout."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from rooftile import library

MOST_TOKENS = 16
LONGEST_HEAD = 256
PAGES = (16, 32, 64, 128, 256)
_OP = "decode_attention"
_FP8 = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of one call. `capacity` is the most keys of a sequence; `page` is 0 for a contiguous cache."""

    batch: int
    n_new: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    capacity: int
    page: int
    n_pages: int


def shape_of(q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor | None, layout: str) -> Shape:
    batch, n_new, heads, head_dim = q.shape
    tokens, kv_heads = (1, 2) if layout == "bthd" else (2, 1)
    page, n_pages, capacity = 0, 0, k_cache.shape[tokens]
    if page_table is not None:
        page, n_pages = k_cache.shape[tokens], k_cache.shape[0]
        capacity = page_table.shape[1] * page
    return Shape(batch, n_new, heads, k_cache.shape[kv_heads], head_dim, v_cache.shape[3], capacity, page, n_pages)


def strides_of(t: Tensor, layout: str) -> tuple[int, int, int]:
    """How far sequences (or pages), tokens and heads are apart in a cache, or in its scales by token."""
    first, second, third = t.stride()[:3]
    return (first, second, third) if layout == "bthd" else (first, third, second)


def scale_kind(scale: Tensor | None) -> str:
    """What shares a scale: "head" (all heads alike, where it is one number), "token", or "" without one."""
    return "" if scale is None else "head" if scale.dim() < 2 else "token"


def scale_strides(scale: Tensor | None, layout: str) -> tuple[int, int, int]:
    if scale is None or scale.dim() == 0:
        return 0, 0, 0
    return strides_of(scale, layout) if scale.dim() > 1 else (0, 0, scale.stride(0))


def _numbers(window: int | None, softcap: float | None, scale: float | None) -> None:
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None and (not isinstance(number, (float, int)) or isinstance(number, bool)):
            raise TypeError(f"{_OP}: {name} is a {type(number).__name__}, expected a number or None")
    if scale is not None and not abs(scale) < 2.0**127:
        raise ValueError(f"{_OP}: scale is {scale}, expected a finite number below 2^127")
    if softcap is not None and not 0 <= softcap < 2.0**64:
        raise ValueError(f"{_OP}: softcap is {softcap}, expected a positive number, or None or 0 for none")
    if window is not None and (not isinstance(window, int) or isinstance(window, bool)):
        raise TypeError(f"{_OP}: window is a {type(window).__name__}, expected an int or None")


def check_arguments(layout: str, window: int | None, softcap: float | None, scale: float | None) -> None:
    """Of the public function: numbers as the schema takes them come out of these."""
    _numbers(window, softcap, scale)
    if window is not None and window < 1:
        raise ValueError(f"{_OP}: window is {window}, expected at least 1: the query's own position")
    library.check_layout(_OP, layout)


def _expect(name: str, t: Tensor, shape: tuple[object, ...], why: str = "") -> None:
    if tuple(t.shape) != shape:
        words = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{_OP}: {name} has shape {tuple(t.shape)}, expected ({words}){why}")


def _check_dtypes(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    library.check_floating(_OP, q=q)
    if k_cache.dtype not in (q.dtype, _FP8, torch.int8):
        raise TypeError(
            f"{_OP}: k_cache has dtype {k_cache.dtype}, expected {q.dtype} to match q, float8_e4m3fn or int8"
        )
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"{_OP}: v_cache has dtype {v_cache.dtype}, expected {k_cache.dtype} to match k_cache")


def _check_scale(name: str, scale: Tensor | None, k_cache: Tensor, kv_heads: int) -> None:
    if scale is None:
        return
    if scale.dtype != torch.float32:
        raise TypeError(f"{_OP}: {name} has dtype {scale.dtype}, expected float32")
    shapes = ((), (kv_heads,), tuple(k_cache.shape[:3]))
    if tuple(scale.shape) not in shapes:
        expected = ", ".join(map(str, shapes[:2])) + f" or {shapes[2]}"
        raise ValueError(
            f"{_OP}: {name} has shape {tuple(scale.shape)}, expected {expected}: for all, for a head, or for a token"
        )


def check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    mask: Tensor | None,
    layout: str,
) -> Shape:
    """Raise for shapes and dtypes that can't be taken."""
    library.check_layout(_OP, layout)
    if q.dim() != 4:
        raise ValueError(f"{_OP}: q has shape {tuple(q.shape)}, expected 4 dimensions (B, T, Hq, D)")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4:
            expected = (
                ("B, S, Hkv, D" if layout == "bthd" else "B, Hkv, S, D")
                if page_table is None
                else ("pages, page_size, Hkv, D" if layout == "bthd" else "pages, Hkv, page_size, D")
            )
            raise ValueError(f"{_OP}: {name} has shape {tuple(cache.shape)}, expected 4 dimensions ({expected})")
    _check_dtypes(q, k_cache, v_cache)
    batch, n_new, heads, head_dim = q.shape
    if n_new > MOST_TOKENS:
        raise ValueError(
            f"{_OP}: q has {n_new} tokens a sequence, expected at most {MOST_TOKENS}; attention takes any number"
        )
    if k_cache.shape[3] != head_dim or not 1 <= head_dim <= LONGEST_HEAD:
        raise ValueError(
            f"{_OP}: q and k_cache have last dimensions of {head_dim} and {k_cache.shape[3]}, expected the same, "
            f"1 to {LONGEST_HEAD}"
        )
    if not 1 <= v_cache.shape[3] <= LONGEST_HEAD:
        raise ValueError(f"{_OP}: v_cache has a last dimension of {v_cache.shape[3]}, expected 1 to {LONGEST_HEAD}")
    _expect("v_cache", v_cache, (*k_cache.shape[:3], v_cache.shape[3]), " to match k_cache")
    kv_heads = k_cache.shape[2 if layout == "bthd" else 1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{_OP}: q has {heads} heads, expected a multiple of k_cache's {kv_heads}")
    _expect("lengths", lengths, (batch,), ": one for each sequence of q")
    if lengths.dtype != torch.int32:
        raise TypeError(f"{_OP}: lengths has dtype {lengths.dtype}, expected int32")
    if page_table is None:
        if k_cache.shape[0] != batch:
            raise ValueError(f"{_OP}: k_cache has {k_cache.shape[0]} sequences, expected {batch} to match q")
    else:
        _check_pages(page_table, batch, k_cache.shape[1 if layout == "bthd" else 2])
    _check_scale("k_scale", k_scale, k_cache, kv_heads)
    _check_scale("v_scale", v_scale, k_cache, kv_heads)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None and k_cache.dtype == torch.int8:
            raise ValueError(f"{_OP}: {name} is None, expected what the int8 numbers of the cache are multiplied by")
    for name, per_head in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if per_head is not None:
            library.check_floating(_OP, **{name: per_head})
            _expect(name, per_head, (heads,), ": one for each head of q")
    s = shape_of(q, k_cache, v_cache, page_table, layout)
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"{_OP}: mask has dtype {mask.dtype}, expected bool: True is seen")
        _expect("mask", mask, (batch, s.capacity), ": for each sequence each key that its cache has room for")
    return s


def _check_pages(page_table: Tensor, batch: int, page: int) -> None:
    if page_table.dim() != 2 or page_table.shape[0] != batch:
        raise ValueError(
            f"{_OP}: page_table has shape {tuple(page_table.shape)}, expected ({batch}, pages of a sequence)"
        )
    if page_table.dtype != torch.int32:
        raise TypeError(f"{_OP}: page_table has dtype {page_table.dtype}, expected int32")
    if page not in PAGES:
        raise ValueError(f"{_OP}: k_cache has pages of {page} tokens, expected one of {', '.join(map(str, PAGES))}")


def check_values(lengths: Tensor, page_table: Tensor | None, s: Shape) -> None:
    """Lengths and pages that are on the CPU, where to look at them costs no synchronisation; elsewhere the kernel
    takes a length beyond the cache as the cache's, and a page that is not there as the nearest."""
    if lengths.device.type == "cpu" and lengths.numel() and int(lengths.max()) > s.capacity:
        at = int(lengths.argmax())
        raise ValueError(f"{_OP}: lengths[{at}] is {int(lengths[at])}, expected at most {s.capacity}, the cache's")
    if page_table is None or page_table.device.type != "cpu" or lengths.device.type != "cpu" or not page_table.numel():
        return
    used = torch.arange(page_table.shape[1], device="cpu") * s.page < lengths[:, None]
    wrong = used & ((page_table < 0) | (page_table >= s.n_pages))
    if bool(wrong.any()):
        b, i = (int(n) for n in wrong.nonzero()[0])
        raise ValueError(
            f"{_OP}: page_table[{b}, {i}] is {int(page_table[b, i])}, expected 0 to {s.n_pages - 1}: "
            f"k_cache has {s.n_pages} pages"
        )
