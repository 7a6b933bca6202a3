"""How decode_attention is launched, and the choice of it."""

from __future__ import annotations

import dataclasses
import functools

import torch

from rooftile import library, runtime
from rooftile.ops.attention.common import parts

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
    width = sum(parts(head_dim)) + sum(parts(value_dim))
    widest = max(sum(parts(head_dim)), sum(parts(value_dim)))
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
