"""Split-K: several CTAs share a sum. Each writes its part, and the last to finish adds the parts in their order.

The order does not depend on which CTA is last, so the result is bit-identical every time. Nothing is added to the
output by atomics, and the output needs no zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import launching, runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def arrives_last(counter_ptr, count):
    """Whether this CTA is the last of `count` to call this. The counter is zero again afterwards.

    The last CTA then sees what the others stored before, if it reads past its own L1 (`.cg`).
    """
    # All threads of the CTA have stored their part. The atomic's release covers those stores too: they precede it.
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


def workspace(tiles: int, elements: int, split: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Memory for the parts of `tiles` tiles, of `elements` float32 each, and a counter a tile. None if split is 1."""
    if split == 1:
        return None, None
    if isinstance(tiles, torch.SymInt):
        raise launching.Untraceable("counters of a symbolic number")
    partial = torch.empty(tiles * split * elements, dtype=torch.float32, device=device)
    return partial, launching.counters(tiles, device)
