"""`python -m rooftile.demo`: the main job on real input. And a small trained model, for examples.

`roof_tiles.txt` was written for this package and is under its licence (Apache-2.0).
"""

from importlib import resources
from pathlib import Path


def byte_model() -> Path:
    """The folder of a Hugging Face checkpoint: a small Llama, trained on the bytes of Python's standard library."""
    return Path(str(resources.files(__name__).joinpath("byte_model")))
