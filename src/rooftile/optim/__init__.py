"""Optimizers in the place of PyTorch's: one launch updates all parameters."""

from rooftile.optim.adamw import AdamW

__all__ = ["AdamW"]
