"""Elementwise arithmetic and matrix multiplication, where the stock interpreter differs from a GPU."""

import math

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter

from rooftile.interpreter.dtypes import NARROW, bits, convert, from_bits, wide
from rooftile.interpreter.patching import original, replace

_COMPARISONS = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
_COMPARISON_NAMES = [
    *(f"create_icmp{sign}{order}" for sign in "SU" for order in ("LT", "LE", "GT", "GE")),
    *("create_icmpEQ", "create_icmpNE"),
    *(f"create_fcmp{kind}{order}" for kind in "OU" for order in _COMPARISONS),
]
_ERF = np.frompyfunc(math.erf, 1, 1)


def _to_tf32(data: np.ndarray) -> np.ndarray:
    """A float32 operand as a tensor core sees it: Triton passes it unchanged, and the low 13 bits are ignored."""
    kept = from_bits(bits(data) & np.uint32(0xFFFFE000), np.dtype(np.float32))
    return np.where(np.isfinite(data), kept, data)


def _dot(a: np.ndarray, b: np.ndarray, accumulator: np.ndarray, input_precision) -> np.ndarray:
    """a @ b + accumulator: products exact, sums in float64 (int32 for integers), rounded once.

    Not in float32, as a GPU has them: BLAS adds those in an order that differs with the processor and the tile.
    """
    if a.dtype == np.float32 and input_precision == ir.INPUT_PRECISION.TF32:
        a, b = _to_tf32(a), _to_tf32(b)
    sums = accumulator.dtype if accumulator.dtype.kind in "iu" else np.float64
    product = np.matmul(a.astype(sums), b.astype(sums))
    return convert(product + accumulator.astype(sums), accumulator.dtype)


def install() -> None:
    builder = original(interpreter, "InterpreterBuilder")
    handle = original(interpreter, "TensorHandle")

    def comparison(name: str):
        compare = _COMPARISONS[name[-2:]]
        ordered_unequal = name.endswith("fcmpONE")

        # The result is int1. Stock calls it by its operands' type, and a later splat then turns the mask into floats.
        @replace(builder, name)
        def create(self, lhs, rhs):
            result = compare(lhs.data, rhs.data)
            if ordered_unequal:
                result &= ~(np.isnan(lhs.data) | np.isnan(rhs.data))
            return handle(result, tl.int1)

    for name in _COMPARISON_NAMES:
        comparison(name)

    # tl.minimum and tl.maximum drop a NaN unless they are told to propagate it (create_minimumf, create_maximumf).
    @replace(builder, "create_minnumf")
    def create_minnumf(self, lhs, rhs):
        return self.binary_op(lhs, rhs, np.fmin)

    @replace(builder, "create_maxnumf")
    def create_maxnumf(self, lhs, rhs):
        return self.binary_op(lhs, rhs, np.fmax)

    @replace(builder, "create_clampf")
    def create_clampf(self, arg, lo, hi, propagate_nans):
        if propagate_nans == ir.PROPAGATE_NAN.NONE:
            return self.binary_op(self.binary_op(arg, lo, np.fmax), hi, np.fmin)
        return self.binary_op(self.binary_op(arg, lo, np.maximum), hi, np.minimum)

    # One rounding. In float64 the product is exact, and its sum is then rounded to at most half the digits; a float64
    # fma itself is left with two roundings.
    @replace(builder, "create_fma")
    def create_fma(self, x, y, z):
        product = x.data.astype(np.float64) * y.data.astype(np.float64)
        return handle((product + z.data.astype(np.float64)).astype(z.data.dtype), z.dtype.scalar)

    @replace(builder, "create_erf")
    def create_erf(self, arg):
        return handle(np.asarray(_ERF(arg.data)).astype(arg.data.dtype), arg.dtype.scalar)

    @replace(builder, "create_dot")
    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        return handle(_dot(a.data, b.data, d.data, input_precision), d.dtype.scalar)

    # Triton 3.9's dot_scaled tests fp8 for infinities by its raw bits: give it the values instead. 3.6 has none.
    stock_values = getattr(interpreter, "_mxfp_value_handle_to_float32", None)
    if stock_values is not None:

        @replace(interpreter, "_mxfp_value_handle_to_float32")
        def values(value_handle):
            data = value_handle.data
            return wide(data) if data.dtype in NARROW else stock_values(value_handle)
