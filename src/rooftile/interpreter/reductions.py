"""Reductions and scans as a GPU does them: sums in a tree, rounded at each step; maxima that drop NaN."""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from rooftile.interpreter.dtypes import convert, is_float, numpy_dtype
from rooftile.interpreter.patching import original, replace


def tree_sum(data: np.ndarray, axis: int | None, keepdims: bool) -> np.ndarray:
    """Sum over an axis (None: over all) by halves, in the type of `data`.

    A GPU keeps partial sums in the element's type too, in threads and then across them. Adding one after the other
    would stop a bfloat16 sum of ones at 256; NumPy does so for bfloat16, and along every axis but the last.
    """
    if axis is None:
        result = tree_sum(data.reshape(-1), 0, False)
        return result.reshape((1,) * data.ndim) if keepdims else result
    rest = np.moveaxis(data, axis, 0)
    while (n := rest.shape[0]) > 1:
        half = n // 2
        rest = np.concatenate([rest[:half] + rest[half : 2 * half], rest[2 * half :]])
    return np.expand_dims(rest[0], axis) if keepdims else np.asarray(rest[0])


def tree_cumsum(data: np.ndarray, axis: int) -> np.ndarray:
    """Running sums along an axis with as many roundings as the number of doublings, in the type of `data`."""
    sums = np.moveaxis(data, axis, 0).copy()
    step = 1
    while step < sums.shape[0]:
        sums[step:] = sums[step:] + sums[:-step]
        step *= 2
    return np.moveaxis(sums, 0, axis)


def install() -> None:
    interface = original(interpreter, "ReduceScanOpInterface")
    reduce_ops = original(interpreter, "ReduceOps")
    stock_min_max = original(reduce_ops, "min_max")
    stock_sum = original(reduce_ops, "sum")
    scan_ops = original(interpreter, "ScanOps")
    stock_cumsum = original(scan_ops, "cumsum")

    # Stock hands Python and NumPy scalars to np.array with a type; NumPy 2 raises there where an integer would wrap.
    @replace(interface, "to_tensor")
    def to_tensor(self, ret, dtype):
        data = convert(np.asarray(ret), numpy_dtype(dtype))
        kind = tl.block_type(dtype, list(data.shape)) if data.shape else dtype
        return tl.core.tensor(interpreter.TensorHandle(data if data.shape else data.reshape(1), dtype.scalar), kind)

    @replace(reduce_ops, "sum")
    def sum_(self, input):
        if not is_float(input.handle.data.dtype):
            return stock_sum(self, input)
        return self.to_tensor(tree_sum(input.handle.data, self.axis, self.keep_dims), input.dtype)

    @replace(scan_ops, "cumsum")
    def cumsum(self, input):
        if not is_float(input.handle.data.dtype):
            return stock_cumsum(self, input)
        return [self.to_tensor(tree_cumsum(input.handle.data, self.axis), input.dtype)]

    # np.nanmax warns where all is NaN; the ufunc gives the same values without a word.
    quiet = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}

    @replace(reduce_ops, "min_max")
    def min_max(self, input, val_reduce_op, idx_reduce_op=None):
        if idx_reduce_op is None:
            val_reduce_op = quiet.get(val_reduce_op, val_reduce_op)
        return stock_min_max(self, input, val_reduce_op, idx_reduce_op)
