"""Sums that several programs share: each writes a partial, and the one that comes last adds them in their order.

The order does not depend on who comes last, so the result is the same to the bit every time; nothing is added into the
output by atomics, and the output needs no zeros.
"""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def arrives_last(counter_ptr, count):
    """Whether this is the last of `count` programs to come here; it leaves the counter as it was.

    What a program stored before is then seen by the one that is last, if it reads past its own L1 (`.cg`).
    """
    tl.debug_barrier()  # all threads of the program have stored their part
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter_ptr, 0)
    return last
