"""The registry of cases: one module per op family, each with a `CASES` tuple."""

from __future__ import annotations

import difflib
import importlib
import pkgutil

from rooftile.cases.case import SETS, Direction, OpCase, Peer, Point, Tolerance, Training, Unsupported

__all__ = [
    "SETS",
    "Direction",
    "OpCase",
    "Peer",
    "Point",
    "Tolerance",
    "Training",
    "Unsupported",
    "all_cases",
    "find_cases",
]

_NOT_CASES = {"case", "check", "check_report", "draw"}


def all_cases() -> dict[str, OpCase]:
    """Every case by name. Every file in this folder is imported."""
    cases: dict[str, OpCase] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _NOT_CASES):
        for case in importlib.import_module(f"{__name__}.{module}").CASES:
            cases[case.name] = case
    return cases


def find_cases(names: list[str] | None = None) -> list[OpCase]:
    """The cases of those names, or all; an unknown name is a ValueError that lists the known ones."""
    cases = all_cases()
    unknown = [n for n in names or [] if n not in cases]
    if unknown:
        near = difflib.get_close_matches(unknown[0], cases, 3)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"unknown op {', '.join(unknown)}{meant}; known ops: {', '.join(cases)}")
    return [cases[n] for n in names] if names else list(cases.values())
