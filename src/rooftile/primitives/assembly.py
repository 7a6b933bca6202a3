"""PTX between Triton's operations."""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton.language as tl  # isort: skip


def assembly(text: str) -> tl.constexpr:
    """Instructions as a constant of kernels: in one line, and without quotes. `torch.compile` writes the constants of a
    kernel that it takes over into a string of its own source, as they are, and a line's end would be that string's."""
    return tl.constexpr(" ".join(text.split()))
