"""Attention of prompts, or of parts of prompts, to a cache in pages: `forward.attend` with a page table.

The queries of all sequences are packed; their keys and values are in the cache already. A program holds a block of
queries of one head of one sequence, as in `attention_varlen`. It finds the page of each block of keys in the table, or,
where pages are smaller than blocks, the page of each key. Elements of 8 bits become q's dtype as they are loaded.

On sm_90 the `hopper` kernel is chosen as it is over dense keys (`problem.choose_forward`). A cache in 8 bits, or with
scales, is dequantized into a copy in q's dtype first (`dequantize_pages`).

Over a latent cache, where values are the first columns of the keys, the portable kernel reads both from the cache of
keys. For sm_90 there is a kernel that reads them once, for all heads (`hopper_latent`); `latent` says when it runs.
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
from rooftile.ops.attention import arguments, dequantize_pages, latent, parts, problem
from rooftile.ops.attention.forward import attend, tile_constants
from rooftile.ops.attention.parts import rasterize, sequence_range
from rooftile.ops.attention.problem import INVARIANT, AttentionConfig, Inputs, Problem, Scoring, is_aligned
from rooftile.ops.decode_attention.choose import LONGEST_LATENT, check_value_columns
from rooftile.primitives import paging
from rooftile.primitives.quantize import writable

import triton  # isort: skip
import triton.language as tl  # isort: skip

_OP = "attention_paged"


@triton.jit(
    do_not_specialize=["pairs", "together", "heads", "group", "n_q", "capacity", "n_pages", "n_blocks", "left", "right"]
)
def paged_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, pages_ptr, lengths_ptr, starts_ptr, k_scale_ptr, v_scale_ptr, slopes_ptr,
    sinks_ptr,
    stride_qh, stride_qt, stride_kp, stride_kh, stride_kt, stride_vp, stride_vh, stride_vt, stride_oh, stride_ot,
    stride_ksp, stride_kst, stride_ksh, stride_vsp, stride_vst, stride_vsh, stride_pb,
    pairs, together, heads, group, n_q, capacity, n_pages, n_blocks, factor, cap, left, right,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, PAGE: tl.constexpr, PTX: tl.constexpr,
    CAPPED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    RAW: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pair, block = rasterize(tl.program_id(0), together, pairs, n_blocks)
    start_m = (n_blocks - 1 - block) * BLOCK_M
    head = (pair % heads).to(tl.int64)
    seq = (pair // heads).to(tl.int64)
    kv_head = head // group

    if ALIBI == 2:
        slopes_ptr += seq * heads
    lse_ptr += head * n_q
    begin, n_q = sequence_range(starts_ptr, seq, n_q)
    if start_m >= n_q:
        return
    n_k = tl.minimum(tl.maximum(tl.load(lengths_ptr + seq), 0), capacity)
    q_ptr += head * stride_qh + begin.to(tl.int64) * stride_qt
    out_ptr += head * stride_oh + begin.to(tl.int64) * stride_ot
    lse_ptr += begin

    if K_SCALES != "":
        k_scale_ptr += kv_head * stride_ksh
    if V_SCALES != "":
        v_scale_ptr += kv_head * stride_vsh
    if K_SCALES == "head":
        factor *= tl.load(k_scale_ptr)
    attend(
        q_ptr, k_ptr + kv_head * stride_kh, v_ptr + kv_head * stride_vh, out_ptr, lse_ptr, None, slopes_ptr, sinks_ptr,
        head, start_m, n_q, n_k, (factor, cap, left, right),
        (pages_ptr, seq, n_pages, stride_pb, stride_kp, stride_vp),
        (k_scale_ptr, stride_ksp, stride_kst, v_scale_ptr, stride_vsp, stride_vst),
        stride_qt, stride_kt, stride_vt, stride_ot, 0, 0,
        CAPPED, HAS_LEFT, HAS_RIGHT, "", ALIBI, SINKS, RAW, PAGE, K_SCALES, V_SCALES, PTX, D, D1, D2, V, V1, V2,
        CHUNK, BLOCK_M, BLOCK_N, STAGES,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What a kernel is compiled for, beside its configuration."""

    dtypes: tuple[torch.dtype | None, ...]  # of q, the cache, the scales, the slopes and the sinks
    dims: tuple[int, int]
    scales: tuple[str, str]
    page: int
    ptx: bool
    flags: tuple[bool, bool, bool]
    alibi: int
    raw: bool
    fuses: bool  # whether the compiler may fuse a product and the addition that follows into an FMA


