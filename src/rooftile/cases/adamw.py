from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Unsupported
from rooftile.cases.draw import normal
from rooftile.ops import adamw as ops
from rooftile.reference import adamw as reference

_FP32 = "float32 throughout; a GPU's quotient and square root are good to two units in the last place"
_ONCE = "float32 inside, rounded once: half a unit in the last place"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(1e-6, _FP32)},
    torch.float16: {"forward": Tolerance(5e-4, _ONCE)},
    torch.bfloat16: {"forward": Tolerance(4e-3, _ONCE)},
}
# At these numbers a step moves a weight by a twentieth of its size, so that an error of the update shows in it.
NUMBERS = {"lr": 0.05, "step": 7, "weight_decay": 0.1}
_OPTIONAL = ("max_exp_avg_sq", "master")
_WRITTEN = ("param", "exp_avg", "exp_avg_sq", *_OPTIONAL)


def _point(rows: int, *, amsgrad: bool = False, master: bool = False, wide: bool = False, **options: object) -> Point:
    """`rows` elements. `wide`: gradient and moments in float32, whatever the parameter's dtype."""
    dims = {"rows": rows, "amsgrad": int(amsgrad), "master": int(master), "wide": int(wide)}
    return Point(f"N{rows}" + "".join(f" {n}" for n, v in dims.items() if n != "rows" and v), dims, options)


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    shape = (point["rows"],)
    own = torch.float32 if point["wide"] else dtype
    inputs = {
        "param": normal(shape, dtype, device, generator),
        "grad": normal(shape, own, device, generator),
        "exp_avg": normal(shape, own, device, generator),
        "exp_avg_sq": normal(shape, own, device, generator).square() + 0.25,
    }
    if point["amsgrad"]:
        inputs["max_exp_avg_sq"] = normal(shape, own, device, generator).square() + 0.25
    if point["master"]:
        inputs["master"] = inputs["param"].float() * (1 + 2.0**-10)  # what the dtype does not hold
    return inputs


def _run(**inputs: Any) -> tuple[Tensor, ...]:
    ops.adamw_(**{**NUMBERS, **inputs})
    return tuple(inputs[name] if name in inputs else _nothing(inputs["param"], name) for name in _WRITTEN)


def _nothing(param: Tensor, name: str) -> Tensor:
    """The result of what was not given."""
    return torch.empty((0,), dtype=torch.float32 if name == "master" else param.dtype, device=param.device)


def _with_all_results(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """The function with our numbers, and an empty tensor for what was not given."""

    @functools.wraps(function)
    def run(**inputs: Any) -> tuple[Tensor, ...]:
        results = list(function(**{**NUMBERS, **inputs}))
        more = [results.pop(3) if name in inputs else _nothing(inputs["param"], name) for name in _OPTIONAL]
        return (*results, *more)

    return run


def _pytorch(how: str) -> Callable[[Point], Callable[..., Any]]:
    """What `torch.optim.AdamW` calls with `foreach` or `fused`, in place."""

    def build(point: Point) -> Callable[..., Any]:
        if point["master"] or point["wide"]:
            raise Unsupported("it takes one dtype, and no master copy")
        steps: dict[torch.device, Tensor] = {}

        def run(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **more: Any) -> tuple[Tensor, ...]:
            step = steps.get(param.device)
            if step is None:  # not before the first call, which is not captured
                step = steps[param.device] = torch.tensor(NUMBERS["step"] - 1.0, device=param.device)
            largest = [more[name] for name in _OPTIONAL[:1] if name in more]
            adamw(
                [param], [grad], [exp_avg], [exp_avg_sq], largest, [step.clone()],
                foreach=how == "foreach", fused=how == "fused", capturable=param.is_cuda, amsgrad=bool(largest),
                beta1=0.9, beta2=0.999, lr=NUMBERS["lr"], weight_decay=NUMBERS["weight_decay"], eps=1e-8,
                maximize=more.get("maximize", False),
            )  # fmt: skip
            return param, exp_avg, exp_avg_sq, *(largest or [_nothing(param, "")]), _nothing(param, "master")

        return run

    return build


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """param, grad and the moments read, param and the moments written; with a master copy, param is not read."""
    own = 4 if point["wide"] else itemsize
    each = 2 * itemsize + own + 4 * own + 2 * own * point["amsgrad"]
    if point["master"]:
        each += 2 * 4 - itemsize
    return point["rows"] * each


def _flops(point: Point, direction: Direction) -> int:
    """Two for the first moment, four for the second, a root, a quotient and four more for the weight."""
    return 12 * point["rows"]


def _output_dtypes(point: Point) -> dict[str, torch.dtype]:
    moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.float32) if point["wide"] else {}
    largest = {"max_exp_avg_sq": torch.float32} if point["wide"] and point["amsgrad"] else {}
    return {"master": torch.float32, **moments, **largest}


CASES = (
    OpCase(
        name="adamw_",
        formula="m = β₁m + (1−β₁)g, v = β₂v + (1−β₂)g²; p = (1−lr·wd)p − lr·m̂ / (√v̂ + eps)",
        function=_run,
        reference=_with_all_results(reference.adamw_),
        eager=_with_all_results(reference.adamw_),
        inputs=_inputs,
        outputs=_WRITTEN,
        output_dtypes=_output_dtypes,
        output_tolerances={"master": dict.fromkeys(TOLERANCES, TOLERANCES[torch.float32]["forward"])},
        grads=(),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        sets={
            "tiny": (
                _point(300),
                _point(257, amsgrad=True, maximize=True),
                _point(128, master=True, wide=True),
                _point(96, wide=True, amsgrad=True),
            ),
            "edge": (_point(1), _point(0), _point(4099), _point(8192, maximize=True), _point(17, master=True)),
            "llm": (*(_point(n * 10**6) for n in (1, 10, 50)), _point(4096)),  # the last as a norm's weight
            "memory": (_point(500 * 10**6),),
        },
        peers=tuple(Peer(f"torch {how}", _pytorch(how), mutates=_WRITTEN) for how in ("foreach", "fused")),
        mutates=_WRITTEN,
    ),
)
