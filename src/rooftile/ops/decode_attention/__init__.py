"""Attention of a few new tokens to a KV cache, with a length of its own for each sequence.

    out = softmax(score(scale * q · k)) · v

Bytes: the seen part of the cache, read once for all query heads of a KV head and all new tokens; q and out are small.
A GPU has more than a hundred SMs, but a sequence only some eight KV heads. So the keys are divided into splits, whose
softmaxes are combined afterwards (split-KV; Flash-Decoding). The splits are chosen on the device from the lengths, the
batch and the number of programs: a launch depends on shapes alone, and one CUDA graph serves all lengths.

Multi-head latent attention (MLA, DeepSeek-V2) in its absorbed form is the same with one KV head, whose values are the
first columns of its keys: `v_cache` is None. For DeepSeek-V3 a token has 576 elements, of which 512 are its value. It
takes 2 Hq T (576 + 512) FLOPs for 2 * 576 bytes: 30 FLOPs a byte with 16 heads, which is bound by memory, and 242 with
128 heads, where an H100's memory and its tensor cores take about as long.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.decode_attention.choose import (
    DecodeConfig,
    Shape,
    check,
    check_values,
    choose,
    column_blocks,
    decode,
    encode,
    most_rows,
    row_tile,
    scale_of_values,
    shape_of,
)
from rooftile.ops.decode_attention.kernel import as_pairs, decode_kernel, packed_format
from rooftile.ops.decode_attention.schedule import NEVER_SPLIT, combine_kernel, partial_numbers
from rooftile.primitives import pdl
from rooftile.primitives.paging import scale_kind, scale_strides, table_of
from rooftile.primitives.quantize import writable
from rooftile.primitives.scores import default_factor, score_factors

__all__ = ["DecodeConfig", "decode_attention"]


@dataclasses.dataclass(frozen=True)
class _Problem:
    """What selects the kernels, beside the configuration.

    `factor` is that of the default scale, or 0. `shape` has the batch rounded up to a power of two, the query rows
    of a KV head for `n_new`, and no sizes that are arguments. `tile` is the rows of a tile. `split`: items may be
    split; `combine_rows`: the rows of a program of the second kernel; `one_item`: items are not split, and each has a
    program of its own. `alibi` is how many dimensions the slopes have.
    """

    dtypes: tuple[torch.dtype | None, ...]
    shape: Shape
    tile: int
    token_strides: tuple[int, int]
    factor: float
    capped: bool
    has_window: bool
    causal: bool
    scale_kinds: tuple[str, str]
    alibi: int
    has_lse: bool
    pdl: bool
    packed: str
    ptx: bool
    split: bool
    combine_rows: int
    one_item: bool


def _hopper() -> ModuleType | None:
    """The module with the kernel for sm_90; None where this Triton has no Gluon, in which it is written."""
    return runtime.gluon_module("rooftile.ops.decode_attention.hopper_latent")


@functools.cache
def _launchers(p: _Problem, c: DecodeConfig) -> tuple[launching.KernelLauncher, launching.KernelLauncher | None]:
    """The kernel, and the one that combines splits, if that is a second kernel."""
    s = p.shape
    (d0, d1), (v0, v1) = column_blocks(s)
    tile, tiles = p.tile, library.cdiv(s.n_new, p.tile)
    width = max(v0, v1)
    itemsize = 1 if p.packed else p.dtypes[1].itemsize  # type: ignore[union-attr]
    has_sinks, has_mask = (dtype is not None for dtype in p.dtypes[7:])
    min_blocks = c.min_blocks if p.split else NEVER_SPLIT.value
    last = max(1, min(64, 1024 * c.num_warps // (tile * width))) if p.split and c.combine == "last" else 0
    constants = {
        "HEAD_DIM": s.head_dim,
        "VALUE_DIM": s.value_dim,
        "GROUP": s.heads // s.kv_heads,
        "ROW_TILES": tiles,
        "PAGE": s.page,
        "STRIDE_KT": p.token_strides[0],
        "STRIDE_VT": p.token_strides[1],
        "FACTOR": p.factor,
        "CAPPED": p.capped,
        "HAS_WINDOW": p.has_window,
        "CAUSAL": p.causal,
        "VALUES_IN_KEYS": s.values_in_keys,
        "K_SCALE_KIND": p.scale_kinds[0],
        "V_SCALE_KIND": p.scale_kinds[1],
        "ALIBI": p.alibi,
        "HAS_SINKS": has_sinks,
        "HAS_MASK": has_mask,
        "HAS_LSE": p.has_lse,
        "D0": d0,
        "D1": d1,
        "V0": v0,
        "V1": v1,
        "ROWS": tile,
        "BLOCK_B": s.batch,
        "BLOCK_M": max(c.block_m, tile),
        "BLOCK_N": c.block_n,
        "STAGES": c.num_stages,
        "MIN_BLOCKS": min_blocks,
        "SLACK": c.slack,
        "COMBINE_SPLITS": last,
        "PREFETCH_BLOCKS": c.prefetch_blocks if p.pdl else 0,
        "ONE_ITEM": p.one_item,
        "K_LINES": library.power_of_two(library.cdiv(s.head_dim * itemsize, 128)),
        "V_LINES": library.power_of_two(library.cdiv(s.value_dim * itemsize, 128)),
        "PDL": p.pdl,
        "PACKED": p.packed,
        "PTX": p.ptx,
    }
    options = pdl.options(p.pdl)
    if c.kernel == "hopper":
        names = ("GROUP", "ROW_TILES", "PAGE", "VALUE_DIM", "CAUSAL", "BLOCK_B", "MIN_BLOCKS", "SLACK", "PDL", "ROWS")
        hopper = _hopper()
        assert hopper is not None, "a configuration for a kernel that is not there is refused"
        launcher = hopper.launcher(**{name.lower(): constants[name] for name in names})
    else:
        limit: dict[str, Any] = {"maxnreg": c.registers} if c.registers and p.ptx else {}
        launcher = launching.KernelLauncher(
            decode_kernel, constants, newest_assembler=True, num_warps=c.num_warps, **options, **limit
        )
    if last or not p.split:
        return launcher, None
    combine = {name: constants[name] for name in combine_kernel.arg_names if name in constants}
    combine |= {"COMBINE_SPLITS": max(1, min(64, 8192 // (width * p.combine_rows))), "COMBINE_ROWS": p.combine_rows}
    return launcher, launching.KernelLauncher(combine_kernel, combine, num_warps=4, **options)


def _prepare(*args: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    if isinstance(args[0], FunctionalTensor):
        raise launching.Untraceable("counters")
    of_out, of_lse = ((t.shape, t.stride()) for t in _fake(*args))
    dtype, device, start = args[0].dtype, args[0].device, _prepare_start(*args)

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        out = torch.empty_strided(*of_out, dtype=dtype, device=device)
        lse = torch.empty_strided(*of_lse, dtype=torch.float32, device=device)
        start(out, lse, *args)
        return out, lse

    return run


def _checked_out(out: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Results like those of the arguments; raises unless `out` has the place of the first."""
    found, lse = _fake(*args)
    if out.shape != found.shape or out.dtype != found.dtype or out.stride() != found.stride():
        raise ValueError(
            f"decode_attention: out is {out.dtype} of shape {tuple(out.shape)} with strides {out.stride()}, expected "
            f"{found.dtype} of {tuple(found.shape)} with strides {found.stride()}"
        )
    return found, lse


