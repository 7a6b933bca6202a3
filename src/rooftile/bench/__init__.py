"""Measurements of ops against their baselines and the GPU's roofs in one run; reports; the tables of the docs."""
