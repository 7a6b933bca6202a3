"""The resources of a compiled kernel, from its binary and assembly. No CUDA or ROCm install is needed."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from rooftile.inspect import machine_code
from rooftile.inspect.mistakes import find, needs_sass


@dataclasses.dataclass(frozen=True)
class Resources:
    """The resources of one kernel.

    Attributes:
        registers: 32-bit vector registers a thread has.
        stack: bytes of local memory a thread has, spills included.
        spills: bytes of registers that a thread writes to local memory or reads back, whichever is more, counted in the
            code (a loop counts once).
        shared: bytes of shared memory of a CTA.
        load: bytes of the widest load from global memory, or "TMA"; "" if there is none.
        store: the same for stores.
        mistakes: known compiler mistakes, a sentence each (mistakes.py).
        machine_code: a hash of the normalised machine code (machine_code.py); "" unless asked for.
        instructions: the number of machine instructions without NOPs; 0 unless asked for.
    """

    registers: int
    stack: int
    spills: int
    shared: int
    load: str
    store: str
    mistakes: list[str] = dataclasses.field(default_factory=list)
    machine_code: str = ""
    instructions: int = 0


def resources(kernel: Any, hashed: bool = False) -> Resources:
    """The resources of a `triton.compiler.CompiledKernel`.

    With `hashed`, its machine code is hashed too; nvdisasm takes a quarter of a second for each kernel.
    """
    if "cubin" in kernel.asm:
        return _nvidia(kernel, hashed)
    if "amdgcn" in kernel.asm:
        return _amd(kernel, hashed)
    raise ValueError(f"{kernel.metadata.name} is compiled to {', '.join(kernel.asm)}, expected a cubin or amdgcn")


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed with {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout + done.stderr


def _field(pattern: str, text: str, where: str) -> list[int]:
    found = re.findall(pattern, text)
    if not found:
        raise RuntimeError(f"{where} does not say {pattern}: {text.strip()[:500]}")
    return [int(n) for n in found]


def _hash_fields(code: machine_code.MachineCode | None) -> dict[str, Any]:
    return {} if code is None else {"machine_code": code.digest, "instructions": code.instructions}


def _nvidia(kernel: Any, hashed: bool) -> Resources:
    from triton import knobs

    ptx = kernel.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        usage = _run(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin)
        stack = max(_field(r"\bSTACK:(\d+)", usage, "cuobjdump"))
        # Faster: the code alone, and if there are no indirect branches, without the analysis that finds their targets.
        options = () if hashed else ("-c",) if "brx.idx" in ptx else ("-c", "-ndf")
        disassembly = _run(knobs.nvidia.nvdisasm.path, *options, cubin) if hashed or needs_sass(ptx) else ""
    return Resources(
        registers=max(_field(r"\bREG:(\d+)", usage, "cuobjdump")),
        stack=stack,
        # A kernel without a stack has no spills.
        spills=max(_field(r"(\d+) bytes spill (?:stores|loads)", kernel.metadata.ptxas_log, "ptxas")) if stack else 0,
        shared=kernel.metadata.shared,
        load=_widest(_ptx_widths("ld", ptx), _has_tma(ptx, "load")),
        store=_widest(_ptx_widths("st", ptx), _has_tma(ptx, "store")),
        mistakes=find(ptx, machine_code.sass_of(disassembly) if needs_sass(ptx) else ""),
        **_hash_fields(machine_code.of_sass(disassembly) if hashed else None),
    )


def _ptx_widths(instruction: str, ptx: str) -> list[int]:
    found = re.findall(rf"\b{instruction}\.global[\w.:]*?(?:\.v(\d))?\.[busf](\d+)\b", ptx)
    widths = [int(n or 1) * int(bits) // 8 for n, bits in found]
    if instruction == "ld":
        widths += [int(n, 0) for n in re.findall(r"\bcp\.async\.c[ag]\.shared\.global[^,;]*,[^,;]*,\s*(\w+)", ptx)]
    return widths


def _has_tma(ptx: str, direction: str) -> bool:
    """Bulk copies name their target first: shared.global loads, global.shared stores."""
    order = r"shared\S*\.global" if direction == "load" else r"global\S*\.shared"
    return re.search(rf"\bcp\.(?:reduce\.)?async\.bulk[\w.:]*?\.{order}", ptx) is not None


def _widest(widths: list[int], tma: bool = False) -> str:
    return "TMA" if tma else str(max(widths)) if widths else ""


_AMD_BYTES = {"dword": 4, "short": 2, "byte": 1}


def _amd(kernel: Any, hashed: bool) -> Resources:
    text = kernel.asm["amdgcn"]

    def count(name: str) -> int:
        return max(_field(rf"\.{name}:\s+(\d+)", text, "the assembly's metadata"))

    return Resources(
        registers=count("vgpr_count"),
        stack=count("private_segment_fixed_size"),
        spills=4 * (count("vgpr_spill_count") + count("sgpr_spill_count")),
        shared=max(kernel.metadata.shared, count("group_segment_fixed_size")),
        load=_widest(_amd_widths("load", text)),
        store=_widest(_amd_widths("store", text)),
        **_hash_fields(machine_code.of_amdgcn(text) if hashed else None),
    )


def _amd_widths(instruction: str, text: str) -> list[int]:
    """From `global_load_dwordx4`, `buffer_store_short`, `global_load_ubyte_d16` and the like."""
    found = re.findall(rf"\b(?:global|buffer|flat)_{instruction}_[us]?(dword|short|byte)(?:x(\d))?", text)
    return [_AMD_BYTES[unit] * int(n or 1) for unit, n in found]
