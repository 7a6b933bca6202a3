"""What an attention is, how its kernels are launched, and which kernel it gets."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from rooftile import library, runtime
from rooftile.primitives.scores import default_factor, score_factors, split_dim

Kernel = Literal["portable", "hopper"]
KERNELS: tuple[Kernel, ...] = ("portable", "hopper")
Invariant = Literal["invariant"]
INVARIANT: Invariant = "invariant"


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """How an attention kernel is launched.

    Args:
        kernel: `"portable"`, for any GPU and every option; `"hopper"`, for sm_90: warp-specialized, with TMA loads and
            wgmma; its forward is persistent except for short prompts.
        block_m, block_n: query rows and keys of a tile.
        num_warps: of a program; of kernel "hopper" those that multiply, with one more that loads.
        num_stages: pipeline stages of the loads.
    """

    kernel: Kernel
    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"AttentionConfig: kernel is {self.kernel!r}, expected one of {', '.join(KERNELS)}")
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if field.name == "num_stages":
                if not whole:
                    raise ValueError(f"AttentionConfig: num_stages is {value!r}, expected a whole number above 0")
                continue
            # Three warpgroups are no power of two.
            unit = {"block_m": 64, "num_warps": 4}.get(field.name, 0) if self.kernel == "hopper" else 0
            if not whole or (value & (value - 1) and not (unit and value % unit == 0)):
                expected = f"a power of two or a multiple of {unit}" if unit else "a power of two"
                raise ValueError(f"AttentionConfig: {field.name} is {value!r}, expected {expected}")


@functools.cache
def encode(config: AttentionConfig | None) -> str:
    """A configuration as the schema of an op takes it; "" for none."""
    return "" if config is None else ",".join(str(value) for value in dataclasses.astuple(config))


@functools.cache
def decode(text: str) -> AttentionConfig | None:
    """The configuration that `encode` wrote."""
    if not text:
        return None
    kernel, *sizes = text.split(",")
    return AttentionConfig(kernel, *(int(size) for size in sizes))  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What happens to a score between q·k and the softmax.

    Query i of n_q stands at position p = i + n_k - n_q among the keys, so that the last query stands at the last key.
    It sees key j where `p - left <= j <= p + right`; -1 is no limit. Causal is `right = 0`.
    """

    scale: float
    softcap: float = 0.0  # score = softcap * tanh(score / softcap); 0 is none
    left: int = -1
    right: int = -1

    @property
    def limited(self) -> bool:
        """Whether a query may not see all keys."""
        return self.left >= 0 or self.right >= 0

    @property
    def flags(self) -> tuple[bool, bool, bool]:
        """What kernels are compiled for: whether there is a cap, and a limit on either side."""
        return bool(self.softcap), self.left >= 0, self.right >= 0

    @property
    def numbers(self) -> tuple[float, float, int, int]:
        """What kernels are given: `primitives.scores.score_factors`, left and right. A new one costs no compilation."""
        return *score_factors(self.scale, self.softcap), self.left, self.right

    def default_factor(self, head_dim: int) -> float:
        """`primitives.scores.default_factor`.

        The Hopper kernels have it compiled in: an argument is a register, the third operand of each FFMA of the
        softmax.
        """
        return default_factor(head_dim, self.scale, self.softcap)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The tensors that an attention reads, as (batch, heads, tokens, dim) by strides, and its scoring.

    Attributes:
        q, k, v: packed sequences are one batch entry.
        mask: broadcast to (B, Hq, Tq, Tk) by strides of 0; bool (True is seen) or floating (added to the score).
        alibi_slopes: (Hq,) or (sequences, Hq); slope * |p - j| is taken off the score.
        sinks: (Hq,); a score that takes part in the softmax and has no value.
        starts_q, starts_k: (sequences + 1,) int32, of packed sequences: where each begins in q and in k.
        longest_q, longest_k: the most queries and keys of one sequence; all of them where nothing is packed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scoring: Scoring
    mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    starts_q: Tensor | None = None
    starts_k: Tensor | None = None
    longest_q: int = 0
    longest_k: int = 0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a prepared launch is given for every call, after q, k and v."""
        return self.mask, self.alibi_slopes, self.sinks, self.starts_q, self.starts_k

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.starts_q is None else self.starts_q.shape[0] - 1

    @property
    def mask_kind(self) -> Literal["", "bool", "float"]:
        return "" if self.mask is None else "bool" if self.mask.dtype is torch.bool else "float"

    @property
    def mask_strides(self) -> tuple[int, ...]:
        return (0, 0, 0, 0) if self.mask is None else self.mask.stride()

    @property
    def problem(self) -> Problem:
        return Problem(
            batch=self.sequences,
            heads=self.q.shape[1],
            kv_heads=self.k.shape[1],
            n_q=self.longest_q,
            n_k=self.longest_k,
            head_dim=self.q.shape[3],
            value_dim=self.v.shape[3],
            dtype=self.q.dtype,
            scoring=self.scoring,
            mask=self.mask_kind,
            alibi=self.alibi_slopes is not None,
            sinks=self.sinks is not None,
            packed=self.starts_q is not None,
            tokens=max(self.q.shape[2], self.k.shape[2]) if self.starts_q is not None else 0,
            aligned=all(map(is_aligned, (self.q, self.k, self.v))),
        )


def is_aligned(t: Tensor) -> bool:
    """Whether the base and all strides but the last are multiples of 16 bytes, as those of a copy are."""
    if t.stride(-1) != 1 and t.shape[-1] > 1:
        return True
    size = t.element_size()
    dims = zip(t.shape[:-1], t.stride()[:-1], strict=True)
    return t.data_ptr() % 16 == 0 and all(n == 1 or stride * size % 16 == 0 for n, stride in dims)


@dataclasses.dataclass(frozen=True)
class Problem:
    """All of an attention that the choice of its kernel depends on."""

    batch: int  # of packed sequences, how many
    heads: int
    kv_heads: int
    n_q: int
    n_k: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    scoring: Scoring
    mask: Literal["", "bool", "float"] = ""
    alibi: bool = False
    sinks: bool = False
    packed: bool = False
    tokens: int = 0  # of packed sequences, all together: queries or keys, whichever are more
    page: int = 0  # keys and values are in pages of so many tokens
    narrow: bool = False  # keys and values have 8 bits or factors, and are converted in registers or in a copy
    aligned: bool = True  # bases and strides of q, k and v are multiples of 16 bytes, as TMA needs


_FORWARD = {"portable": "forward", "hopper": "hopper_forward"}
_BACKWARD = {"portable": "backward", "hopper": "hopper_backward"}


def _module(name: str) -> ModuleType | None:
    name, is_gluon = f"rooftile.ops.attention.{name}", name.startswith("hopper")
    return runtime.gluon_module(name) if is_gluon else importlib.import_module(name)


def forward_module(kernel: str) -> ModuleType | None:
    """The module with that forward kernel; None where this Triton has no Gluon, in which it is written."""
    return _module(_FORWARD[kernel])


def backward_module(kernel: str) -> ModuleType | None:
    """The same for the backward."""
    return _module(_BACKWARD[kernel])


def _can_implement(found: ModuleType | None, p: Problem, c: AttentionConfig, target: runtime.Target) -> str | None:
    if found is None:
        return f"kernel is {c.kernel!r}, which this installation does not have"
    if c.num_warps * target.warp_size > target.max_threads:
        return f"num_warps is {c.num_warps}, expected at most {target.max_threads // target.warp_size} on {target.arch}"
    return found.can_implement(p, c, target)


def can_implement_forward(p: Problem, c: AttentionConfig, target: runtime.Target) -> str | None:
    """None where that configuration can run that problem, or the reason why it can't."""
    return _can_implement(forward_module(c.kernel), p, c, target)


