from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases import rope
from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Unsupported
from rooftile.cases.draw import normal, rotary_dim
from rooftile.ops.qk_norm_rope import qk_norm_rope
from rooftile.reference import qk_norm_rope as reference

_ROUNDED_ONCE = "float32 inside, rounded once: half a unit in the last place"
_AS_MODELS_ROUND = "one unit in the last place: a model rounds between the norm and the rotation, too"
_FP32 = "a float32 sum over a head, two products and a sum, each rounded"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {
        "forward": Tolerance(1e-6, _FP32),
        "backward": Tolerance(5e-6, f"{_FP32}; sums over all tokens and heads"),
    },
    torch.float16: {"forward": Tolerance(5e-4, _ROUNDED_ONCE), "backward": Tolerance(1e-3, _AS_MODELS_ROUND)},
    torch.bfloat16: {"forward": Tolerance(4e-3, _ROUNDED_ONCE), "backward": Tolerance(8e-3, _AS_MODELS_ROUND)},
}
_WEIGHTS = ("q_weight", "k_weight")


def _point(seq_len: int, q_heads: int, k_heads: int, head_dim: int, *, weight_fp32: bool = False, **more: Any) -> Point:
    """A point of rope's. An option `q_weight` or `k_weight` of None is a call without that weight."""
    point = rope._point(seq_len, q_heads, k_heads, head_dim, **more)
    label = f"{point.label} weight fp32" if weight_fp32 else point.label
    return dataclasses.replace(point, label=label, dims={**point.dims, "weight_fp32": int(weight_fp32)})


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    drawn = rope._inputs(point, dtype, device, generator)
    inputs = {"q": drawn.pop("q"), "k": drawn.pop("k")}
    for name in _WEIGHTS:
        if name not in point.options:
            weight_dtype = torch.float32 if point["weight_fp32"] else dtype
            inputs[name] = normal((point["head_dim"],), weight_dtype, device, generator)
    return {**inputs, **drawn}


def _elements(point: Point) -> int:
    return point["batch"] * point["seq_len"] * (point["q_heads"] + point["k_heads"]) * point["head_dim"]


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Forward: q and k read and written; backward: their gradients too. Beside tables and weights, and the latter's."""
    tensors, vectors = (2, 1) if direction == "forward" else (3, 2)
    weights = sum(n not in point.options for n in _WEIGHTS) * (4 if point["weight_fp32"] else itemsize)
    return tensors * itemsize * _elements(point) + vectors * weights * point["head_dim"] + rope._tables(point, itemsize)


def _flops(point: Point, direction: Direction) -> int:
    """The norm's (rms_norm has them) and the rotation's: four products and two sums a pair."""
    norm = 4 if direction == "forward" else 9
    return norm * _elements(point) + rope._flops(point, direction)


def _liger(point: Point) -> Callable[..., Any]:
    """Its norm of q, its norm of k and its RoPE, which overwrites what they wrote."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction

    if point.options.get("style", "half") != "half":
        raise Unsupported("Liger's RoPE has the half-split style alone")
    if point["positions"]:
        raise Unsupported("Liger's RoPE ignores position ids")
    token_major = point.options.get("layout") == "bthd"

    def norm(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
        """(B, T, H, D), in order, which it takes as rows; out as (B, H, T, D), which its RoPE takes."""
        x = x if token_major else x.transpose(1, 2)
        rounding = "llama" if offset == 0.0 else "gemma"
        return LigerRMSNormFunction.apply(x, weight, eps, offset, rounding, False).transpose(1, 2)

    def run(
        q: Tensor,
        k: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        *,
        eps: float = 1e-6,
        offset: float = 0.0,
        **_: object,
    ) -> tuple[Tensor, Tensor]:
        q, k = LigerRopeFunction.apply(norm(q, q_weight, eps, offset), norm(k, k_weight, eps, offset), cos, sin)
        return (q.transpose(1, 2), k.transpose(1, 2)) if token_major else (q, k)

    return run


_TINY = (
    _point(16, 4, 2, 32),
    _point(7, 3, 1, 64, batch=2, table_batch=2, offset=1.0, layout="bthd"),
    _point(9, 4, 2, 48, rotary=16, table_fp32=True, weight_fp32=True),
    _point(9, 4, 2, 32, q_weight=None, k_weight=None),
    _point(6, 4, 2, 48, rotary=20, batch=2, positions=11, position_batch=2, style="interleaved"),
    _point(9, 4, 1, 40, rotary=32, style="deepseek"),
)
_EDGE = (
    # A head of two elements has almost no derivative unless eps is large; only then is it a fair test.
    _point(1, 1, 1, 2, eps=100.0),
    _point(17, 13, 1, 33, rotary=32),
    _point(2, 33, 3, 18, rotary=10, style="interleaved"),
    _point(3, 2, 1, 500),
    _point(0, 4, 2, 32),
    _point(3, 4, 2, 32, batch=0),
    _point(5, 2, 0, 16),
)


def _by_name(q: Tensor, k: Tensor, *, cos: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    """The op with `rotary_dim` from its tables."""
    return qk_norm_rope(q, k, cos=cos, rotary_dim=rotary_dim(cos), **inputs)


CASES = (
    OpCase(
        name="qk_norm_rope",
        formula="rope of h / sqrt(mean(h²) + eps) · (weight + offset) for each head h of q and of k",
        function=_by_name,
        reference=reference.qk_norm_rope,
        eager=reference.eager,
        inputs=_inputs,
        outputs=("q", "k"),
        grads=("q", "k", *_WEIGHTS),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        sets={
            "tiny": _TINY,
            "edge": _EDGE,
            "llm": (*(_point(t, 32, 8, 128) for t in (512, 2048, 8192, 32768)), _point(8192, 8, 4, 256, offset=1.0)),
            "decode": tuple(_point(1, 32, 8, 128, batch=b, positions=8192, position_batch=b) for b in (1, 8, 64)),
        },
        # Heads of 256 spill 148 bytes on sm_90 with Triton 3.9, and none with 3.6, where they were measured: other
        # tiles, with fewer registers, took 1.3 times as long. Where heads are turned in part, 16 bytes on sm_100.
        spills=160,
        peers=(Peer("liger", _liger),),
    ),
)
