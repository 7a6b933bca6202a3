from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Unsupported
from rooftile.cases.draw import angles, integers, normal, rotary_dim
from rooftile.ops import kv_cache as ops
from rooftile.reference import kv_cache as reference
from rooftile.reference import rope as rope_reference

_FEW = "copied exactly; in an 8-bit cache one element in 10^4 is so near a tie that it rounds the other way"
_TIES = f"{_FEW}; a {{}} input with few digits has more ties"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(3e-3, _FEW)},
    torch.float16: {"forward": Tolerance(2e-2, _TIES.format("fp16"))},
    torch.bfloat16: {"forward": Tolerance(4e-2, _TIES.format("bf16"))},
}
_SCALE = Tolerance(1e-6, "a maximum and a quotient in float32, of elements rotated in float32")
# Models round the rotated k before they take its scale; a quantized norm may lose as much (quantized.py).
_TURNED = {
    torch.float32: _SCALE,
    torch.float16: dataclasses.replace(_SCALE, peers=1e-3),
    torch.bfloat16: dataclasses.replace(_SCALE, peers=8e-3),
}


def _point(
    seq_len: int,
    k_heads: int,
    head_dim: int,
    *,
    batch: int = 1,
    q_heads: int = 0,
    value_dim: int | None = None,
    capacity: int | None = None,
    page_size: int = 0,
    ragged: bool = False,
    scales: str = "",
    rotary: int | None = None,
    table: bool = True,
    **options: object,
) -> Point:
    """`capacity`: positions of a sequence; by default as many as there are tokens, so that all starts are 0. `scales`:
    "", "tensor", "head" or "token". `table`: cos and sin are looked up by position, else they are given by token."""
    value_dim = head_dim if value_dim is None else value_dim
    capacity = seq_len if capacity is None else capacity
    heads = f"{q_heads}/{k_heads}" if q_heads else f"{k_heads}"
    label = f"B{batch} T{seq_len} H{heads} D{head_dim}" + (f"/{value_dim}" if value_dim != head_dim else "")
    label += f" into {capacity}" if capacity != seq_len else ""
    label += f" pages of {page_size}" if page_size else ""
    label += " ragged" if ragged else ""
    label += f" scale by {scales}" if scales else ""
    dims = {
        "batch": batch,
        "seq_len": seq_len,
        "k_heads": k_heads,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "capacity": capacity,
        "page_size": page_size,
        "ragged": int(ragged),
        "scales": ("", "tensor", "head", "token").index(scales),
    }
    if q_heads:
        rotary = head_dim if rotary is None else rotary
        if rotary != head_dim:
            label += f" R{rotary}"
        label += "" if table else " angles by token"
        dims |= {"q_heads": q_heads, "rotary": rotary, "table": int(table)}
    return Point(label, dims, options)


def _laid(x: Tensor, point: Point) -> Tensor:
    """In the point's layout; in memory always (B, T, H, D), as a projection writes it."""
    return x.transpose(1, 2) if point.options.get("layout") == "bhtd" else x


