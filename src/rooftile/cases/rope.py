from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Unsupported
from rooftile.cases.draw import angles, integers, normal, rotary_dim
from rooftile.ops.rope import rope, rope_
from rooftile.reference import rope as reference

_ROUNDED_ONCE = "float32 inside, rounded once: half a unit in the last place"
_BOTH: dict[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(5e-7, "two products and a sum, each rounded to float32"),
    torch.float16: Tolerance(5e-4, _ROUNDED_ONCE),
    torch.bfloat16: Tolerance(4e-3, _ROUNDED_ONCE),
}
# The backward is the same rotation, by the opposite angle.
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {d: {"forward": t, "backward": t} for d, t in _BOTH.items()}


def _point(
    seq_len: int,
    q_heads: int,
    k_heads: int,
    head_dim: int,
    *,
    batch: int = 1,
    rotary: int | None = None,
    table_batch: int = 1,
    table_fp32: bool = False,
    positions: int = 0,
    position_batch: int = 1,
    **options: object,
) -> Point:
    """`table_batch` 0 is a table of shape (T, R). `positions` is the length of a table that position ids index, or 0
    for no position ids, whose own batch is `position_batch` (0: shape (T,))."""
    rotary = head_dim if rotary is None else rotary
    label = f"B{batch} T{seq_len} H{q_heads}/{k_heads} D{head_dim}"
    label += f" R{rotary}" if rotary != head_dim else ""
    label += f" ids of {positions}, batch {position_batch}" if positions else ""
    if not positions and table_batch != 1:
        label += f" cos batch {table_batch}" if table_batch else " cos (T, R)"
    label += " cos fp32" if table_fp32 else ""
    dims = {
        "batch": batch,
        "seq_len": seq_len,
        "q_heads": q_heads,
        "k_heads": k_heads,
        "head_dim": head_dim,
        "rotary": rotary,
        "table_batch": table_batch,
        "table_fp32": int(table_fp32),
        "positions": positions,
        "position_batch": position_batch,
    }
    return Point(label, dims, options)


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    """q and k lie in memory as (B, T, H, D), which is how a projection writes them, whatever the layout is called."""
    batch, seq_len, head_dim = point["batch"], point["seq_len"], point["head_dim"]
    inputs: dict[str, Tensor] = {}
    for name in ("q", "k"):
        x = normal((batch, seq_len, point[f"{name}_heads"], head_dim), dtype, device, generator)
        inputs[name] = x if point.options.get("layout") == "bthd" else x.transpose(1, 2)

    rows = point["positions"] or seq_len
    positions = torch.arange(rows, device=device)
    if point["table_batch"] and not point["positions"]:
        # Each batch has its own angles, as left-padded sequences have.
        shift = torch.arange(point["table_batch"], device=device)[:, None]
        positions = positions + shift
    inputs["cos"], inputs["sin"] = angles(
        positions,
        point["rotary"],
        torch.float32 if point["table_fp32"] else dtype,
        interleaved=point.options.get("style") == "interleaved",
    )
    if point["positions"]:
        shape = (point["position_batch"], seq_len) if point["position_batch"] else (seq_len,)
        inputs["position_ids"] = integers(point["positions"], shape, device, generator)
    return inputs


def _rotary_elements(point: Point) -> int:
    return point["batch"] * point["seq_len"] * (point["q_heads"] + point["k_heads"]) * point["rotary"]


def _tables(point: Point, itemsize: int) -> int:
    """Of cos and sin, one of each pair's two equal entries, and the position ids."""
    rows = point["seq_len"] * max(1, point["table_batch"])
    ids = 0
    if point["positions"]:
        ids = point["seq_len"] * max(1, point["position_batch"])
        rows = min(ids, point["positions"])
    return 2 * rows * (point["rotary"] // 2) * (4 if point["table_fp32"] else itemsize) + 8 * ids


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """q, k and the tables read, q and k written; the same for their gradients."""
    elements = point["batch"] * point["seq_len"] * (point["q_heads"] + point["k_heads"]) * point["head_dim"]
    return 2 * itemsize * elements + _tables(point, itemsize)


def _nbytes_in_place(point: Point, itemsize: int, direction: Direction) -> int:
    """In place the elements past the rotary dimension are not touched; the gradients are new tensors."""
    if direction == "backward":
        return _nbytes(point, itemsize, direction)
    return 2 * itemsize * _rotary_elements(point) + _tables(point, itemsize)


def _flops(point: Point, direction: Direction) -> int:
    """Four products and two sums a pair."""
    return 3 * _rotary_elements(point)


def _liger(point: Point) -> Callable[..., Any]:
    from liger_kernel.ops.rope import LigerRopeFunction

    if point.options.get("style", "half") != "half":
        raise Unsupported("Liger's RoPE has the half-split style alone")
    if point["positions"]:
        raise Unsupported("Liger's RoPE ignores position ids")
    token_major = point.options.get("layout") == "bthd"

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: object) -> tuple[Tensor, Tensor]:
        if not token_major:
            return LigerRopeFunction.apply(q, k, cos, sin)
        q, k = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    return run


