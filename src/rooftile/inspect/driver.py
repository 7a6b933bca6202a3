"""A stand-in for Triton's GPU driver: the ops' own launchers compile exactly what they would launch, and nothing runs.

Everything up to the driver's launch call is Triton's own path. So host code, specialization, options and grids are
those of a GPU. Every call of `JITFunction.run` is caught, Gluon's functions included.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from rooftile import runtime  # before Triton: runtime fixes the mode of the process

from triton.backends.compiler import GPUTarget  # isort: skip
from triton.backends.driver import DriverBase  # isort: skip
from triton.runtime import driver  # isort: skip
from triton.runtime.jit import JITFunction  # isort: skip

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; ROCm's limits are no lower.
_MAX_GRID = (2**31 - 1, 65_535, 65_535)


def triton_target(target: runtime.Target) -> GPUTarget:
    """The target as Triton names it."""
    if target.arch.startswith("sm_"):
        return GPUTarget("cuda", int(target.arch.removeprefix("sm_")), target.warp_size)
    return GPUTarget("hip", target.arch, target.warp_size)


class _Launcher:
    def __init__(self, src: Any, metadata: Any) -> None:
        pass

    def __call__(self, grid_x: int, grid_y: int, grid_z: int, *_: Any) -> None:
        grid = (grid_x, grid_y, grid_z)
        if any(n > limit for n, limit in zip(grid, _MAX_GRID, strict=True)):
            raise ValueError(f"the grid is {grid}, expected at most {_MAX_GRID}")


class _Binaries:
    """Where Triton loads kernels and checks the chip's limits. Exceeded limits become verdicts later."""

    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        target = runtime.target(torch.device("meta"))
        return {
            "max_shared_mem": 1 << 40,
            "multiprocessor_count": target.multiprocessors,
            "warpSize": target.warp_size,
        }

    @staticmethod
    def load_binary(name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, None, int, int, int]:
        return object(), None, 0, 0, 1 << 30

    @staticmethod
    def unload_module(module: Any) -> None:
        pass


class StandIn(DriverBase):
    """The driver of a GPU that is not there."""

    launcher_cls = _Launcher
    utils = _Binaries

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "void*"

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(self._target.arch, 10)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1)

    def clear_cache(self, cache: torch.Tensor) -> None:
        pass

    def get_benchmarker(self) -> Callable[..., Any]:
        def compile_once(call: Callable[[], Any], quantiles: Any = None, **_: Any) -> tuple[float, float, float]:
            call()
            return 1.0, 1.0, 1.0

        return compile_once


def _keep_ptxas_log() -> None:
    """Put what ptxas says of a kernel (its registers and spills) into the kernel's metadata, as `ptxas_log`."""
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend

    make_cubin = CUDABackend.make_cubin

    def logged(self: Any, src: str, metadata: dict[str, Any], *args: Any) -> bytes:
        with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as printed:
            knobs.nvidia.dump_ptxas_log = True
            try:
                cubin = make_cubin(self, src, metadata, *args)
            except Exception:
                sys.stderr.write(printed.getvalue())
                raise
        metadata["ptxas_log"] = printed.getvalue()
        return cubin

    CUDABackend.make_cubin = logged


def _processor_seconds() -> float:
    """Of this process, and of those that it has started and that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def install(target: runtime.Target, launched: Callable[[Any, float], None]) -> None:
    """Compile for `target` from now on in this process, and call `launched(kernel, seconds)` at every launch.

    `seconds` is the processor time of the call, with the assembler's: a kernel's compilation at its first launch, a
    look-up later. Other processes don't lengthen it.
    """
    driver.set_active(StandIn(triton_target(target)))
    _keep_ptxas_log()
    run = JITFunction.run

    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = _processor_seconds()
        kernel = run(self, *args, **kwargs)
        launched(kernel, _processor_seconds() - start)
        return kernel

    JITFunction.run = observed
