"""`adamw_`: one tensor, in one launch."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.adamw import parts
from rooftile.ops.adamw.parts import AMSGRAD, MASTER, STOCHASTIC, Group, coefficients, kind_of, laid_as, update_chunk

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _number(bits):
    """The float32 with these bits: launches take integers."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize=[
        "size", "step", "lr_bits", "decay_bits", "log_beta1_bits", "rate1_bits", "log_beta2_bits", "beta2_bits",
        "rate2_bits", "eps_bits", "sign_bits", "seed",
    ]
)  # fmt: skip
def _adamw_kernel(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    max_exp_avg_sq_ptr,
    master_ptr,
    lr_ptr,
    step_ptr,
    size,
    step,
    lr_bits,
    decay_bits,
    log_beta1_bits,
    rate1_bits,
    log_beta2_bits,
    beta2_bits,
    rate2_bits,
    eps_bits,
    sign_bits,
    seed,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    zero = size.to(tl.int64) * 0
    max_at = zero
    if max_exp_avg_sq_ptr is not None:
        max_at = max_exp_avg_sq_ptr.to(tl.int64)
    master_at = zero
    if master_ptr is not None:
        master_at = master_ptr.to(tl.int64)
    lr = _number(lr_bits)
    if lr_ptr is not None:
        lr = tl.load(lr_ptr)
    t = step.to(tl.float32)
    if step_ptr is not None:
        t = tl.load(step_ptr)

    logs = _number(log_beta1_bits), _number(log_beta2_bits)
    keep, step_size, root = coefficients(lr, _number(decay_bits), t, logs[0], logs[1])
    hyper = (
        _number(sign_bits),
        keep,
        step_size,
        root,
        _number(rate1_bits),
        _number(beta2_bits),
        _number(rate2_bits),
        _number(eps_bits),
    )
    addresses = (
        param_ptr.to(tl.int64),
        grad_ptr.to(tl.int64),
        exp_avg_ptr.to(tl.int64),
        exp_avg_sq_ptr.to(tl.int64),
        max_at,
        master_at,
    )
    random = (seed.to(tl.int64), t.to(tl.int32), 0)
    update_chunk(addresses, start, size, hyper, random, KIND, BLOCK)


def _bits(numbers: Sequence[float]) -> tuple[int, ...]:
    """The bits of each number in float32, as a signed integer."""
    return struct.unpack(f"={len(numbers)}i", struct.pack(f"={len(numbers)}f", *numbers))


def _check(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    master: Tensor | None,
    lr: Tensor | None,
    step: Tensor | None,
    stochastic: bool,
) -> None:
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "max_exp_avg_sq": max_exp_avg_sq}
    library.check_floating("adamw_", param=param, grad=grad, **moments)
    for name, t in {"grad": grad, **moments, "master": master}.items():
        if t is None:
            continue
        if t.shape != param.shape:
            raise ValueError(f"adamw_: {name} has shape {tuple(t.shape)}, expected {tuple(param.shape)} to match param")
        if name in moments and t.dtype != exp_avg.dtype:
            raise TypeError(f"adamw_: {name} has dtype {t.dtype}, expected {exp_avg.dtype} to match exp_avg")
    for name, t in {"master": master, "lr": lr, "step": step}.items():
        if t is not None and t.dtype != torch.float32:
            raise TypeError(f"adamw_: {name} has dtype {t.dtype}, expected float32")
    for name, t in {"lr": lr, "step": step}.items():
        if t is not None and t.numel() != 1:
            raise ValueError(f"adamw_: {name} has shape {tuple(t.shape)}, expected one number")
    if stochastic and (param.dtype != torch.bfloat16 or master is not None):
        raise ValueError("adamw_: seed is for a param in bfloat16 without a master copy")


def _prepare(*args: Any) -> Callable[..., None]:
    param, grad, exp_avg, _, max_exp_avg_sq, master, *_, stochastic = args = args[:TENSORS_AND_FLAG]
    _check(*args)
    if not param.numel():
        return library.start_nothing
    flags = AMSGRAD * (max_exp_avg_sq is not None) + MASTER * (master is not None) + STOCHASTIC * stochastic
    c = parts.config(parts.widest(param, exp_avg, master), runtime.target(param.device))
    constants = {"KIND": kind_of(param.dtype, grad.dtype, exp_avg.dtype, flags), "BLOCK": c.block}
    launcher = launching.launcher(_adamw_kernel, args[:-1], constants, num_warps=c.num_warps)
    programs = library.cdiv(param.numel(), c.block)
    start = launching.bind(launcher, programs, numbers=(param.numel(), *(None,) * 11))
    shaped = args[:6]
    copied = [t is not None and laid_as(t, param) is not t for t in shaped]

    def run(*args: Any) -> None:
        lr, beta1, beta2, eps, weight_decay, step, maximize, seed = args[TENSORS_AND_FLAG:]
        row = Group(lr, beta1, beta2, eps, weight_decay, maximize).row()
        numbers = (step, *_bits((row[0], *row[2:])), seed)
        tensors = args[: TENSORS_AND_FLAG - 1]
        if not any(copied):
            start(*tensors, *numbers)
            return
        flat = [laid_as(t, args[0]) if copy else t for t, copy in zip(args[:6], copied, strict=True)]
        start(*flat, *tensors[6:], *numbers)
        for i in (0, 2, 3, 4, 5):
            if copied[i]:
                args[i].copy_(flat[i])

    return run


