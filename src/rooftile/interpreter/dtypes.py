"""Values of bfloat16 and fp8 as NumPy arrays, and the conversions between formats with the roundings of a GPU."""

from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter

from rooftile.interpreter.patching import original, replace

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FP8 = {
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
    tl.float8e4b8: np.dtype(ml_dtypes.float8_e4m3fnuz),
    tl.float8e5b16: np.dtype(ml_dtypes.float8_e5m2fnuz),
}
_BY_TRITON = {tl.bfloat16: BFLOAT16, **_FP8}
_LARGEST = {dtype: np.float32(ml_dtypes.finfo(dtype).max) for dtype in _FP8.values()}
# NVIDIA's conversions give a single NaN: the bits 0x7f (PTX ISA, cvt). The fnuz formats have a single NaN anyway.
_CANONICAL_NAN = {_FP8[tl.float8e4nv]: 0x7F, _FP8[tl.float8e5]: 0x7F}
NARROW = frozenset(_BY_TRITON.values())
_BITS: dict[int, Any] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


def numpy_dtype(triton_type: tl.dtype) -> np.dtype:
    """The NumPy type that holds values (or, for a block, the elements) of this Triton type."""
    return interpreter._get_np_dtype(triton_type)


def is_float(dtype: np.dtype) -> bool:
    return dtype in NARROW or dtype.kind == "f"


def wide(data: np.ndarray) -> np.ndarray:
    """bfloat16 and fp8 as float32, which holds them exactly; other types unchanged."""
    return data.astype(np.float32) if data.dtype in NARROW else data


def bits(data: np.ndarray) -> np.ndarray:
    """The same bytes as unsigned integers of the same width."""
    return np.ascontiguousarray(data).view(_BITS[data.dtype.itemsize]).reshape(data.shape)


def from_bits(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(data).view(dtype).reshape(data.shape)


def convert(data: np.ndarray, dtype: np.dtype, *, toward_zero: bool = False) -> np.ndarray:
    """`data` in another format: floats to nearest even (or toward zero), fp8 saturating, integers wrapping."""
    if data.dtype == dtype:
        return data
    data = wide(data)
    if is_float(data.dtype) and dtype.kind in "iu":
        return _float_to_int(data, dtype)
    if dtype in _LARGEST:  # cvt.rn.satfinite
        data = data.astype(np.float32)
        data = np.where(np.isnan(data), data, np.clip(data, -_LARGEST[dtype], _LARGEST[dtype]))
    result = data.astype(dtype)
    if toward_zero:
        # One step back wherever rounding went away from zero: the order of values is that of their bits.
        away = np.abs(result.astype(np.float64)) > np.abs(data.astype(np.float64))
        result = from_bits(bits(result) - away.astype(_BITS[dtype.itemsize]), dtype)
    if dtype in _CANONICAL_NAN:
        result = from_bits(np.where(np.isnan(data), np.uint8(_CANONICAL_NAN[dtype]), bits(result)), dtype)
    return result


def _float_to_int(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """As PTX's cvt.rzi: the nearest representable integer, and for NaN zero, or the top bit in 64-bit conversions.

    There is no 8-bit register: Triton converts to 16 bits and keeps the low byte.
    """
    register = np.dtype(f"{dtype.kind}2") if dtype.itemsize == 1 else dtype
    limits = np.iinfo(register)
    values = np.trunc(data).astype(np.float64)
    low, high = float(limits.min), float(limits.max)  # for 64 bits `high` is one past the largest
    inside = (values > low) & (values < high)
    result = np.where(inside, values, 0).astype(register)
    result = np.where(values >= high, limits.max, np.where(values <= low, limits.min, result)).astype(register)
    if data.dtype == np.float64 or register.itemsize == 8:
        top = np.array(1 << (8 * register.itemsize - 1), _BITS[register.itemsize]).view(register)
        result = np.where(np.isnan(values), top, result)
    return result.astype(dtype)


def install() -> None:
    stock_dtype = original(interpreter, "_get_np_dtype")
    builder = original(interpreter, "InterpreterBuilder")

    @replace(interpreter, "_get_np_dtype")
    def _get_np_dtype(triton_type: Any) -> np.dtype:
        element = triton_type.element_ty if isinstance(triton_type, tl.block_type) else triton_type
        if not isinstance(element, tl.pointer_type) and element in _BY_TRITON:
            return _BY_TRITON[element]
        return stock_dtype(triton_type)

    @replace(
        builder,
        "cast_impl",
        "create_si_to_fp",
        "create_ui_to_fp",
        "create_fp_to_si",
        "create_fp_to_ui",
        "create_fp_ext",
        "create_fp_trunc",
    )
    def cast_impl(self, src, dst_type):
        return interpreter.TensorHandle(convert(src.data, numpy_dtype(dst_type)), dst_type.scalar)

    @replace(builder, "create_fp_to_fp")
    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        if tl.float8e4b15 in (src.dtype.scalar, dst_type.scalar):
            raise NotImplementedError("Rooftile's interpreter has no fp8e4b15: use float8e4nv or float8e5")
        toward_zero = rounding_mode == ir.ROUNDING_MODE.RTZ
        data = convert(src.data, numpy_dtype(dst_type), toward_zero=toward_zero)
        return interpreter.TensorHandle(data, dst_type.scalar)

    # Triton 3.6 has none, which keeps tl.full and constants from being bfloat16.
    def get_bf16(self, value):
        return interpreter.TensorHandle(np.array([value], dtype=BFLOAT16), tl.bfloat16)

    builder.get_bf16 = get_bf16
