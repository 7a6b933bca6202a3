"""Inline PTX."""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton.language as tl  # isort: skip


def assembly(text: str) -> tl.constexpr:
    """Instructions as a kernel's constant, in one line and without comments.

    `torch.compile` writes a kernel's constants into a string of its own source, unescaped: no line may end there.
    """
    assert "//" not in text, "a comment would hide the rest of the line"
    return tl.constexpr(" ".join(text.split()))