def _fake(*args: Any) -> None:
    _check(*args[:TENSORS_AND_FLAG])


TENSORS_AND_FLAG = 9  # arguments on which the launch depends; the rest are numbers
_op = library.define(
    "adamw_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? max_exp_avg_sq, "
    "Tensor(e!)? master, Tensor? lr_tensor, Tensor? step_tensor, bool stochastic, float lr, float beta1, float beta2, "
    "float eps, float weight_decay, int step, bool maximize, int seed) -> ()",
    prepare=_prepare,
    varying=8,
    fake=_fake,
)


def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None = None,
    master: Tensor | None = None,
    *,
    lr: float | Tensor,
    step: int | Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    maximize: bool = False,
    seed: int | None = None,
) -> None:
    """One step of AdamW for one tensor (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101), in place.

        exp_avg = beta1 exp_avg + (1 - beta1) grad,   exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) grad²
        param = (1 - lr weight_decay) param
                - lr / (1 - beta1^step) · exp_avg / (sqrt(exp_avg_sq / (1 - beta2^step)) + eps)

    All arithmetic is float32; each tensor is rounded once. To update many tensors in one launch, use
    `rooftile.optim.AdamW`.

    Args:
        param: any shape; float32, float16 or bfloat16, as grad and the moments, each of its own dtype.
        grad: of param's shape.
        exp_avg, exp_avg_sq: the moments, of param's shape, of one dtype.
        max_exp_avg_sq: the largest second moment so far, which takes the place of exp_avg_sq in the update (AMSGrad,
            Reddi et al. 2018), of the moments' dtype.
        master: a float32 copy of param. It is updated, and param is rounded from it.
        lr: the learning rate, or a float32 tensor of one number on param's device, which is read there.
        step: the number of this step, from 1 on, or a float32 tensor as for lr. It is not incremented.
        beta1, beta2: decay of the moments, from 0 to below 1.
        eps: added to the square root.
        weight_decay: decoupled weight decay.
        maximize: go up the gradient instead of down.
        seed: round param stochastically, for a param in bfloat16: up or down with the probability that makes the
            expectation exact. The random bits (Philox) are a function of seed, step and the index of the element.

    Tensors are taken as they are where they are dense and have the strides of param, or are contiguous if param is not
    dense. Others are copied, and what is written is copied back.

    Raises:
        ValueError: a shape is not param's, or a number is out of its range; a tensor is sparse, or requires grad in
            grad mode; devices differ, or are the CPU without the interpreter.
        TypeError: a dtype is not one of those named; a number is not one, or step or seed not an int.
    """
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    library.check_tensors("adamw_", param=param, grad=grad, **moments)
    for name, optional in {"max_exp_avg_sq": max_exp_avg_sq, "master": master}.items():
        if optional is not None:
            library.check_tensors("adamw_", **{name: optional})
    for name, t in {"param": param, "grad": grad, **moments}.items():
        if t.layout != torch.strided:
            raise ValueError(f"adamw_: {name} has layout {t.layout}, expected a dense tensor")
    lr_tensor, lr = (lr, 0.0) if isinstance(lr, Tensor) else (None, lr)
    step_tensor, step = (step, 1) if isinstance(step, Tensor) else (None, step)
    library.check_numbers("adamw_", lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"adamw_: {name} is {beta}, expected at least 0 and below 1")
    for name, number in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not 0.0 <= number < math.inf:
            raise ValueError(f"adamw_: {name} is {number}, expected a finite number of 0 or more")
    for name, whole, least in (("step", step, 1), ("seed", 0 if seed is None else seed, 0)):
        if isinstance(whole, bool) or not isinstance(whole, int):
            raise TypeError(f"adamw_: {name} is {library.named(whole)}, expected an int")
        if not least <= whole < 2**31:
            raise ValueError(f"adamw_: {name} is {whole}, expected {least} to 2^31 - 1")
    if not isinstance(maximize, bool):
        raise TypeError(f"adamw_: maximize is {library.named(maximize)}, expected True or False")
    numbers = (float(lr), beta1, beta2, eps, weight_decay, step, maximize, seed or 0)
    _op(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, master, lr_tensor, step_tensor, seed is not None, *numbers)
