"""Known compiler mistakes in kernels for NVIDIA GPUs, found in the code without a GPU.

- A warpgroup MMA (sm_90) gets the shared-memory addresses of its operands from descriptors in uniform registers. Some
  versions of ptxas (12.8 among them) compute a descriptor from registers that nothing wrote. The MMA then reads other
  memory or raises an illegal access, and only sometimes. In the machine code, a uniform register is read although not
  every path from the entry has written it. A copy is no such read: ptxas also moves half-computed pairs of registers,
  and computes the other half after that. It hands on what nothing wrote, to a register of either kind.
- A conditional sum or maximum over a warp's lanes (REDUX) was guarded by a predicate that ptxas (12.8 and 12.9) had
  already reused. So none may be guarded.
- A barrier may be initialized but never used. Triton reuses its memory for data handed to a specialized warp, and the
  order of the two writes is undefined. It failed when several processes shared a GPU. So no barrier may overlap plain
  stores, although a truly dead one could; nor may its address be unknown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Sized

_LABEL = re.compile(r"^(\.L_x_\d+):")
_LINE = re.compile(r"^(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;$")
_UNIFORM = 256  # registers, one bit each, of which sm_90 has 63 and sm_100 more; those of threads have the bits above
_THREADS = ((1 << 256) - 1) << _UNIFORM
_ALL = _THREADS | ((1 << _UNIFORM) - 1)
_COPY = re.compile(r"^(U?R\d+), (?:RZ, RZ, )?(U?R\d+)$")
_COPIES = ("MOV", "UMOV", "R2UR", "IMAD.U32", "IMAD.MOV.U32")

Instruction = tuple[str | None, str, str]  # predicate, name with modifiers, operands


def _parse(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        line = re.sub(r"/\*[^*]*\*/", "", line).strip()
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _LINE.match(line):
            code.append((found[1], found[2], found[3]))
    return code, labels


def _bit(register: str) -> int:
    return 1 << int(register[2:]) if register.startswith("UR") else 1 << (_UNIFORM + int(register[1:]))


def _copied(name: str, operands: str) -> tuple[int, int] | None:
    """The bits of the register that a copy writes, and of the one that it reads."""
    found = _COPY.match(operands) if name in _COPIES else None
    return (_bit(found[1]), _bit(found[2])) if found else None


def _registers(name: str, operands: str) -> tuple[int, int]:
    """The registers that an instruction writes, and those that it reads, as bit masks.

    Of threads' registers it is the first one of each operand. Only copies leave one of them unwritten.
    """
    parts = [part.strip() for part in operands.split(",")]
    if "GMMA" in name:  # wgmma: one descriptor names two pairs of registers; the first operand may be in registers
        found = re.search(r"gdesc\[UR(\d+)\]", operands)
        assert found is not None
        first = int(found[1])
        in_memory = len(parts) > 1 and parts[1].startswith("gdesc")
        return 0, (12 << first) | (3 << first if in_memory else 0)
    writes = reads = 0
    width = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
    while parts and re.match(r"^!?U?P\w+$", parts[0]):  # predicates that it writes
        parts.pop(0)
    if parts and (target := re.match(r"^UR(\d+)$", parts[0])):
        writes = ((1 << width) - 1) << int(target[1])
        parts.pop(0)
    elif parts and re.match(r"^R\d+$", parts[0]):
        writes = _bit(parts.pop(0))
    for part in parts:
        for n in re.findall(r"\bR(\d+)\b", part):
            reads |= 1 << (_UNIFORM + int(n))
        for n in re.findall(r"\bUR(\d+)\b", part):
            is_pair = part.startswith(("desc[", "gdesc[")) or (".64" in name and name.startswith("U"))
            reads |= (3 if is_pair else 1) << int(n)
    return writes, reads


def _next(code: Sequence[Instruction], labels: dict[str, int], i: int) -> list[int]:
    predicate, name, operands = code[i]
    following = [i + 1] if i + 1 < len(code) else []
    if name.startswith(("BRA", "BRX", "JMP")):
        there = [
            labels[label] for label in re.findall(r"\.L_x_\d+", operands) if labels.get(label, len(code)) < len(code)
        ]
        falls_through = predicate is not None or "UP" in operands.partition("`")[0]
        return there + (following if falls_through else [])
    if name.startswith(("EXIT", "RET")):
        return following if predicate is not None else []
    return following


def unwritten(sass: str) -> list[str]:
    """The instructions but copies that read a uniform register, or a copy of one, that some path has not written."""
    if "gdesc[UR" not in sass:
        return []
    code, labels = _parse(sass)
    registers = [_registers(name, operands) for _, name, operands in code]
    copies = [_copied(name, operands) for _, name, operands in code]
    written = [_ALL] * len(code)  # before each instruction, on every path to it
    reached = [False] * len(code)
    work = [0]
    written[0], reached[0] = _THREADS, True
    while work:
        i = work.pop()
        after, copy = written[i] | registers[i][0], copies[i]
        if copy and not written[i] & copy[1]:
            after &= ~copy[0]
        for j in _next(code, labels, i):
            both = written[j] & after
            if both != written[j] or not reached[j]:
                written[j], reached[j] = both, True
                work.append(j)
    return [
        " ".join(filter(None, code[i][1:]))
        for i in range(len(code))
        if reached[i] and not copies[i] and registers[i][1] & ~written[i]
    ]


def guarded(sass: str) -> list[str]:
    """The warp sums and maxima guarded by a predicate."""
    code, _ = _parse("\n".join(line for line in sass.splitlines() if "REDUX" in line))
    return [f"{name} {operands}" for predicate, name, operands in code if predicate]


_INITIALISED = re.compile(r"mbarrier\.init\S*\s+\[([^\]]+)\]")
_PLACE = re.compile(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);")
_BASE = re.compile(r"mov\.b32\s+(%r\d+), global_smem;")
_STORED = re.compile(r"st\.shared(?:::cta)?(?:\.v(\d))?\.b(\d+)\s+\[([^\]]+)\]")


def _places(ptx: str) -> dict[str, int]:
    """The registers that hold a known address in shared memory, and the address."""
    places = {"global_smem": 0} | dict.fromkeys(_BASE.findall(ptx), 0)
    for register, base, offset in _PLACE.findall(ptx):
        if base in places:
            places[register] = places[base] + int(offset)
    return places


def _place(address: str, places: dict[str, int]) -> int | None:
    """The value of an address such as `%r1+8`; None if its register is not known."""
    base, _, offset = address.replace(" ", "").partition("+")
    return places[base] + int(offset or 0) if base in places else None


def overlaid(ptx: str) -> list[int | None]:
    """Shared-memory addresses of barriers that plain stores also write; None for an unknown address."""
    places = _places(ptx)
    barriers = [_place(address, places) for address in _INITIALISED.findall(ptx)]
    stores = [(_place(at, places), int(n or 1) * int(bits) // 8) for n, bits, at in _STORED.findall(ptx)]
    known = [(at, size) for at, size in stores if at is not None]
    return [b for b in barriers if b is None or any(b < at + size and at < b + 8 for at, size in known)]


def find(ptx: str, sass: str) -> list[str]:
    """The mistakes in a kernel, a sentence each. `sass` may be empty if `needs_sass` is false."""
    found: list[tuple[str, Sized]] = [
        ("instructions that read registers which nothing wrote", unwritten(sass)),
        ("sums or maxima of a warp that a predicate guards", guarded(sass)),
        ("barriers that lie where something else is written", overlaid(ptx)),
    ]
    return [f"{what}: {len(which)}" for what, which in found if which]


def needs_sass(ptx: str) -> bool:
    """Whether the machine code is needed."""
    return "wgmma.mma_async" in ptx or "redux.sync" in ptx
