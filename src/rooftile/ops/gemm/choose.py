"""Which kernel computes a GEMM, and in what tiles: from a tuned table where it has an entry, else by regime.

    one row of x      gemv, gemv_persistent; for int8 and int4 weights gemv_imma
    up to 64 rows     skinny
    more rows         hopper on sm_90, elsewhere tiled; a quantized weight is dequantized first, or within hopper

Behind a norm `choose` gives the one kernel that does both, or None where the norm is a kernel of its own. The
configurations of each kind of problem are in choose_dense.py, choose_norm.py, choose_quantized.py and choose_fp8.py.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from rooftile import library, runtime, tuning
from rooftile.ops.gemm.choose_dense import interpreted, of_dense, tiled
from rooftile.ops.gemm.choose_fp8 import of_fp8
from rooftile.ops.gemm.choose_norm import of_norm
from rooftile.ops.gemm.choose_quantized import of_quantized, of_quantized_norm
from rooftile.ops.gemm.config import GemmConfig, Problem, rows_rounded
from rooftile.primitives import pdl

# The module of each kernel, by what it multiplies.
_DENSE = {k: k for k in ("gemv", "skinny", "tiled", "hopper")}
_NORMED = {k: k for k in ("gemv", "gemv_persistent", "skinny")}
_QUANTIZED = {
    "gemv": "gemv", "gemv_imma": "gemv_imma", "skinny": "skinny_dequantize",
    "hopper": "hopper_dequantize", "dequantize": "dequantize",
}  # fmt: skip
_QUANTIZED_NORMED = {k: k for k in ("gemv", "gemv_imma")}
_FP8 = {"skinny": "skinny", "tiled": "tiled", "hopper": "tiled"}
_GLUON = ("hopper", "hopper_fp8", "hopper_dequantize", "gemv_imma")


def is_fp8(p: Problem) -> bool:
    """Whether both operands are fp8: `fp8_linear`."""
    return p.dtype.itemsize == 1


def is_quantized(p: Problem) -> bool:
    """Whether the weight alone is quantized."""
    return bool(p.weight) and not is_fp8(p)


def kernels(p: Problem) -> dict[str, str]:
    """The kernels that compute such a problem, with their modules' names."""
    if is_fp8(p):
        return _FP8
    if is_quantized(p):
        return _QUANTIZED_NORMED if p.norm else _QUANTIZED
    return _NORMED if p.norm else _DENSE


def _imported(name: str) -> ModuleType | None:
    name, is_gluon = f"rooftile.ops.gemm.{name}", name in _GLUON
    return runtime.gluon_module(name) if is_gluon else importlib.import_module(name)


def module(p: Problem, c: GemmConfig) -> ModuleType | None:
    """The module with that kernel; None where it has none for such a problem, or this Triton has no Gluon."""
    name = kernels(p).get(c.kernel)
    if is_fp8(p) and c.kernel == "hopper" and c.pingpong:
        name = "hopper_fp8"
    return None if name is None else _imported(name)


@functools.lru_cache(4096)
def can_implement(p: Problem, c: GemmConfig, target: runtime.Target) -> str | None:
    """Why the problem can't be computed as c says; None where it can."""
    known = kernels(p)
    if c.kernel not in known:
        return f"kernel is '{c.kernel}', expected one of {', '.join(known)}"
    found = module(p, c)
    if found is None:
        return f"kernel '{c.kernel}' is written in Gluon, which this Triton has not"
    if p.k == 0 and c.kernel != "tiled" and not p.weight:
        return f"kernel is '{c.kernel}', expected 'tiled' where there is nothing to sum"
    why: str | None = _common_reason(p, c, target) or found.can_implement(p, c, target)
    return why


def _common_reason(p: Problem, c: GemmConfig, target: runtime.Target) -> str | None:
    """What no kernel takes."""
    steps = library.cdiv(p.k, c.block_k)
    if not p.weight and c.split_k > max(8, steps):  # a few CTAs with nothing to do are only a waste
        return f"split_k is {c.split_k}: there are {steps} steps of {c.block_k}"
    if c.num_warps * target.warp_size > target.max_threads:
        most = target.max_threads // target.warp_size
        return f"num_warps is {c.num_warps}, of which {target.arch} runs {most} at most"
    stages = c.num_stages * c.block_k * (c.block_m + c.block_n)
    if is_fp8(p) and not c.pingpong and c.num_stages > 1 and stages > target.shared_memory:
        return f"its {c.num_stages} stages take {stages} bytes of shared memory, a CTA has {target.shared_memory}"
    for name in ("block_m", "num_warps"):
        value = getattr(c, name)
        if c.kernel != "hopper" and value & (value - 1):
            return f"{name} is {value}, expected a power of two"
    if c.kernel != "hopper" and c.pingpong:
        return "pingpong is True, which kernel 'hopper' alone has"
    if c.slices > 1 and not is_quantized(p):
        return f"slices is {c.slices}, expected 1 for a weight that is not quantized"
    if c.prefetch is not None and c.prefetch >= 0 and not pdl.supported(target):
        return f"prefetch is {c.prefetch}, expected -1: {target.arch} has no programmatic dependent launch"
    if c.prefetch is not None and c.kernel not in ("gemv", "gemv_imma") and not is_quantized(p):
        return f"prefetch is {c.prefetch}, expected None for kernel '{c.kernel}'"
    return None