@functools.cache
def _launcher(kind: _Kind, c: AttentionConfig) -> launching.KernelLauncher:
    dtype, *_, sinks = kind.dtypes
    assert dtype is not None
    constants = {
        "K_SCALES": kind.scales[0],
        "V_SCALES": kind.scales[1],
        "PAGE": kind.page,
        "PTX": kind.ptx,
        "CAPPED": kind.flags[0],
        "HAS_LEFT": kind.flags[1],
        "HAS_RIGHT": kind.flags[2],
        "ALIBI": kind.alibi,
        "SINKS": sinks is not None,
        "RAW": kind.raw,
        **tile_constants(dtype, kind.dims, c),
    }
    options = {} if kind.fuses else {"enable_fp_fusion": False}
    return launching.KernelLauncher(paged_kernel, constants, newest_assembler=True, num_warps=c.num_warps, **options)


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """The op's arguments, in the order of its schema."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor | None
    page_table: Tensor
    lengths: Tensor
    starts: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    longest: int
    scale: float | None
    softcap: float
    left: int
    right: int
    layout: str
    config: str = ""
    head_dim_v: int | None = None

    def check(self) -> None:
        """Raise unless shapes and dtypes fit together."""
        library.check_layout(_OP, self.layout, "cache_layout")
        arguments.check_dimensions(_OP, "q", self.q, "thd")
        for name, cache in (("k_cache", self.k_cache), ("v_cache", self.v_cache)):
            if cache is not None and cache.dim() != 4:
                axes = "pages, page_size, Hkv, D" if self.layout == "bthd" else "pages, Hkv, page_size, D"
                raise ValueError(f"{_OP}: {name} has shape {tuple(cache.shape)}, expected 4 dimensions ({axes})")
        paging.check_dtypes(_OP, self.q, self.k_cache, self.k_cache if self.v_cache is None else self.v_cache)
        heads, head_dim = self.q.shape[1:]
        longest = LONGEST_LATENT if self.latent else arguments.LONGEST_HEAD
        if self.k_cache.shape[3] != head_dim or not 1 <= head_dim <= longest:
            raise ValueError(
                f"{_OP}: q and k_cache have last dimensions of {head_dim} and {self.k_cache.shape[3]}, expected the "
                f"same, 1 to {longest}"
            )
        check_value_columns(_OP, self.k_cache, self.v_cache, self.head_dim_v)
        kv_heads = self.k_cache.shape[self.layout.index("h")]
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(f"{_OP}: q has {heads} heads, expected a multiple of k_cache's {kv_heads}")
        arguments.check_starts(_OP, self.starts, None)
        sequences = self.starts.shape[0] - 1
        if self.lengths.dtype != torch.int32:
            raise TypeError(f"{_OP}: lengths has dtype {self.lengths.dtype}, expected torch.int32")
        if tuple(self.lengths.shape) != (sequences,):
            raise ValueError(
                f"{_OP}: lengths has shape {tuple(self.lengths.shape)}, expected ({sequences},), one for each sequence "
                "of cu_seqlens_q"
            )
        paging.check_pages(_OP, self.page_table, sequences, self.page)
        paging.check_scales(_OP, self.k_scale, self.v_scale, self.k_cache, kv_heads)
        library.check_floating(_OP, alibi_slopes=self.alibi_slopes, sinks=self.sinks)
        arguments.check_per_head(_OP, heads, sinks=self.sinks)
        arguments.check_slopes(_OP, self.alibi_slopes, sequences, heads)

    @property
    def latent(self) -> bool:
        return self.v_cache is None

    @property
    def kernels(self) -> ModuleType:
        """What chooses the kernel."""
        return latent if self.latent else problem

    @property
    def values(self) -> Tensor:
        """The cache of values, which may be the first columns of the keys."""
        return self.k_cache[..., : self.head_dim_v] if self.v_cache is None else self.v_cache

    @property
    def page(self) -> int:
        return self.k_cache.shape[self.layout.index("t")]

    @property
    def capacity(self) -> int:
        """The most keys of a sequence."""
        return self.page_table.shape[1] * self.page

    @property
    def narrow(self) -> bool:
        return self.k_cache.element_size() == 1 or self.k_scale is not None or self.v_scale is not None

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Memory for out and lse."""
        tokens, heads, _ = self.q.shape
        out = torch.empty((tokens, heads, self.values.shape[3]), dtype=self.q.dtype, device=self.q.device)
        return out, torch.empty((heads, tokens), dtype=torch.float32, device=self.q.device)

    @property
    def vectors(self) -> tuple[Tensor | None, ...]:
        return self.k_scale, self.v_scale, self.alibi_slopes, self.sinks

    def views(self) -> tuple[Tensor, Tensor, Tensor]:
        """q as (1, heads, tokens, dim), and the caches as (pages, heads, page, dim)."""
        k, v = (t if self.layout == "bhtd" else t.transpose(1, 2) for t in (self.k_cache, self.values))
        return arguments.as_bhtd(self.q, "thd"), k, v

    def inputs(self, scoring: Scoring) -> Inputs:
        """The same where pages are no kernel's own matter: lengths are in place of where keys begin."""
        longest = min(self.longest, self.q.shape[0]) if self.longest else self.q.shape[0]
        return Inputs(
            *self.views(), scoring, sinks=self.sinks, alibi_slopes=self.alibi_slopes, starts_q=self.starts,
            starts_k=self.lengths, longest_q=longest, longest_k=self.capacity,
        )  # fmt: skip

    def problem(self, scoring: Scoring) -> Problem:
        tokens, heads, head_dim = self.q.shape
        views = self.views()
        return Problem(
            batch=self.lengths.shape[0],
            heads=heads,
            kv_heads=self.k_cache.shape[self.layout.index("h")],
            n_q=min(self.longest, tokens) if self.longest else tokens,
            n_k=self.capacity if self.k_cache.shape[0] else 0,  # a cache without pages has no keys
            head_dim=head_dim,
            value_dim=views[2].shape[3],
            dtype=self.q.dtype,
            scoring=scoring,
            alibi=self.alibi_slopes is not None,
            sinks=self.sinks is not None,
            packed=True,
            tokens=tokens,
            page=self.page,
            narrow=self.narrow,
            # Of a narrow cache TMA reads a copy.
            aligned=_is_describable(views[0])
            and (self.narrow or all(_is_describable(t) and paging.page_step(t) for t in views[1:])),
        )