def _cache(point: Point, dim: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    """A cache with contents, in the point's layout."""
    rows, heads = point["page_size"] or max(point["capacity"], point["seq_len"]), point["k_heads"]
    blocks = point["batch"] * (_pages(point) if point["page_size"] else 1)
    middle = (heads, rows) if point.options.get("layout") == "bhtd" else (rows, heads)
    shape = (blocks, *middle, dim)
    stored = getattr(torch, point.options.get("dtype", ""), dtype)
    if stored == torch.int8:
        return (integers(255, shape, device, generator) - 127).to(torch.int8)
    return normal(shape, torch.float32 if stored.itemsize == 1 else stored, device, generator).to(stored)


def _pages(point: Point) -> int:
    """Pages of a sequence."""
    return -(-max(point["capacity"], point["seq_len"]) // point["page_size"])


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    batch, seq_len, heads = point["batch"], point["seq_len"], point["k_heads"]

    def tokens(heads: int, dim: int) -> Tensor:
        return _laid(normal((batch, seq_len, heads, dim), dtype, device, generator), point)

    inputs = {"q": tokens(point["q_heads"], point["head_dim"])} if "q_heads" in point.dims else {}
    inputs |= {"k": tokens(heads, point["head_dim"]), "v": tokens(heads, point["value_dim"])}
    if "q_heads" in point.dims:
        positions = torch.arange(max(point["capacity"], seq_len), device=device)
        if not point["table"]:
            positions = torch.arange(seq_len, device=device) + 3 * torch.arange(batch, device=device)[:, None]
        interleaved = point.options.get("style") == "interleaved"
        inputs["cos"], inputs["sin"] = angles(positions, point["rotary"], dtype, interleaved=interleaved)
    inputs["k_cache"] = _cache(point, point["head_dim"], dtype, device, generator)
    inputs["v_cache"] = _cache(point, point["value_dim"], dtype, device, generator)
    free = max(point["capacity"], seq_len) - seq_len
    inputs["starts"] = integers(free + 1, (batch,), device, generator).to(torch.int32)
    if point["page_size"]:
        pages = batch * _pages(point)
        order = torch.randperm(pages, device=device, generator=None if device.type == "meta" else generator)
        inputs["page_table"] = order.to(torch.int32).reshape(batch, -1)
    if point["ragged"]:
        inputs["counts"] = integers(seq_len + 1, (batch,), device, generator).to(torch.int32)
    is_int8 = point.options.get("dtype") == "int8"  # int8 always has scales, also with the sizes of another point
    scales = point["scales"] or (3 if is_int8 else 0)
    shape = {1: (), 2: (heads,), 3: tuple(inputs["k_cache"].shape[:3])}.get(scales)
    if shape is not None:  # a few elements exceed the range of an 8-bit cache
        most = 127.0 if is_int8 else 448.0
        for name in ("k_scale", "v_scale"):
            inputs[name] = (1 + normal(shape, torch.float32, device, generator).abs()) * (2.5 / most)
    return inputs


def in_one_layout(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the cache's layout for all tensors: a point has one layout, `"bthd"` by default."""

    @functools.wraps(function)
    def run(*args: Any, layout: str = "bthd", **inputs: Any) -> Any:
        return function(*args, layout=layout, cache_layout=layout, **inputs)

    return run


@in_one_layout
def _run_append(k_cache: Tensor, v_cache: Tensor, *, dtype: str | None = None, **inputs: Any) -> tuple[Tensor, ...]:
    ops.append_kv(k_cache=k_cache, v_cache=v_cache, **inputs)
    return (k_cache, v_cache, *_scales(k_cache, inputs))


@in_one_layout
def _run_rope(k_cache: Tensor, v_cache: Tensor, *, dtype: str | None = None, **inputs: Any) -> tuple[Tensor, ...]:
    q = ops.rope_and_cache(k_cache=k_cache, v_cache=v_cache, rotary_dim=rotary_dim(inputs["cos"]), **inputs)
    return (k_cache, v_cache, *_scales(k_cache, inputs), q)


def _scales(cache: Tensor, inputs: dict[str, Any]) -> list[Tensor]:
    none = torch.empty((0,), dtype=torch.float32, device=cache.device)
    return [none if inputs.get(name) is None else inputs[name] for name in ("k_scale", "v_scale")]


def _in_place(point: Point) -> Callable[..., Any]:
    """Eager PyTorch, assigning by index into the cache itself; `eager` returns a new cache."""
    if "dtype" in point.options or point["ragged"]:
        raise Unsupported("the assignment by index takes only caches of the model's dtype, without counts")

    layout, style = point.options.get("layout", "bthd"), point.options.get("style", "half")

    def run(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, starts: Tensor, **more: Any) -> Any:
        page_table = more.get("page_table")
        t = layout.index("t")
        position = starts[:, None].long() + torch.arange(k.shape[t], device=k.device)
        turned = []
        if "q" in more:
            cos, sin = (more[n][position] if point["table"] else more[n] for n in ("cos", "sin"))
            q, k = rope_reference.eager(more["q"], k, cos, sin, style=style, layout=layout)
            turned = [q]
        block, row = torch.arange(k.shape[0], device=k.device)[:, None], position
        if page_table is not None:
            block, row = page_table.gather(1, position // k_cache.shape[t]), position % k_cache.shape[t]
        for x, cache in ((k, k_cache), (v, v_cache)):
            by_token = cache if layout == "bthd" else cache.transpose(1, 2)
            by_token[block, row] = x if layout == "bthd" else x.transpose(1, 2)
        return (k_cache, v_cache, *_scales(k_cache, {}), *turned)

    return run


def _elements(point: Point) -> int:
    return point["batch"] * point["seq_len"] * point["k_heads"] * (point["head_dim"] + point["value_dim"])


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """k and v read and written, scales written, starts and pages read; with RoPE also q and the angles."""
    batch, seq_len = point["batch"], point["seq_len"]
    stored = 1 if "dtype" in point.options else itemsize
    total = (itemsize + stored) * _elements(point) + 4 * batch
    if point["scales"]:
        total += 8 * {1: 1, 2: point["k_heads"], 3: batch * seq_len * point["k_heads"]}[point["scales"]]
    if point["page_size"]:
        total += 4 * batch * -(-seq_len // point["page_size"])
    if "q_heads" in point.dims:
        total += 2 * itemsize * batch * seq_len * point["q_heads"] * point["head_dim"]
        total += itemsize * batch * seq_len * point["rotary"]
    return total


def _flops(point: Point, direction: Direction) -> int:
    """One multiplication an element for a scale; four multiplications and two additions for a rotated pair."""
    turned = 0
    if "q_heads" in point.dims:
        turned = 3 * point["batch"] * point["seq_len"] * (point["q_heads"] + point["k_heads"]) * point["rotary"]
    return _elements(point) + turned


def _output_dtypes(point: Point) -> dict[str, torch.dtype]:
    dtypes = {"k_scale": torch.float32, "v_scale": torch.float32}
    if "dtype" in point.options:
        dtypes |= dict.fromkeys(("k_cache", "v_cache"), getattr(torch, point.options["dtype"]))
    return dtypes


_E4M3 = {"dtype": "float8_e4m3fn"}
_INT8 = {"dtype": "int8"}
_TINY: tuple[tuple[tuple[int, int, int], dict[str, Any]], ...] = (
    ((7, 2, 32), {"batch": 3, "capacity": 48}),
    ((5, 2, 32), {"batch": 2, "capacity": 40, "value_dim": 16, "layout": "bhtd", "page_size": 16}),
    ((6, 3, 24), {"batch": 3, "capacity": 20, "ragged": True, "page_size": 16, "scales": "token", **_E4M3}),
    ((4, 2, 16), {"batch": 2, "capacity": 12, "scales": "head", "layout": "bhtd", **_INT8}),
    ((4, 2, 16), {"batch": 2, "capacity": 12, **_E4M3}),
    ((4, 2, 16), {"batch": 2, "capacity": 12, "scales": "token", "layout": "bhtd", **_INT8}),
)
_TURNS: tuple[dict[str, Any], ...] = (
    {},
    {"table": False, "rotary": 20},
    {"style": "interleaved", "rotary": 16},
    {"style": "deepseek"},
    {"table": False},
    {"rotary": 6},
)
_EDGE: tuple[tuple[tuple[int, int, int], dict[str, Any]], ...] = (
    ((1, 1, 2), {}),
    ((17, 1, 34), {"value_dim": 1, "capacity": 33}),
    ((33, 5, 6), {"batch": 2, "capacity": 64, "page_size": 32}),
    ((0, 2, 16), {"capacity": 8}),
    ((4, 2, 16), {"batch": 2, "capacity": 12, "scales": "tensor", **_E4M3}),
    ((3, 2, 16), {"batch": 0}),
    ((1, 13, 18), {"batch": 5, "capacity": 3, "scales": "token", **_INT8}),
)


def _sets(q_heads: int) -> dict[str, tuple[Point, ...]]:
    """The points of both ops; `q_heads` for each head of k."""

    def point(sizes: tuple[int, int, int], **options: Any) -> Point:
        return _point(*sizes, q_heads=q_heads * sizes[1], **options)

    turns = _TURNS if q_heads else ({},) * len(_TINY)
    long = tuple(point((t, 8, 128)) for t in (512, 2048, 8192, 32768))
    prefill: tuple[dict[str, Any], ...] = (
        {},
        {"page_size": 64},
        {"scales": "token", **_E4M3},
        {"scales": "tensor", **_INT8},
    )
    return {
        "tiny": tuple(point(sizes, **options, **turn) for (sizes, options), turn in zip(_TINY, turns, strict=True)),
        "edge": tuple(point(sizes, **options) for sizes, options in _EDGE),
        "llm": long,
        "prefill": tuple(point((2048, 8, 128), batch=4, capacity=4096, **options) for options in prefill),
        "decode": tuple(
            point((1, 8, 128), batch=b, capacity=8192, **options)
            for b in (1, 8, 64)
            for options in ({}, {"page_size": 64}, {"scales": "token", **_E4M3})
        ),
    }


_WRITTEN = ("k_cache", "v_cache", "k_scale", "v_scale")
_OUTPUT_TOLERANCES = dict.fromkeys(("k_scale", "v_scale"), dict.fromkeys(TOLERANCES, _SCALE))

CASES = (
    OpCase(
        name="append_kv",
        formula="cache[starts + t] = k[t], v[t]",
        function=_run_append,
        reference=in_one_layout(reference.append_kv),
        eager=in_one_layout(reference.append_kv_eager),
        inputs=_inputs,
        outputs=_WRITTEN,
        output_dtypes=_output_dtypes,
        grads=(),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        output_tolerances=_OUTPUT_TOLERANCES,
        sets=_sets(0),
        peers=(Peer("index_put_", _in_place, mutates=_WRITTEN),),
        mutates=_WRITTEN,
    ),
    OpCase(
        name="rope_and_cache",
        formula="q, k turned by starts + t; cache[starts + t] = k[t], v[t]",
        function=_run_rope,
        reference=in_one_layout(reference.rope_and_cache),
        eager=in_one_layout(reference.rope_and_cache_eager),
        inputs=_inputs,
        outputs=(*_WRITTEN, "q"),
        peers=(Peer("index_put_", _in_place, mutates=_WRITTEN),),
        output_dtypes=_output_dtypes,
        grads=(),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        output_tolerances={**_OUTPUT_TOLERANCES, "k_scale": _TURNED},
        sets=_sets(2),
        mutates=_WRITTEN,
    ),
)
