"""Programmatic dependent launch (PDL): a kernel that starts while the previous kernel on the stream still drains.

Between two kernels the memory is idle for a microsecond or two, a tenth of what a small GEMV takes. A kernel that is
launched with `launch_pdl=True` starts as soon as every CTA of the previous kernel has called `pdl_launch_dependents`.
It may then prefetch memory into the L2, and must call `pdl_wait` before it reads or writes memory. A prefetch reads
nothing itself: what the previous kernel still writes is written into the same L2. Only within `constant_weights` may a
kernel load its weight before `pdl_wait`.

For sm_90 and later; the constant that switches it on is never set elsewhere.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import runtime

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.language.extra import cuda  # isort: skip

_ARCHS = ("sm_90", "sm_100", "sm_120")


def supported(target: runtime.Target) -> bool:
    """Whether kernels for that target can be launched so."""
    return target.arch in _ARCHS


def early(x: Tensor) -> bool:
    """Whether a kernel over that tensor is launched so. Not in a graph that a compiler takes over: it has no such
    launches, and the op would have to stay whole in it."""
    return supported(runtime.target(x.device)) and not isinstance(x, FunctionalTensor)


def options(early: bool) -> dict[str, Any]:
    """The options of a kernel's launcher: with `early`, those of a programmatic dependent launch."""
    return {"launch_pdl": True} if early else {}


_constant_weights = contextvars.ContextVar("constant_weights", default=False)


@contextlib.contextmanager
def constant_weights() -> Iterator[None]:
    """A context in which no kernel on this thread's streams writes a weight: kernels may load theirs before `pdl_wait`.

    For the engine alone, whose weights don't change once they are loaded.
    """
    token = _constant_weights.set(True)
    try:
        yield
    finally:
        _constant_weights.reset(token)


def weights_are_constant() -> bool:
    """Whether the caller is within `constant_weights`."""
    return _constant_weights.get()


@triton.jit
def pdl_launch_dependents():
    """The next kernel may start as soon as every program has called this."""
    cuda.gdc_launch_dependents()


@triton.jit
def pdl_wait():
    """Wait until the previous kernel has ended and all that it wrote is visible."""
    cuda.gdc_wait()


@triton.jit
def prefetch(pointers):
    """Bring the lines of those addresses into the L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
