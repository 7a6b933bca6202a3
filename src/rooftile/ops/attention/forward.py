"""The portable forward: what its kernel is compiled for, what it takes, and how it is launched."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime
from rooftile.ops.attention.common import parts
from rooftile.ops.attention.forward_kernel import forward_kernel
from rooftile.ops.attention.problem import AttentionConfig, Extras, Problem, Scoring
from rooftile.ops.attention.scores import LOG2E

_CHUNK = 16  # elements of a head that are multiplied at once, of float32


def shared_memory(p: Problem, c: AttentionConfig, target: runtime.Target) -> int:
    """Bytes of shared memory of a program: its queries, and the keys and values on their way."""
    d, v = sum(parts(p.head_dim)), sum(parts(p.value_dim))
    if p.dtype.itemsize == 4:  # queries and keys come in parts, and the output leaves through it
        return 4 * (c.block_m + c.block_n) * (v + _CHUNK) + 1024
    queries, keys = c.block_m * d, c.num_stages * c.block_n * (d + v)
    # AMD's matrix unit takes its operands from registers: the queries are gone before the keys come.
    return p.dtype.itemsize * (max(queries, keys) if target.warp_size == 64 else queries + keys) + 1024


def refuses(p: Problem, c: AttentionConfig, target: runtime.Target) -> str | None:
    """Why this kernel can't run that problem so; None where it can."""
    for name in ("block_m", "block_n"):
        if getattr(c, name) < 16:
            return f"{name} is {getattr(c, name)}, expected at least 16: the matrix unit takes no smaller tile"
    needed = shared_memory(p, c, target)
    if needed > target.shared_memory:
        return (
            f"num_stages is {c.num_stages}: tiles take {needed} bytes of shared memory, expected at most "
            f"{target.shared_memory}"
        )
    sums = c.block_m * (c.block_n + sum(parts(p.value_dim))) // (c.num_warps * target.warp_size)
    if sums > 256:
        return f"block_m x (block_n + value_dim) is {sums} numbers for each thread, expected at most 256"
    return None


@functools.cache
def _plan(
    dtype: torch.dtype,
    dims: tuple[int, int],
    mask: torch.dtype | None,
    alibi: bool,
    sinks: bool,
    packed: bool,
    even: bool,
    eights: bool,
    s: Scoring,
    c: AttentionConfig,
) -> launching.KernelLauncher:
    head_dim, value_dim = dims
    (d1, d2), (v1, v2) = parts(head_dim), parts(value_dim)
    float_mask = mask is not None and mask is not torch.bool
    # What would be subnormal is zero on the device, and zero times -inf is NaN.
    raw = not (s.softcap or alibi or float_mask) and s.scale * LOG2E.value >= 2.0**-126
    constants = {
        "SCALE": s.scale,
        "SOFTCAP": s.softcap,
        "LEFT": s.left,
        "RIGHT": s.right,
        "MASK": "" if mask is None else "float" if float_mask else "bool",
        "ALIBI": alibi,
        "SINKS": sinks,
        "PACKED": packed,
        "EVEN": even,
        "EIGHTS": eights,
        "RAW": raw,
        "D": head_dim,
        "D1": d1,
        "D2": d2,
        "V": value_dim,
        "V1": v1,
        "V2": v2,
        "CHUNK": 0 if dtype.itemsize == 2 else _CHUNK,
        "BLOCK_M": c.block_m,
        "BLOCK_N": c.block_n,
        "STAGES": c.num_stages,
    }
    return launching.KernelLauncher(forward_kernel, constants, newest_assembler=True, num_warps=c.num_warps)


def launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, x: Extras, s: Scoring, c: AttentionConfig
) -> None:
    """Launch it: q, k, v, out (batch, heads, tokens, dim) with a last stride of 1; lse contiguous."""
    batch, heads, n_q, head_dim = q.shape
    kv_heads, n_k, value_dim = k.shape[1], k.shape[2], v.shape[3]
    packed = x.starts_q is not None
    sequences = x.starts_q.shape[0] - 1 if x.starts_q is not None else batch
    pairs, n_blocks = sequences * heads, library.cdiv(x.longest_q, c.block_m)
    if pairs * n_blocks == 0:
        return
    group = heads // kv_heads
    target = runtime.target(q.device)
    held = x.longest_k * (head_dim + value_dim) * k.element_size()
    together = min(pairs, max(1, target.l2 // 2 // max(1, held)) * group)
    even = not packed and n_k % c.block_n == 0
    mask = None if x.mask is None else x.mask.dtype
    tensors = (q, k, v, out, lse, x.mask, x.alibi_slopes, x.sinks, x.starts_q, x.starts_k)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3])
    # A stride that is a multiple of 16 Triton knows by itself.
    eights = all(n % 8 == 0 for n in strides) and not all(n % 16 == 0 for n in strides)
    extra = (x.alibi_slopes is not None, x.sinks is not None, packed, even, eights)
    plan = _plan(q.dtype, (head_dim, value_dim), mask, *extra, s, c)
    strides += x.mask.stride() if x.mask is not None else (0, 0, 0, 0)
    launching.launch(plan, pairs * n_blocks, tensors, strides, (pairs, together, heads, group, n_q, n_k, n_blocks))
