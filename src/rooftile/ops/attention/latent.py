"""The choice of the forward over a latent cache, as `problem` has it for others."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from rooftile import runtime
from rooftile.ops.attention import problem
from rooftile.ops.attention.arguments import LONGEST_HEAD
from rooftile.ops.attention.problem import AttentionConfig, Problem

HOPPER = AttentionConfig("hopper", 64, 64, 8, 2)  # the one form of the kernel for sm_90, chosen where it can run
_LEAST = AttentionConfig("portable", 16, 16, 4, 1)  # on gfx942, in float32, it takes 32 of 64 KB of shared memory


def forward_module(kernel: str) -> ModuleType | None:
    """The module with that kernel; None where this Triton has no Gluon, in which it is written."""
    if kernel == "hopper":
        return runtime.gluon_module("rooftile.ops.attention.hopper_latent")
    return problem.forward_module(kernel)  # which takes such a cache as any other


def can_implement_forward(p: Problem, c: AttentionConfig, target: runtime.Target) -> str | None:
    """None where that configuration can run that problem, or the reason why it can't."""
    if c == _LEAST:
        return None
    if c.kernel != "hopper":
        return problem.can_implement_forward(p, c, target)
    module = forward_module(c.kernel)
    if module is None:
        return f"kernel is {c.kernel!r}, which this installation does not have"
    return module.can_implement(p, c, target)


def choose_forward(p: Problem, target: runtime.Target) -> AttentionConfig:
    """The configuration on that target."""
    return HOPPER if can_implement_forward(p, HOPPER, target) is None else choose_invariant(p, target)


def choose_invariant(p: Problem, target: runtime.Target) -> AttentionConfig:
    """That of the portable kernel, which is the same for any number of queries and sequences."""
    if target is runtime.INTERPRETER or max(p.head_dim, p.value_dim) <= LONGEST_HEAD:
        return problem.choose_invariant(p, target)
    return next(c for c in _long(p, target) if can_implement_forward(p, c, target) is None)


def _long(p: Problem, target: runtime.Target) -> Iterator[AttentionConfig]:
    """8 warps, as 32 rows of 512 columns are 64 registers of each thread."""
    warps = max(1, 8 * 32 // target.warp_size)
    for rows, keys, stages in ((32, 32, 2), (32, 32, 1), (32, 16, 1)) if p.dtype.itemsize == 2 else ((16, 16, 1),):
        yield AttentionConfig("portable", rows, keys, warps, stages)
    yield _LEAST
