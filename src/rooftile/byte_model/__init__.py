"""A small model trained on bytes, as a Hugging Face checkpoint in this folder, and the text of its training."""

from pathlib import Path


def folder() -> Path:
    """The folder of a Hugging Face checkpoint: a small Llama, trained on the bytes of Python's standard library."""
    return Path(__file__).parent
