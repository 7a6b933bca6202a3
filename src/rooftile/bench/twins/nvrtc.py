"""CUDA C++ compiled at run time by NVRTC, which comes with PyTorch's CUDA wheels, and launched through the driver.

https://docs.nvidia.com/cuda/nvrtc and https://docs.nvidia.com/cuda/cuda-driver-api
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# Keys of cuLaunchKernel's `extra`: the arguments as one block of memory, its size, and the end.
_BUFFER, _SIZE, _END = 1, 2, 0


def _wheels() -> Iterator[Path]:
    """The library's files in the wheels beside PyTorch, of its own version of CUDA if it has one."""
    major = (torch.version.cuda or "*").partition(".")[0]
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia and nvidia.submodule_search_locations) or ():
        yield from sorted(Path(folder).glob(f"*/lib/libnvrtc.so.{major}"), reverse=True)


@functools.cache
def library() -> Any:
    """NVRTC.

    Raises:
        ImportError: it is not here; the message says how to get it.
    """
    for path in _wheels():
        with contextlib.suppress(OSError):
            for part in path.parent.glob("libnvrtc-builtins.so.*"):  # NVRTC opens it by its name alone
                ctypes.CDLL(str(part))
            return ctypes.CDLL(str(path))
    for name in (f"libnvrtc.so.{(torch.version.cuda or '13').partition('.')[0]}", "libnvrtc.so"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise ImportError("NVRTC, which compiles CUDA C++ at run time, was not found: pip install nvidia-cuda-nvrtc")


def compiled(source: Path, instance: str, arch: str, kind: str = "CUBIN") -> tuple[bytes, str]:
    """Machine code (`kind` "CUBIN") or PTX of an instance of a kernel template, and the instance's symbol.

    Args:
        source: a .cu file; it may include files of its folder.
        instance: such as `softmax<bf16, 1024, 32, 4>`.
        arch: such as `sm_90`.

    Raises:
        ImportError: NVRTC is not here.
        RuntimeError: the source does not compile; the message is the compiler's.
    """
    nvrtc, program, name = library(), ctypes.c_void_p(), instance.encode()

    def check(code: int) -> None:
        if code:
            nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(code).decode()}")

    def read(what: str) -> bytes:
        size = ctypes.c_size_t()
        check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        text = ctypes.create_string_buffer(size.value)
        check(getattr(nvrtc, f"nvrtcGet{what}")(program, text))
        return text.raw

    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None))
    try:
        check(nvrtc.nvrtcAddNameExpression(program, name))
        options = [f"--gpu-architecture={arch}", "--std=c++17", f"--include-path={source.parent}"]
        arguments = (ctypes.c_char_p * len(options))(*map(str.encode, options))
        if nvrtc.nvrtcCompileProgram(program, len(options), arguments):
            raise RuntimeError(f"{source.name}, {instance}, {arch}: {read('ProgramLog').rstrip(bytes(1)).decode()}")
        symbol = ctypes.c_char_p()
        check(nvrtc.nvrtcGetLoweredName(program, name, ctypes.byref(symbol)))
        return read(kind), (symbol.value or b"").decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


class Kernel:
    """A kernel on the current device.

    Args:
        code: machine code, as `compiled` returns it.
        symbol: the kernel's name in it.
        layout: the kernel's parameters, as the format of a `struct`: P a pointer, i an int, q a long long, f a float.
        threads: of a CTA.
    """

    def __init__(self, code: bytes, symbol: str, layout: str, threads: int) -> None:
        self._driver, self._threads = ctypes.CDLL("libcuda.so.1"), threads
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._driver.cuModuleLoadData(ctypes.byref(module), code))
        self._check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, symbol.encode()))
        self._launch, self._pack = self._driver.cuLaunchKernel, struct.Struct(layout).pack_into
        self._arguments = ctypes.create_string_buffer(struct.calcsize(layout))
        self._size = ctypes.c_size_t(struct.calcsize(layout))
        addresses = (_BUFFER, ctypes.addressof(self._arguments), _SIZE, ctypes.addressof(self._size), _END)
        self._extra = (ctypes.c_void_p * len(addresses))(*addresses)

    def _check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"CUDA driver: {(text.value or b'unknown error').decode()}")

    def __call__(self, grid: tuple[int, int], stream: int, *arguments: float) -> None:
        """Launch it. The driver copies the arguments before it returns."""
        self._pack(self._arguments, 0, *arguments)
        code = self._launch(
            self._function, *grid, 1, self._threads, 1, 1, 0, ctypes.c_void_p(stream), None, self._extra
        )  # fmt: skip
        if code:
            self._check(code)
