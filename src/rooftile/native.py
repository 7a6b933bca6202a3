"""The module in C (native.c): how it is built, and what it is told of PyTorch and Triton.

It is built at the first launch on an NVIDIA GPU, by the C compiler that Triton builds its launchers with, and cached
beside them. Where it can't be built, everything works through Python, and a call costs some 10 us more.
"""

from __future__ import annotations

import functools
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

from rooftile import runtime  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
from triton.runtime.build import compile_module_from_src  # isort: skip

# The parameters of a kernel end in two pointers to scratch memory, as native.c passes them.
_TRITON = ("3.6.",)

# By the types in a kernel's signature.
_FORMATS = {
    "i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q",
    "u1": "?", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
_NUMBERS = {"i32": 4, "u32": 4, "i64": 8, "u64": 8}


class Unbindable(Exception):
    """native.c can't launch that kernel; Triton's launcher can."""


def build() -> Any:
    """The module, compiled where it is not in Triton's cache.

    Raises:
        Exception: there is no C compiler, or Triton has not CUDA's header beside it.
    """
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    source = Path(__file__).with_name("native.c").read_text(encoding="utf-8")
    return compile_module_from_src(src=source, name="rooftile_native", include_dirs=[str(include)])


def configure(module: Any, stream_of: Any) -> None:
    """Tell the module what to ask at each call; `stream_of(device index)` is a device's current stream."""
    quiet = (
        (torch._C._len_torch_dispatch_stack, 0),
        (torch._C._functorch.maybe_current_level, None),
        (torch.autograd._profiler_enabled, False),
    )
    types = (torch.Tensor, torch.nn.Parameter)
    enabled = torch.is_grad_enabled
    module.configure(triton.knobs.runtime, stream_of, types, torch.dtype, quiet, enabled, vars(forward_ad))


@functools.cache
def module() -> Any:
    """The module, ready for this process's GPU; None where Python has to serve."""
    if runtime.MODE is not runtime.Mode.GPU or torch.version.cuda is None or not triton.__version__.startswith(_TRITON):
        return None
    try:
        built = build()
        built.use_driver(None)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        warnings.warn(f"calls take longer, for rooftile/native.c was not built: {text}", RuntimeWarning, stacklevel=2)
        return None
    configure(built, torch._C._cuda_getCurrentRawStream)
    return built


def _map(descriptor: Any, meta: dict[str, Any]) -> tuple[Any, ...]:
    """What cuTensorMapEncodeTiled takes beside the address, as Triton gives it: the fastest dimension first."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    dims = tuple(reversed(descriptor.shape))
    strides = tuple(meta["elem_size"] * stride for stride in reversed(descriptor.strides[:-1]))
    last = dims[-1] * (strides[-1] if strides else meta["elem_size"]) % 2**64  # the driver does not read it
    fill = 1 if descriptor.padding == "nan" else 0
    kind = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    return kind, meta["swizzle"], fill, dims, (*strides, last), tuple(reversed(meta["block_size"]))


def _is_constant(kind: Any) -> bool:
    return all(map(_is_constant, kind)) if isinstance(kind, tuple) else kind == "constexpr"


def bind(
    launch: Any, compiled: Any, device: int, programs: int, args: tuple[Any, ...], given: Mapping[int, int]
) -> None:
    """Bind a `Launch` of the module to a compiled kernel.

    Args:
        launch: an unbound one.
        compiled: what Triton's launcher returned.
        device: the index of the device that it was loaded for.
        programs: of the grid; -1 where the last argument of each call says how many.
        args: all that Triton's launcher was given, in the kernel's order, with the constants.
        given: the place in a call of each of these that a call gives; the others keep their values.

    Raises:
        Unbindable: native.c can't launch it.
    """
    metadata = compiled.metadata
    num_warps, num_ctas, shared = compiled.packed_metadata[:3]
    if metadata.global_scratch_size or metadata.profile_scratch_size or num_ctas == 16:
        raise Unbindable("scratch memory, or clusters of 16")
    maps = iter(getattr(metadata, "tensordesc_meta", None) or ())
    params: list[tuple[Any, ...]] = []
    none: list[int] = []
    fixed = bytearray()

    def keep(kind: str, value: Any) -> None:
        if kind not in _FORMATS:
            raise Unbindable(f"a constant of type {kind}")
        params.append(("fixed", len(fixed)))
        try:
            fixed.extend(struct.pack("=" + _FORMATS[kind], value).ljust(8, b"\0"))
        except struct.error as error:
            raise Unbindable(f"{value} is no {kind}: {error}") from None

    for i, (kind, value) in enumerate(zip(compiled.src.signature.values(), args, strict=True)):
        if _is_constant(kind):
            if i in given:
                if value is not None:
                    raise Unbindable("a number that Triton compiled in")
                none.append(given[i])
        elif not isinstance(kind, str):
            raise Unbindable(f"an argument of type {kind}")
        elif kind.startswith("*"):
            params.append(("pointer", given[i], value.data_ptr() % 16 == 0))
        elif kind.startswith("tensordesc"):
            meta = next(maps, None)
            if meta is None or meta["fp4_padded"]:
                raise Unbindable("a descriptor that is no tensor map")
            params.append(("map", given[i], *_map(value, meta)))
            for size in value.shape:
                keep("i32", size)
            for stride in value.strides:
                keep("i64", stride)
        elif i not in given:
            keep(kind, value)
        elif kind in _NUMBERS:
            params.append(("number", given[i], _NUMBERS[kind]))
        else:
            raise Unbindable(f"a number of type {kind}")
    try:
        launch.bind(
            device, compiled.function, programs, 32 * num_warps, num_ctas, shared,
            metadata.launch_cooperative_grid, metadata.launch_pdl, len(given) + (programs < 0), tuple(none),
            bytes(fixed), tuple(params),
        )  # fmt: skip
    except ValueError as error:
        raise Unbindable(str(error)) from None
