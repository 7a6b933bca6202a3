from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Unsupported
from rooftile.cases.draw import integers, normal
from rooftile.ops.softmax import softmax
from rooftile.reference import softmax as reference

_FP32 = "differences, exponentials and a sum as a tree in float32; a GPU's exp2 is good to two units in the last place"
_ONCE = "float32 inside, rounded once: half a unit in the last place"
_TWICE = "float32 inside; the output that it starts from is rounded, and the gradient"
_SMALL = "in rows of 10^5 elements most are subnormal numbers of float16"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(1e-6, _FP32), "backward": Tolerance(2e-6, _FP32)},
    torch.float16: {
        "forward": Tolerance(3e-3, f"{_ONCE}; {_SMALL}"),
        "backward": Tolerance(4e-3, f"{_TWICE}; {_SMALL}"),
    },
    torch.bfloat16: {"forward": Tolerance(4e-3, _ONCE), "backward": Tolerance(8e-3, _TWICE)},
}


def point(rows: int, cols: int, lead: tuple[int, ...] = (), mask: str | None = None, **options: object) -> Point:
    """`lead` is what stands before (rows, cols): (batch, heads), or nothing.

    `mask` names those of x's dimensions that the mask has, the others being broadcast: "BTS" is a mask for all heads
    alike, "" a single element.
    """
    dims = {"rows": rows, "cols": cols, "batch": 0, "heads": 0, "has_mask": int(mask is not None)}
    dims |= dict(zip(("batch", "heads"), lead, strict=False))
    dims |= {f"mask_{letter}": int(letter in (mask or "")) for letter in "BHTS"}
    label = "x".join(map(str, (*lead, rows, cols)))
    return Point(label if mask is None else f"{label} mask {mask}", dims, options)


def _shape(point: Point) -> tuple[int, ...]:
    lead = (point["batch"], point["heads"]) if point["batch"] else ()
    return (*lead, point["rows"], point["cols"])


def _mask_shape(point: Point) -> tuple[int, ...]:
    shape = _shape(point)
    return tuple(n if point[f"mask_{d}"] else 1 for n, d in zip(shape, "BHTS"[-len(shape) :], strict=True))


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    drawn = {"x": normal(_shape(point), dtype, device, generator)}
    if point["has_mask"]:
        mask = integers(4, _mask_shape(point), device, generator) > 0  # three of four are kept
        mask[..., :1] = True  # something in each row: what eager makes of an empty one is another matter
        drawn["mask"] = mask
    return drawn


def _product(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _kept(point: Point) -> int:
    """Elements that need be read: a mask is known only as it is read, but a causal row ends where it ends."""
    rows, cols = point["rows"], point["cols"]
    if not point.options.get("causal"):
        return _product(_shape(point))
    # Row i keeps i + cols - rows + 1 columns, the first rows - cols rows none.
    most = min(rows, cols)
    each = most * cols - most * (most - 1) // 2
    return _product(_shape(point)[:-2]) * each


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Forward: x and the mask read, y written; backward: dy and y read, dx written."""
    written = itemsize * _product(_shape(point))
    if direction == "backward":
        return 2 * itemsize * _kept(point) + written
    return itemsize * _kept(point) + written + point["has_mask"] * _product(_mask_shape(point))


def _flops(point: Point, direction: Direction) -> int:
    """Forward: maximum, difference, exponential, sum and quotient; backward: two products, a sum and a difference."""
    return (5 if direction == "forward" else 4) * _kept(point)


def _plain(point: Point, name: str) -> None:
    if point["has_mask"] or point.options.get("causal"):
        raise Unsupported(f"{name} has no mask")
    if point.options.get("scale", 1.0) != 1.0:
        raise Unsupported(f"{name} has no scale")


def _torch(point: Point) -> Callable[..., Any]:
    _plain(point, "torch.softmax")
    return lambda x, **_: torch.softmax(x, dim=-1)


def _liger(point: Point) -> Callable[..., Any]:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    _plain(point, "Liger's softmax")
    if point["cols"] > 65536:
        raise Unsupported("Liger's softmax takes rows of 65536 elements at most")
    return lambda x, **_: LigerSoftmaxFunction.apply(x)


def _quack(point: Point) -> Callable[..., Any]:
    from quack import softmax as quack_softmax

    _plain(point, "quack's softmax")
    return lambda x, **_: quack_softmax(x.reshape(-1, x.shape[-1])).view(x.shape)


_MODES = (
    point(5, 64, scale=0.125),
    point(5, 64, scale=-1.5),
    point(13, 21, causal=True),
    point(5, 64, mask="TS"),
    point(5, 24, (2, 3), mask="BS"),
    point(9, 12, (2, 2), mask="BTS", causal=True, scale=0.25),
)
_AWKWARD = ((1, 1), (3, 7), (17, 127), (2, 257), (65, 1025), (1, 4099), (0, 64))
_ROWWISE = ((32768, 1024), (16384, 4096), (8192, 8192), (4096, 16384), (2048, 65536), (1024, 131072), (8192, 3584))
_SCORES = {"scale": 128**-0.5}

CASES = (
    OpCase(
        name="softmax",
        formula="y = exp(s − max s) / sum(exp(s − max s)), s = scale · x where kept, else −∞",
        function=softmax,
        reference=reference.softmax,
        eager=reference.eager,
        inputs=_inputs,
        outputs=("y",),
        grads=("x",),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        sets={
            "tiny": (point(4, 128), point(33, 256), *_MODES),
            "edge": (*(point(r, c) for r, c in _AWKWARD), point(7, 3, causal=True)),
            "llm": tuple(point(r, c) for r, c in _ROWWISE),
            "sweep": tuple(point(2048, c) for c in (896, 1536, 2048, 3072, 4096)),
            # Attention's scores, of 32 heads.
            "prefill": (
                *(point(t, t, (1, 32), causal=True, **_SCORES) for t in (2048, 4096)),
                point(4096, 4096, (1, 32), mask="BTS", **_SCORES),
            ),
            # The logits of Llama 3's vocabulary.
            "decode": tuple(point(r, 128256) for r in (1, 8, 64)),
            "softmax": tuple(point(256, c) for c in (16384, 16385, 32768, 65536, 65537, 131072)),
        },
        # Split kernels have few registers, so that several programs fit an SM: 96 bytes, with Triton 3.8 120.
        spills=120,
        # Numbers of a row of 65537 are loaded one at a time, each into a register of its own: 540 bytes on
        # sm_80, 584 on sm_90.
        odd_spills=584,
        peers=(Peer("torch", _torch), Peer("liger", _liger), Peer("quack", _quack)),
    ),
)