def can_implement_backward(p: Problem, c: AttentionConfig, target: runtime.Target) -> str | None:
    """The same for the backward."""
    return _can_implement(backward_module(c.kernel), p, c, target)


def tiles_of(p: Problem, rows: int) -> int:
    """The number of tiles of `rows` queries in the batch."""
    return p.batch * p.heads * library.cdiv(p.n_q, rows)


def _is_short(p: Problem) -> bool:
    """Whether starting and ending programs is much of the Hopper forward's time. Windows and more keys than 1024 were
    not measured.
    """
    has_window = p.scoring.left >= 0 or p.scoring.right > 0
    return not p.packed and not has_window and max(p.n_q, p.n_k) <= 1024


def has_pairs(p: Problem, target: runtime.Target) -> bool:
    """Whether the two consumers of a program of the Hopper forward have queries from both ends of a causal prompt.

    Only where programs have one tile each, and occupy more than half of the SMs: with fewer, one consumer a program
    uses more of them. Heads up to 64 were not faster. `work_order` evens out the work of programs with several tiles.
    """
    programs, sms = tiles_of(p, 128), target.multiprocessors
    return _is_short(p) and p.scoring.right == 0 and 64 < _dim(p) <= 128 and sms < 2 * programs <= 2 * sms


def choose_forward(p: Problem, target: runtime.Target) -> AttentionConfig:
    """The configuration of the forward on that target: the first of the preferred ones that can run the problem."""
    for c in _forward(p, target):
        if can_implement_forward(p, c, target) is None:
            return c
    return AttentionConfig("portable", 16, 16, 4, 1)