def _prepare_into(out: Tensor, *args: Any) -> Callable[..., Tensor]:
    lse = _checked_out(out, *args)[1]
    shape, strides, device, start = lse.shape, lse.stride(), lse.device, _prepare_start(*args)

    def run(out: Tensor, *args: Any) -> Tensor:
        lse = torch.empty_strided(shape, strides, dtype=torch.float32, device=device)
        start(out, lse, *args)
        return lse

    return run


def _prepare_start(*args: Any) -> Callable[..., None]:
    """The launches for checked arguments, to be called with memory for out and lse, and with them."""
    q, k_cache, v_cache, lengths, page_table, k_scale, v_scale, alibi_slopes, sinks, mask, head_dim_v = args[:11]
    scale, window, softcap, causal, layout, cache_layout, return_lse, config = args[11:]
    s = shape_of(q, k_cache, v_cache, page_table, head_dim_v, layout, cache_layout)
    check_values(lengths, page_table, s)
    no_pages = page_table is not None and s.n_pages == 0
    if s.batch * s.n_new * s.heads * s.value_dim == 0 or s.capacity == 0 or no_pages:  # no keys, for any lengths

        def without_keys(out: Tensor, lse: Tensor, *args: Any) -> None:
            lse.fill_(float("-inf"))
            if args[8] is not None and return_lse:  # sinks
                lse.copy_(args[8][:, None].expand_as(lse))
            out.zero_()

        return without_keys

    target = runtime.target(q.device)
    rows = s.heads // s.kv_heads * s.n_new
    tile, tiles = row_tile(rows, most_rows(s.head_dim, q.dtype, target))
    items = s.batch * s.kv_heads * tiles
    copies = library.Copies()
    q, k_cache = (library.unit_last_of(t, copies, i) for i, t in enumerate((q, k_cache)))
    views = q if layout == "bthd" else q.transpose(1, 2), k_cache if cache_layout == "bhtd" else k_cache.transpose(1, 2)
    c = decode(config)
    if c is None:
        hopper = s.values_in_keys and _why_not_hopper(*views, s, args, target) is None
        c = choose(
            rows, s.head_dim, s.value_dim, q.dtype, k_cache.dtype, items, s.capacity, s.page, target, s.values_in_keys,
            hopper,
        )  # fmt: skip
    else:
        c.check_device(target, (s.head_dim + (0 if s.values_in_keys else s.value_dim)) * k_cache.element_size())
        reason = _why_not_hopper(*views, s, args, target) if c.kernel == "hopper" else None
        if reason is not None:
            raise ValueError(f"decode_attention: config can't be launched: {reason}")

    v_cache = None if v_cache is None else library.unit_last_of(v_cache, copies, 2)
    for i, t in ((3, lengths), (7, alibi_slopes), (8, sinks)):
        library.contiguous_of(t, copies, i)
    page_table, mask = (
        None if t is None else library.unit_last_of(t, copies, i) for i, t in ((4, page_table), (9, mask))
    )
    packed = "" if v_cache is None else packed_format(q, k_cache, v_cache, target)
    as_read = as_pairs if packed else writable
    k_bytes, v_bytes = as_read(k_cache), None if v_cache is None else as_read(v_cache)
    for i, t, as_bytes in ((1, k_cache, k_bytes), (2, v_cache, v_bytes)):
        if as_bytes is not t:
            copies[i] = functools.partial(_as_bytes, packed, copies.get(i))

    # The programs of each tile divide the work among themselves.
    items //= tiles
    blocks = items * library.cdiv(s.capacity, c.block_n)
    most_splits = items if c.combine == "none" else max(1, blocks // c.min_blocks)
    programs = max(1, min(target.multiprocessors * c.programs_per_sm // tiles, most_splits))
    split = programs > 1 and c.combine != "none"
    _, (v0, v1) = column_blocks(s)
    n_partial = partial_numbers(programs * tiles, tile, v0 + v1) if split else 0
    # Registers let an SM hold some four programs of the second kernel. One for each row would be several waves.
    of_batch = library.power_of_two(s.batch) * s.kv_heads * tiles * tile
    waves = library.cdiv(of_batch, 4 * target.multiprocessors)
    combine_rows = min(tile, library.power_of_two(waves), max(1, 8192 // max(v0, v1))) if split else 1
    n_counters = items * tiles if split and c.combine == "last" else 0
    k_strides, v_strides = (
        library.axis_strides(t, cache_layout) for t in (k_bytes, k_bytes if v_bytes is None else v_bytes)
    )
    cap, last = float(softcap or 0.0), 0 if window is None or window >= 1 << 30 else window
    factors = score_factors(s.head_dim**-0.5 if scale is None else float(scale), cap)
    problem = _Problem(
        dtypes=tuple(None if t is None else t.dtype for t in (q, k_bytes, *args[3:10])),
        tile=tile,
        shape=dataclasses.replace(s, batch=library.power_of_two(s.batch), n_new=rows, capacity=0, n_pages=0),
        token_strides=(k_strides[2], v_strides[2]),
        factor=default_factor(s.head_dim, scale, cap),
        capped=cap > 0.0,
        has_window=last > 0,
        causal=causal or s.n_new == 1,  # one token, the last, sees all keys in either case
        scale_kinds=(scale_kind(k_scale), scale_kind(v_scale)),
        alibi=0 if alibi_slopes is None else alibi_slopes.dim(),
        has_lse=return_lse,
        pdl=c.pdl and pdl.supported(target),
        packed=packed,
        ptx=target.arch.startswith("sm_"),
        split=split,
        combine_rows=combine_rows,
        one_item=not split and programs == items,
    )
    launcher, combine = _launchers(problem, c)
    q_strides = library.axis_strides(q, layout)
    strides = (
        q_strides[0],
        q_strides[2],
        q_strides[1],
        *k_strides[:2],
        *v_strides[:2],
        *scale_strides(k_scale, cache_layout),
        *scale_strides(v_scale, cache_layout),
        0 if page_table is None else page_table.stride(0),
        1 if mask is None else mask.stride(0),  # a 1 is compiled in: without a mask there is one argument less
    )
    sizes = (s.batch, s.n_new, s.kv_heads, s.capacity)
    hopper_module = _hopper() if c.kernel == "hopper" else None
    if hopper_module is not None:
        start = hopper_module.prepare(launcher, *views, s, page_table, programs, factors[0])
    else:
        start = launching.bind(
            launcher, programs * tiles, strides=strides, numbers=(*sizes, s.n_pages, programs, *factors, last)
        )
    start = library.copying(start, copies)
    finish = None
    if combine is not None:
        finish = launching.bind(combine, items * tiles * (tile // combine_rows), numbers=(*sizes, programs, last))
        finish = library.copying(finish, {i: Tensor.contiguous for i, place in ((0, 3), (1, 8)) if place in copies})
    device = q.device

    def run(
        out: Tensor, lse: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor | None, lengths: Tensor,
        page_table: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, alibi_slopes: Tensor | None,
        sinks: Tensor | None, mask: Tensor | None, *_: object,
    ) -> None:  # fmt: skip
        lse_or_none = lse if return_lse else None
        partial = torch.empty_strided((n_partial,), (1,), dtype=torch.float32, device=device) if split else None
        counters = launching.counters(n_counters, device) if n_counters else None
        start(
            q, k_cache, v_cache, lengths, page_table, k_scale, v_scale, alibi_slopes, sinks, mask, out, lse_or_none,
            partial, counters,
        )  # fmt: skip
        if finish is not None:
            finish(lengths, sinks, partial, out, lse_or_none)

    return run


def _why_not_hopper(q: Tensor, k: Tensor, s: Shape, args: tuple[Any, ...], target: runtime.Target) -> str | None:
    """None where the kernel for sm_90 takes a call with those views of q and the keys, or why it does not."""
    module = _hopper()
    if module is None:
        return "kernel is 'hopper', which this installation does not have"
    scale, window, softcap = args[11:14]
    given = {"k_scale": args[5], "alibi_slopes": args[7], "sinks": args[8], "mask": args[9], "window": window}
    options = tuple(name for name, value in given.items() if value is not None) + ("softcap",) * bool(softcap)
    found: str | None = module.can_implement(q, k, s, s.head_dim**-0.5 if scale is None else scale, options, target)
    return found


def _as_bytes(packed: str, first: Callable[[Tensor], Tensor] | None, t: Tensor) -> Tensor:
    """A cache as the kernel reads it; `first` makes its last stride 1."""
    t = t if first is None else first(t)
    return as_pairs(t) if packed else writable(t)


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, layout, return_lse = args[0], args[15], args[17]
    s = check(*args[:17])
    batch, heads, n_new = s.batch, s.heads, s.n_new
    out = torch.empty((batch, n_new, heads, s.value_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, n_new) if return_lse else (0,), dtype=torch.float32, device=q.device)
    return (out if layout == "bthd" else out.transpose(1, 2)), lse


_ARGUMENTS = (
    "Tensor q, Tensor k_cache, Tensor? v_cache, Tensor lengths, Tensor? page_table, Tensor? k_scale, Tensor? v_scale, "
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? mask, int? head_dim_v, float? scale, int? window, float? softcap, "
    "bool causal, str layout, str cache_layout, bool return_lse, str config"
)
_op = library.define(f"decode_attention({_ARGUMENTS}) -> (Tensor, Tensor)", prepare=_prepare, fake=_fake)
_into = library.define(
    f"decode_attention_into(Tensor(a!) out, {_ARGUMENTS}) -> Tensor",
    prepare=_prepare_into,
    fake=lambda out, *args: _checked_out(out, *args)[1],
    called=lambda args: "decode_attention",
)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    lengths: Tensor,
    *,
    head_dim_v: int | None = None,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: str = "bhtd",
    cache_layout: str = "bthd",
    return_lse: bool = False,
    config: DecodeConfig | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the last T tokens of each sequence to all its keys up to their own position.

    Token i of sequence b stands at position `p = lengths[b] - T + i`, and its keys and values are in the cache already:

        s_j = scale * q · k_j * k_scale,   softcap * tanh(s_j / softcap),   - slope * (p - j)
        out = sum_j exp(s_j) v_j * v_scale / (sum_j exp(s_j) + exp(sink)),   p - window < j <= p,   mask[b, j]

    computed in float32 (both GEMMs take q's dtype, as in `attention`) and rounded once. It has no derivative. The
    splits of the keys depend on the lengths, the batch and the GPU alone, so results are bit-identical on every run.

    Args:
        q: `(B, Hq, T, D)` (or `(B, T, Hq, D)` with `layout="bthd"`), T at most 16, float32, float16 or bfloat16. Any
            strides; copied where the last is not 1.
        k_cache, v_cache: `(B, S, Hkv, D)`, or `(B, Hkv, S, D)` with `cache_layout="bhtd"`; with a page table
            `(pages, page_size, Hkv, D)` or `(pages, Hkv, page_size, D)`, page_size 16, 32, 64, 128, 256 or 512. Of q's
            dtype, float8_e4m3fn or int8. Query head h reads KV head `h // (Hq // Hkv)`. D, and the last dimension of
            v_cache, which may be another, are 1 to 256. Any strides; copied as a whole where the last is not 1, or
            where rows of 8-bit elements begin at odd bytes.
            `v_cache=None`, with `head_dim_v`: the value of a token is the first head_dim_v elements of its key, as in
            multi-head latent attention (DeepSeek-V2, section 2.1). They are read once. D is 1 to 576, head_dim_v 1 to
            D. For DeepSeek-V3, q is q_nope · W_uk beside q_rope, k_cache `(B, S, 1, 576)`, head_dim_v 512, scale the
            model's own, and out is multiplied by W_uv.
        lengths: `(B,)`, int32: the keys of each sequence, including the new tokens; 0 or less for none. The cache may
            hold anything beyond them.
        page_table: `(B, most pages)`, int32: the pages of each sequence. Entries beyond its length are not read.
        cache_batch_idx: `(B,)`, int32: the entry of each sequence in a contiguous cache, `k_cache[cache_batch_idx[b]]`,
            as in FlashAttention; b by default. The cache may have any number of entries, and sequences may share them.
        scale: of the scores; `1 / sqrt(D)` by default, which is compiled in. A new value of scale, window or softcap
            compiles nothing.
        window: the most keys that a token sees, including its own. Earlier keys are not read. No tensor: reading it
            would make the host wait for the device.
        softcap: as in Gemma 2; None or 0 for none.
        causal: False for cross-attention: all new tokens see all keys of their sequence, `j < lengths[b]`; their own
            keys need not be among them. It takes no window. ALiBi counts |p - j|, the last token at the last key.
        alibi_slopes: `(Hq,)` or `(B, Hq)`, floating (Press et al. 2022).
        sinks: `(Hq,)`, floating: a score of each head that takes part in the softmax without a value.
        mask: `(B, S)`, bool, where S is the capacity of a sequence (pages times page_size, with a page table): False
            hides a key that lengths, position and window would show. Any strides; copied where the last is not 1.
            Hidden keys are read all the same, and their values must be finite.
        k_scale, v_scale: float32, the factors of cached elements: `()`, `(Hkv,)`, or one for each token and head,
            of the cache's first three dimensions. Without a v_cache, k_scale holds for both.
        layout: the order of the dimensions of q and out.
        cache_layout: the order of the dimensions of the caches, and of scales by token.
        return_lse: also return `(B, Hq, T)`, float32: the logarithm of the softmax's denominator, including sinks.
        config: the launch configuration; chosen by default.
        out: memory for the result, such as rows of a larger tensor; new memory by default. No other argument may share
            it.

    Returns:
        out, of q's dtype and layout, contiguous in the order (B, T, Hq, Dv); with `return_lse` (out, lse). A token that
        sees no key is 0, and its lse is -inf, or its sink.

    Raises:
        ValueError: shapes, devices or a configuration do not fit; an input requires grad; lengths or pages on the CPU
            lead out of the cache. On the GPU both are clamped, and nothing outside the cache is read.
        TypeError: an unsupported dtype.
    """
    if type(return_lse) is not bool:  # a call costs the host more
        library.check_flags("decode_attention", return_lse=return_lse)
    v_scale = scale_of_values("decode_attention", v_cache, k_scale, v_scale)
    if cache_batch_idx is not None or (isinstance(page_table, Tensor) and page_table.dim() == 1):
        library.check_tensors("decode_attention", lengths=lengths)
        page_table = table_of("decode_attention", lengths, page_table, cache_batch_idx)
    on_cpu = isinstance(lengths, Tensor) and lengths.is_cpu and isinstance(q, Tensor) and not q.is_cpu
    if on_cpu and not torch.compiler.is_compiling():
        s = check(
            q, k_cache, v_cache, lengths, page_table, k_scale, v_scale, alibi_slopes, sinks, mask, head_dim_v, scale,
            window, softcap, causal, layout, cache_layout,
        )  # fmt: skip
        check_values(lengths, page_table, s)
        lengths = lengths.to(q.device)
        page_table = None if page_table is None else page_table.to(q.device)
    if config is None:
        text = ""
    else:
        text = (encode.__wrapped__ if torch.compiler.is_compiling() else encode)(config)  # compilers warn of a cache
    args = (
        q, k_cache, v_cache, lengths, page_table, k_scale, v_scale, alibi_slopes, sinks, mask, head_dim_v, scale,
        window, softcap, causal, layout, cache_layout, return_lse, text,
    )  # fmt: skip
    if out is None:
        out, lse = _op(*args)
    else:
        lse = _into(out, *args)
    return (out, lse) if return_lse else out
