"""A hash of a kernel's machine code that a rename or a move does not change.

The code is normalized before it is hashed:

- SASS: instructions without their addresses, and the constants of the cubin. Function names and labels are numbered
  in the order in which they first appear, and so are offsets into constant bank 0 from 0x160 on, where the kernel's
  parameters are. So a parameter may be renamed, and in most cases reordered.
- AMD's assembly: instructions and labels, without directives and comments. Labels and function names are numbered.
  Offsets of parameters stay: a reordered parameter changes the hash.

Two kernels with the same hash run the same instructions. Registers, spills and shared memory are not part of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator

_SECTION = re.compile(r"^//-+ (\S+) +-+$", re.MULTILINE)
_ADDRESS = re.compile(r"^/\*[0-9a-f]+\*/\s*")
_LABEL = re.compile(r"\.L\w+")
_BANK_0 = re.compile(r"c\[0x0\]\[0x([0-9a-f]+)\]")
_FIRST_PARAMETER = 0x160  # sm_80: 0x160; sm_90: 0x210; sm_100: 0x380. What lies below holds sizes of the grid.


@dataclasses.dataclass(frozen=True)
class MachineCode:
    """Attributes:
    digest: of the normalised code, 16 hexadecimal digits.
    instructions: their number, without NOPs.
    """

    digest: str
    instructions: int


class _Numbering:
    """Names numbered in the order in which they first appear."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._numbers: dict[str, int] = {}

    def __call__(self, match: re.Match[str]) -> str:
        return f"{self._prefix}{self._numbers.setdefault(match[0], len(self._numbers))}"


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(set(names), key=len, reverse=True)
    return re.compile(r"(?<![\w$.])(?:" + ("|".join(map(re.escape, longest_first)) or r"(?!)") + r")(?![\w$])")


def sections(disassembly: str) -> Iterator[tuple[str, str]]:
    """The name and the text of each section in nvdisasm's output."""
    _, *parts = _SECTION.split(disassembly)
    yield from zip(parts[::2], parts[1::2], strict=True)


def sass_of(disassembly: str) -> str:
    """Only the sections of code, as `nvdisasm -c` prints them."""
    return "".join(text for name, text in sections(disassembly) if name.startswith(".text"))


def of_sass(disassembly: str) -> MachineCode:
    """The machine code in nvdisasm's output for a cubin, constants included."""
    parts = list(sections(disassembly))
    functions = _any_of(re.findall(r"^\s*\.type\s+(\S+),@function", disassembly, re.MULTILINE))
    numbered = (
        (functions, _Numbering("function")),
        (_LABEL, _Numbering("label")),
    )
    parameter = _Numbering("parameter")
    lines, instructions = [], 0
    for name, text in parts:
        if re.match(r"\.nv\.constant[1-9]", name):
            lines += [re.sub(r"^.*\*/\s*", "", line) for line in text.splitlines() if ".byte" in line]
        if not name.startswith(".text"):
            continue
        for raw in map(str.strip, text.splitlines()):
            line = _ADDRESS.sub("", raw)
            is_instruction = line != raw
            if not is_instruction and not re.fullmatch(r"\.L\w+:", line):
                continue
            for pattern, numbering in numbered:
                line = pattern.sub(numbering, line)
            line = _BANK_0.sub(lambda m: parameter(m) if int(m[1], 16) >= _FIRST_PARAMETER else m[0], line)
            instructions += is_instruction and not line.startswith("NOP")
            lines.append(re.sub(r"\s+", " ", line))
    return MachineCode(_digest(lines), instructions)


def of_amdgcn(assembly: str) -> MachineCode:
    """The machine code of AMD's assembly."""
    functions = _any_of(re.findall(r"^\s*\.type\s+(\S+),@function", assembly, re.MULTILINE))
    function, label = _Numbering("function"), _Numbering("label")
    lines, instructions = [], 0
    for raw in assembly.splitlines():
        line = raw.partition(";")[0].strip()
        if re.fullmatch(r"\.LBB\w+:", line):
            lines.append(_LABEL.sub(label, line))
        elif line and not line.startswith((".", "//")) and not line.endswith(":"):
            line = _LABEL.sub(label, functions.sub(function, line))
            lines.append(re.sub(r"\s+", " ", line))
            instructions += not line.startswith("s_nop")
        elif line.startswith(".amdgpu_metadata"):
            break
    return MachineCode(_digest(lines), instructions)
