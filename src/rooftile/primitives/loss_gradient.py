"""The gradient of a reduced loss, which the forward writes: known but for one factor, the gradient of the loss itself.

That factor is 1 where the loss is what `backward` is called on. The backward multiplies the gradient by it in place:
the buffer belongs to the graph alone. Each program reads the factor, and ends at once where it is 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip

GRADIENTS = ("none", "now", "later")  # "now": the forward writes it; "later": the backward does


def gradient_when(wanted: bool, reduction: str, dtype: torch.dtype, *, in_graphs: bool = False) -> str:
    """Which of `GRADIENTS` a loss over tensors of that dtype has.

    Without a reduction the factor is a number for each element or row, which only the backward has. In float16 a
    gradient could underflow before a loss scaler's factor reaches it. A compiled graph can't write the forward's buffer
    in place; in the interpreter it copies it. With `in_graphs` it does so on a GPU too: where the logits cost more.
    """
    if not (wanted and torch.is_grad_enabled()):
        return "none"
    compiled = not in_graphs and runtime.MODE is runtime.Mode.GPU and torch.compiler.is_compiling()
    return "later" if reduction == "none" or dtype is torch.float16 or compiled else "now"


@triton.jit
def _scale_kernel(gradient_ptr, dloss_ptr, n, BLOCK: tl.constexpr):
    factor = tl.load(dloss_ptr).to(tl.float32)
    if factor != 1.0:
        first = tl.program_id(0).to(tl.int64) * BLOCK
        for start in tl.range(first, n, tl.num_programs(0) * BLOCK, num_stages=1):
            index = start + tl.arange(0, BLOCK)
            gradient = tl.load(gradient_ptr + index, mask=index < n, other=0.0).to(tl.float32)
            tl.store(gradient_ptr + index, (gradient * factor).to(gradient_ptr.dtype.element_ty), mask=index < n)


@functools.cache
def _launcher(dtype: torch.dtype, dloss_dtype: torch.dtype, target: runtime.Target) -> launching.KernelLauncher:
    return launching.KernelLauncher(
        _scale_kernel, {"BLOCK": 8192 // dtype.itemsize}, num_warps=8 * 32 // target.warp_size
    )


def _prepare(gradient: Tensor, dloss: Tensor) -> Callable[..., None]:
    _fake(gradient, dloss)
    start = library.start_nothing
    n = gradient.numel()
    if n:
        target = runtime.target(gradient.device)
        launcher = _launcher(gradient.dtype, dloss.dtype, target)
        programs = min(library.cdiv(n, launcher.constants["BLOCK"]), 8 * target.multiprocessors)
        start = launching.bind(launcher, programs, strides=(n,))
    return start


def _fake(gradient: Tensor, dloss: Tensor) -> None:
    op = "scale_gradient_backward"
    library.check_floating(op, gradient=gradient, dloss=dloss)
    if not gradient.is_contiguous():
        raise ValueError(f"{op}: gradient is not contiguous, as the forward wrote it")
    if dloss.dim():
        raise ValueError(f"{op}: dloss has shape {tuple(dloss.shape)}, expected ()")


_op = library.define("scale_gradient_backward(Tensor(a!) gradient, Tensor dloss) -> ()", prepare=_prepare, fake=_fake)


def scaled(gradient: Tensor, dloss: Tensor) -> Tensor:
    """`gradient * dloss`, in a backward: the saved gradient itself, written in place, if this graph is walked once.

    The gradient is an output of the forward that is not marked as non-differentiable. So a second derivative, which its
    graph leads to, is an error and not a silent zero. The loss is not saved: whoever has it may write it in place.

    A graph that is kept may be walked again, and one that is being traced must not write what it was given: a copy.
    The result leads to the graph only if a second derivative is asked for (`create_graph`).
    """
    if type(gradient) is not Tensor or torch._C._autograd._get_current_graph_task_keep_graph():
        gradient = gradient.clone()
    _op(gradient, dloss)
    return gradient if torch.is_grad_enabled() else gradient.detach()
