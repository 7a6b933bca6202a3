from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Training, Unsupported
from rooftile.cases.draw import normal
from rooftile.ops.divergence import jsd, kl_div
from rooftile.reference import divergence as reference

_FP32 = "a logarithm or an exponential for each element, added in float32 as a tree; a GPU's are good to two units"
_ROUNDED_ONCE = "float32 inside, rounded once: half a unit in the last place"
_SMALL = "small probabilities, and averages of them, are subnormal numbers of float16"
KL_TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(2e-6, _FP32), "backward": Tolerance(2e-6, _FP32)},
    torch.float16: {
        "forward": Tolerance(5e-4, _ROUNDED_ONCE),
        "backward": Tolerance(2e-2, f"{_ROUNDED_ONCE}; {_SMALL}"),
    },
    torch.bfloat16: {"forward": Tolerance(4e-3, _ROUNDED_ONCE), "backward": Tolerance(4e-3, _ROUNDED_ONCE, peers=2e-2)},
}


# Two near distributions differ by less than their logarithms are rounded to.
_NEAR = "differences of logarithms of probabilities and of their mixture, which are near each other"
_EAGER = "eager's mixture is rounded, and so are its logarithm and both terms"
JSD_TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(4e-6, f"{_FP32}; {_NEAR}"), "backward": Tolerance(4e-6, _NEAR)},
    torch.float16: {
        "forward": Tolerance(1e-3, _ROUNDED_ONCE, peers=2e-2),
        "backward": Tolerance(2e-2, f"{_ROUNDED_ONCE}; {_SMALL}; {_EAGER}", peers=1e-1),
    },
    torch.bfloat16: {
        "forward": Tolerance(4e-3, _ROUNDED_ONCE, peers=1e-1),
        "backward": Tolerance(6e-3, f"rounded as the forward writes it, and again with a factor; {_EAGER}", peers=1e-1),
    },
}


def _point(rows: int, cols: int, **options: object) -> Point:
    return Point(f"{rows}x{cols}", {"rows": rows, "cols": cols}, options)


def _two(
    point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator, log_target: bool
) -> dict[str, Tensor]:
    """Two distributions over each row, the first in logarithms."""
    shape = (point["rows"], point["cols"])
    x, t = (normal(shape, torch.float32, device, generator) for _ in range(2))
    target = torch.log_softmax(t, -1) if log_target else torch.softmax(t, -1)
    return {"input": torch.log_softmax(x, -1).to(dtype), "target": target.to(dtype)}


def _kl_inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    return _two(point, dtype, device, generator, bool(point.options.get("log_target")))


