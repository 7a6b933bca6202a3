"""`python -m rooftile.demo`: the main job on real input.

`roof_tiles.txt` was written for this package and is under its licence (Apache-2.0).
"""
