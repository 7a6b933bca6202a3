from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Unsupported
from rooftile.cases.draw import normal
from rooftile.ops.gated import gelu_mul, gelu_mul_packed, silu_mul, silu_mul_packed
from rooftile.reference import gated as reference

_ROUNDED_ONCE = "float32 inside, rounded once: half a unit in the last place"
_FP32 = "an exponential, a quotient and products in float32; a GPU's exp2 is good to two units in the last place"
_GELU_FP32 = "the normal distribution's tail to 1e-7, or as for silu_mul, and products in float32"


def _tolerances(fp32: str) -> dict[torch.dtype, dict[Direction, Tolerance]]:
    both = {
        torch.float32: Tolerance(1e-6, fp32),
        torch.float16: Tolerance(5e-4, _ROUNDED_ONCE),
        torch.bfloat16: Tolerance(4e-3, _ROUNDED_ONCE),
    }
    return {dtype: {"forward": t, "backward": t} for dtype, t in both.items()}


TOLERANCES = _tolerances(_FP32)
GELU_TOLERANCES = _tolerances(_GELU_FP32)


def _point(rows: int, cols: int, **options: object) -> Point:
    return Point(f"{rows}x{cols}", {"rows": rows, "cols": cols}, options)


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    shape = (point["rows"], point["cols"])
    return {"gate": normal(shape, dtype, device, generator), "up": normal(shape, dtype, device, generator)}


def _packed(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    return {"gate_up": normal((point["rows"], 2 * point["cols"]), dtype, device, generator)}


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Forward: gate, up and y; backward: dy, gate, up and two gradients."""
    return (3 if direction == "forward" else 5) * itemsize * point["rows"] * point["cols"]


def _flops(point: Point, direction: Direction) -> int:
    """A sigmoid counts three: exponential, sum, quotient."""
    return (5 if direction == "forward" else 10) * point["rows"] * point["cols"]


def _gelu_flops(point: Point, direction: Direction) -> int:
    """Exact: a polynomial of degree eight, an exponential and the rest; the derivative adds the density."""
    forward, more = (9, 10) if point.options["activation"] == "gelu_tanh" else (22, 9)
    return (forward if direction == "forward" else forward + more) * point["rows"] * point["cols"]


def _liger(point: Point) -> Callable[..., Any]:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return lambda gate, up: LigerSiLUMulFunction.apply(gate, up)


def _liger_packed(point: Point) -> Callable[..., Any]:
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    return lambda gate_up: LigerFusedGateUpSiLUMulFunction.apply(gate_up)


def _liger_gelu(point: Point) -> Callable[..., Any]:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    if point.options["activation"] != "gelu_tanh":
        raise Unsupported("Liger's GeGLU has only the tanh form")
    return lambda gate, up, **_: LigerGELUMulFunction.apply(gate, up)


def _liger_gelu_packed(point: Point) -> Callable[..., Any]:
    apart = _liger_gelu(point)  # Liger's op takes contiguous rows: halves are copied
    return lambda gate_up, **_: apart(*gate_up.chunk(2, dim=-1))


_AWKWARD = ((1, 1), (3, 7), (17, 127), (2, 257), (65, 1025), (1, 8209), (0, 64), (5, 0))
_LLM = ((2048, 4096), (2048, 18944), (8192, 14336))


def _sets(**options: object) -> dict[str, tuple[Point, ...]]:
    return {
        "tiny": (_point(4, 128, **options), _point(33, 256, **options)),
        "edge": tuple(_point(r, c, **options) for r, c in _AWKWARD),
        "llm": tuple(_point(r, c, **options) for r, c in _LLM),
        "sweep": tuple(_point(2048, c, **options) for c in (4096, 8192, 11008, 14336, 18944)),
        "prefill": tuple(_point(r, 14336, **options) for r in (512, 2048, 8192)),
        "decode": tuple(_point(r, 14336, **options) for r in (1, 2, 8, 32)),
    }


_SETS = _sets()
_EXACT, _TANH = _sets(activation="gelu"), _sets(activation="gelu_tanh")
# Most models use the tanh form. The exact one is measured at one real size, and tested at awkward sizes.
_GELU_SETS = {
    **_TANH,
    "tiny": (_EXACT["tiny"][0], *_TANH["tiny"]),
    "edge": _EXACT["edge"],
    "llm": (*_TANH["llm"], _EXACT["llm"][-1]),
}

CASES = (
    OpCase(
        name="silu_mul",
        formula="y = gate · sigmoid(gate) · up",
        function=silu_mul,
        reference=reference.silu_mul,
        eager=reference.silu_mul_eager,
        inputs=_inputs,
        outputs=("y",),
        grads=("gate", "up"),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        sets=_SETS,
        # Liger's backward writes its gradients over gate and up: fresh copies for each call.
        peers=(Peer("liger", _liger, mutates=("gate", "up")),),
    ),
    OpCase(
        name="silu_mul_packed",
        formula="y = gate · sigmoid(gate) · up, [gate | up] = gate_up",
        function=silu_mul_packed,
        reference=reference.silu_mul_packed,
        eager=reference.silu_mul_packed_eager,
        inputs=_packed,
        outputs=("y",),
        grads=("gate_up",),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        sets=_SETS,
        peers=(Peer("liger", _liger_packed),),
    ),
    OpCase(
        name="gelu_mul",
        formula="y = gelu(gate) · up, gelu(g) = g · Φ(g) or its tanh form",
        function=gelu_mul,
        reference=reference.gelu_mul,
        eager=reference.gelu_mul_eager,
        inputs=_inputs,
        outputs=("y",),
        grads=("gate", "up"),
        nbytes=_nbytes,
        flops=_gelu_flops,
        tolerances=GELU_TOLERANCES,
        sets=_GELU_SETS,
        peers=(Peer("liger", _liger_gelu, mutates=("gate", "up")),),
    ),
    OpCase(
        name="gelu_mul_packed",
        formula="y = gelu(gate) · up, [gate | up] = gate_up",
        function=gelu_mul_packed,
        reference=reference.gelu_mul_packed,
        eager=reference.gelu_mul_packed_eager,
        inputs=_packed,
        outputs=("y",),
        grads=("gate_up",),
        nbytes=_nbytes,
        flops=_gelu_flops,
        tolerances=GELU_TOLERANCES,
        sets=_GELU_SETS,
        peers=(Peer("liger", _liger_gelu_packed),),
    ),
)
