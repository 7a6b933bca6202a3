from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Training, Unsupported
from rooftile.cases.draw import integers, normal
from rooftile.ops.fused_head.linear_cross_entropy import linear_cross_entropy
from rooftile.reference import linear_cross_entropy as reference

_FP32 = "chains of float32 sums, of products over the hidden size and, for gradients, over the vocabulary or the tokens"
_LOGITS = "logits are rounded to 16 bits, and the loss is float32: errors of tokens have either sign"
_GRADIENT = "logits and their gradients are rounded to 16 bits; sums are float32, rounded once a chunk"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(5e-6, _FP32), "backward": Tolerance(1e-5, _FP32)},
    torch.float16: {
        "forward": Tolerance(1e-3, _LOGITS),
        "backward": Tolerance(2e-2, f"{_GRADIENT}; the mean's gradients are subnormal numbers of float16"),
    },
    torch.bfloat16: {"forward": Tolerance(4e-3, _LOGITS), "backward": Tolerance(1e-2, _GRADIENT)},
}


def _point(
    rows: int, hidden: int, vocabulary: int, *, bias: bool = False, weight: bool = False, tokens: bool = False,
    **options: object,
) -> Point:  # fmt: skip
    """`weight`: classes have weights; `tokens`: tokens have."""
    dims = {
        "rows": rows,
        "hidden": hidden,
        "vocabulary": vocabulary,
        "has_bias": int(bias),
        "has_class_weight": int(weight),
        "has_token_weights": int(tokens),
    }
    label = f"{rows}x{hidden}->{vocabulary}" + " bias" * bias + " class weight" * weight + " token weights" * tokens
    return Point(label, dims, options)


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    """Logits of order 1; every eighth row is ignored, but for the first."""
    rows, hidden, vocabulary = point["rows"], point["hidden"], point["vocabulary"]
    target = integers(vocabulary, (rows,), device, generator)
    if device.type != "meta":
        target[8::8] = point.options.get("ignore_index", -100)
    weight = normal((vocabulary, hidden), torch.float32, device, generator) * hidden**-0.5
    drawn = {
        "hidden": normal((rows, hidden), dtype, device, generator),
        "weight": weight.to(dtype),
        "target": target,
    }
    if point["has_bias"]:
        drawn["bias"] = normal((vocabulary,), dtype, device, generator)
    if point["has_class_weight"]:
        drawn["class_weight"] = normal((vocabulary,), dtype, device, generator).abs()
    if point["has_token_weights"]:
        drawn["token_weights"] = normal((rows,), dtype, device, generator).abs()
    return drawn


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Hidden states, the head, targets, weights and the loss; backward: the gradients as well."""
    rows, hidden, vocabulary = point["rows"], point["hidden"], point["vocabulary"]
    learned = rows * hidden + vocabulary * hidden + point["has_bias"] * vocabulary
    small = point["has_class_weight"] * vocabulary + point["has_token_weights"] * rows
    loss = 4 * (rows if point.options.get("reduction") == "none" else 1)
    return itemsize * ((1 + (direction == "backward")) * learned + small) + rows * 8 + loss


def _flops(point: Point, direction: Direction) -> int:
    """A GEMM; backward: two more. The logits are computed once."""
    return (2 if direction == "forward" else 6) * point["rows"] * point["hidden"] * point["vocabulary"]


def _float32_loss(point: Point) -> Mapping[str, torch.dtype]:
    return {"loss": torch.float32}


_OURS = ("chunk_bytes", "valid_rows", "float32_weight_gradient", "precision")


def _torch(point: Point) -> Callable[..., Any]:
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        raise ImportError("this version of torch has no linear_cross_entropy")
    if point["has_token_weights"] or set(point.options) & {"z_loss", "softcap", "temperature"}:
        raise Unsupported(
            "torch.nn.functional.linear_cross_entropy has no token weights, z-loss, soft cap or temperature"
        )

    def run(
        hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *,
        class_weight: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        options = {name: value for name, value in options.items() if name not in _OURS}
        return function(hidden, weight, target, linear_bias=bias, weight=class_weight, **options)

    return run


def _liger(point: Point) -> Callable[..., Any]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return _as_liger(point, liger_fused_linear_cross_entropy)


def _liger_cutedsl(point: Point) -> Callable[..., Any]:
    """The same with Liger's kernel for Hopper, in CuTe DSL."""
    import cutlass.cute  # noqa: F401
    from liger_kernel.functional import fused_linear_cross_entropy

    return _as_liger(point, lambda *given, **more: fused_linear_cross_entropy(*given, **more, impl="nvidia-cutedsl")[0])


