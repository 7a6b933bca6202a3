"""Compiles a plan of kernels without a GPU: `python tools/compile_targets.py every`.

`.ci/run` has the plans `every` and `newest`, and `make test-all` has `options`.

Hundreds of kernels: only those that fail are shown, and a summary of each target. Calls that several lines of a plan
name are compiled once, in one process for each target and dtype. `rooftile inspect --all` compiles the whole of it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from rooftile.cases import find_cases
from rooftile.cases.check import DTYPES
from rooftile.engine import cases as engine_cases
from rooftile.inspect import Task, plan, report
from rooftile.runtime import TARGETS


@dataclasses.dataclass(frozen=True)
class Line:
    """Ops, or all but some, at the first point of each set, or at all points, compiled for those targets.

    With `engine`, the engine's own kernels instead.
    """

    archs: Sequence[str]
    sets: Sequence[str] = ("llm",)
    ops: Sequence[str] = ()  # all
    but: Sequence[str] = ()
    first: bool = True
    dtype: str = "bf16"
    engine: bool = False

    def tasks(self) -> list[Task]:
        how: dict[str, Any] = {"sets": self.sets, "dtypes": [DTYPES[self.dtype]], "first": self.first}
        if self.engine:
            return plan(engine_cases.CASES, source=engine_cases.__name__, **how)
        return plan([case for case in find_cases(list(self.ops) or None) if case.name not in self.but], **how)


MEASURED = ("sm_90",)  # the target on which the kernels were measured
SMALL = ("sm_86",)  # that with the least shared memory
# Their tiles and schedules depend on the sizes.
BY_SIZE = ("linear", "gated_linear", "int4_linear", "attention")
# So do these, but their kernels are those of the ops above with other flags, or are compiled at all sizes for the
# target measured: compiled by `make test-all`.
LIKEWISE = (
    "matmul", "int8_linear", "fp8_linear", "fp8_weight_linear", "rms_norm_linear", "rms_norm_gated_linear",
    "rms_norm_qkv_rope_cache", "attention_varlen", "attention_paged", "decode_attention", "linear_cross_entropy",
    "linear_jsd", "rms_norm", "softmax",
)  # fmt: skip

# Their options are flags of one kernel, and the interpreter runs each: compiled by `make test-all`.
BY_FLAGS = (
    "add_rms_norm", "rms_norm", "layer_norm", "softmax", "rope", "rope_", "qk_norm_rope", "bias_gelu", "bias_silu",
    "gelu_mul", "gelu_mul_packed", "silu_mul", "silu_mul_packed", "embedding", "quantize_tensor", "rms_norm_quantized",
    "add_rms_norm_quantized", "silu_mul_quantized", "gelu_mul_quantized", "cross_entropy", "kl_div", "jsd",
    "linear_cross_entropy", "append_kv", "rope_and_cache",
)  # fmt: skip
# With options these have the kernels of `sample_`, `linear`, `int4_linear`, `rms_norm_qkv_rope_cache`, `attention` and
# `decode_attention` with other flags: compiled by `make test-all`.
OF_OTHERS = (
    "sample", "linear_jsd", "linear_kl", "lora_linear", "matmul", "int8_linear", "fp8_weight_linear", "gated_linear",
    "rms_norm_gated_linear", "rms_norm_linear_quantized", "rms_norm_gated_linear_quantized", "attention_varlen",
    "attention_paged",
)  # fmt: skip
# In float32 their tiles are twice as large.
TILED = (
    "linear", "gated_linear", "int4_linear", "rms_norm_linear", "attention", "decode_attention", "linear_cross_entropy",
)  # fmt: skip

PLANS = {
    # Every op for every target, and the engine's own kernels. Ops with options, in a decode step and at the sizes of
    # GEMMs and attention for the one measured; at the models' sizes and in float32 for the one with the least shared
    # memory. Long rows have kernels of their own; layer_norm's, and those with a residual, differ from rms_norm's by a
    # flag. Tiny sizes that differ from others in sizes alone are left to `make test-all`.
    "every": (
        Line(MEASURED, ("llm", "decode")),
        Line(MEASURED, ("tiny",), but=(*BY_FLAGS, *OF_OTHERS)),
        Line(MEASURED, ops=("linear", "gated_linear", "attention", "decode_attention"), first=False),
        Line(MEASURED, ("sweep", "softmax"), ("rms_norm", "softmax"), first=False),
        Line(SMALL, ops=BY_SIZE, first=False),
        Line(tuple(TARGETS)),
        Line(tuple(TARGETS), engine=True),
        Line(SMALL, ops=TILED, dtype="fp32"),
    ),
    "options": (
        Line(MEASURED, ("tiny",), (*BY_FLAGS, *OF_OTHERS)),
        Line(SMALL, ops=LIKEWISE, first=False),
        Line(SMALL, dtype="fp32"),
    ),
    # These have every kernel: ops left out differ by a flag, or in what is allocated.
    "newest": (
        Line(
            MEASURED,
            ops=(
                "add_rms_norm", "layer_norm", "softmax", "rope", "qk_norm_rope", "silu_mul", "bias_gelu",
                "rms_norm_quantized", "silu_mul_quantized", "linear", "gated_linear", "rms_norm_linear",
                "rms_norm_gated_linear", "fp8_linear", "int8_linear", "attention", "decode_attention", "append_kv",
                "embedding", "sample", "cross_entropy", "kl_div", "adamw_",
            ),
        ),
        Line(("gfx942",), ops=("silu_mul",)),
        Line(MEASURED, engine=True),
    ),
}  # fmt: skip


def tasks_of(lines: Iterable[Line]) -> dict[str, list[Task]]:
    """The calls of each target, each once."""
    found: dict[str, dict[str, Task]] = {}
    for line in lines:
        for arch in line.archs:
            found.setdefault(arch, {}).update({repr(task): task for task in line.tasks()})
    return {arch: list(tasks.values()) for arch, tasks in found.items()}


def main() -> None:
    tasks = tasks_of(PLANS[sys.argv[1]])
    for arch, own in tasks.items():
        print(f"{arch}: {len(own)} calls of {len({task.op for task in own})} ops", flush=True)
    console = Console(width=120)
    rows = report.compile_all(tasks, [*find_cases(), *engine_cases.CASES], console)
    report.show_summary(rows, console)
    if any(row.verdict == "FAIL" for row in rows) or not rows:
        sys.exit(1)


if __name__ == "__main__":
    main()