def _jsd_inputs(
    point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> dict[str, Tensor]:
    return _two(point, dtype, device, generator, True)


def _whole(point: Point, itemsize: int, tensors: int) -> int:
    """The bytes of so many tensors, and of one more, the loss or its gradient, if there is no reduction."""
    return (tensors + (point.options.get("reduction") == "none")) * itemsize * point["rows"] * point["cols"]


def _kl_nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Forward: input and target. Backward: both again, dinput and dtarget."""
    return _whole(point, itemsize, 2 if direction == "forward" else 4)


def _jsd_nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Forward: input and target. Backward: both again, and dinput."""
    return _whole(point, itemsize, 2 if direction == "forward" else 3)


def _kl_flops(point: Point, direction: Direction) -> int:
    """Forward: a logarithm, a difference, a product and a sum; backward: the logarithm again, and four more."""
    return (4 if direction == "forward" else 5) * point["rows"] * point["cols"]


def _jsd_flops(point: Point, direction: Direction) -> int:
    """Forward: two exponentials, a logarithm, the mixture's three, two differences, four products and two sums;
    backward: all but the last sums."""
    return (14 if direction == "forward" else 12) * point["rows"] * point["cols"]


def _kl_liger(point: Point) -> Callable[..., Any]:
    from liger_kernel.ops.kl_div import LigerKLDivLossFunction

    return _kl_as_liger(point, LigerKLDivLossFunction.apply)


def _kl_liger_cutedsl(point: Point) -> Callable[..., Any]:
    """Liger's kernel for Hopper, in CuTe DSL; it takes longer rows than its limit to the other."""
    import cutlass.cute  # noqa: F401
    from liger_kernel.functional import kl_div as liger_kl_div

    return _kl_as_liger(point, lambda *given: liger_kl_div(*given, impl="nvidia-cutedsl"))


def _kl_as_liger(point: Point, function: Callable[..., Any]) -> Callable[..., Any]:
    reduction, log_target = point.options.get("reduction", "mean"), point.options.get("log_target", False)
    if reduction == "none":
        raise Unsupported("Liger's gradients are wrong where reduction is none")
    return lambda input, target, **_: function(input, target, reduction, log_target)


def _jsd_liger(point: Point) -> Callable[..., Any]:
    """With CuTe DSL installed it takes its kernel for Hopper by itself."""
    from liger_kernel.ops.jsd import LigerJSDFunction

    beta = point.options.get("beta", 0.5)
    if point.options.get("reduction", "batchmean") != "batchmean":
        raise Unsupported("Liger's jsd divides by the number of rows alone")
    return lambda input, target, **_: LigerJSDFunction.apply(input, target, None, beta)


_KL_MODES = tuple(
    _point(5, 64, reduction=reduction, log_target=log_target)
    for reduction in ("none", "sum", "batchmean", "mean")
    for log_target in (False, True)
)
_JSD_MODES = (
    *(_point(5, 64, reduction=reduction) for reduction in ("none", "sum", "mean")),
    *(_point(5, 64, beta=beta) for beta in (0.0, 0.1, 1.0)),
)
_AWKWARD = ((1, 1), (3, 7), (17, 127), (2, 257), (65, 1025))
_VOCABULARIES = (4096, 32000, 65536, 128256, 131072)
_TRAINING = tuple(_point(4096, 2**n, reduction="batchmean") for n in range(12, 18))
# The target is a teacher's: it gets no gradient.
_DISTILLATION = Training(
    ("input",),
    lambda p, itemsize: _whole(p, itemsize, 3),
    lambda p: _kl_flops(p, "forward") + 2 * p["rows"] * p["cols"],
)

CASES = (
    OpCase(
        name="kl_div",
        formula="l = target · (log target − input), summed or averaged",
        function=kl_div,
        reference=reference.kl_div,
        eager=reference.kl_div_eager,
        inputs=_kl_inputs,
        outputs=("loss",),
        grads=("input", "target"),
        nbytes=_kl_nbytes,
        flops=_kl_flops,
        tolerances=KL_TOLERANCES,
        training=_DISTILLATION,
        sets={
            "tiny": (_point(4, 128), _point(33, 256, reduction="batchmean"), *_KL_MODES),
            "edge": (*(_point(r, c, reduction="batchmean") for r, c in _AWKWARD), _point(0, 64, reduction="sum")),
            # Sums: averages of so small gradients would be 0 in float16.
            "llm": (*(_point(4096, v, reduction="sum") for v in _VOCABULARIES), _point(32, 4096, reduction="sum")),
            "sweep": tuple(_point(2048, v, reduction="sum", log_target=True) for v in _VOCABULARIES),
            "training": _TRAINING,
        },
        over="cols",
        peers=(Peer("liger", _kl_liger), Peer("liger-cutedsl", _kl_liger_cutedsl)),
    ),
    OpCase(
        name="jsd",
        formula="l = β · KL(p ‖ m) + (1 − β) · KL(q ‖ m), m = β · p + (1 − β) · q, p = exp target, q = exp input",
        function=jsd,
        reference=reference.jsd,
        eager=reference.jsd_eager,
        inputs=_jsd_inputs,
        outputs=("loss",),
        grads=("input",),
        nbytes=_jsd_nbytes,
        flops=_jsd_flops,
        tolerances=JSD_TOLERANCES,
        training=dataclasses.replace(
            _DISTILLATION, flops=lambda p: _jsd_flops(p, "forward") + 3 * p["rows"] * p["cols"]
        ),
        sets={
            "tiny": (_point(4, 128), _point(33, 256), *_JSD_MODES),
            "edge": tuple(_point(r, c) for r, c in _AWKWARD),
            "llm": (*(_point(4096, v, reduction="sum") for v in _VOCABULARIES), _point(32, 4096, reduction="sum")),
            "sweep": tuple(_point(2048, v) for v in _VOCABULARIES),
            "training": _TRAINING,
        },
        over="cols",
        # Terms of both signs, several times as large as their sum, of logarithms that are rounded at their own size.
        float32_floor=1e-6,
        peers=(Peer("liger", _jsd_liger),),
    ),
)