def choose_invariant(p: Problem, target: runtime.Target) -> AttentionConfig:
    """That of the portable forward for any number of queries and sequences."""
    p = dataclasses.replace(p, batch=1, n_q=64, tokens=1 << 30)
    for c in _forward(p, target):
        if c.kernel == "portable" and can_implement_forward(p, c, target) is None:
            return c
    return AttentionConfig("portable", 16, 16, 4, 1)


def choose_backward(p: Problem, target: runtime.Target, portable: bool = False) -> AttentionConfig:
    """The same for the backward; that of the portable kernels with `portable`."""
    if target.gluon and not portable and not _many_short(p):
        # Steps of 128 queries for heads that are short enough to keep their sums in registers.
        c = AttentionConfig("hopper", 128 if p.head_dim <= 64 else 64, 128, 8, 2)
        if can_implement_backward(p, c, target) is None:
            return c
    module = backward_module("portable")
    assert module is not None
    return module.default_config(p, target)


def _dim(p: Problem) -> int:
    return max(sum(split_dim(p.head_dim)), sum(split_dim(p.value_dim)))


def _rows(p: Problem, most: int) -> int:
    """Rows of a tile: those that exist, rounded up, and at least 64, which a warpgroup multiplies at once."""
    longest = 64 if _many_short(p) else max(1, p.n_q)
    return max(64, min(most, library.power_of_two(longest)))


def _many_short(p: Problem) -> bool:
    """Whether packed sequences are too short, on average, for tiles of 128 queries.

    The time of the portable forward over that of the Hopper forward, on an H100, for 32/8 heads of 128 and 16384 tokens
    in sequences of 16, 32, 64, 96, 128 and 512: in tiles of 64 queries 0.62, 0.69, 0.85, 1.57, 1.41 and 1.52, in tiles
    of 128 queries 1.3 to 1.9. For one sequence of 8192 tokens among 128 of 32 it is 2.57.
    """
    return p.packed and p.tokens <= 64 * p.batch


def saves_dequantizing(p: Problem) -> bool:
    """Whether the Hopper forward saves more time than a narrow cache takes to be dequantized; true if it is not narrow.

    On an H100, with 4 sequences of 4096 keys in 8 heads of 128, it took 0.69 of the portable kernel's time for 128
    queries of 8 heads. Fewer were not measured.
    """
    return not p.narrow or p.tokens * p.heads >= 128 * p.batch * p.kv_heads


