"""From the hidden states to decode attention: the norm, the GEMM of q, k and v, RoPE, the write into the cache.

    [q | k | v] = rms_norm(x) @ weight^T + bias          `rooftile.rms_norm_linear`
    q, k turned by the angles of their positions,
    cache[starts[b] + t] = k[b, t], v[b, t]             `rooftile.rope_and_cache`

One token of one sequence, a step of decoding, is one kernel: q, k and v are not written to be read again, and a launch
is saved. It is "gemv_persistent" for weights of 16 bits with rows of up to 8192, "gemv_imma" for int8 and int4 weights
where `rms_norm_linear` takes that, and "gemv" for others. More tokens are the kernels of the two ops.

Bytes of the one kernel: the weights, x, and of cos and sin one of each pair's two equal entries read; q, k and v
written once. Rounding is that of the two ops: q, k and v are rounded to x's dtype before they are turned, and after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile import library, runtime
from rooftile.ops import kv_cache
from rooftile.ops.gemm import choose, dispatch, gemv, gemv_persistent
from rooftile.ops.gemm.config import GemmConfig, Operands, Problem
from rooftile.ops.gemm.gemv_epilogue import QkvOutput
from rooftile.ops.gemm.norm_linear import check, rms_norm_linear
from rooftile.ops.kv_cache import QUANTIZED, Layout, cache_arguments, cache_of, check_rope, rope_into_cache
from rooftile.ops.rope import Style, check_rotary_dim
from rooftile.primitives.paging import Cache

__all__ = ["rms_norm_qkv_rope_cache"]

_OP = "rms_norm_qkv_rope_cache"
_STYLES = {"gemv": gemv.STYLES, "gemv_persistent": gemv_persistent.STYLES, "gemv_imma": gemv.STYLES}


@functools.lru_cache(4096)
def choose_fused(p: Problem, style: str, target: runtime.Target) -> GemmConfig | None:
    """How the one kernel is launched: the first configuration for the norm and the GEMM that has whole pairs of rows in
    each CTA; None where there is none."""
    for c in choose.candidates(p, target):
        if style in _STYLES.get(c.kernel, ()) and choose.can_implement(p, c, target) is None:
            if c.split_k == 1 and c.block_n > 1:
                return c
            if c.kernel != "gemv_imma":
                return None
    return None


def choose_kernel(
    x: Tensor, weight: Tensor, weight_scale: Tensor | None, cos: Tensor, style: str, cache: Cache
) -> tuple[Problem, GemmConfig] | None:
    """The norm and the GEMM, and how they, RoPE and the cache are one kernel; None where they are several."""
    one_row = x.shape[0] * x.shape[1] == 1
    if not one_row or cos.shape[-1] != cache.k.shape[-1] or cache.k.dtype != x.dtype:
        return None
    rows = library.as_rows(x)
    out = dispatch.like(x, (1, weight.shape[0]))
    p = dispatch.problem_of(Operands(rows, weight, out, norm_weight=rows, weight_scale=weight_scale))
    c = choose_fused(p, style, runtime.target(x.device))
    return None if c is None else (p, c)


def _check_sizes(x: Tensor, weight: Tensor, k_cache: Tensor, v_cache: Tensor, paged: bool, layout: str) -> int:
    """Heads of q: as many as the rows of the weight that those of k and v leave."""
    library.check_layout(_OP, layout, "cache_layout")
    if k_cache.dtype not in (x.dtype, *QUANTIZED):
        raise TypeError(
            f"{_OP}: k_cache has dtype {k_cache.dtype}, expected {x.dtype} to match x, float8_e4m3fn or int8"
        )
    if k_cache.dim() != 4 or not (paged or k_cache.shape[0] == x.shape[0]):
        first = "pages" if paged else x.shape[0]
        raise ValueError(
            f"{_OP}: k_cache has shape {tuple(k_cache.shape)}, expected 4 dimensions, {layout}, the first {first}"
        )
    library.check_same(_OP, "v_cache", v_cache, "k_cache", k_cache)
    heads, head_dim, n = k_cache.shape[layout.index("h")], k_cache.shape[3], weight.shape[0]
    if head_dim == 0 or n % head_dim or n // head_dim <= 2 * heads:
        raise ValueError(
            f"{_OP}: weight has {n} rows, expected (q_heads + 2 * {heads}) * {head_dim} to match the heads of k_cache"
        )
    return n // head_dim - 2 * heads


def _heads(x: Tensor, tensor: Tensor, heads: tuple[int, ...], layout: str) -> tuple[Tensor, ...]:
    """Those columns of (B, T, columns) by head, in the order of the layout."""
    parts = tensor.unflatten(-1, (sum(heads), -1)).split(heads, dim=2)
    return tuple(part if layout == "bthd" else part.transpose(1, 2) for part in parts)


def _checked(
    x: Tensor, norm_weight: Tensor, weight: Tensor, weight_scale: Tensor | None, bias: Tensor | None, cos: Tensor,
    sin: Tensor, *rest: Any,
) -> tuple[Cache, Tensor]:  # fmt: skip
    """The cache, and memory for q, (B, T, Hq, D), after all checks."""
    *of_cache, style, eps, offset = rest
    check(_OP, x, norm_weight, weight, weight_scale, bias, eps, offset)
    if x.dim() != 3:
        raise ValueError(f"{_OP}: x has shape {tuple(x.shape)}, expected (batch, tokens, {x.shape[-1]})")
    k_cache, v_cache, _, page_table, *_, layout, cache_layout = of_cache
    library.check_layout(_OP, layout)
    q_heads = _check_sizes(x, weight, k_cache, v_cache, page_table is not None, cache_layout)
    heads, head_dim = k_cache.shape[cache_layout.index("h")], k_cache.shape[3]
    # The shapes of q, k and v are checked, which are not there yet.
    qkv = x[..., :1].expand(*x.shape[:2], weight.shape[0])
    q, k, v = _heads(x, qkv, (q_heads, heads, heads), layout)
    cache = cache_of(_OP, k, v, *of_cache)
    check_rope(_OP, q, k, cos, sin, style, cos.shape[-1] if cos.dim() else None, layout)
    return cache, torch.empty((*x.shape[:2], q_heads, head_dim), dtype=x.dtype, device=x.device)


def _fake(*inputs: Any) -> Tensor:
    _, q = _checked(*inputs)
    return q if inputs[-5] == "bthd" else q.transpose(1, 2)


def _prepare(
    x: Tensor, norm_weight: Tensor, weight: Tensor, weight_scale: Tensor | None, bias: Tensor | None, cos: Tensor,
    sin: Tensor, *rest: Any,
) -> Callable[..., Tensor]:  # fmt: skip
    cache, out = _checked(x, norm_weight, weight, weight_scale, bias, cos, sin, *rest)
    dispatch.refuse_symbols(*x.shape, *weight.shape)
    layout, _, style, eps, offset = rest[-5:]
    by_token, q_heads, kv_heads = cache.scales == "token", out.shape[2], cache.k.shape[cache.layout.index("h")]
    shape, strides, dtype, device = out.shape, out.stride(), out.dtype, out.device
    kv_cache.check_values(_OP, x.shape[1], cache)

    def run(
        x: Tensor, norm_weight: Tensor, weight: Tensor, weight_scale: Tensor | None, bias: Tensor | None, cos: Tensor,
        sin: Tensor, *rest: Any,
    ) -> Tensor:  # fmt: skip
        """The kernels of the two ops."""
        kv_cache.check_memory(_OP, rest[0], rest[1], *(rest[7:9] if by_token else (None, None)))
        out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        q_out = out if layout == "bthd" else out.transpose(1, 2)
        if out.numel():
            qkv = rms_norm_linear(x, norm_weight, weight, bias, weight_scale=weight_scale, eps=eps, offset=offset)
            q, k, v = _heads(x, qkv, (q_heads, kv_heads, kv_heads), layout)
            rope_into_cache(_OP, q, k, v, q_out, cos, sin, *rest[:-3], style, cos.shape[-1])
        return q_out

    fused = choose_kernel(x, weight, weight_scale, cos, style, cache) if out.numel() else None
    if fused is None:
        return run
    p, c = fused
    copies = library.Copies()
    rows = library.rows_of(x, copies, 0)
    for place, tensor in ((3, bias), (5, norm_weight), (7, weight_scale), (12, cache.starts), (13, cache.counts)):
        library.contiguous_of(tensor, copies, place)
    for place, tensor in ((10, cos), (11, sin), (14, cache.page_table)):
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            copies[place] = Tensor.contiguous
    o = Operands(
        rows, weight, out, bias, norm_weight=norm_weight,
        weight_scale=None if weight_scale is None else weight_scale.contiguous(), eps=eps, offset=offset,
    )  # fmt: skip
    found = choose.module(p, c)
    assert found is not None, "can_implement rejects it"
    target = QkvOutput.of(cos, sin, q_heads, out.shape[-1], style, cache)
    start = library.copying(found.prepare(o, c, target), copies)

    def run_one_kernel(
        x: Tensor, norm_weight: Tensor, weight: Tensor, weight_scale: Tensor | None, bias: Tensor | None, cos: Tensor,
        sin: Tensor, k_cache: Tensor, v_cache: Tensor, starts: Tensor, page_table: Tensor | None,
        counts: Tensor | None, *rest: Any,
    ) -> Tensor:  # fmt: skip
        kv_cache.check_memory(_OP, k_cache, v_cache, None, None)
        out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        start(
            x, weight, out, bias, None, norm_weight, None, weight_scale, k_cache, v_cache, cos, sin, starts, counts,
            page_table,
        )  # fmt: skip
        return out if layout == "bthd" else out.transpose(1, 2)

    return run_one_kernel


_op = library.define(
    f"{_OP}(Tensor x, Tensor norm_weight, Tensor weight, Tensor? weight_scale, Tensor? bias, Tensor cos, Tensor sin, "
    f"{kv_cache.CACHE_SCHEMA}, str style, float eps, float offset) -> Tensor",
    prepare=_prepare,
    fake=_fake,
)


def rms_norm_qkv_rope_cache(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    *,
    bias: Tensor | None = None,
    weight_scale: Tensor | None = None,
    page_table: Tensor | None = None,
    counts: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    rotary_dim: int | None = None,
    style: Style = "half",
    layout: Layout = "bhtd",
    cache_layout: Layout = "bthd",
) -> Tensor:
    """`rope_and_cache` of `[q | k | v] = rms_norm_linear(x, norm_weight, weight, bias)`: q turned is returned.

    One kernel for one token of one sequence, where style is `"half"`, all of a head is turned, the caches have x's
    dtype, and the weight is contiguous along k; with weights of 16 bits for `"interleaved"`, too, on a GPU. Else the
    kernels of the two ops. Each number is rounded where the two ops round it. For inference.

    Args:
        x: `(B, T, K)`, float32, float16 or bfloat16: T new tokens of each sequence.
        norm_weight: `(K,)`, of any of these dtypes.
        weight: `((Hq + 2H) * D, K)` of x's dtype: the rows of q, k and v, head by head, of H heads of k as the caches
            have.
        cos, sin, page_table, counts, k_scale, v_scale, rotary_dim, style, cache_layout: as `rope_and_cache`
            takes them.
        layout: the order of the dimensions of the returned q.
        starts: `(B,)`, int32: the tokens that each sequence has in the cache before this call, as `append_kv` takes it
            and as a `KVCache` or a `PagedKVCache` has it; the method `norm_qkv_rope_and_append` of these passes it.
        k_cache, v_cache: the same, of one shape. Written in place.
        bias, weight_scale, eps, offset: as `rms_norm_linear` takes them; with weights of 8 and 4 bits several
            tokens are rounded as there. Under `torch.autocast` nothing is cast.

    Returns:
        q turned, `(B, Hq, T, D)`, or `(B, T, Hq, D)` with `layout="bthd"`; zeros where `counts` or a negative start
        say that there is no token.

    Raises:
        ValueError: as `rms_norm_linear` and `rope_and_cache`, the weight's rows are not those of whole heads, or an
            argument requires grad.
        TypeError: as `rms_norm_linear` and `rope_and_cache`.
    """
    library.check_tensors(
        _OP, x=x, norm_weight=norm_weight, weight=weight, cos=cos, sin=sin, k_cache=k_cache, v_cache=v_cache,
        starts=starts,
    )  # fmt: skip
    if x.dim() != 3:
        raise ValueError(f"{_OP}: x has shape {tuple(x.shape)}, expected (batch, tokens, K)")
    check_rotary_dim(_OP, k_cache, cos, rotary_dim)
    new = x.unsqueeze(1 if layout == "bhtd" else 2)  # of its batch and tokens
    rest = cache_arguments(_OP, new, k_cache, starts, page_table, counts, k_scale, v_scale, layout, cache_layout)
    return _op(x, norm_weight, weight, weight_scale, bias, cos, sin, k_cache, v_cache, *rest, style, eps, offset)