def _is_describable(t: Tensor) -> bool:
    """Whether TMA can read t, or its copy: not where a stride is 0, as that of an expanded tensor."""
    is_copied = t.stride(-1) != 1 and t.shape[-1] > 1
    expanded = any(n > 1 and stride == 0 for n, stride in zip(t.shape, t.stride(), strict=True))
    return is_aligned(t) and (is_copied or not expanded)


def checked_indices(*args: Any) -> tuple[Tensor, Tensor]:
    """The page table and the lengths of the op's arguments, on the device of q.

    What is on the CPU is checked. On a GPU that would cost a synchronization, and the kernel clamps it.
    """
    q, table, lengths = args[0], args[3], args[4]
    if torch.compiler.is_compiling() or not lengths.is_cpu or type(lengths) is not Tensor:
        return table, lengths
    a = _Arguments(*args)
    a.check()
    paging.check_values(_OP, lengths, table, a.capacity, a.page, a.k_cache.shape[0])
    return (table, lengths) if q.is_cpu else (table.to(q.device), lengths.to(q.device))


def _choose(kernels: ModuleType, p: Problem, text: str, target: runtime.Target) -> AttentionConfig:
    """The configuration of that text, or the choice by sizes and target."""
    if text == INVARIANT:
        return kernels.choose_invariant(p, target)
    config = problem.decode(text)
    if config is None:
        return kernels.choose_forward(p, target)
    reason = kernels.can_implement_forward(p, config, target)
    if reason is not None:
        raise ValueError(f"{_OP}: config can't be launched: {reason}")
    return config


