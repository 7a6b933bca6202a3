"""`python -m rooftile.demo`: the main job on real input. And a small trained model, for examples.

`roof_tiles.txt` was written for this package and is under its licence (Apache-2.0).
"""

from rooftile.byte_model import folder as byte_model

__all__ = ["byte_model"]
