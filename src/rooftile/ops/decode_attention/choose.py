"""decode_attention's arguments: their checks, the launch configuration and its choice.

The file has three sections: the configuration, its choice, and the checks.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from rooftile import library, runtime
from rooftile.primitives import paging
from rooftile.primitives.scores import split_dim

COMBINES = ("last", "kernel", "none")
KERNELS = ("portable", "hopper")
# The one form of kernel "hopper"
_HOPPER: dict[str, tuple[object, ...]] = {
    "block_n": (64,), "block_m": (16,), "num_warps": (8,), "num_stages": (2,), "programs_per_sm": (1,),
    "registers": (0,), "prefetch_blocks": (0,), "combine": ("kernel", "none"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How decode_attention is launched.

    Args:
        block_n: keys in a block, which are loaded together.
        block_m: least query rows of a tile: 8 or 16, the tensor core's size.
        num_warps, num_stages: warps of a program, and the depth of its load pipeline.
        programs_per_sm: programs for each SM.
        min_blocks: least blocks in a split.
        slack: blocks, beside 1/32, that a program may have more than an equal share before the work is cut into equal
            shares instead of aligned splits.
        registers: limit of registers for each thread (NVIDIA), so that more programs fit an SM; 0 for no limit.
        prefetch_blocks: blocks that a program prefetches into the L2 before the previous kernel has ended. With 0 it
            also plans its work only afterwards. Needs `pdl`.
        combine: what combines the splits of an item: `"last"`, the last program to finish; `"kernel"`, a second kernel;
            `"none"`, nothing: no item is split.
        pdl: start while the previous kernel still runs (programmatic dependent launch, sm_90 and later).
        kernel: `"portable"`, for any GPU and every option; `"hopper"`, for sm_90, more than 8 query rows of a KV head
            and a latent cache (`v_cache=None`) in 16 bits of 513 to 576 elements, of which 257 to 512 are values: TMA
            copies, and two warpgroups that share the values' columns. It has blocks of 64 keys, tiles of 16 to 64
            rows, 8 warps, 2 stages, one program an SM, and a combine of "kernel" or "none".
    """

    block_n: int = 64
    block_m: int = 16
    num_warps: int = 4
    num_stages: int = 4
    programs_per_sm: int = 2
    min_blocks: int = 1
    slack: int = 2
    registers: int = 0
    prefetch_blocks: int = 0
    combine: str = "kernel"
    pdl: bool = False
    kernel: str = "portable"

    def __post_init__(self) -> None:
        for name in ("block_n", "block_m", "num_warps", "num_stages", "programs_per_sm", "min_blocks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"DecodeConfig: {name} is {value!r}, expected a positive integer")
            if name in ("block_n", "block_m", "num_warps") and value & (value - 1):
                raise ValueError(f"DecodeConfig: {name} is {value}, expected a power of two")
        for name in ("slack", "registers", "prefetch_blocks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"DecodeConfig: {name} is {value!r}, expected 0 or more")
        if self.block_n < 16 or self.block_m < 8:
            raise ValueError(
                f"DecodeConfig: block_n is {self.block_n} and block_m {self.block_m}, expected at least 16 and 8"
            )
        if self.combine not in COMBINES:
            raise ValueError(f"DecodeConfig: combine is {self.combine!r}, expected one of {', '.join(COMBINES)}")
        if self.kernel not in KERNELS:
            raise ValueError(f"DecodeConfig: kernel is {self.kernel!r}, expected one of {', '.join(KERNELS)}")
        fixed = _HOPPER if self.kernel == "hopper" else {}
        for name, only in fixed.items():
            if getattr(self, name) not in only:
                raise ValueError(
                    f"DecodeConfig: {name} is {getattr(self, name)!r}, expected {' or '.join(map(str, only))} for "
                    "kernel 'hopper'"
                )

    def check_device(self, target: runtime.Target, key_bytes: int) -> None:
        """Raise ValueError for what the device cannot run; `key_bytes` is the size of a key and its value."""
        most_warps = target.max_threads // target.warp_size
        most_registers = min(255, 65536 // (32 * self.num_warps))
        shared = (self.num_stages - 1) * self.block_n * key_bytes  # the kernel needs at least this
        if self.num_warps > most_warps:
            raise ValueError(
                f"DecodeConfig: num_warps is {self.num_warps}, expected at most {most_warps} on {target.arch}"
            )
        if self.registers > most_registers:
            raise ValueError(
                f"DecodeConfig: registers is {self.registers}, expected at most {most_registers} with "
                f"{self.num_warps} warps"
            )
        if shared > target.shared_memory:
            raise ValueError(
                f"DecodeConfig: num_stages {self.num_stages} and block_n {self.block_n} need at least {shared} bytes "
                f"of shared memory, expected at most {target.shared_memory} on {target.arch}"
            )


@functools.cache
def encode(config: DecodeConfig | None) -> str:
    """A configuration as a string for the op's schema; "" for None."""
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
    *sizes, combine, pdl, kernel = text.split(",")
    return DecodeConfig(*(int(n) for n in sizes), combine, pdl == "1", kernel)  # type: ignore[arg-type, call-arg]


# Choice


def row_tile(rows: int, most: int = 64) -> tuple[int, int]:
    """Query rows in a tile, and the number of tiles of a KV head."""
    tile = min(library.power_of_two(max(1, rows)), most)
    return tile, library.cdiv(rows, tile)


def most_rows(head_dim: int, dtype: torch.dtype, target: runtime.Target) -> int:
    """The most rows of a tile; of long ones, those that leave room for keys in shared memory and registers."""
    if head_dim <= LONGEST_HEAD or (target.shared_memory >= 200 << 10 and dtype != torch.float32):
        return 64
    return 16


def _sizes(most: int, cache: torch.dtype, items: int, capacity: int, page: int, sms: int) -> tuple[int, int]:
    """Programs of an SM and keys of a block, for 16-bit rows of which `most` = 64 keys take 32 KB.

    Measured on an H200 (132 SMs), bfloat16, 32 query heads, 8 KV heads, D 128, in us. A program's blocks are loaded
    concurrently, so fewer programs may have larger blocks or more of them:

        batch x keys     1 x 512   1 x 2048   1 x 8192   1 x 32768   8 x 2048   8 x 8192   32 x 2048
        blocks of an SM      0.5        1.9        7.8          31         16         62          62
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
    """Whether a block may have twice as many keys.

    Not with smaller pages, where each key needs its own pointer: 74.6 us at 8 x 8192 in pages of 64, and 70.4 with
    blocks of 64 keys. Not with caches of 8 bits, whose kernel would spill.
    """
    return cache.itemsize == 2 and (page == 0 or page >= 2 * most)


def _whole(items: int, capacity: int, most: int, sms: int) -> bool:
    """Whether no item is split, which saves the second kernel or the combining program.

    Measured on an H200, 32 KV heads, in us: at 1 x 44 two kernels took 5.4, one 3.2 and cuDNN's 3.7; at 8 x 512 two
    took 11.8, one 9.1 and cuDNN's 8.9; at 64 x 512 two took 38.1 and one 37.4. At 1 x 1024 splits are faster: 6.4, and
    22.9 without. At D 64, with up to 192 keys, a step of Llama-3.2-1B on an H100 took 1037 us, and 1008 without.
    """
    return capacity <= max(128, 2 * most) or (capacity <= min(512, 8 * most) and items >= 0.45 * sms)


def _choose_latent(
    rows: int,
    head_dim: int,
    dtype: torch.dtype,
    cache: torch.dtype,
    items: int,
    capacity: int,
    target: runtime.Target,
    hopper: bool,
) -> DecodeConfig:
    """For values that are the first columns of the keys: one program of an SM, as two blocks fill shared memory.

    64 keys are the least rows of wgmma, which other targets lack. 8-bit elements are converted in registers. The output
    of 64 rows and 512 columns takes half the registers of 8 warps. A plan made before the previous kernel ends would
    take registers in the loop. On an H100 with DeepSeek-V3's 16 heads 8 x 32768 took 125.8 us; with 4 warps 135.4, with
    4 stages of 32 keys 162.0.

    128 heads reach 0.39 of cuBLAS's rate so: 64 keys and 64 rows take 4.1 us, of which tensor cores need 1.3. Both warp
    groups read all keys from shared memory, and no GEMM runs during the softmax or while copies are issued. So there is
    a kernel of its own where it can run (`hopper_latent`). With it 16 heads and 32 x 8192 took 77.6 us on an H200 with
    one token of each sequence, 81.9 with two (32 rows) and 87.4 with four (64 rows).
    """
    if hopper:
        return DecodeConfig(64, 16, 8, 2, 1, combine="none" if capacity <= 64 else "kernel", pdl=True, kernel="hopper")
    tile, _ = row_tile(rows, most_rows(head_dim, dtype, target))
    columns = sum(split_dim(head_dim))
    nvidia = target.arch.startswith("sm_")
    block_n = 64 if target.arch == "sm_90" and cache.itemsize == 2 else 32
    if dtype == torch.float32 or (cache.itemsize == 1 and not nvidia):
        block_n = 16
    room = target.shared_memory - max(tile, 16) * columns * dtype.itemsize - 8192
    while block_n > 16 and 2 * block_n * columns * cache.itemsize > room:
        block_n //= 2
    warps = 8 if nvidia else 4
    combine = "none" if capacity <= block_n else "kernel"
    return DecodeConfig(block_n, 16, warps, 2, 1, combine=combine, pdl=True)


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
    values_in_keys: bool = False,
    hopper: bool = False,
) -> DecodeConfig:
    """For `rows` (query heads of a KV head times new tokens) and `items` (sequences times KV heads times tiles).

    `hopper`: the kernel of that name takes the call.
    """
    if target is runtime.INTERPRETER:
        return DecodeConfig(block_n=32, num_stages=2, programs_per_sm=3)
    if values_in_keys:
        return _choose_latent(rows, head_dim, dtype, cache, items, capacity, target, hopper)
    tile, _ = row_tile(rows)
    width = sum(split_dim(head_dim)) + sum(split_dim(value_dim))
    widest = max(sum(split_dim(head_dim)), sum(split_dim(value_dim)))
    # float32 has no tensor-core instruction: threads hold the operands, so a small block is spread over many of them.
    most = 16 if dtype == torch.float32 else 128 if width <= 128 else 64
    warps = 8 if tile > 32 or widest > 128 or dtype == torch.float32 else 4
    sms = target.multiprocessors
    whole = _whole(items, capacity, most, sms)
    if most != 64 or capacity <= 128:
        wanted = 2, most
    elif whole and items <= sms and _takes_twice(most, cache, page):
        wanted = 1, 2 * most  # a program for each item, with all of its loads in flight
    else:
        wanted = _sizes(most, cache, items, capacity, page, sms)
    # As many pipeline stages as fit; smaller blocks where not even two do.
    for programs, block_n in (wanted, (2, most), (2, most // 2), (1, most), (1, most // 2), (1, 16)):
        left = target.shared_memory // programs - tile * 4 * widest - 8192
        stages = min(5, left // (block_n * width * cache.itemsize))
        if stages >= 2 and block_n >= 16 and not (warps == 8 and programs == 2):
            break
    # Where items alone nearly occupy the programs they have few splits, which the last program combines: 65.1 us at
    # 32 x 2048 and 67.6 with a second kernel; 23.5 and 23.9 at 8 x 2048; but 16.8 and 9.1 at 1 x 2048. More rows are
    # more work for that program, and it spills. 16 rows on an H100, with a program of the second kernel for each row:
    # 94.2 and 100.8 at 32 x 2048, 104.0 and 103.3 at 8 x 8192, 37.2 and 38.0 at 8 x 2048. Fewer such programs: not
    # measured.
    few = 0.45 if tile <= 8 else 0.9
    combine = "none" if whole else "last" if items >= few * programs * sms else "kernel"
    # Short blocks: 6.4 us at 1 x 1024 with at least two in a split, and 7.3 with one.
    short = combine == "kernel" and (programs, block_n) == wanted == (2, most // 2)
    min_blocks = 2 if short and 2 * items * library.cdiv(capacity, most) > sms else 1
    return DecodeConfig(
        block_n, 16, warps, max(2, stages), programs, min_blocks, prefetch_blocks=1, combine=combine, pdl=True
    )


# Checks

MOST_TOKENS = 16
LONGEST_HEAD = 256
LONGEST_LATENT = 576  # of keys that hold their values
_OP = "decode_attention"


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a call. `capacity` is the most keys of a sequence; `page` is 0 for a contiguous cache.

    `n_pages`, of pages or of sequences, is 0 for a contiguous cache without `cache_batch_idx`.
    """

    batch: int
    n_new: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    capacity: int
    page: int
    n_pages: int
    values_in_keys: bool


def column_blocks(s: Shape) -> tuple[tuple[int, int], tuple[int, int]]:
    """The blocks of columns of keys and of values; those of values in keys are the keys'."""
    keys = split_dim(s.head_dim)
    if not s.values_in_keys:
        return keys, split_dim(s.value_dim)
    return keys, keys if s.value_dim > keys[0] else (keys[0], 0)


def shape_of(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    page_table: Tensor | None,
    head_dim_v: int | None,
    layout: str,
    cache_layout: str,
) -> Shape:
    batch, heads, n_new, head_dim = (q.shape[layout.index(axis)] for axis in "bhtd")
    tokens, kv_heads = cache_layout.index("t"), cache_layout.index("h")
    page, n_pages, capacity = 0, 0, k_cache.shape[tokens]
    if page_table is not None and page_table.dim() == 1:
        n_pages = k_cache.shape[0]
    elif page_table is not None:
        page, n_pages = k_cache.shape[tokens], k_cache.shape[0]
        capacity = page_table.shape[1] * page
    value_dim = v_cache.shape[3] if v_cache is not None else head_dim_v
    assert value_dim is not None
    return Shape(
        batch, n_new, heads, k_cache.shape[kv_heads], head_dim, value_dim, capacity, page, n_pages, v_cache is None
    )


def _check_options(
    scale: float | None, window: int | None, softcap: float | None, causal: bool, layout: str, cache_layout: str
) -> None:
    library.check_layout(_OP, layout)
    library.check_layout(_OP, cache_layout, "cache_layout")
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and (not isinstance(value, (float, int)) or isinstance(value, bool)):
            raise TypeError(f"{_OP}: {name} is {library.named(value)}, expected a number or None")
    if scale is not None and not abs(scale) < 2.0**127:
        raise ValueError(f"{_OP}: scale is {scale}, expected a finite value below 2^127")
    if softcap is not None and not 0 <= softcap < 2.0**64:
        raise ValueError(f"{_OP}: softcap is {softcap}, expected 0 or more and below 2^64")
    library.check_window(_OP, window)
    if window is not None and (not isinstance(window, int) or isinstance(window, bool)):
        raise TypeError(f"{_OP}: window is {library.named(window)}, expected an int or None")
    if window is not None and window < 1:
        raise ValueError(f"{_OP}: window is {window}, expected at least 1: the query's own position")
    if not isinstance(causal, bool):
        raise TypeError(f"{_OP}: causal is {library.named(causal)}, expected a bool")
    if window is not None and not causal:
        raise ValueError(f"{_OP}: window is {window} with causal=False, expected None: all tokens see all keys")


def _expect(name: str, t: Tensor, shape: tuple[object, ...], why: str = "") -> None:
    if tuple(t.shape) != shape:
        words = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{_OP}: {name} has shape {tuple(t.shape)}, expected ({words}){why}")


def check_value_columns(op: str, k_cache: Tensor, v_cache: Tensor | None, head_dim_v: int | None) -> None:
    """Raise unless v_cache, or head_dim_v instead of it, fits k_cache."""
    if head_dim_v is not None and (not isinstance(head_dim_v, int) or isinstance(head_dim_v, bool)):
        raise TypeError(f"{op}: head_dim_v is {library.named(head_dim_v)}, expected an int or None")
    if v_cache is None:
        if head_dim_v is None or not 1 <= head_dim_v <= k_cache.shape[3]:
            raise ValueError(
                f"{op}: head_dim_v is {head_dim_v} without a v_cache, expected 1 to {k_cache.shape[3]}: the elements "
                "of a key that are its value"
            )
        return
    if v_cache.shape[:3] != k_cache.shape[:3] or not 1 <= v_cache.shape[3] <= LONGEST_HEAD:
        expected = library.shown((*k_cache.shape[:3], f"1 to {LONGEST_HEAD}"))
        raise ValueError(f"{op}: v_cache has shape {tuple(v_cache.shape)}, expected {expected} to match k_cache")
    if head_dim_v not in (None, v_cache.shape[3]):
        raise ValueError(f"{op}: head_dim_v is {head_dim_v}, expected None or v_cache's {v_cache.shape[3]}")


def scale_of_values(op: str, v_cache: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None) -> Tensor | None:
    """v_scale; without a v_cache, k_scale."""
    if v_cache is not None:
        return v_scale
    if v_scale is not None:
        raise ValueError(f"{op}: v_scale is given without a v_cache, expected None: k_scale holds for both")
    return k_scale


def check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    lengths: Tensor,
    page_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    mask: Tensor | None,
    head_dim_v: int | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    causal: bool,
    layout: str,
    cache_layout: str,
) -> Shape:
    """Raise for unsupported shapes, dtypes and options."""
    _check_options(scale, window, softcap, causal, layout, cache_layout)
    if q.dim() != 4:
        expected = "B, T, Hq, D" if layout == "bthd" else "B, Hq, T, D"
        raise ValueError(f"{_OP}: q has shape {tuple(q.shape)}, expected 4 dimensions ({expected})")
    in_pages = page_table is not None and page_table.dim() != 1
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache is not None and cache.dim() != 4:
            expected = (
                ("pages, page_size, Hkv, D" if cache_layout == "bthd" else "pages, Hkv, page_size, D")
                if in_pages
                else ("B, S, Hkv, D" if cache_layout == "bthd" else "B, Hkv, S, D")
            )
            raise ValueError(f"{_OP}: {name} has shape {tuple(cache.shape)}, expected 4 dimensions ({expected})")
    paging.check_dtypes(_OP, q, k_cache, k_cache if v_cache is None else v_cache)
    batch, heads, n_new, head_dim = (q.shape[layout.index(axis)] for axis in "bhtd")
    if n_new > MOST_TOKENS:
        raise ValueError(
            f"{_OP}: q has {n_new} tokens a sequence, expected at most {MOST_TOKENS}; "
            f"{'attention_paged' if v_cache is None or in_pages else 'attention'} takes any number"
        )
    longest = LONGEST_LATENT if v_cache is None else LONGEST_HEAD
    if k_cache.shape[3] != head_dim or not 1 <= head_dim <= longest:
        raise ValueError(
            f"{_OP}: q and k_cache have last dimensions of {head_dim} and {k_cache.shape[3]}, expected the same, "
            f"1 to {longest}"
        )
    check_value_columns(_OP, k_cache, v_cache, head_dim_v)
    kv_heads = k_cache.shape[cache_layout.index("h")]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{_OP}: q has {heads} heads, expected a multiple of k_cache's {kv_heads}")
    _expect("lengths", lengths, (batch,), ": one for each sequence of q")
    if lengths.dtype != torch.int32:
        raise TypeError(f"{_OP}: lengths has dtype {lengths.dtype}, expected int32")
    if page_table is None:
        if k_cache.shape[0] != batch:
            raise ValueError(f"{_OP}: k_cache has {k_cache.shape[0]} sequences, expected {batch} to match q")
    elif page_table.dim() == 1:
        paging.check_entries(_OP, page_table, batch)
    else:
        paging.check_pages(_OP, page_table, batch, k_cache.shape[cache_layout.index("t")])
    paging.check_scales(_OP, k_scale, v_scale, k_cache, kv_heads)
    library.check_floating(_OP, alibi_slopes=alibi_slopes, sinks=sinks)
    if sinks is not None:
        _expect("sinks", sinks, (heads,), ": one for each head of q")
    if alibi_slopes is not None and tuple(alibi_slopes.shape) != (batch, heads):
        _expect("alibi_slopes", alibi_slopes, (heads,), f" or ({batch}, {heads}): one for each head of q")
    s = shape_of(q, k_cache, v_cache, page_table, head_dim_v, layout, cache_layout)
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"{_OP}: mask has dtype {mask.dtype}, expected bool: True where a key is seen")
        _expect("mask", mask, (batch, s.capacity), ": one for each sequence and key of its capacity")
    return s


def check_values(lengths: Tensor, page_table: Tensor | None, s: Shape) -> None:
    """Check lengths and pages on the CPU. Those on the GPU would cost a synchronization; the kernel clamps them."""
    paging.check_values(_OP, lengths, page_table, s.capacity, s.page, s.n_pages)
