"""Which library a GPU kernel comes from, and what part of a transformer block it computes, by its name."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal

PACKAGE = Path(__file__).parents[2]

Kind = Literal["Rooftile", "Inductor", "NCCL", "copy", "foreign"]

GEMMS, ATTENTION, NORMS, ROPE = "GEMMs", "attention", "norms", "RoPE + cache write"
ACTIVATION, EMBEDDING, SAMPLING, COPIES, OTHER = "activation", "embedding", "sampling", "copies", "other"
COMMUNICATION = "communication"
BLOCKS = (GEMMS, ATTENTION, NORMS, ROPE, ACTIVATION, EMBEDDING, SAMPLING, COMMUNICATION, COPIES, OTHER)

# The families of ops, by the name of their file or folder; the first that fits.
_FAMILIES = (
    (r"gemm", GEMMS),
    (r"attention", ATTENTION),
    (r"rope|kv_cache", ROPE),
    (r"norm", NORMS),
    (r"gated|activation", ACTIVATION),
    (r"embedding", EMBEDDING),
    (r"sampl|softmax", SAMPLING),
)

# Kernels of others, by what their names have in common; the first that fits. An Inductor kernel is named after all that
# it fuses, so what is dearest stands first. A norm's name may say embedding too: it is the first layer's.
_OTHERS = (
    (r"flash|fmha|sdpa|attention|flex|splitkv|mem_?eff", ATTENTION),
    (r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|splitk|matmul|triton_(tem|mm|bmm)|_(add)?b?mm_|dot_kernel", GEMMS),
    (r"argmax|topk|sort|multinomial|exponential|softmax|distribution|gumbel|scan", SAMPLING),
    (r"rsqrt|norm|mean|pow_", NORMS),
    (r"silu|gelu|swiglu|sigmoid", ACTIVATION),
    (r"index_put|scatter|cat|rope|rotary|neg|cos|sin(?!g)", ROPE),
    (r"embedding|gather|index_?select|index_elementwise|index_kernel", EMBEDDING),
)

# triton_poi_fused_..., triton_red_..., triton_per_..., templates (tem) and kernels of several (for): names of Inductor.
_INDUCTOR = re.compile(r"triton_(poi|red|per|tem|for|unk|mix|mm|bmm|flex|spl)\w*_")

# ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...), and ncclKernel_... before NCCL 2.19; ncclSymkDevKernel_... since 2.27.
_NCCL = re.compile(r"(void )?nccl\w*Kernel")

# The driver copies a few bytes by kernels of its own: memcpy32_post was seen beside NCCL's on two H200s.
_COPY = re.compile(r"mem(cpy|set)\d+_post$")


@dataclasses.dataclass(frozen=True)
class Source:
    """A function in Triton or Gluon of this package: its name, its file within the package, its line, its family."""

    name: str
    file: str
    line: int

    @property
    def family(self) -> str:
        """The op that it belongs to: `ops/gemm/gemv.py` is of `gemm`, `engine/cache.py` of `engine`."""
        first, *rest = self.file.removesuffix(".py").split("/")
        return rest[0] if first == "ops" and rest else first

    @property
    def block(self) -> str:
        return _first(_FAMILIES, self.family)

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclasses.dataclass(frozen=True)
class Launched:
    """A kernel that this process launched: where it is written, and what tells it from its namesakes in a trace."""

    source: Source
    threads: int = 0
    shared: int = 0
    registers: int = 0

    def likeness(self, threads: int, shared: int, registers: int) -> int:
        return (self.threads == threads) + (self.shared == shared) + (self.registers == registers)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Which library a kernel comes from. `op` and `place` are empty unless it is Rooftile's."""

    kind: Kind
    block: str
    op: str = ""
    place: str = ""


def _first(rules: Collection[tuple[str, str]], name: str) -> str:
    return next((block for pattern, block in rules if re.search(pattern, name, re.IGNORECASE)), OTHER)


def _is_jit(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (
        isinstance(called, ast.Attribute) and called.attr == "jit" and ast.unparse(called.value) in ("triton", "gluon")
    )


def functions(package: Path = PACKAGE) -> Iterator[Source]:
    """Every `@triton.jit` and `@gluon.jit` function below a folder, read from the files: nothing is imported.

    What only measures (bench) is left out, for the engine has no use for it.
    """
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        if file.startswith("bench/"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list)):
                yield Source(node.name, file, node.lineno)


@functools.cache
def registry() -> Mapping[str, tuple[Source, ...]]:
    """By name: names are not unique, for many ops have a `_tile_kernel`."""
    found: dict[str, tuple[Source, ...]] = {}
    for source in functions():
        found[source.name] = (*found.get(source.name, ()), source)
    return found


def source_of(function: object) -> Source | None:
    """Where a kernel (`@triton.jit`, or a plain function) is written, if that is in this package."""
    function = getattr(function, "fn", function)
    module = str(getattr(function, "__module__", ""))
    name = str(getattr(function, "__name__", ""))
    if module != "rooftile" and not module.startswith("rooftile."):
        return None
    parts = module.split(".")[1:]
    files = ("/".join(parts) + ".py", "/".join([*parts, "__init__.py"]))
    return next((s for s in registry().get(name, ()) if s.file in files), None)


def origin_of(
    name: str,
    launched: Collection[Launched] = (),
    *,
    strict: bool = False,
    threads: int = 0,
    shared: int = 0,
    registers: int = 0,
) -> Origin:
    """Which library the kernel of that name comes from.

    Args:
        name: as the profiler has it.
        launched: what this process launched by Rooftile's launchers.
        strict: a kernel is Rooftile's only if it is among them, by name and threads of a block, for another library may
            have one of the same name. If not, one of the package's names will do: a compiler that took kernels over
            launches them itself.
        threads, shared, registers: of a block and of a thread, which tell namesakes apart.
    """
    if _INDUCTOR.match(name):
        return Origin("Inductor", _first(_OTHERS, name.removeprefix("triton_")))
    if _NCCL.match(name):
        return Origin("NCCL", COMMUNICATION)
    if _COPY.match(name):
        return Origin("copy", COPIES)
    alike = [k for k in launched if k.source.name == name]
    if strict and threads:  # those of a block are what the launcher asked for, to the last
        alike = [k for k in alike if k.threads in (0, threads)]
    most = max((k.likeness(threads, shared, registers) for k in alike), default=0)
    sources = [k.source for k in alike if k.likeness(threads, shared, registers) == most]
    if not sources and not strict:
        sources = list(registry().get(name, ()))
    sources = sorted(dict.fromkeys(sources), key=lambda s: s.place)
    if not sources:
        return Origin("foreign", _first(_OTHERS, name))
    blocks = {s.block for s in sources}
    ops = dict.fromkeys(s.family for s in sources)
    return Origin(
        "Rooftile", blocks.pop() if len(blocks) == 1 else OTHER, " or ".join(ops), " or ".join(s.place for s in sources)
    )
