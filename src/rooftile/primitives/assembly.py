"""PTX between Triton's operations."""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton.language as tl  # isort: skip


def assembly(text: str) -> tl.constexpr:
    """Instructions as a constant of kernels: in one line, and so without comments. `torch.compile` writes the constants
    of a kernel that it takes over into a string of its own source, as they are, and a line's end would be that
    string's."""
    assert "//" not in text, "a comment would hide what follows it"
    return tl.constexpr(" ".join(text.split()))
