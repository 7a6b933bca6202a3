"""What can be tuned: an op's problems, its configurations, and how one is run and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rooftile import tuning
from rooftile.bench.roof import tf32
from rooftile.bench.tune.matmul import matmul_space
from rooftile.bench.workloads import GemmShape
from rooftile.cases.draw import normal
from rooftile.ops.gated import silu_mul_packed
from rooftile.ops.gemm import choose
from rooftile.ops.gemm.config import GemmConfig, Problem
from rooftile.ops.gemm.linear import gated_linear, linear
from rooftile.ops.gemm.matmul import matmul
from rooftile.runtime import Target

# Of each output with numbers that are right, `|out - ref| / |ref|` over the whole tensor is half of this or less:
# half a unit in the last place, a sum in float32, or inputs cut to tf32.
LIMITS = {"bf16": 4e-3, "fp16": 5e-4, "fp32": 2e-5, "tf32": 1.5e-3}


class Tunable(Protocol):
    """An op with a tunable launch configuration. Problems and configurations are hashable and compare."""

    name: str
    """The op's."""
    table: str
    """The name of its file under tuning/<gpu>/."""
    peer: str
    """What its times are set beside, for people."""

    def problem(self, m: int, n: int, k: int, dtype: torch.dtype, precision: str) -> Any:
        """The problem of an output (m, n) whose elements are sums of k."""
        ...

    def problem_in(self, shape: GemmShape, m: int, dtype: torch.dtype, precision: str) -> Any | None:
        """The op's problem for a model's GEMM with m rows, or None."""
        ...

    def key(self, problem: Any) -> str:
        """The key by which the op looks up a configuration."""
        ...

    def describe(self, problem: Any) -> dict[str, Any]:
        """Its sizes, for the file."""
        ...

    def nbytes(self, problem: Any) -> int: ...

    def default(self, problem: Any, target: Target) -> Any:
        """The op's choice without a table."""
        ...

    def space(self, problem: Any, target: Target, exhaustive: bool) -> list[Any]:
        """Configurations that can run it, the likely ones first."""
        ...

    def binary(self, problem: Any, config: Any) -> Hashable:
        """Problems with equal values share a compiled kernel."""
        ...

    def fields(self, config: Any) -> dict[str, Any]:
        """The configuration, for the file."""
        ...

    def draw(self, problem: Any, device: torch.device, numbers: torch.Generator) -> dict[str, Tensor]:
        """Inputs of one call, standard normal."""
        ...

    def call(self, problem: Any, inputs: Mapping[str, Tensor], config: Any) -> Tensor: ...

    def reference(self, problem: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        """The result in float32 throughout."""
        ...

    def call_peer(self, problem: Any, inputs: Mapping[str, Tensor]) -> Tensor: ...

    def limit(self, problem: Any) -> float:
        """The largest allowed relative error."""
        ...


def label(tunable: Tunable, config: Any) -> str:
    """A configuration in one line: "tiled 128 x 256 x 64, ..." by the names of its fields."""
    values = tunable.fields(config)
    return " ".join(str(v) if isinstance(v, str) else f"{k}={v}" for k, v in values.items())


DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Products:
    """GEMMs; one table holds them all.

    Args:
        layout: how x and the weight lie in memory: "nt" as nn.Linear has them, "nn" as the gradient of x does, "tn" as
            that of the weight.
    """

    table = "matmul"

    def __init__(self, name: str, *, gated: bool = False, layout: str = "nt") -> None:
        self.name, self.gated, self.layout = name, gated, layout
        self.peer = "cuBLAS, then silu_mul" if gated else "cuBLAS"

    def problem(self, m: int, n: int, k: int, dtype: torch.dtype, precision: str) -> Problem:
        return Problem(
            m,
            n,
            k,
            dtype,
            gated=self.gated,
            activation="silu" if self.gated else "",
            precision=precision,  # type: ignore[arg-type]
            x_layout="k" if self.layout[0] == "n" else "m",
            w_layout="k" if self.layout[1] == "t" else "n",
        )

    def problem_in(self, shape: GemmShape, m: int, dtype: torch.dtype, precision: str) -> Problem | None:
        if self.gated and not shape.gated:
            return None
        n, k = shape.n // (1 + self.gated), shape.k
        sizes = {"nt": (m, n, k), "nn": (m, k, n), "tn": (n, k, m)}[self.layout]
        return self.problem(*sizes, dtype, precision)

    def key(self, problem: Problem) -> str:
        return choose.tuning_key(problem)[1]

    def describe(self, problem: Problem) -> dict[str, Any]:
        return {
            "m": problem.m,
            "n": problem.n,
            "k": problem.k,
            "dtype": self._dtype(problem),
            "layout": self.layout,
            "gated": problem.gated,
        }

    def _dtype(self, problem: Problem) -> str:
        name = DTYPE_NAMES[problem.dtype]
        return "tf32" if name == "fp32" and problem.precision == "tf32" else name

    def nbytes(self, problem: Problem) -> int:
        p = problem
        return p.dtype.itemsize * (p.m * p.k + p.n * p.k * (1 + p.gated) + p.m * p.n)

    def default(self, problem: Problem, target: Target) -> GemmConfig:
        with tuning.off():
            found = choose.choose(problem, target)
        assert found is not None, "there is no norm"
        return found

    def space(self, problem: Problem, target: Target, exhaustive: bool) -> list[GemmConfig]:
        return matmul_space(problem, target, exhaustive)

    def binary(self, problem: Problem, config: GemmConfig) -> Hashable:
        p, c = problem, config
        # What kernels ask of sizes at compile time: whether tiles come out even, and what Triton specialises on. An
        # answer too many costs a look on disk, one too few a compilation in the search.
        even = tuple(n % b == 0 for n, b in ((p.m, c.block_m), (p.n, c.block_n), (p.k, c.block_k)))
        sixteen = tuple(16 if n % 16 == 0 else 1 if n == 1 else 0 for n in (p.m, p.n, p.k))
        layouts = (p.x_layout, p.w_layout)
        return (config, p.dtype, p.gated, p.activation, p.precision, layouts, even, sixteen)

    def fields(self, config: GemmConfig) -> dict[str, Any]:
        values = dataclasses.asdict(config)
        return {name: value for name, value in values.items() if name not in ("slices", "prefetch")}  # of other GEMMs

    def draw(self, problem: Problem, device: torch.device, numbers: torch.Generator) -> dict[str, Tensor]:
        p = problem

        def drawn(rows: int, cols: int, transposed: bool, scale: float) -> Tensor:
            t = normal((cols, rows) if transposed else (rows, cols), torch.float32, device, numbers)
            t = t.mul_(scale).to(p.dtype)
            return t.mT if transposed else t

        rows = p.n * (1 + p.gated)
        # Sums of order 1, as a model has them: those of fp16 must not overflow behind a gate.
        weight = drawn(rows, p.k, p.w_layout == "n", max(1, p.k) ** -0.5)
        return {"x": drawn(p.m, p.k, p.x_layout == "m", 1.0), "weight": weight}

    def call(self, problem: Problem, inputs: Mapping[str, Tensor], config: GemmConfig | None) -> Tensor:
        x, weight = inputs["x"], inputs["weight"]
        if self.gated:
            return gated_linear(x, weight, activation="silu", config=config)
        if self.layout == "nt":
            return linear(x, weight, precision=problem.precision, config=config)
        return matmul(x, weight.mT, precision=problem.precision, config=config)

    def reference(self, problem: Problem, inputs: Mapping[str, Tensor]) -> Tensor:
        z = F.linear(inputs["x"].float(), inputs["weight"].float())
        if not self.gated:
            return z
        gate, up = z.chunk(2, dim=-1)
        return F.silu(gate) * up

    def call_peer(self, problem: Problem, inputs: Mapping[str, Tensor]) -> Tensor:
        with tf32(problem.precision == "tf32"):
            z = F.linear(inputs["x"], inputs["weight"])
        return silu_mul_packed(z) if self.gated else z

    def limit(self, problem: Problem) -> float:
        return LIMITS[self._dtype(problem)]


TUNABLES: dict[str, Tunable] = {
    "linear": Products("linear"),
    "gated_linear": Products("gated_linear", gated=True),
    "matmul_nn": Products("matmul_nn", layout="nn"),
    "matmul_tn": Products("matmul_tn", layout="tn"),
}