def _as_liger(point: Point, function: Callable[..., Any]) -> Callable[..., Any]:
    if point["has_token_weights"]:
        raise Unsupported("Liger's fused head has no token weights")
    if "temperature" in point.options:
        raise Unsupported("Liger's fused head has no temperature")
    if point.options.get("reduction") == "none":
        raise Unsupported("Liger's gradients are wrong where reduction is none")
    if point["has_class_weight"] and point.options.get("z_loss"):
        raise Unsupported("Liger divides the z-loss by another number than the class weights' sum")

    def run(
        hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *,
        class_weight: Tensor | None = None, z_loss: float = 0.0, **options: Any,
    ) -> Tensor:  # fmt: skip
        options = {name: value for name, value in options.items() if name not in _OURS}
        loss: Tensor = function(
            hidden, weight, target, bias=bias, ce_weight=class_weight, lse_square_scale=z_loss, **options
        )
        return loss

    return run


def _quack(point: Point) -> Callable[..., Any]:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    given = any(point[f"has_{name}"] for name in ("bias", "class_weight", "token_weights"))
    if given or set(point.options) - {"ignore_index", "reduction", *_OURS} or point.options.get("reduction") == "none":
        raise Unsupported("quack's chunked head has ignore_index, and mean and sum, alone")
    if any(point[name] % 8 for name in ("rows", "hidden", "vocabulary")) or not point["rows"]:
        raise Unsupported("quack's chunked head needs sizes that are multiples of 8")

    def run(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
        options = {name: value for name, value in options.items() if name not in _OURS}
        loss: Tensor = chunked_linear_cross_entropy(hidden, weight, target, **options)
        return loss

    return run


# Of a mean, the gradients of the logits at the targets, (p - 1) / n, are near each other, and so are their rounding
# errors, which then add up: against twice eager's error, nine rows are too few unless the reduction is "sum".
_MODES = (
    _point(9, 32, 64, bias=True, reduction="sum", chunk_bytes=512),
    _point(9, 32, 64, bias=True, reduction="none", label_smoothing=0.1),
    _point(9, 32, 64, weight=True, label_smoothing=0.2, ignore_index=3),
    _point(9, 32, 64, softcap=4.0, temperature=0.5, reduction="none"),
    _point(
        9, 32, 64, tokens=True, z_loss=1e-2, softcap=2.0, float32_weight_gradient=True, chunk_bytes=512,
        reduction="sum",
    ),
    _point(9, 32, 64, weight=True, tokens=True, label_smoothing=0.3, z_loss=1e-2, softcap=3.0, reduction="none"),
)  # fmt: skip
_AWKWARD = ((1, 1, 2), (3, 5, 7), (17, 24, 127), (2, 33, 257), (0, 16, 64))

CASES = (
    OpCase(
        name="linear_cross_entropy",
        formula="cross_entropy(hidden · weightᵀ + bias, target), a chunk of the logits at a time",
        function=linear_cross_entropy,
        reference=reference.linear_cross_entropy,
        eager=reference.eager,
        inputs=_inputs,
        outputs=("loss",),
        output_dtypes=_float32_loss,
        grads=("hidden", "weight", "bias"),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        training=Training(
            ("hidden", "weight", "bias"),
            lambda p, itemsize: _nbytes(p, itemsize, "backward"),
            lambda p: _flops(p, "backward"),
        ),
        sets={
            "tiny": (_point(4, 64, 128, bias=True), _point(17, 64, 256), *_MODES),
            "edge": tuple(_point(*sizes, reduction="sum") for sizes in _AWKWARD),
            "llm": tuple(
                _point(*sizes, reduction="sum")
                for sizes in ((16384, 4096, 32000), (8192, 4096, 128256), (4096, 2048, 128256))
            ),
            "sweep": tuple(_point(8192, 2048, v, reduction="sum") for v in (32000, 50257, 65536, 128256, 262144)),
            "training": (
                *(_point(*sizes, reduction="sum") for sizes in ((16384, 4096, 32000), (8192, 4096, 128256))),
                _point(8192, 4096, 128256, reduction="mean"),
            ),
        },
        spills=64,  # as cross_entropy, and the portable GEMM
        over="vocabulary",
        peers=(
            Peer("torch", _torch),
            Peer("liger", _liger),
            Peer("liger-cutedsl", _liger_cutedsl),
            Peer("quack", _quack),
        ),
        roof="gemm",
    ),
)
