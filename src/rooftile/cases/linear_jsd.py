from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Training, Unsupported
from rooftile.cases.draw import integers, normal
from rooftile.ops.fused_head.linear_jsd import linear_jsd, linear_kl
from rooftile.reference import linear_jsd as reference

_FP32 = "chains of float32 sums, of products over the hidden size and, for gradients, over the vocabulary or the tokens"
_LOGITS = "logits of both are rounded to 16 bits, and the loss is float32: errors of tokens have either sign"
_GRADIENT = "logits of both and the gradient are rounded to 16 bits; sums are float32, rounded once a chunk"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(5e-6, _FP32), "backward": Tolerance(1e-5, _FP32)},
    torch.float16: {
        "forward": Tolerance(1e-3, _LOGITS),
        "backward": Tolerance(2e-2, f"{_GRADIENT}; the mean's gradients are subnormal numbers of float16"),
    },
    torch.bfloat16: {"forward": Tolerance(6e-3, _LOGITS), "backward": Tolerance(1.2e-2, _GRADIENT)},
}


def _point(rows: int, hidden: int, teacher: int, vocabulary: int, *, bias: bool = False, **options: object) -> Point:
    dims = {"rows": rows, "hidden": hidden, "teacher": teacher, "vocabulary": vocabulary, "has_bias": int(bias)}
    return Point(f"{rows}x{hidden}|{teacher}->{vocabulary}" + " bias" * bias, dims, options)


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    """Logits of order 1; every eighth row is ignored, but for the first."""
    rows, vocabulary = point["rows"], point["vocabulary"]
    target = integers(vocabulary, (rows,), device, generator)
    if device.type != "meta":
        target[8::8] = point.options.get("ignore_index", -100)
    drawn = {}
    for prefix, size in (("", point["hidden"]), ("teacher_", point["teacher"])):
        weight = normal((vocabulary, size), torch.float32, device, generator) * size**-0.5
        drawn[f"{prefix}hidden"] = normal((rows, size), dtype, device, generator)
        drawn[f"{prefix}weight"] = weight.to(dtype)
    drawn["target"] = target
    if point["has_bias"]:
        drawn["bias"] = normal((vocabulary,), dtype, device, generator)
        drawn["teacher_bias"] = normal((vocabulary,), dtype, device, generator)
    return drawn


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Hidden states and heads of both, labels and the loss; backward: the student's gradients as well."""
    rows, vocabulary, bias = point["rows"], point["vocabulary"], point["has_bias"] * point["vocabulary"]
    student, teacher = ((rows + vocabulary) * point[name] + bias for name in ("hidden", "teacher"))
    loss = 4 * (rows if point.options.get("reduction") == "none" else 1)
    return itemsize * ((1 + (direction == "backward")) * student + teacher) + rows * 8 + loss


def _flops(point: Point, direction: Direction) -> int:
    """A GEMM of each; backward: two more of the student's. Logits are computed once."""
    student = (2 if direction == "forward" else 6) * point["hidden"]
    return (student + 2 * point["teacher"]) * point["rows"] * point["vocabulary"]


def _float32_loss(point: Point) -> Mapping[str, torch.dtype]:
    return {"loss": torch.float32}


def _liger(point: Point, *, beta: float) -> Callable[..., Any]:
    from liger_kernel.transformers.functional import liger_fused_linear_jsd

    if point["has_bias"]:
        raise Unsupported("Liger's fused head adds no bias")
    if point.options.get("reduction", "mean") != "mean":
        raise Unsupported("Liger's fused divergence is always averaged")
    beta, temperature = point.options.get("beta", beta), point.options.get("temperature", 1.0)

    def run(
        hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, target: Tensor, **_: Any
    ) -> Tensor:
        return liger_fused_linear_jsd(
            hidden, weight, teacher_hidden, teacher_weight, target, jsd_beta=beta, temperature=temperature
        )

    return run


# In the order of sizes: tokens, hidden size of the student, that of the teacher, vocabulary.
_AWKWARD = ((1, 24, 1, 65), (7, 9, 5, 13), (17, 24, 33, 127), (2, 33, 16, 257), (0, 16, 16, 64))
_LLM = ((8192, 2048, 4096, 32000), (4096, 2048, 4096, 128256))


def _case(name: str, formula: str, function: Callable[..., Any], sets: Mapping[str, tuple[Point, ...]]) -> OpCase:
    return OpCase(
        name=name,
        formula=formula,
        function=function,
        reference=getattr(reference, name),
        eager=getattr(reference, f"{name}_eager"),
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
            **sets,
            "edge": tuple(_point(*sizes, reduction="sum") for sizes in _AWKWARD),
            "sweep": tuple(_point(8192, 2048, 4096, v) for v in (32000, 50257, 65536, 128256)),
            "training": tuple(_point(*sizes) for sizes in _LLM),
        },
        # The portable GEMM has 64; on sm_90, where it adds to linear_kl's float32 gradient of the weight, 120.
        spills=128 if name == "linear_kl" else 64,
        over="vocabulary",
        # Terms of both signs, several times as large as their sum, of logarithms that are rounded at their own size.
        float32_floor=2e-6,
        peers=(Peer("liger", functools.partial(_liger, beta=0.0 if name == "linear_kl" else 0.5)),),
        roof="gemm",
    )


CASES = (
    _case(
        "linear_jsd",
        "jsd(log softmax((hidden · weightᵀ + bias) / T), that of a teacher), a chunk of the logits at a time",
        linear_jsd,
        {
            "tiny": (
                _point(4, 64, 32, 128, bias=True),
                _point(17, 64, 96, 256, reduction="sum", beta=1.0, chunk_bytes=16384),
                _point(9, 32, 48, 64, bias=True, reduction="none", beta=0.0, temperature=2.0),
            ),
            "llm": tuple(_point(*sizes, reduction="sum", beta=beta) for sizes in _LLM for beta in (0.0, 0.5)),
        },
    ),
    _case(
        "linear_kl",
        "KL(teacher ‖ softmax((hidden · weightᵀ + bias) / T)), a chunk of the logits at a time",
        linear_kl,
        {
            "tiny": (
                _point(4, 64, 32, 128, bias=True),
                _point(17, 64, 96, 256, reduction="sum", temperature=2.0, ignore_index=3, chunk_bytes=16384),
                _point(9, 32, 48, 64, bias=True, reduction="none", float32_weight_gradient=True),
            ),
            "llm": tuple(_point(*sizes, reduction="sum") for sizes in _LLM),
        },
    ),
)
