from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance
from rooftile.cases.draw import normal
from rooftile.ops.silu_mul import silu_mul, silu_mul_packed
from rooftile.reference import silu_mul as reference

_ROUNDED_ONCE = "float32 inside, rounded once: half a unit in the last place"
_FP32 = "an exponential, a quotient and products in float32; a GPU's exp2 is good to two units in the last place"
_BOTH: dict[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(1e-6, _FP32),
    torch.float16: Tolerance(5e-4, _ROUNDED_ONCE),
    torch.bfloat16: Tolerance(4e-3, _ROUNDED_ONCE),
}
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {d: {"forward": t, "backward": t} for d, t in _BOTH.items()}


def _point(rows: int, cols: int) -> Point:
    return Point(f"{rows}x{cols}", {"rows": rows, "cols": cols})


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


def _liger(point: Point) -> Callable[..., Any]:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return lambda gate, up: LigerSiLUMulFunction.apply(gate, up)


def _liger_packed(point: Point) -> Callable[..., Any]:
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    return lambda gate_up: LigerFusedGateUpSiLUMulFunction.apply(gate_up)


_AWKWARD = ((1, 1), (3, 7), (17, 127), (2, 257), (65, 1025), (1, 8209), (0, 64), (5, 0))
_SETS = {
    "tiny": (_point(4, 128), _point(33, 256)),
    "edge": tuple(_point(r, c) for r, c in _AWKWARD),
    "llm": tuple(_point(r, c) for r, c in ((2048, 4096), (2048, 18944), (8192, 14336))),
    "sweep": tuple(_point(2048, c) for c in (4096, 8192, 11008, 14336, 18944)),
    "prefill": tuple(_point(r, 14336) for r in (512, 2048, 8192)),
    "decode": tuple(_point(r, 14336) for r in (1, 2, 8, 32)),
}

CASES = (
    OpCase(
        name="silu_mul",
        formula="y = gate · sigmoid(gate) · up",
        function=silu_mul,
        reference=reference.silu_mul,
        eager=reference.eager,
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
        eager=reference.packed_eager,
        inputs=_packed,
        outputs=("y",),
        grads=("gate_up",),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        sets=_SETS,
        peers=(Peer("liger", _liger_packed),),
    ),
)