def _interpreted(p: Problem) -> AttentionConfig:
    """Few large programs, but more than one step for more than 64 keys."""
    return AttentionConfig("portable", _rows(p, 64), 64, 4, 1)


def _forward(p: Problem, target: runtime.Target) -> Iterator[AttentionConfig]:
    if target is runtime.INTERPRETER:
        yield _interpreted(p)
        return
    dim = _dim(p)
    if target.gluon and p.n_q > 64 and not _many_short(p) and saves_dequantizing(p):
        yield from _hopper(p, dim, target)
    if p.dtype.itemsize == 4:
        yield from _float32(p, dim, target)
        return
    # A mask takes 1.5 registers for each score of a thread, so fewer scores fit.
    wide = not (p.mask or p.alibi)
    rows = _rows(p, 128)
    warps = 8 if rows == 128 and (dim > 64 or not wide) else 4
    if target.warp_size == 64:  # a wave has many registers and little shared memory
        for m in (rows, 64, 32):
            yield AttentionConfig("portable", m, 32, 4, 1)
    if target.arch == "sm_90" and wide and not p.narrow and rows == 128 and dim <= 128:  # on sm_100 it spills
        if dim <= 64:
            yield AttentionConfig("portable", 128, 128, 8, 3)
        yield AttentionConfig("portable", 128, 128, 8, 2)
    yield from _sized(rows, ((64, 3), (64, 2), (32, 2), (32, 1)), warps, p, target)
    yield from _sized(64, ((64, 2), (32, 2), (32, 1)), 4, p, target)
    yield from _sized(32, ((32, 1), (16, 1)), 4, p, target)


def _hopper(p: Problem, dim: int, target: runtime.Target) -> Iterator[AttentionConfig]:
    """Three warpgroups for heads up to 64 and many queries: one multiplies while two compute their softmax.

    On an H200 three reach 1.18 of cuDNN's speed at 8192 tokens, and two 0.98. Two are faster up to 1024 tokens, and by
    3 percent for 2048 causal ones.

    One warpgroup for few tiles of a short prompt, with a ring that leaves room for a second program on the SM, unless
    two have pairs. The limits are from an H100, with 128 to 1024 tokens of 32 heads.
    """
    most = (4 if p.scoring.right == 0 else 2) * target.multiprocessors
    if dim <= 128 and _is_short(p) and tiles_of(p, 64) <= most and not has_pairs(p, target):
        yield AttentionConfig("hopper", 64, 64, 4, 10 if dim <= 64 else 5)
    if dim <= 64 and p.n_q >= (4096 if p.scoring.right == 0 else 2048):
        yield AttentionConfig("hopper", 192, 128, 12, 6)
    elif dim <= 128:
        yield AttentionConfig("hopper", 128, 128, 8, 6 if dim <= 64 else 4)
    else:
        yield AttentionConfig("hopper", 128, 64, 8, 2)


def _sized(
    rows: int, steps: tuple[tuple[int, int], ...], warps: int, p: Problem, target: runtime.Target
) -> Iterator[AttentionConfig]:
    """Tiles of so many rows, in steps of (keys, stages). Steps that would spill on sm_90 are left out."""
    more = bool(p.mask or p.alibi or p.scoring.softcap)
    most = 32 if (more or rows < 128) and ((rows < 128 and more) or _dim(p) > 128) else 64
    if p.narrow and target.arch not in ("sm_90", "sm_100"):  # whose tensor cores read keys from shared memory
        most = 32
    for keys, stages in steps:
        if keys <= most:
            yield AttentionConfig("portable", rows, keys, max(1, warps * 32 // target.warp_size), stages)


def _float32(p: Problem, dim: int, target: runtime.Target) -> Iterator[AttentionConfig]:
    """Exact products run on the FMA units, whose operands are in registers: few keys a step."""
    warps = max(1, 8 * 32 // target.warp_size)
    for rows, keys in ((64, 32 if dim <= 64 else 16), (32, 16)):
        yield AttentionConfig("portable", rows, keys, warps, 1)
