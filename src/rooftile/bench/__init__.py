"""Measuring ops against their peers and the roof of the GPU, in one run; reports; the tables of the docs."""
