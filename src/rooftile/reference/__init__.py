"""The formulas in plain PyTorch, written for reading; the same file names as ops. Imports torch alone."""
