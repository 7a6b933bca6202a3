from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases import rms_norm
from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Unsupported
from rooftile.cases.draw import normal
from rooftile.ops.add_rms_norm import add_rms_norm
from rooftile.reference import add_rms_norm as reference

_FORWARD = "as rms_norm, and the sum is rounded before it"
_BACKWARD = "as rms_norm; the reference does not round the sum either"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: rms_norm.TOLERANCES[torch.float32],
    torch.float16: {"forward": Tolerance(1.5e-3, _FORWARD), "backward": Tolerance(2e-3, _BACKWARD)},
    torch.bfloat16: {"forward": Tolerance(1.2e-2, _FORWARD), "backward": Tolerance(1.2e-2, _BACKWARD)},
}
_SUM = "a float32 sum rounded once: half a unit in the last place"
SUM_TOLERANCES = {
    torch.float32: Tolerance(2**-24, _SUM),
    torch.float16: Tolerance(2**-11, _SUM),
    torch.bfloat16: Tolerance(2**-8, _SUM),
}


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    inputs = rms_norm.inputs(point, dtype, device, generator)
    return {
        "x": inputs.pop("x"),
        "residual": normal((point["rows"], point["cols"]), dtype, device, generator),
        **inputs,
    }


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Forward: x and residual read, y and u written; backward: dy, du and u read, and one gradient for x and residual
    alike written; beside the weight, and its gradient."""
    vectors = 1 if direction == "forward" else 2
    return itemsize * point["cols"] * (4 * point["rows"] + vectors * point["has_weight"])


def _flops(point: Point, direction: Direction) -> int:
    return rms_norm.flops(point, direction) + point["rows"] * point["cols"]


def _liger(point: Point) -> Callable[..., Any]:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    if not point["has_weight"]:
        raise Unsupported("Liger's fused_add_rms_norm needs a weight")

    def run(
        x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0, rounding: str = "llama"
    ) -> tuple[Tensor, Tensor]:
        return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, offset, rounding, False)

    return run


def _quack(point: Point) -> Callable[..., Any]:
    from quack import rmsnorm

    def run(
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None = None,
        *,
        eps: float = 1e-6,
        offset: float = 0.0,
        **_: object,
    ) -> tuple[Tensor, Tensor]:
        return rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True, weight_offset=offset)

    return run


CASES = (
    OpCase(
        name="add_rms_norm",
        formula="u = x + residual, y = u / sqrt(mean(u²) + eps) · (weight + offset)",
        function=add_rms_norm,
        reference=reference.add_rms_norm,
        eager=reference.eager,
        inputs=_inputs,
        outputs=("y", "u"),
        grads=("x", "residual", "weight"),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        output_tolerances={"u": SUM_TOLERANCES},
        sets=rms_norm.CASES[0].sets,
        # Split kernels have few registers, so that several programs fit an SM: 68 bytes, on sm_86.
        spills=96,
        # Numbers of a row of 65537 are loaded one at a time, each into a register: 756 bytes of float32, on sm_80.
        odd_spills=756,
        peers=(Peer("liger", _liger), Peer("quack", _quack)),
    ),
)
