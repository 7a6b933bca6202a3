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
    """Ops, or all, at the first point of each set, or at all points, compiled for those targets.

    With `points`, those of them alone that have these labels. With `engine`, the engine's own kernels instead.
    """

    archs: Sequence[str]
    sets: Sequence[str] = ("llm",)
    ops: Sequence[str] = ()  # all
    points: Sequence[str] = ()  # all
    first: bool = True
    dtype: str = "bf16"
    engine: bool = False

    def tasks(self) -> list[Task]:
        how: dict[str, Any] = {"sets": self.sets, "dtypes": [DTYPES[self.dtype]], "first": self.first}
        if self.engine:
            return plan(engine_cases.CASES, source=engine_cases.__name__, **how)
        tasks = plan(find_cases(list(self.ops) or None), **how)
        if missing := set(self.points) - {str(task.point) for task in tasks}:
            sys.exit(f"{', '.join(self.ops)} has no point {', '.join(missing)}")
        return [task for task in tasks if not self.points or str(task.point) in self.points]


MOST_SECONDS = 15.0  # of processor time for a kernel: who runs it for the first time waits so long
MEASURED = ("sm_90",)  # the target on which the kernels were measured
SMALL = ("sm_86",)  # that with the least shared memory
# Their tiles and schedules depend on the sizes.
BY_SIZE = (
    "linear", "gated_linear", "int4_linear", "matmul", "int8_linear", "fp8_linear", "fp8_weight_linear",
    "rms_norm_linear", "rms_norm_gated_linear", "rms_norm_qkv_rope_cache", "attention", "attention_varlen",
    "attention_paged", "decode_attention", "linear_cross_entropy", "linear_jsd", "rms_norm", "softmax",
)  # fmt: skip
LATENT = tuple(f"B8 T4096 H{heads}/1 D576/512 page 64 latent v_cache=None head_dim_v=512" for heads in (16, 128))
LATENT_32_ROWS = "B32 T8192 H16/1 D576/512 tokens 2 page 64 latent v_cache=None head_dim_v=512"
TWO_BLOCKS = "B2 H16 T4096 D96 causal=True"  # of q and k

PLANS = {
    # Every op for every target, and the engine's own kernels. For the one measured also every kernel that those leave
    # out: of decode steps, of GEMMs with few rows or with bias and activation, of attention without Hopper's
    # instructions, of heads in two blocks, of latent attention. For the one with the least shared memory also GEMMs at
    # the models' sizes, and tiles of float32, which are twice as large.
    "every": (
        Line(tuple(TARGETS)),
        Line(tuple(TARGETS), engine=True),
        Line(MEASURED, ("decode",), ("rms_norm", "softmax", "fp8_linear", "sample_")),
        Line(MEASURED, ("tiny",), ("linear", "int4_linear", "fp8_linear", "adamw_", "accept_drafts_")),
        Line(MEASURED, ("tiny",), ("attention",), points=("B1 H2 T70 D80/48 causal=True window=17",)),
        Line(MEASURED, ("tiny",), ("linear_cross_entropy",), points=("4x64->128 bias",)),
        Line(MEASURED, ("prefill",), ("attention",), points=(TWO_BLOCKS,), first=False),
        Line(MEASURED, ops=("decode_attention",), points=LATENT, first=False),
        Line(MEASURED, ("latent",), ("decode_attention",), points=(LATENT_32_ROWS,), first=False),
        Line(SMALL, ops=("linear", "gated_linear"), first=False),
        Line(SMALL, ops=("linear", "attention", "decode_attention", "linear_cross_entropy"), dtype="fp32"),
    ),
    # The same kernels with each option, which the interpreter runs in `make test`, and at each size.
    "options": (
        Line(MEASURED, ("decode",)),
        Line(MEASURED, ("tiny",)),
        Line(MEASURED, ops=("linear", "gated_linear", "attention", "decode_attention"), first=False),
        Line(MEASURED, ("sweep", "softmax"), ("rms_norm", "softmax"), first=False),
        Line(SMALL, ops=BY_SIZE, first=False),
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
        Line(MEASURED, ("prefill",), ("attention",), points=(TWO_BLOCKS,), first=False),
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
    rows = report.limited(report.compile_all(tasks, [*find_cases(), *engine_cases.CASES], console), MOST_SECONDS)
    report.show_summary(rows, console)
    if any(row.verdict == "FAIL" for row in rows) or not rows:
        sys.exit(1)


if __name__ == "__main__":
    main()
