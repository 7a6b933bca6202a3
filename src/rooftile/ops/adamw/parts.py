"""What the kernels share: kinds of tensors, the mathematics of a chunk, groups of hyperparameters, configurations."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

from rooftile import library, runtime  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip


# A kind is a number: the dtypes of parameter, gradient and moments in base 3, then the flags.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
AMSGRAD, MASTER, STOCHASTIC = 1, 2, 4

# A row of the hyperparameters: float64. Row 0 holds the greatest norm, the others a group each.
_LR, _LR_ADDRESS, _DECAY, _LOG_BETA1, _RATE1, _LOG_BETA2, _BETA2, _RATE2, _EPS, _SIGN = (
    tl.constexpr(i) for i in range(10)
)
HYPER = tl.constexpr(10)


def kind_of(param: torch.dtype, grad: torch.dtype, moments: torch.dtype, flags: int) -> int:
    """The kind of a parameter: a number below 2^8."""
    code = DTYPES.index(param) + 3 * (DTYPES.index(grad) + 3 * DTYPES.index(moments))
    return code + 27 * flags


@triton.jit
def _pointer(address, CODE: tl.constexpr, ALIGNED: tl.constexpr):
    """The address as a pointer to elements of `DTYPES[CODE]`; ALIGNED: to 16 bytes."""
    if CODE == 0:
        ptr = address.to(tl.pointer_type(tl.float32))
    elif CODE == 1:
        ptr = address.to(tl.pointer_type(tl.float16))
    else:
        ptr = address.to(tl.pointer_type(tl.bfloat16))
    if ALIGNED:  # here, beside the cast: a hint on what a function returned is lost
        ptr = tl.multiple_of(ptr, 16)
    return ptr


@triton.jit
def load(address, offsets, mask, CODE: tl.constexpr, ALIGNED: tl.constexpr):
    ptrs = _pointer(address, CODE, ALIGNED) + offsets
    if ALIGNED:
        return tl.load(ptrs).to(tl.float32)
    else:
        return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(address, offsets, x, mask, CODE: tl.constexpr, ALIGNED: tl.constexpr):
    ptrs = _pointer(address, CODE, ALIGNED) + offsets
    x = x.to(ptrs.dtype.element_ty)
    if ALIGNED:
        tl.store(ptrs, x)
    else:
        tl.store(ptrs, x, mask=mask)


@triton.jit
def _random_bits(seed, step, serial, first, BLOCK: tl.constexpr):
    """16 random bits for each element from `first`, a multiple of 8: a function of the element's index, the seed, the
    step and the tensor's serial number alone.

    Philox (Salmon et al. 2011) with the seed as key and (index // 8, step, serial) as counter gives four words, two
    halves each.
    """
    counter = first // 8 + tl.arange(0, BLOCK // 8)
    zero = tl.zeros((BLOCK // 8,), tl.int32)
    high = (counter >> 32).to(tl.int32)
    a, b, c, d = tl.philox(seed, counter.to(tl.int32), high, zero + step, zero + serial)
    words = tl.join(tl.join(a, b), tl.join(c, d)).to(tl.int32, bitcast=True)
    return tl.reshape(tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF), (BLOCK,))


@triton.jit
def _round_stochastically(x, bits):
    """x as a float32 that bfloat16 holds: one of its two neighbours, so that the expectation is x.

    The bits are added below the last bit that stays. Infinities and NaN stay what they are.
    """
    word = x.to(tl.int32, bitcast=True)
    rounded = ((word + bits) & -65536).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < float("inf"), rounded, x)


@triton.jit
def coefficients(lr, decay, step, log_beta1, log_beta2):
    """1 - lr decay, lr / (1 - beta1^step) and 1 / sqrt(1 - beta2^step), in float64: the differences cancel."""
    lr, step = lr.to(tl.float64), step.to(tl.float64)
    bias1 = 1.0 - tl.exp2(step * log_beta1.to(tl.float64))
    bias2 = 1.0 - tl.exp2(step * log_beta2.to(tl.float64))
    keep = 1.0 - lr * decay.to(tl.float64)
    return keep.to(tl.float32), (lr / bias1).to(tl.float32), (1.0 / tl.sqrt(bias2)).to(tl.float32)


@triton.jit
def read_group(group_ptr, scale, step):
    """What `_update` takes of a group's row, with a number to multiply gradients by and the step."""
    lr = tl.load(group_ptr + _LR)
    lr_at = tl.load(group_ptr + _LR_ADDRESS).to(tl.int64)
    if lr_at != 0:
        lr = tl.load(lr_at.to(tl.pointer_type(tl.float32))).to(tl.float64)
    logs = tl.load(group_ptr + _LOG_BETA1), tl.load(group_ptr + _LOG_BETA2)
    keep, step_size, root = coefficients(lr, tl.load(group_ptr + _DECAY), step, logs[0], logs[1])
    return (
        scale * tl.load(group_ptr + _SIGN).to(tl.float32),
        keep,
        step_size,
        root,
        tl.load(group_ptr + _RATE1).to(tl.float32),
        tl.load(group_ptr + _BETA2).to(tl.float32),
        tl.load(group_ptr + _RATE2).to(tl.float32),
        tl.load(group_ptr + _EPS).to(tl.float32),
    )


@triton.jit
def _update(
    addresses,
    start,
    size,
    hyper,
    random,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk of one tensor, from element `start` on. `hyper` is what `read_group` returned.

    The bits of FLAGS are AMSGRAD, MASTER and STOCHASTIC.
    """
    p_at, g_at, m_at, v_at, max_at, master_at = addresses
    P: tl.constexpr = KIND % 3
    G: tl.constexpr = KIND // 3 % 3
    S: tl.constexpr = KIND // 9 % 3
    FLAGS: tl.constexpr = KIND // 27
    W: tl.constexpr = 0 if FLAGS & 2 else P
    w_at = master_at if FLAGS & 2 else p_at
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < size

    g = load(g_at, offsets, mask, G, ALIGNED)
    m = load(m_at, offsets, mask, S, ALIGNED)
    v = load(v_at, offsets, mask, S, ALIGNED)
    w = load(w_at, offsets, mask, W, ALIGNED)
    scale, keep, step_size, root, rate1, beta2, rate2, eps = hyper

    g *= scale
    m += rate1 * (g - m)
    v = beta2 * v + rate2 * g * g
    largest = v
    if FLAGS & 1:
        largest = load(max_at, offsets, mask, S, ALIGNED)
        largest = tl.maximum(largest, v, propagate_nan=tl.PropagateNan.ALL)
    w = w * keep - step_size * m / (tl.sqrt(largest) * root + eps)

    _store(m_at, offsets, m, mask, S, ALIGNED)
    _store(v_at, offsets, v, mask, S, ALIGNED)
    if FLAGS & 1:
        _store(max_at, offsets, largest, mask, S, ALIGNED)
    if FLAGS & 2:
        _store(master_at, offsets, w, mask, 0, ALIGNED)
    if FLAGS & 4:
        seed, step, serial = random
        w = _round_stochastically(w, _random_bits(seed, step, serial, start, BLOCK))
    _store(p_at, offsets, w, mask, P, ALIGNED)


@triton.jit
def update_chunk(
    addresses,
    start,
    size,
    hyper,
    random,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update a chunk: in vectors of 16 bytes if it is whole and all addresses are aligned, else element by element."""
    PART: tl.constexpr = BLOCK // 8  # so that its pointers take no more registers than the vectors do
    p_at, g_at, m_at, v_at, max_at, master_at = addresses
    low = p_at | g_at | m_at | v_at | max_at | master_at
    if (start + BLOCK <= size) & (low & 15 == 0):
        _update(addresses, start, size, hyper, random, KIND, True, BLOCK)
    else:
        for first in tl.range(start, tl.minimum(start + BLOCK, size), PART, num_stages=1):
            _update(addresses, first, size, hyper, random, KIND, False, PART)


@dataclasses.dataclass(frozen=True, eq=False)
class AdamWConfig:
    """Launches of the update and of the norm of the gradients.

    Attributes:
        block: elements of a chunk of the update, which has a program for each.
        num_warps: warps of a program.
        blocks: chunks of the update in a chunk of the norm.
        per_sm: programs of the norm on each SM.
    """

    block: int
    num_warps: int
    blocks: int = 4
    per_sm: int = 4


@functools.cache
def config(itemsize: int, target: runtime.Target) -> AdamWConfig:
    """By the bytes of the widest element: a thread holds 32 bytes of its tensor, two vectors.

    A step over 50M elements in float32 took 482 us on an H100, 495 with four programs an SM that walk the chunks, 491
    with two of twice the size; over a model of 1.2 billion in bfloat16 6011, 6508 and 6386.
    """
    if target is runtime.INTERPRETER:
        return AdamWConfig(4096, num_warps=4, per_sm=1)
    return AdamWConfig(8192 // itemsize, num_warps=256 // target.warp_size)


def widest(param: Tensor, exp_avg: Tensor, master: Tensor | None) -> int:
    """The bytes of the widest element that is updated."""
    return max(t.itemsize for t in (param, exp_avg, master) if t is not None)


@dataclasses.dataclass(frozen=True)
class Group:
    """The hyperparameters of a group. A tensor `lr` is a float32 number on the device."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool

    def row(self) -> list[float]:
        tensor = isinstance(self.lr, Tensor)
        return [
            0.0 if tensor else float(self.lr),
            float(self.lr.data_ptr()) if isinstance(self.lr, Tensor) else 0.0,  # exact: addresses have 48 bits
            self.weight_decay,
            _log2(self.beta1),
            1.0 - self.beta1,
            _log2(self.beta2),
            self.beta2,
            1.0 - self.beta2,
            self.eps,
            -1.0 if self.maximize else 1.0,
        ]


def _log2(x: float) -> float:
    return math.log2(x) if x > 0.0 else -math.inf


def dense(t: Tensor) -> bool:
    """Whether the elements fill one piece of memory, each once."""
    return t.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(t))


def laid_as(t: Tensor, param: Tensor) -> Tensor:
    """t in the memory layout of param, or contiguous where param is not dense: t itself, or a copy."""
    strides = param.stride() if dense(param) else library.contiguous_strides(param.shape)
    if t.is_contiguous() and param.is_contiguous():  # strides of dimensions of one element may be any
        return t
    if all(n == 1 or a == b for n, a, b in zip(t.shape, t.stride(), strides, strict=True)) or not t.numel():
        return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)
