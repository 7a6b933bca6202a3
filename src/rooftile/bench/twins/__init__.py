"""`rooftile bench twins`: ops beside the same ops in hand-written CUDA C++, for whoever asks what Triton costs.

A twin computes what the op's default mode computes, with the same roundings, in one kernel of its own .cu file: 16-byte
loads, rows in registers, warp shuffles. Each row of the table gives the twin its fastest configuration of several,
measured there. Its launch is a call of the driver from Python, without autograd or checks of arguments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooftile import runtime
from rooftile.bench.twins import nvrtc
from rooftile.cases import OpCase, Peer, Point, Unsupported
from rooftile.cases.check import NAMES

CUDA = "cuda"  # the twin among an op's implementations
BAR = 0.95  # of its speed, which Triton is to reach in every row
FOLDER = Path(__file__).parent
VECTOR = 16  # bytes


@dataclasses.dataclass(frozen=True)
class Config:
    """A launch. `count`: of a row-wise kernel, the rows of a CTA; of the others, the vectors or heads of a thread.

    `threads` are those of a row, or of the CTA.
    """

    threads: int
    count: int


@dataclasses.dataclass(frozen=True)
class Twin:
    """The parts of a twin that its op decides.

    Attributes:
        layout: the kernel's parameters, as `nvrtc.Kernel` takes them.
        configs: by the length N that is a constant of the kernel and the itemsize, those worth measuring. The first is
            used if nothing was measured.
        length: N at a point, or 0 if the kernel has none.
        refusal: why the twin does not take a point, or "".
        run: calls a kernel on the op's inputs; returns its outputs.
        by_row: whether a CTA is `threads * count` threads.
    """

    layout: str
    configs: Callable[[int, int], list[Config]]
    length: Callable[[Point], int]
    refusal: Callable[[Point], str]
    run: Callable[..., Any]
    by_row: bool = False

    def instance(self, op: str, dtype: torch.dtype, length: int, config: Config) -> str:
        numbers = [*([length] if length else []), config.threads, config.count]
        return f"{op}<{NAMES[dtype]}, {', '.join(map(str, numbers))}>"


def _stream(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream


def _row_configs(n: int, itemsize: int) -> list[Config]:
    """At most 8 vectors a thread: more take the registers of other CTAs. As few idle threads as that allows."""
    vectors = n * itemsize // VECTOR
    busy = {t: vectors / (t * -(-vectors // t)) for t in (16, 32, 64, 128, 256, 512, 1024) if vectors <= 8 * t}
    least = min(7 / 8, max(busy.values()))
    return [Config(t, max(1, 128 // t) if t <= 32 else 1) for t, share in busy.items() if share >= least]


def _flat_configs(n: int, itemsize: int) -> list[Config]:
    return [Config(*c) for c in ((256, 2), (256, 1), (256, 4), (128, 4), (512, 1), (512, 2))]


def _head_configs(n: int, itemsize: int) -> list[Config]:
    lanes = n * itemsize // (2 * VECTOR)
    return [Config(t, c) for t, c in ((128, 2), (128, 4), (64, 4), (128, 1), (256, 1), (256, 2)) if t % lanes == 0]


def _whole_vectors(n: int) -> str:
    return "" if n % 8 == 0 else f"the twin reads 16 bytes at a time, and {n} is not divisible by 8"


def _refuse_rms_norm(p: Point) -> str:
    if p.options or not p["has_weight"] or p["weight_fp32"]:
        return "the twin has the default mode with a weight of x's dtype alone"
    return _whole_vectors(p["cols"]) or ("" if p["cols"] <= 16384 else "the twin holds a row in a CTA's registers")


def _refuse_softmax(p: Point) -> str:
    if p.options or p["has_mask"]:
        return "the twin has no scale and no mask"
    return _whole_vectors(p["cols"]) or ("" if p["cols"] <= 16384 else "the twin holds a row in a CTA's registers")


def _refuse_rope(p: Point) -> str:
    one_sequence = p["batch"] == 1 and p["seq_len"] < 65536
    if p.options or not one_sequence or p["positions"] or p["table_fp32"] or p["rotary"] != p["head_dim"]:
        return "the twin rotates one sequence of whole heads by a table of its dtype"
    return "" if p["head_dim"] in (64, 128, 256) else "the twin takes heads of 64, 128 or 256"


def _run_rms_norm(kernel: Any, c: Config, x: Tensor, weight: Tensor) -> Tensor:
    y = torch.empty_like(x)
    rows = x.shape[0]
    kernel((-(-rows // c.count), 1), _stream(x), x.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, 1e-6)
    return y


def _run_softmax(kernel: Any, c: Config, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    rows = x.numel() // x.shape[-1]
    kernel((-(-rows // c.count), 1), _stream(x), x.data_ptr(), y.data_ptr(), rows)
    return y


def _run_silu_mul(kernel: Any, c: Config, gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty_like(gate)
    vectors = gate.numel() * gate.element_size() // VECTOR
    programs = -(-vectors // (c.threads * c.count))
    kernel((programs, 1), _stream(gate), gate.data_ptr(), up.data_ptr(), y.data_ptr(), vectors)
    return y


def _run_rope(kernel: Any, c: Config, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)  # in q's and k's memory order: (tokens, heads, D)
    q_heads, k_heads, tokens, d = q.shape[1], k.shape[1], q.shape[2], q.shape[3]
    heads = c.threads * c.count * 2 * VECTOR // (d * q.element_size())  # of a CTA
    pointers = [t.data_ptr() for t in (q, k, cos, sin, q_out, k_out)]
    kernel((-(-(q_heads + k_heads) // heads), tokens), _stream(q), *pointers, q_heads, k_heads)
    return q_out, k_out


chosen: dict[tuple[str, str, torch.dtype], Config] = {}  # by op, point and dtype, in this process

TWINS: Mapping[str, Twin] = {
    "rms_norm": Twin("PPPif", _row_configs, lambda p: p["cols"], _refuse_rms_norm, _run_rms_norm, by_row=True),
    "rope": Twin("PPPPPPii", _head_configs, lambda p: p["head_dim"], _refuse_rope, _run_rope),
    "silu_mul": Twin("PPPq", _flat_configs, lambda p: 0, lambda p: _whole_vectors(p["cols"]), _run_silu_mul),
    "softmax": Twin("PPi", _row_configs, lambda p: p["cols"], _refuse_softmax, _run_softmax, by_row=True),
}


@functools.cache
def _kernel(op: str, dtype: torch.dtype, length: int, config: Config, device: torch.device) -> nvrtc.Kernel:
    twin = TWINS[op]
    instance = twin.instance(op, dtype, length, config)
    code, symbol = nvrtc.compiled(FOLDER / f"{op}.cu", instance, runtime.target(device).arch)
    threads = config.threads * config.count if twin.by_row else config.threads
    return nvrtc.Kernel(code, symbol, twin.layout, threads)


def build(op: str, point: Point, config: Config | None = None) -> Callable[..., Any]:
    """The twin at a point, a function with the op's arguments. By default it has the configuration chosen for them.

    Raises:
        ImportError: NVRTC is not here.
        Unsupported: there is no NVIDIA GPU here, or the twin does not take the point.
    """
    twin = TWINS[op]
    nvrtc.library()
    if refusal := twin.refusal(point):
        raise Unsupported(refusal)
    if runtime.MODE is not runtime.Mode.GPU or torch.version.cuda is None:
        raise Unsupported("the twin needs an NVIDIA GPU")
    length = twin.length(point)
    prepared: dict[torch.dtype, tuple[nvrtc.Kernel, Config]] = {}

    def run(**inputs: Tensor) -> Any:
        first = next(iter(inputs.values()))
        if first.dtype not in prepared:
            default = twin.configs(length, first.element_size())[0]
            c = config or chosen.get((op, str(point), first.dtype), default)
            prepared[first.dtype] = _kernel(op, first.dtype, length, c, first.device), c
        return twin.run(*prepared[first.dtype], **inputs)

    return run


def peers(case: OpCase) -> tuple[Peer, ...]:
    """The twin of an op, if it has one. A benchmark has it only where it is named."""
    return (Peer(CUDA, functools.partial(build, case.name)),) if case.name in TWINS else ()
