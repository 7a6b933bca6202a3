"""How decode_attention is launched, and the choice of it."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from rooftile import library, runtime
from rooftile.primitives.scores import split_dim

COMBINES = ("last", "kernel", "none")


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How a decode attention is launched.

    Args:
        block_n: keys of a block, which are loaded together.
        block_m: query rows of a tile at least: 8 or 16, what the matrix unit takes.
        num_warps, num_stages: warps of a program, and how deep its loads are pipelined.
        programs: how many there are for each multiprocessor.
        least: blocks of the smallest part that an item is cut into.
        surplus: blocks that a program may have beyond an equal share, and a 32nd of it, before the work is cut into
            equal shares.
        ahead: blocks that an early program brings into the L2 before the kernel before has ended, by a plan that it
            makes then; with 0 it makes none before that.
        combine: who brings the parts of an item together: `"last"`, the last program to arrive; `"kernel"`, another
            kernel, a row to a program; `"none"`, nobody: no item is cut into parts.
        registers: the most of a thread, so that more programs fit a multiprocessor (NVIDIA); 0 for no limit.
        early: launched while the kernel before it still ends (sm_90 and later).
    """

    block_n: int = 64
    block_m: int = 16
    num_warps: int = 4
    num_stages: int = 4
    programs: int = 2
    least: int = 1
    surplus: int = 2
    registers: int = 0
    ahead: int = 0
    combine: str = "kernel"
    early: bool = False

    def __post_init__(self) -> None:
        for name in ("block_n", "block_m", "num_warps", "num_stages", "programs", "least"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"DecodeConfig: {name} is {value!r}, expected a positive integer")
            if name in ("block_n", "block_m", "num_warps") and value & (value - 1):
                raise ValueError(f"DecodeConfig: {name} is {value}, expected a power of two")
        for name in ("surplus", "registers", "ahead"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"DecodeConfig: {name} is {value!r}, expected 0 or more")
        if self.block_n < 16 or self.block_m < 8:
            raise ValueError(f"DecodeConfig: a block of {self.block_n} keys and {self.block_m} rows, expected 16 and 8")
        if self.combine not in COMBINES:
            raise ValueError(f"DecodeConfig: combine is {self.combine!r}, expected one of {', '.join(COMBINES)}")


@functools.cache
def encode(config: DecodeConfig | None) -> str:
    """A configuration as the schema of an op takes it; "" for none."""
    if config is None:
        return ""
    if not isinstance(config, DecodeConfig):
        raise TypeError(f"decode_attention: config is a {type(config).__name__}, expected a DecodeConfig or None")
    return ",".join(str(int(v)) if isinstance(v, bool) else str(v) for v in dataclasses.astuple(config))


@functools.cache
def decode(text: str) -> DecodeConfig | None:
    """The configuration that `encode` wrote."""
    if not text:
        return None
    *numbers, combine, early = text.split(",")
    return DecodeConfig(*(int(n) for n in numbers), combine, early == "1")  # type: ignore[arg-type, call-arg]


def row_tile(rows: int) -> tuple[int, int]:
    """Query rows of a tile, and how many such tiles a KV head has."""
    tile = min(library.power_of_two(max(1, rows)), 64)
    return tile, library.cdiv(rows, tile)


def _sizes(most: int, cache: torch.dtype, items: int, capacity: int, page: int, sms: int) -> tuple[int, int]:
    """Programs of a multiprocessor, and keys of a block, where 16-bit rows are `most` = 64 keys to 32 KB.

    Measured on an H200 (132 multiprocessors), bfloat16, 32 heads on 8 of the cache, D 128, in us; a program's blocks
    are on their way together, so fewer programs have larger ones, or more:

        batch x keys     1 x 512   1 x 2048   1 x 8192   1 x 32768   8 x 2048   8 x 8192   32 x 2048
        blocks, each SM      0.5        1.9        7.8          31         16         62          62
        2 programs of 32     6.1        8.9       15.0        38.4       25.5       70.9        69.4
        1 of 64              6.5        8.2       14.4        37.7       24.0       71.4        76.0
        2 of 64              7.2        9.1       14.1        37.7       24.4       69.1        65.1
        1 of 128             7.1        9.0       14.2        37.0       23.3       68.0        69.4
    """
    blocks = items * library.cdiv(capacity, most)
    if blocks <= sms:
        return 2, most // 2
    if blocks <= 4 * sms:
        return 1, most
    if blocks >= 12 * sms and items < 1.8 * sms and _takes_twice(most, cache, page):
        return 1, 2 * most
    return 2, most


