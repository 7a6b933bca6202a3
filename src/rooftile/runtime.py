"""The device, its limits, and the mode of this process.

A process runs in one mode, fixed before Triton is imported:

- `Mode.GPU`: kernels are compiled and launched;
- `Mode.INTERPRETER` (`TRITON_INTERPRET=1`): kernels run on the CPU, in Triton's interpreter, made exact;
- `Mode.COMPILE` (`ROOFTILE_COMPILE_TARGET=sm_90`): kernels are compiled for that target and never launched.
"""

import dataclasses
import enum
import functools
import importlib
import os
from types import ModuleType

import torch

from rooftile.errors import NoGPU


class Mode(enum.Enum):
    GPU = "gpu"
    INTERPRETER = "interpreter"
    COMPILE = "compile"


# What errors advise where there is no GPU. Later is too late: transformers, for one, imports Triton.
TO_INTERPRET = "to run on the CPU, slowly, set TRITON_INTERPRET=1 in the environment before Python starts"

# On Hopper, the kernels of all other GPUs: to compare with, or where a release of Triton breaks Gluon.
PORTABLE = os.environ.get("ROOFTILE_PORTABLE", "0") == "1"


@dataclasses.dataclass(frozen=True, eq=False)  # compared and hashed by identity: it is a cache key of every call
class Target:
    """What a launch configuration may depend on.

    `shared_memory` is the most bytes of shared memory a CTA can have; `l2` is the L2 cache in bytes.
    """

    arch: str
    multiprocessors: int
    shared_memory: int
    l2: int
    warp_size: int = 32
    max_threads: int = 1024
    gpu: str = ""

    @property
    def gluon(self) -> bool:
        """Whether kernels in Gluon, which are for Hopper, may be chosen: not with `ROOFTILE_PORTABLE=1`."""
        return self.arch == "sm_90" and not PORTABLE

    @property
    def why_no_gluon(self) -> str:
        return "ROOFTILE_PORTABLE is set" if PORTABLE else f"the device is {self.arch}"


# Targets for compiling without the chip. SMs and caches are those of the GPU named.
TARGETS = {
    "sm_80": Target("sm_80", 108, 166_912, 40 << 20, gpu="A100"),
    "sm_86": Target("sm_86", 84, 101_376, 6 << 20, gpu="RTX 3090"),
    "sm_89": Target("sm_89", 128, 101_376, 72 << 20, gpu="RTX 4090"),
    "sm_90": Target("sm_90", 132, 232_448, 50 << 20, gpu="H100"),
    "sm_100": Target("sm_100", 148, 232_448, 126 << 20, gpu="B200"),
    "sm_120": Target("sm_120", 170, 101_376, 96 << 20, gpu="RTX 5090"),
    "gfx942": Target("gfx942", 304, 65_536, 4 << 20, warp_size=64, gpu="MI300X"),
}

# The interpreter's cost is by Triton operation, not by element: few, large programs are fast.
INTERPRETER = Target("interpreter", 2, 1 << 30, 1 << 30)


def _mode() -> Mode:
    if os.environ.get("ROOFTILE_COMPILE_TARGET"):
        return Mode.COMPILE
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y"):
        return Mode.INTERPRETER
    return Mode.GPU


MODE = _mode()

if MODE is Mode.COMPILE and os.environ["ROOFTILE_COMPILE_TARGET"] not in TARGETS:
    raise ValueError(
        f"ROOFTILE_COMPILE_TARGET is {os.environ['ROOFTILE_COMPILE_TARGET']!r}, expected one of {', '.join(TARGETS)}"
    )
if MODE is Mode.INTERPRETER:
    from rooftile import interpreter

    interpreter.install()


def accelerator() -> torch.device | None:
    """The accelerator that PyTorch sees (CUDA, ROCm or XPU), or None."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return device if device is not None and device.type in ("cuda", "xpu") else None


def default_device() -> torch.device:
    """Where commands put their tensors: the CPU under the interpreter, meta in compile mode, else the accelerator."""
    if MODE is Mode.INTERPRETER:
        return torch.device("cpu")
    if MODE is Mode.COMPILE:
        return torch.device("meta")
    device = accelerator()
    if device is None:
        raise NoGPU(f"no GPU was found, and Rooftile's kernels need one ({TO_INTERPRET})")
    return device


def device_of(caller: str, device: torch.device | str | int | None) -> torch.device:
    """The device that an argument names; None is the default one.

    Raises:
        ValueError: there is no such device, or it is the CPU and kernels are compiled.
        NoGPU: None is given, and there is none.
    """
    if device is None:
        return default_device()
    gpu = accelerator()
    count = 0 if gpu is None else torch.accelerator.device_count()
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):  # no device's name, or an index without an accelerator
        found = None
    if found is not None:
        is_gpu = gpu is not None and found.type == gpu.type and (found.index or 0) < count
        if is_gpu or found.type == "meta" or (found.type == "cpu" and MODE is not Mode.GPU):
            return found
    if MODE is not Mode.GPU:
        accepted = f"{default_device()} in this process, whose mode is {MODE.value}"
    elif gpu is None:
        accepted = f"a GPU, of which there is none ({TO_INTERPRET})"
    else:
        accepted = f"a GPU: {gpu.type}:0" + (f" to {gpu.type}:{count - 1}" if count > 1 else "")
    raise ValueError(f"{caller}: device is {device}, expected {accepted}")


@functools.cache
def _device_target(device_type: str, index: int) -> Target:
    if device_type != "cuda":  # XPU: never run; Triton's own limits refuse what does not fit
        properties = torch.get_device_module(device_type).get_device_properties(index)
        units = int(getattr(properties, "max_compute_units", 64))
        return Target(device_type, units, 65_536, 16 << 20, warp_size=32)
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
    else:
        arch = f"sm_{properties.major}{properties.minor}"
    shared = int(getattr(properties, "shared_memory_per_block_optin", 65_536))
    warp = int(getattr(properties, "warp_size", 32))
    return Target(arch, properties.multi_processor_count, shared, int(properties.L2_cache_size), warp)


# The one target of a process that has no GPU to ask.
_FIXED = {
    Mode.GPU: None,
    Mode.INTERPRETER: INTERPRETER,
    Mode.COMPILE: TARGETS.get(os.environ.get("ROOFTILE_COMPILE_TARGET", "")),
}[MODE]


def target(device: torch.device) -> Target:
    """The target that kernels on `device` are configured for, in this process's mode."""
    return _FIXED or _device_target(device.type, device.index or 0)


@functools.cache
def gluon_module(name: str) -> ModuleType | None:
    """The module of that name, which is written in Gluon; None where this Triton lacks Gluon, or a part of it."""
    try:
        return importlib.import_module(name)
    except (ImportError, AttributeError):
        return None
