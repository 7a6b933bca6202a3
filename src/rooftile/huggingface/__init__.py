"""Rooftile's kernels inside Hugging Face models: one instance at a time, and reversible."""

from rooftile.huggingface.patching import Left, PatchHandle, patch

__all__ = ["Left", "PatchHandle", "patch"]