def _takes_twice(most: int, cache: torch.dtype, page: int) -> bool:
    """Whether a block may have twice as many keys. In smaller pages each would have a pointer of its own: 74.6 at
    8 x 8192 in pages of 64, and 70.4 of 64 keys; and numbers of 8 bits would spill."""
    return cache.itemsize == 2 and (page == 0 or page >= 2 * most)


def _whole(items: int, capacity: int, most: int, sms: int) -> bool:
    """Whether no item is cut into parts, which takes a second kernel or a program that waits.

    In us on an H200: at 1 x 44, 32 heads of the cache, two kernels took 5.4, one 3.2 and cuDNN's 3.7. At 8 x 512 two
    took 11.8, one 9.1 and cuDNN's 8.9; at 64 x 512 one 37.4 in place of 38.1. But 22.9 at 1 x 1024, where parts take
    6.4.
    """
    return capacity <= 128 or (capacity <= min(512, 8 * most) and items >= 0.45 * sms)


@functools.lru_cache(4096)
def choose(
    rows: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    cache: torch.dtype,
    items: int,
    capacity: int,
    page: int,
    target: runtime.Target,
) -> DecodeConfig:
    """`rows`: query heads of a KV head, times new tokens; `items`: sequences, times tiles of rows."""
    if target is runtime.INTERPRETER:
        return DecodeConfig(block_n=32, num_stages=2, programs=3)
    tile, _ = row_tile(rows)
    width = sum(split_dim(head_dim)) + sum(split_dim(value_dim))
    widest = max(sum(split_dim(head_dim)), sum(split_dim(value_dim)))
    # In float32 the products are multiplications of the threads', which hold their operands: in few registers, where
    # many threads share a small block.
    most = 16 if dtype == torch.float32 else 128 if width <= 128 else 64
    warps = 8 if tile > 32 or widest > 128 or dtype == torch.float32 else 4
    sms = target.multiprocessors
    whole = _whole(items, capacity, most, sms)
    if most != 64 or capacity <= 128:
        wanted = 2, most
    elif whole and items <= sms and _takes_twice(most, cache, page):
        wanted = 1, 2 * most  # a program for each item, which has all of its loads under way
    else:
        wanted = _sizes(most, cache, items, capacity, page, sms)
    # With as many blocks on their way as fit; where not even two do, smaller ones.
    for programs, block_n in (wanted, (2, most), (2, most // 2), (1, most), (1, most // 2), (1, 16)):
        left = target.shared_memory // programs - tile * 4 * widest - 8192
        stages = min(5, left // (block_n * width * cache.itemsize))
        if stages >= 2 and block_n >= 16 and not (warps == 8 and programs == 2):
            break
    # Where whole items are enough for the programs, they have few parts, and the last to come brings them together:
    # 65.1 at 32 x 2048, and 67.6 with a second kernel, 23.5 and 23.9 at 8 x 2048; but 16.8 and 9.1 at 1 x 2048.
    combine = "none" if whole else "last" if items >= 0.45 * programs * sms else "kernel"
    # Of short blocks: 6.4 at 1 x 1024 with two to a part at least, and 7.3 with one.
    short = combine == "kernel" and (programs, block_n) == wanted == (2, most // 2)
    least = 2 if short and 2 * items * library.cdiv(capacity, most) > sms else 1
    return DecodeConfig(block_n, 16, warps, max(2, stages), programs, least=least, ahead=1, combine=combine, early=True)


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
