"""Cases whose kernels `rooftile inspect` must not pass, and some beside them that it must."""

import os

import torch

from rooftile import runtime  # before Triton: runtime fixes the mode of the process
from rooftile.cases import OpCase, Point, Tolerance

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon import language as gl  # isort: skip
from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip


@triton.jit
def _copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)


@triton.jit
def _whole_row_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i).to(tl.float32)
    tl.store(y_ptr + i, (x - tl.sum(x) / N).to(y_ptr.dtype.element_ty))


@triton.jit
def _matmul_kernel(x_ptr, y_ptr, k_steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, cols, inner = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    acc = tl.zeros((M, N), tl.float32)
    for step in range(k_steps):
        k = step * K + inner
        acc = tl.dot(tl.load(x_ptr + rows * 4096 + k[None, :]), tl.load(x_ptr + k[:, None] * 4096 + cols), acc)
    tl.store(y_ptr + rows * 4096 + cols, acc.to(y_ptr.dtype.element_ty))


@triton.jit
def _type_error_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    acc = tl.zeros((BLOCK,), tl.float32)
    for _ in range(n):
        acc = acc.to(tl.float16)  # the interpreter lets a variable change its type in a loop
    tl.store(y_ptr + tl.arange(0, BLOCK), acc)


@triton.jit
def _descriptor_kernel(x, y, BLOCK: tl.constexpr):
    y.store([0, 0], x.load([0, 0]))


@gluon.jit
def _gluon_kernel(x_ptr, y_ptr, n, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    i = gl.arange(0, BLOCK, layout=layout)
    gl.store(y_ptr + i, gl.load(x_ptr + i, mask=i < n), mask=i < n)


def _launcher(kernel, *args, grid=(1,), **options):
    def function(x):
        y = torch.empty_like(x)
        kernel[grid](x, y, *args, **options)
        return y

    return function


def _abort(x):
    os.abort()


def _no_kernel(x):
    return x * 1


def _specialized(x):
    """Compiled again for 16 rows and for 100: their number is specialized on."""
    y = torch.empty_like(x)
    _copy_kernel[(1,)](x, y, x.shape[0], BLOCK=1024)
    return y


def _descriptors(x):
    y = torch.empty_like(x)
    _descriptor_kernel[(1,)](*(TensorDescriptor.from_tensor(t, [64, 64]) for t in (x, y)), BLOCK=64)
    return y


def _inputs(point, dtype, device, generator):
    return {"x": torch.empty((point["rows"], 4096), dtype=dtype, device=device)}


TWO_POINTS = (Point("16 rows", {"rows": 16}), Point("100 rows", {"rows": 100}))


def _case(name, function, points=TWO_POINTS, **fields):
    return OpCase(
        name=name,
        formula="",
        function=function,
        reference=function,
        eager=function,
        inputs=_inputs,
        outputs=("y",),
        grads=(),
        nbytes=lambda point, itemsize, direction: 0,
        flops=lambda point, direction: 0,
        tolerances={torch.bfloat16: {"forward": Tolerance(0.0, "")}},
        sets={"llm": points},
        **fields,
    )


CASES = (
    _case("good", _launcher(_copy_kernel, 64, BLOCK=1024)),
    _case("specialized", _specialized),
    _case("spilling", _launcher(_whole_row_kernel, N=8192, num_warps=1)),
    _case("spilling as allowed", _launcher(_whole_row_kernel, N=8192, num_warps=1), spills=1 << 20),
    _case("spilling on AMD", _launcher(_whole_row_kernel, N=4096, num_warps=1, waves_per_eu=8)),
    _case("shared", _launcher(_matmul_kernel, 8, M=64, N=64, K=64, num_warps=4, num_stages=8)),
    _case("threads", _launcher(_copy_kernel, 64, BLOCK=8192, num_warps=32)),
    _case("grid", _launcher(_copy_kernel, 64, BLOCK=1024, grid=(1, 70_000))),
    _case("type error", _launcher(_type_error_kernel, 8, BLOCK=1024)),
    _case("descriptors", _descriptors),
    _case("gluon", _launcher(_gluon_kernel, 64, BLOCK=1024)),
    _case("abort", _abort, TWO_POINTS[:1]),
    _case("no kernel", _no_kernel),
    _case("good after all", _launcher(_copy_kernel, 64, BLOCK=2048)),
    _case("excluded", _abort, excluded=dict.fromkeys(runtime.TARGETS, "this chip has no such thing")),
)
