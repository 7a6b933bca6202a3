from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases import kv_cache, weight_only
from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance
from rooftile.cases.draw import normal, rotary_dim
from rooftile.ops.gemm.norm_linear import rms_norm_linear
from rooftile.ops.gemm.packing import GROUPS
from rooftile.ops.gemm.qkv_rope_cache import rms_norm_qkv_rope_cache
from rooftile.ops.kv_cache import rope_and_cache
from rooftile.reference import rms_norm_qkv_rope_cache as reference
from rooftile.reference.quantize_tensor import quantize_tensor_eager

_FP32 = "a chain of float32 sums loses 1.0e-6 at 3584, its rstd less"
_ROUNDED = "float32 sums; rounded up to three times: what is multiplied, q, k and v, and what is turned"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(5e-6, _FP32)},
    torch.float16: {"forward": Tolerance(1.2e-3, _ROUNDED)},
    torch.bfloat16: {"forward": Tolerance(8e-3, _ROUNDED)},
}
_FORMATS = ("", "int8", "float8_e4m3fn", "int4")


def _group(k: int) -> int:
    """Of int4: as the engine has it."""
    return next(g for g in reversed(GROUPS) if k % g == 0)


def _point(
    tokens: int,
    k: int,
    q_heads: int,
    k_heads: int,
    head_dim: int,
    *,
    bias: bool = False,
    weight: str = "",
    eps: float | None = None,
    offset: float | None = None,
    **options: Any,
) -> Point:
    """`weight`: "", "int8", "float8_e4m3fn" or "int4"; `options` are those of a point of rope_and_cache."""
    cached = kv_cache._point(tokens, k_heads, head_dim, q_heads=q_heads, **options)
    n = (q_heads + 2 * k_heads) * head_dim
    dims = {"k": k, "n": n, "has_bias": int(bias), "format": _FORMATS.index(weight)}
    label = f"{k}->{n}" + " bias" * bias + f" {weight}" * bool(weight) + f" {cached.label}"
    given = {name: value for name, value in (("eps", eps), ("offset", offset)) if value is not None}
    return dataclasses.replace(cached, label=label, dims={**cached.dims, **dims}, options={**cached.options, **given})


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    k, n = point["k"], point["n"]
    drawn = {
        "x": normal((point["batch"], point["seq_len"], k), dtype, device, generator),
        "norm_weight": normal((k,), dtype, device, generator),
        # Of a size that leaves sums of k products with numbers of order 1.
        "weight": (normal((n, k), torch.float32, device, generator) * k**-0.5).to(dtype),
    }
    if _FORMATS[point["format"]] == "int4":
        q = weight_only.draw_int4(n, k, _group(k), dtype, device, generator)
        drawn |= {"weight": q[0], "weight_scale": q[1]}
    elif point["format"]:
        q = quantize_tensor_eager(drawn["weight"], dtype=_FORMATS[point["format"]])
        drawn |= {"weight": q[0], "weight_scale": q[1]}
    if point["has_bias"]:
        drawn["bias"] = normal((n,), dtype, device, generator)
    of_cache = kv_cache._inputs(point, dtype, device, generator)
    return drawn | {name: t for name, t in of_cache.items() if name not in ("q", "k", "v")}


@kv_cache.in_one_layout
def _run(k_cache: Tensor, v_cache: Tensor, **inputs: Any) -> tuple[Tensor, ...]:
    q = rms_norm_qkv_rope_cache(k_cache=k_cache, v_cache=v_cache, rotary_dim=rotary_dim(inputs["cos"]), **inputs)
    return k_cache, v_cache, q


