from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Unsupported
from rooftile.cases.draw import normal
from rooftile.ops.kl_div import kl_div
from rooftile.reference import kl_div as reference

_FP32 = "a logarithm or an exponential for each element, added in float32 as a tree; a GPU's are good to two units"
_ROUNDED_ONCE = "float32 inside, rounded once: half a unit in the last place"
_SMALL = "small probabilities, and averages of them, are subnormal numbers of float16"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(2e-6, _FP32), "backward": Tolerance(2e-6, _FP32)},
    torch.float16: {
        "forward": Tolerance(5e-4, _ROUNDED_ONCE),
        "backward": Tolerance(2e-2, f"{_ROUNDED_ONCE}; {_SMALL}"),
    },
    torch.bfloat16: {"forward": Tolerance(4e-3, _ROUNDED_ONCE), "backward": Tolerance(4e-3, _ROUNDED_ONCE, peers=2e-2)},
}


def _point(rows: int, cols: int, **options: object) -> Point:
    return Point(f"{rows}x{cols}", {"rows": rows, "cols": cols}, options)


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    """Two distributions over each row, the first in logarithms."""
    shape = (point["rows"], point["cols"])
    x, t = (normal(shape, torch.float32, device, generator) for _ in range(2))
    log_target = bool(point.options.get("log_target"))
    target = torch.log_softmax(t, -1) if log_target else torch.softmax(t, -1)
    return {"input": torch.log_softmax(x, -1).to(dtype), "target": target.to(dtype)}


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Forward: input and target, and the loss of each element if it is not reduced. Backward: input and target read,
    dinput and dtarget written, and with "none" the gradient of each element's loss read."""
    whole = itemsize * point["rows"] * point["cols"]
    return ((2 if direction == "forward" else 4) + (point.options.get("reduction") == "none")) * whole


def _flops(point: Point, direction: Direction) -> int:
    """Forward: a logarithm, a difference, a product and a sum; backward: the logarithm again, and four more."""
    return (4 if direction == "forward" else 5) * point["rows"] * point["cols"]


def _liger(point: Point) -> Callable[..., Any]:
    from liger_kernel.ops.kl_div import LigerKLDivLossFunction

    reduction, log_target = point.options.get("reduction", "mean"), point.options.get("log_target", False)
    if reduction == "none":
        raise Unsupported("Liger's gradients are wrong where reduction is none")

    def run(input: Tensor, target: Tensor, **_: Any) -> Tensor:
        return LigerKLDivLossFunction.apply(input, target, reduction, log_target)

    return run


_MODES = tuple(
    _point(5, 64, reduction=reduction, log_target=log_target)
    for reduction in ("none", "sum", "batchmean", "mean")
    for log_target in (False, True)
)
_AWKWARD = ((1, 1), (3, 7), (17, 127), (2, 257), (65, 1025))
_VOCABULARIES = (4096, 32000, 65536, 128256, 131072)

CASES = (
    OpCase(
        name="kl_div",
        formula="l = target · (log target − input), summed or averaged",
        function=kl_div,
        reference=reference.kl_div,
        eager=reference.eager,
        inputs=_inputs,
        outputs=("loss",),
        grads=("input", "target"),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        sets={
            "tiny": (_point(4, 128), _point(33, 256, reduction="batchmean"), *_MODES),
            "edge": (*(_point(r, c, reduction="batchmean") for r, c in _AWKWARD), _point(0, 64, reduction="sum")),
            # Sums: averages of so small gradients would be 0 in float16.
            "llm": tuple(_point(4096, v, reduction="sum") for v in _VOCABULARIES),
            "sweep": tuple(_point(2048, v, reduction="sum", log_target=True) for v in _VOCABULARIES),
        },
        over="cols",
        peers=(Peer("liger", _liger),),
    ),
)
