from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Training, Unsupported
from rooftile.cases.draw import integers, normal
from rooftile.ops.cross_entropy import cross_entropy
from rooftile.reference import cross_entropy as reference

_FP32 = "exponentials and a sum of a row in float32, added as a tree; a GPU's exp2 is good to two units"
_LOSS = "the loss is float32 whatever the logits are"
_TWICE = "float32 inside; rounded as the forward writes it, and again with the factor of the backward"
_SMALL = "in float16 the mean's gradients are subnormal numbers"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(1e-6, _FP32), "backward": Tolerance(2e-6, _FP32)},
    torch.float16: {
        "forward": Tolerance(1e-6, f"{_FP32}; {_LOSS}"),
        "backward": Tolerance(2e-2, f"float32 inside, rounded once; {_SMALL}"),
    },
    torch.bfloat16: {
        "forward": Tolerance(1e-6, f"{_FP32}; {_LOSS}"),
        "backward": Tolerance(4e-3, _TWICE),
    },
}


def _point(rows: int, vocabulary: int, *, weight: bool = False, tokens: bool = False, **options: object) -> Point:
    """`weight`: classes have weights; `tokens`: tokens have."""
    dims = {"rows": rows, "vocabulary": vocabulary, "has_weight": int(weight), "has_token_weights": int(tokens)}
    label = f"{rows}x{vocabulary}" + (" weight" if weight else "") + (" token weights" if tokens else "")
    return Point(label, dims, options)


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    """Every eighth row is ignored, but for the first."""
    rows, vocabulary = point["rows"], point["vocabulary"]
    target = integers(vocabulary, (rows,), device, generator)
    if device.type != "meta":
        target[8::8] = point.options.get("ignore_index", -100)
    drawn = {"logits": normal((rows, vocabulary), dtype, device, generator), "target": target}
    if point["has_weight"]:
        drawn["weight"] = normal((vocabulary,), dtype, device, generator).abs()
    if point["has_token_weights"]:
        drawn["token_weights"] = normal((rows,), dtype, device, generator).abs()
    return drawn


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Logits and targets, weights, and the loss; backward: the gradient as well."""
    rows, vocabulary = point["rows"], point["vocabulary"]
    small = rows * 8 + itemsize * (point["has_weight"] * vocabulary + point["has_token_weights"] * rows)
    loss = 4 * (rows if point.options.get("reduction") == "none" else 1)
    return (1 + (direction == "backward")) * itemsize * rows * vocabulary + small + loss


def _flops(point: Point, direction: Direction) -> int:
    """Maximum, difference, exponential and sum; backward: an exponential, a difference and two products more."""
    return (4 if direction == "forward" else 8) * point["rows"] * point["vocabulary"]


def _float32_loss(point: Point) -> Mapping[str, torch.dtype]:
    return {"loss": torch.float32}


def _torch(point: Point) -> Callable[..., Any]:
    if point["has_token_weights"] or set(point.options) & {"z_loss", "softcap"}:
        raise Unsupported("torch.nn.functional.cross_entropy has no token weights, z-loss or soft cap")
    return lambda logits, target, **options: torch.nn.functional.cross_entropy(logits, target, **options)


def _liger(point: Point) -> Callable[..., Any]:
    """It writes the gradient over the logits."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    return _as_liger(point, liger_cross_entropy)


def _liger_cutedsl(point: Point) -> Callable[..., Any]:
    """Liger's kernel for Hopper, in CuTe DSL."""
    import cutlass.cute  # noqa: F401
    from liger_kernel.functional import cross_entropy as liger_cross_entropy

    return _as_liger(point, lambda *given, **more: liger_cross_entropy(*given, **more, impl="nvidia-cutedsl")[0])


def _as_liger(point: Point, function: Callable[..., Any]) -> Callable[..., Any]:
    if point["has_token_weights"]:
        raise Unsupported("Liger's cross entropy has no token weights")
    if point.options.get("reduction") == "none":
        raise Unsupported("Liger's gradients are wrong where reduction is none")
    if point["has_weight"] and point.options.get("z_loss"):
        raise Unsupported("Liger divides the z-loss by another number than the class weights' sum")

    def run(
        logits: Tensor, target: Tensor, weight: Tensor | None = None, *, z_loss: float = 0.0, **options: Any
    ) -> Tensor:
        loss: Tensor = function(logits, target, weight, lse_square_scale=z_loss, **options)
        return loss

    return run


def _quack(point: Point) -> Callable[..., Any]:
    from quack import cross_entropy as quack_cross_entropy

    if point["has_weight"] or point["has_token_weights"] or set(point.options) - {"ignore_index", "reduction"}:
        raise Unsupported("quack's cross entropy has ignore_index and a reduction alone")

    def run(logits: Tensor, target: Tensor, *, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
        return quack_cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)

    return run


_MODES = (
    _point(9, 64, reduction="sum"),
    _point(9, 64, reduction="none", label_smoothing=0.1),
    _point(9, 64, weight=True, label_smoothing=0.2, ignore_index=3),
    _point(9, 64, tokens=True, z_loss=1e-2, softcap=2.0),
    _point(9, 64, weight=True, tokens=True, label_smoothing=0.3, z_loss=1e-2, softcap=3.0, reduction="none"),
)
# Sums, as transformers' Trainer asks for them: it divides by the number of tokens in the whole batch.
_TRAINING = tuple(_point(r, v, reduction="sum") for r, v in ((8192, 32000), (4096, 128256), (2048, 262144)))
_AWKWARD = ((1, 1), (3, 7), (17, 127), (2, 257), (9, 1025), (1, 4099), (0, 64))

CASES = (
    OpCase(
        name="cross_entropy",
        formula="l = lse(x) − x[y] for each row, averaged; label smoothing, weights, z-loss, soft cap",
        function=cross_entropy,
        reference=reference.cross_entropy,
        eager=reference.eager,
        inputs=_inputs,
        outputs=("loss",),
        output_dtypes=_float32_loss,
        grads=("logits",),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        training=Training(
            ("logits",), lambda p, itemsize: _nbytes(p, itemsize, "backward"), lambda p: _flops(p, "backward")
        ),
        sets={
            "tiny": (_point(4, 128), _point(17, 256), *_MODES),
            "edge": tuple(_point(r, v, reduction="sum") for r, v in _AWKWARD),
            "llm": (*_TRAINING, _point(32, 4096, reduction="sum")),
            "sweep": tuple(_point(4096, v, reduction="sum") for v in (4096, 16384, 50257, 65536, 151936)),
            "training": _TRAINING,
        },
        # With a soft cap, whose tanh takes registers that the row was to stay in.
        spills=64,
        over="vocabulary",
        peers=(
            Peer("torch", _torch),
            Peer("liger", _liger, ("logits",)),
            Peer("liger-cutedsl", _liger_cutedsl, ("logits",)),
            Peer("quack", _quack),
        ),
    ),
)