def _apart(point: Point) -> Callable[..., Any]:
    """Rooftile's two ops, one after the other."""

    @kv_cache.in_one_layout
    def run(
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
        eps: float = 1e-6,
        offset: float = 0.0,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        qkv = rms_norm_linear(x, norm_weight, weight, bias, weight_scale=weight_scale, eps=eps, offset=offset)
        heads = (point["q_heads"], point["k_heads"], point["k_heads"])
        q, k, v = qkv.unflatten(-1, (sum(heads), point["head_dim"])).split(heads, dim=2)
        if options.get("layout") == "bhtd":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        q = rope_and_cache(q, k, v, cos, sin, k_cache, v_cache, starts, rotary_dim=rotary_dim(cos), **options)
        return k_cache, v_cache, q

    return run


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """x and the weights read, q, k and v written, starts, pages and angles read."""
    tokens, n, k = point["batch"] * point["seq_len"], point["n"], point["k"]
    if _FORMATS[point["format"]] == "int4":
        weight = n * k // 2 + n * k // _group(k) * itemsize
    else:
        weight = n * k * (1 if point["format"] else itemsize) + 4 * n * bool(point["format"])
    places = 4 * point["batch"] * (1 + (-(-point["seq_len"] // point["page_size"]) if point["page_size"] else 0))
    return weight + places + itemsize * (k + point["has_bias"] * n + tokens * (k + n + point["rotary"]))


def _flops(point: Point, direction: Direction) -> int:
    """Two for each product and its sum, the norm's four for each x; four products and two sums a pair turned."""
    turned = 3 * (point["q_heads"] + point["k_heads"]) * point["rotary"]
    return point["batch"] * point["seq_len"] * (point["k"] * (2 * point["n"] + 4) + turned)


_MODELS: tuple[tuple[tuple[int, int, int, int], bool], ...] = (
    ((4096, 32, 8, 128), False),  # Llama-3-8B
    ((3584, 28, 4, 128), True),  # Qwen2.5-7B
)
_WRITTEN = ("k_cache", "v_cache")

CASES = (
    OpCase(
        name="rms_norm_qkv_rope_cache",
        formula="[q | k | v] = rms_norm_linear(x); q, k turned by starts + t; cache[starts + t] = k[t], v[t]",
        function=_run,
        reference=kv_cache.in_one_layout(reference.rms_norm_qkv_rope_cache),
        eager=kv_cache.in_one_layout(reference.eager),
        inputs=_inputs,
        outputs=(*_WRITTEN, "q"),
        grads=(),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        roof="gemm",
        spills=32,  # Qwen2.5-7B's 3584 -> 4608 with a bias, whose threads have 64 registers
        sets={
            "tiny": (
                _point(1, 64, 4, 2, 16, bias=True, capacity=40, page_size=16),
                _point(1, 70, 3, 1, 24, capacity=20, ragged=True, layout="bhtd", eps=0.5, offset=1.0),
                _point(1, 64, 4, 2, 16, capacity=40, weight="int8", bias=True),
                _point(1, 64, 4, 2, 16, capacity=40, page_size=16, weight="float8_e4m3fn", table=False),
                _point(1, 96, 4, 2, 16, capacity=40, weight="int4", bias=True),
                _point(3, 48, 4, 2, 16, batch=2, capacity=24, page_size=16, bias=True),
                _point(1, 48, 4, 2, 16, capacity=24, rotary=10, style="interleaved", layout="bhtd"),
            ),
            "edge": (
                _point(1, 1, 1, 1, 2, eps=100.0),
                _point(1, 127, 5, 1, 34, capacity=33),
                _point(1, 130, 7, 7, 6, capacity=64, page_size=32, bias=True),
                _point(1, 1024, 3, 1, 34, capacity=33, weight="int8", bias=True),
                _point(1, 1024, 3, 1, 16, capacity=64, page_size=32, weight="int4"),
                _point(0, 64, 2, 1, 16, capacity=8),
                _point(17, 33, 3, 3, 10, batch=3, capacity=20),
            ),
            "llm": tuple(_point(1, *sizes, weight=w, bias=bias) for sizes, bias in _MODELS for w in _FORMATS),
            "decode": tuple(
                _point(1, *sizes, weight=w, bias=bias, capacity=8192, page_size=64)
                for sizes, bias in _MODELS
                for w in _FORMATS
            ),
        },
        peers=(Peer("rms_norm_linear+rope_and_cache", _apart, mutates=_WRITTEN),),
        mutates=_WRITTEN,
    ),
)
