"""Compiling every kernel for every target, with no GPU, and reading what it takes of the chip."""

from rooftile.inspect.compiling import compile_case, compile_on
from rooftile.inspect.plan import Kernel, Row, Task, faults, first_points, plan

__all__ = ["Kernel", "Row", "Task", "compile_case", "compile_on", "faults", "first_points", "plan"]