def _quack(point: Point) -> Callable[..., Any]:
    from quack.rotary import apply_rotary_emb

    style = point.options.get("style", "half")
    if style == "deepseek":
        raise Unsupported("quack's rotary has no style that moves elements")
    if point["positions"] or point["table_batch"] > 1:
        raise Unsupported("quack's rotary takes one table, in order, for the whole batch")
    if point["head_dim"] % 8 or point["rotary"] % 8:
        raise Unsupported("quack's rotary needs dimensions divisible by 8")
    token_major = point.options.get("layout") == "bthd"

    def one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if token_major:
            return apply_rotary_emb(x, cos, sin, style == "interleaved")
        return apply_rotary_emb(x.transpose(1, 2), cos, sin, style == "interleaved").transpose(1, 2)

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: object) -> tuple[Tensor, Tensor]:
        cos, sin = cos.reshape(cos.shape[-2:]), sin.reshape(sin.shape[-2:])
        if style == "interleaved":
            cos, sin = cos[:, 0::2], sin[:, 0::2]
        else:
            cos, sin = cos[:, : cos.shape[1] // 2], sin[:, : sin.shape[1] // 2]
        return one(q, cos, sin), one(k, cos, sin)

    return run


_TINY = (
    _point(16, 4, 2, 32),
    _point(7, 4, 4, 32, batch=2, table_batch=0),
    _point(7, 3, 1, 32, batch=2, table_batch=2, layout="bthd"),
    _point(9, 4, 2, 64, rotary=16),
    _point(9, 4, 2, 32, table_fp32=True),
    _point(5, 4, 2, 32, batch=2, positions=40, position_batch=2),
    _point(5, 4, 2, 32, batch=2, positions=40, position_batch=0),
    _point(9, 4, 2, 32, style="interleaved"),
    _point(6, 4, 2, 48, rotary=20, batch=2, positions=11, position_batch=1, style="interleaved", layout="bthd"),
)
_TINY_DEEPSEEK = (
    _point(9, 4, 1, 32, style="deepseek"),
    _point(6, 2, 1, 48, rotary=20, batch=2, table_batch=2, style="deepseek", layout="bthd"),
)
_EDGE = (
    _point(1, 1, 1, 2),
    _point(17, 13, 1, 2),
    _point(33, 9, 1, 6),
    _point(2, 33, 3, 18, rotary=10, style="interleaved"),
    _point(257, 1, 1, 34),
    _point(0, 4, 2, 32),
    _point(3, 4, 2, 32, batch=0),
    _point(5, 2, 0, 16),
)
_SETS = {
    "edge": _EDGE,
    "llm": tuple(_point(t, 32, 8, 128) for t in (512, 2048, 8192, 32768)),
    "sweep": tuple(_point(t, 32, 32, 128) for t in (512, 1024, 2048, 4096, 8192)),
    "prefill": tuple(_point(t, 28, 4, 128) for t in (128, 2048, 8192)),
    "decode": tuple(_point(1, 32, 8, 128, batch=b, positions=8192, position_batch=b) for b in (1, 8, 64)),
}


def _by_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """The op with `rotary_dim` from its tables: options meet other points' sizes."""

    @functools.wraps(function)
    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Any:
        return function(q, k, cos, sin, rotary_dim=rotary_dim(cos), **options)

    return run


CASES = (
    OpCase(
        name="rope",
        formula="(a, b) -> (a·cos − b·sin, b·cos + a·sin) for each pair of q and of k",
        function=_by_name(rope),
        reference=reference.rope,
        eager=reference.eager,
        inputs=_inputs,
        outputs=("q", "k"),
        grads=("q", "k"),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        sets={"tiny": (*_TINY, *_TINY_DEEPSEEK), **_SETS},
        peers=(Peer("liger", _liger, mutates=("q", "k")), Peer("quack", _quack)),
    ),
    OpCase(
        name="rope_",
        formula="rope, written over q and k",
        function=_by_name(rope_),
        reference=reference.rope,
        eager=reference.eager,
        inputs=_inputs,
        outputs=("q", "k"),
        grads=("q", "k"),
        nbytes=_nbytes_in_place,
        flops=_flops,
        tolerances=TOLERANCES,
        sets={"tiny": _TINY, **_SETS},
        peers=(Peer("liger", _liger, mutates=("q", "k")),),
        mutates=("q", "k"),
    ),
)
