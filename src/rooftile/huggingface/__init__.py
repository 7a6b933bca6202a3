"""Rooftile's kernels inside Hugging Face models: one instance at a time, and reversible."""

from rooftile.huggingface.attention import register_attention
from rooftile.huggingface.auto import AutoModelForCausalLM
from rooftile.huggingface.patching import Left, PatchHandle, patch, unpatch

__all__ = ["AutoModelForCausalLM", "Left", "PatchHandle", "patch", "register_attention", "unpatch"]
