"""What an attention is, and how its kernels are launched: the two things that the choice of a kernel is about."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import torch
from torch import Tensor

Kernel = Literal["portable", "hopper"]
KERNELS: tuple[Kernel, ...] = ("portable", "hopper")


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """How an attention kernel is launched.

    Args:
        kernel: `"portable"`, any GPU and every option; `"hopper"`, persistent, with copies by the tensor memory
            accelerator and warpgroups in ping-pong, for sm_90.
        block_m, block_n: query rows and keys of a tile.
        num_warps, num_stages: warps of a program, and how deep its loads are pipelined.
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
    """What happens to a score between q·k and the softmax: a constant of the kernels.

    Query i of n_q stands at position p = i + n_k - n_q among the keys, so that the last query stands at the last key.
    It sees key j where `p - left <= j <= p + right`; -1 is no limit. Causal is `right = 0`.
    """

    scale: float
    softcap: float = 0.0  # score = softcap * tanh(score / softcap); 0 is none
    left: int = -1
    right: int = -1


@dataclasses.dataclass(frozen=True)
class Extras:
    """The tensors that an attention has beside q, k and v; all optional, all read only.

    Attributes:
        mask: broadcast to (B, Hq, Tq, Tk) by strides of 0; bool (True is seen) or floating (added to the score).
        alibi_slopes: (Hq,) float32; slope * |p - j| is taken off the score.
        sinks: (Hq,) float32; a score that takes part in the softmax and has no value.
        starts_q, starts_k: (sequences + 1,) int32, of packed sequences: where each begins in q's and k's one entry.
        longest_q, longest_k: the most queries and keys of one sequence; without packed sequences Tq and Tk.
    """

    mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    starts_q: Tensor | None = None
    starts_k: Tensor | None = None
    longest_q: int = 0
    longest_k: int = 0


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention, as far as the choice of its kernel goes."""

    batch: int  # sequences, where they are packed
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
    aligned: bool = True  # bases and strides of q, k, v in multiples of 16 bytes, for the tensor memory accelerator