def tuning_key(p: Problem) -> tuple[str, str]:
    """The tuned table that has such problems, and the problem as it names it: with rows rounded to a power of two."""
    rows = rows_rounded(p)
    if is_fp8(p):
        words = [f"m{rows} n{p.n} k{p.k}"]
        # Where scales belong to 128 elements, fast accumulation makes no difference.
        words += ["parts"] if p.scaled_steps else ["fast"] * p.fast
        return "fp8_linear", " ".join([*words, *["unaligned"] * (not p.aligned)])
    dtype = str(p.dtype).removeprefix("torch.")
    if p.weight:
        table = {"int8": "int8_linear", "int4": "int4_linear", "fp8": "fp8_weight_linear"}[p.weight]
        return table, " ".join([f"m{rows} n{p.n} k{p.k}", dtype, *[f"group{p.group}"] * bool(p.group)])
    rows = 16 if 1 < rows <= 16 else min(rows, 8192)  # 2 to 16 rows are one tile's
    words = [f"m{rows} n{p.n} k{p.k}", dtype, f"x{p.x_layout or '-'} w{p.w_layout or '-'}"]
    if p.batch != 1:
        words.append(f"batch{p.batch}")
    if p.gated:
        words.append("gated")
    if p.dtype == torch.float32 and p.precision != "ieee":
        words.append(p.precision)
    return "matmul", " ".join(words)


def _tuned(p: Problem, target: runtime.Target) -> GemmConfig | None:
    """What a tuned table has for the problem, if it can be launched."""
    if target is runtime.INTERPRETER or p.norm or _is_portable(p):
        return None
    entry: dict[str, Any] | None = tuning.lookup(*tuning_key(p), target)
    if entry is None:
        return None
    try:
        c = GemmConfig(**entry)
    except (TypeError, ValueError):  # somebody edited the table
        return None
    return None if can_implement(p, c, target) else c


@functools.lru_cache(4096)
def choose(p: Problem, target: runtime.Target) -> GemmConfig | None:
    """How the problem is computed on that target; None where it has a norm, and norm and GEMM are two kernels."""
    tuned = _tuned(p, target)
    if tuned is not None:
        return tuned
    for c in candidates(p, target):
        if can_implement(p, c, target) is None:
            return c
    return None if p.norm else GemmConfig("tiled", 16, 16, 16, num_warps=4, num_stages=1)


tuning.when_changed(choose.cache_clear)

# Rows of x that "invariant" is chosen for. Decoding has no more, and in larger tiles most of a step's weights would be
# read by few SMs.
_INVARIANT_ROWS = 64


@functools.lru_cache(4096)
def choose_invariant(p: Problem, target: runtime.Target) -> GemmConfig:
    """How the problem is computed with any number of rows of x.

    The kernel, its tile and its split of the sum are the same for all of them, so a row of the result does not depend
    on how many others there are, nor on its place among them.
    """
    assert not p.norm, "the norm is a kernel of its own"
    x_aligned = p.x_aligned and p.k * p.dtype.itemsize % 16 == 0  # a single row always is
    p = dataclasses.replace(
        p, m=_INVARIANT_ROWS, x_aligned=x_aligned, out_aligned=p.out_aligned and p.n * p.out_size % 16 == 0
    )
    sizes = [dataclasses.replace(p, m=m) for m in (1, _INVARIANT_ROWS, 1 << 20)]
    for c in candidates(p, target):
        if all(can_implement(size, c, target) is None for size in sizes):
            return c
    return GemmConfig("tiled", 16, 16, 16, num_warps=4, num_stages=1)


def candidates(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
    """Configurations by regime, the preferred one first; the first that can be launched is taken."""
    if is_fp8(p):
        return of_fp8(p, target)
    if is_quantized(p):
        return of_quantized_norm(p, target) if p.norm else of_quantized(p, target)
    if p.norm:
        return of_norm(p, target)
    if target is runtime.INTERPRETER:
        return iter((interpreted(p),))
    return tiled(p, target) if _is_portable(p) else of_dense(p, target)


def _is_portable(p: Problem) -> bool:
    """Whether the result has another dtype than x, which the portable kernel alone can write."""
    return not p.weight and p.out_dtype not in (None, p.dtype)
