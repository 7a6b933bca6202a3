"""Compile every kernel for every target without a GPU, and read its resources."""

from rooftile.inspect.compiling import compile_case, compile_on
from rooftile.inspect.plan import Kernel, Row, Task, faults, plan

__all__ = ["Kernel", "Row", "Task", "compile_case", "compile_on", "faults", "plan"]