def _prepare(*args: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    a = _Arguments(*args)
    if isinstance(a.q, FunctionalTensor):  # the choice of a kernel needs sizes: in a compiled graph the op stays whole
        raise launching.Untraceable("a kernel that is chosen by all sizes")
    a.check()
    out = a.outputs()[0]
    new_out = functools.partial(torch.empty_strided, out.shape, out.stride(), dtype=out.dtype, device=out.device)
    start = _prepare_start(a, out)

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        out = new_out()
        return out, start(out, *args)

    return run


def _checked_out(out: Tensor, *args: Any) -> _Arguments:
    """The arguments; raises unless `out` has the place of their result."""
    a = _Arguments(*args)
    a.check()
    shape = a.outputs()[0].shape
    if out.shape != shape or out.dtype != a.q.dtype or not out.is_contiguous():
        raise ValueError(
            f"{_OP}: out is {out.dtype} of shape {tuple(out.shape)} with strides {out.stride()}, expected {a.q.dtype} "
            f"of {tuple(shape)}, contiguous"
        )
    return a


def _prepare_into(out: Tensor, *args: Any) -> Callable[..., Tensor]:
    return _prepare_start(_checked_out(out, *args), out)


def _prepare_start(a: _Arguments, out: Tensor) -> Callable[..., Tensor]:
    """The launches for checked arguments and such memory for the result, to be called with that and with them.

    They return lse.
    """
    lse = a.outputs()[1]
    new_lse = functools.partial(torch.empty_strided, lse.shape, lse.stride(), dtype=lse.dtype, device=lse.device)
    s = arguments.scoring(a.q.shape[2], a.scale, a.softcap, a.left, a.right)
    p, target = a.problem(s), runtime.target(a.q.device)
    c = _choose(a.kernels, p, a.config, target)
    if out.numel() == 0:
        return lambda *_: new_lse()

    copies = library.Copies()
    q, k = (library.unit_last_of(t, copies, i) for i, t in enumerate((a.q, a.k_cache)))
    v = None if a.v_cache is None else library.unit_last_of(a.v_cache, copies, 2)
    a = dataclasses.replace(a, q=q, k_cache=k, v_cache=v, page_table=library.unit_last_of(a.page_table, copies, 5))
    for i, t in ((6, a.lengths), (7, a.starts), (10, a.alibi_slopes), (11, a.sinks)):
        library.contiguous_of(t, copies, i)
    start = _prepare_hopper(a, s, c, out) if c.kernel == "hopper" else _prepare_portable(a, s, c, out, copies)
    start = library.copying(start, copies)
    clear = parts.prepare_zero_uncovered(arguments.as_bhtd(out, "thd"), True, a.starts.contiguous(), p.n_q)
    clear = library.copying(clear, {2: Tensor.contiguous} if 7 in copies else {})

    def run(
        out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor | None, page_table: Tensor, lengths: Tensor,
        starts: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, alibi_slopes: Tensor | None,
        sinks: Tensor | None, *_: object,
    ) -> Tensor:  # fmt: skip
        lse = new_lse()
        clear(out, lse, starts)
        start(q, k_cache, v_cache, out, lse, page_table, lengths, starts, k_scale, v_scale, alibi_slopes, sinks)
        return lse

    return run


def _prepare_hopper(a: _Arguments, s: Scoring, c: AttentionConfig, out: Tensor) -> Callable[..., None]:
    module = a.kernels.forward_module(c.kernel)
    assert module is not None, "can_implement refuses a kernel that is not there"
    if a.latent:
        q, k, _ = a.views()
        attend: Callable[..., None] = module.prepare(q, k, a.problem(s), a.page_table, runtime.target(q.device))

        def run_latent(
            q: Tensor, k: Tensor, v: None, out: Tensor, lse: Tensor, table: Tensor, lengths: Tensor, starts: Tensor,
            *_: None,
        ) -> None:  # fmt: skip
            attend(q, k, out, lse, table, lengths, starts)

        return run_latent
    x, table, dequantize = a.inputs(s), a.page_table, None
    if a.narrow:
        dequantize = dequantize_pages.prepare(x, table, a.k_scale, a.v_scale, a.layout)
        k, table = dequantize_pages.describe_copies(x)
        x = dataclasses.replace(x, k=k, v=k)
    start = module.prepare(x, arguments.as_bhtd(out, "thd"), c, table)

    def run(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, table: Tensor, lengths: Tensor, starts: Tensor,
        k_scale: Tensor | None, v_scale: Tensor | None, slopes: None, sinks: Tensor | None,
    ) -> None:  # fmt: skip
        if dequantize is not None:
            k, v, table = dequantize(k, v, table, lengths, starts, k_scale, v_scale)
        start(q, k, v, out, lse, None, None, sinks, starts, lengths, table)

    return run


def _prepare_portable(
    a: _Arguments, s: Scoring, c: AttentionConfig, out: Tensor, copies: library.Copies
) -> Callable[..., None]:
    """The launch of `paged_kernel`, for tensors whose last stride is 1; `copies` has what makes them so."""
    p, target, q, k, v = a.problem(s), runtime.target(a.q.device), a.q, a.k_cache, a.values
    k_bytes, v_bytes = (t if t.element_size() > 1 else writable(t) for t in (k, v))
    for i, t, as_bytes in ((1, k, k_bytes), (2, v, v_bytes)):
        if as_bytes is not t and not (i == 2 and a.latent):
            copies[i] = functools.partial(_as_bytes, copies.get(i))

    tokens, heads, head_dim = q.shape
    n_pages, value_dim = k.shape[0], v.shape[3]
    pairs, n_blocks = p.batch * heads, library.cdiv(p.n_q, c.block_m)
    group = heads // p.kv_heads
    kv_bytes = p.n_k * (head_dim + value_dim) * k.element_size()
    together = min(max(1, pairs), max(1, target.l2 // 2 // max(1, kv_bytes)) * group)
    scales = paging.scale_kind(a.k_scale), paging.scale_kind(a.v_scale)
    # Without factors of keys, scores stay unscaled where they can, as in the dense kernel.
    raw = not (scales[0] or s.softcap or p.alibi) and s.numbers[0] >= 2.0**-126
    kind = _Kind(
        dtypes=tuple(None if t is None else t.dtype for t in (q, k_bytes, *a.vectors)),
        dims=(head_dim, value_dim),
        scales=scales,
        page=a.page,
        ptx=target.arch.startswith("sm_"),
        flags=s.flags,
        alibi=0 if a.alibi_slopes is None else a.alibi_slopes.dim(),
        raw=raw,
        # Whether a block of keys is masked depends on the other queries of the tile. Scores that are no raw products
        # would be fused with the subtraction of their maximum in one of the two loops, and not in the other.
        fuses=raw or a.config != INVARIANT,
    )
    k_strides, v_strides = (library.axis_strides(t, a.layout) for t in (k, v))
    strides = (
        *(q.stride(1), q.stride(0)),
        *k_strides,
        *v_strides,
        *(out.stride(1), out.stride(0)),
        *paging.scale_strides(a.k_scale, a.layout),
        *paging.scale_strides(a.v_scale, a.layout),
        a.page_table.stride(0),
    )
    numbers = (pairs, together, heads, group, tokens, p.n_k, n_pages, n_blocks, *s.numbers)
    if not pairs * n_blocks:
        return library.start_nothing
    start = launching.bind(_launcher(kind, c), pairs * n_blocks, strides=strides, numbers=numbers)
    if not a.latent:
        return start

    def run_latent(q: Tensor, k: Tensor, v: None, *rest: Tensor | None) -> None:
        start(q, k, k, *rest)

    return run_latent


def _as_bytes(first: Callable[[Tensor], Tensor] | None, t: Tensor) -> Tensor:
    """A cache as the kernel reads it; `first` makes its last stride 1."""
    return writable(t if first is None else first(t))


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    a = _Arguments(*args)
    a.check()
    return a.outputs()


_ARGUMENTS = (
    "Tensor q, Tensor k_cache, Tensor? v_cache, Tensor page_table, Tensor lengths, Tensor cu_seqlens_q, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? alibi_slopes, Tensor? sinks, SymInt longest_q, float? scale, "
    "float softcap, int left, int right, str cache_layout, str config, int? head_dim_v=None"
)
attention_paged_op = library.define(f"attention_paged({_ARGUMENTS}) -> (Tensor, Tensor)", prepare=_prepare, fake=_fake)
attention_paged_into = library.define(
    f"attention_paged_into(Tensor(a!) out, {_ARGUMENTS}) -> Tensor",
    prepare=_prepare_into,
    fake=lambda out, *args: _checked_out(out, *args).outputs()[1],
    called=lambda args: _OP,
)
