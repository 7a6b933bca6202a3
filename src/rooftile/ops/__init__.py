"""Kernels, one file per op family, to be read from top to bottom."""
