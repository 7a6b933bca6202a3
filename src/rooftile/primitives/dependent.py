"""Programmatic dependent launch: a kernel that starts while the one before it on the stream still ends.

Between two kernels the memory is idle for a microsecond or two, a tenth of what a small product takes. A kernel that is
launched with `launch_pdl=True` starts as soon as all programs of the one before have called `let_next_start`; it may
then ask for memory to be brought into the L2, and must call `wait_for_previous` before it reads or writes any. A
prefetch reads nothing itself: what the kernel before still writes is written into that same L2.

For sm_90 and later; the constant that switches it on is never set elsewhere.
"""

from __future__ import annotations

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
    """The options of a plan, for an early launch or none."""
    return {"launch_pdl": True} if early else {}


@triton.jit
def let_next_start():
    """The kernel behind may start, as soon as every program has said so."""
    cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Until the kernel before has ended and all it wrote can be read."""
    cuda.gdc_wait()


@triton.jit
def prefetch(pointers):
    """Bring the lines of those addresses into the L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
