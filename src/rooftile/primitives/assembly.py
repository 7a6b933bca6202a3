"""Inline PTX."""

from __future__ import annotations

import torch

from rooftile import runtime  # before Triton: runtime fixes the mode of the process

import triton.language as tl  # isort: skip


def _has_ptx() -> bool:
    if runtime.MODE is runtime.Mode.GPU:
        return torch.version.cuda is not None
    return runtime.target(torch.device("cpu")).arch.startswith("sm_")


HAS_PTX = tl.constexpr(_has_ptx())  # whether kernels of this process become PTX


def assembly(text: str) -> tl.constexpr:
    """Instructions as a kernel's constant, in one line and without comments.

    `torch.compile` writes a kernel's constants into a string of its own source, unescaped: no line may end there.
    """
    assert "//" not in text, "a comment would hide the rest of the line"
    return tl.constexpr(" ".join(text.split()))
