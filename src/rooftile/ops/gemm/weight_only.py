"""Linear layers whose weights alone are quantised, for decoding: the weight is read, and it is all that is read.

    int8_linear          out = (x @ weight^T) * scale + bias + residual    a scale for each row of the weight
    fp8_weight_linear    the same, of a weight in float8_e4m3fn
    int4_linear          out = x @ (q * scale)^T + bias + residual         a scale for each group of a row,
                         q = unpack_int4(packed)

A weight of (N, K) is read at every step of a decode, N * K bytes or half of them, beside which x, the scales and the
output are little. Products are of x as it is and exact small numbers, sums float32; scales multiply sums, in float32,
so that nothing is rounded before the end. But one row of x in 16 bits may be multiplied on the integer matrix unit, in
three digits (`digits.py`), and for many rows in bfloat16 the weight is dequantised first, where each number is rounded,
and the dense product multiplies.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime, tuning
from rooftile.ops.gemm import adapters
from rooftile.ops.gemm import weight_only_choose as choose
from rooftile.ops.gemm import weight_only_config as configs
from rooftile.ops.gemm.config import Operands
from rooftile.ops.gemm.packing import check_packed, pack_int4, quantize_int4, quantize_int8, unpack_int4
from rooftile.ops.gemm.weight_only_config import WeightOnlyConfig

__all__ = [
    "WeightOnlyConfig",
    "fp8_weight_linear",
    "int4_linear",
    "int8_linear",
    "pack_int4",
    "quantize_int4",
    "quantize_int8",
    "unpack_int4",
]

_WEIGHTS = {
    "int8_linear": ("weight", torch.int8),
    "fp8_weight_linear": ("weight", torch.float8_e4m3fn),
    "int4_linear": ("packed", torch.uint8),
}


def _check(
    op: str, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None
) -> tuple[int, int]:
    """The rows of the weight, and the group: 0 for 8 bits. Raises for what can't be multiplied."""
    name, dtype = _WEIGHTS[op]
    library.check_floating(op, x=x, scale=scale, bias=bias, residual=residual)
    if weight.dtype != dtype:
        raise TypeError(f"{op}: {name} has dtype {weight.dtype}, expected {dtype}")
    for other_name, other in (("scale", scale), ("bias", bias)):
        if other is not None and other.dtype not in (x.dtype, torch.float32):
            raise TypeError(
                f"{op}: {other_name} has dtype {other.dtype}, expected {x.dtype} to match x, or torch.float32"
            )
    if x.dim() == 0:
        raise ValueError(f"{op}: x has shape (), expected at least one dimension")
    k = x.shape[-1]
    if op == "int4_linear":
        group = check_packed(op, name, weight, "scale", scale, k)
        n = weight.shape[0]
    else:
        if weight.dim() != 2 or weight.shape[1] != k:
            raise ValueError(
                f"{op}: {name} has shape {tuple(weight.shape)}, expected (N, {k}) to match x's last dimension"
            )
        group, n = 0, weight.shape[0]
        if scale.shape not in ((n,), (n, 1)):
            raise ValueError(
                f"{op}: scale has shape {tuple(scale.shape)}, expected ({n},) or ({n}, 1) to match weight's rows"
            )
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"{op}: bias has shape {tuple(bias.shape)}, expected ({n},) to match {name}'s rows")
    if residual is not None:
        shape = (*x.shape[:-1], n)
        if residual.shape != shape:
            raise ValueError(f"{op}: residual has shape {tuple(residual.shape)}, expected {shape} to match the result")
        if residual.dtype != x.dtype:
            raise TypeError(f"{op}: residual has dtype {residual.dtype}, expected {x.dtype} to match x")
    return n, group


@functools.cache
def _tuned(
    op: str, m: int, n: int, k: int, group: int, dtype: torch.dtype, target: Any, aligned: bool
) -> WeightOnlyConfig | None:
    """What was measured for that many rows, rounded up to a power of two."""
    entry = tuning.lookup(op, tuning_key(m, n, k, group, dtype), target)
    if entry is None:
        return None
    try:
        found = WeightOnlyConfig(**entry)
    except (TypeError, ValueError):  # a table of another version, or one that somebody edited
        return None
    refused = choose.can_implement(found, group, dtype, target, k, aligned, m=m, fp8=op == "fp8_weight_linear")
    return None if refused else found


def tuning_key(m: int, n: int, k: int, group: int, dtype: torch.dtype) -> str:
    """A problem as a tuned table names it: rows rounded up to a power of two."""
    words = [f"m{library.power_of_two(max(1, m))} n{n} k{k}", str(dtype).removeprefix("torch.")]
    return " ".join(words + [f"group{group}"] * bool(group))


def _choose(
    op: str, m: int, n: int, k: int, group: int, dtype: torch.dtype, target: Any, aligned: bool, given: str
) -> WeightOnlyConfig:
    asked, fp8 = configs.decode(given), op == "fp8_weight_linear"
    if asked is None:
        m = int(library.power_of_two(max(1, m)))
        found = _tuned(op, m, n, k, group, dtype, target, aligned)
        return found or choose.config(m, n, k, group, dtype, target, aligned, fp8)
    why = choose.can_implement(asked, group, dtype, target, k, aligned, m=m, fp8=fp8)
    if why:
        raise ValueError(f"{op}: config can't be used here: {why}")
    return asked


def _aligned(weight: Tensor) -> bool:
    """Whether its rows begin at multiples of 16 bytes. What is traced has no address: memory begins at such a one."""
    traced = isinstance(weight, (FunctionalTensor, FakeTensor))
    return not ((weight.storage_offset() if traced else weight.data_ptr()) | weight.stride(0)) % 16


def _fake(
    op: str, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, config: str
) -> Tensor:
    n, _ = _check(op, x, weight, scale, bias, residual)
    return torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)


def _launch(
    op: str, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, config: str
) -> Tensor:
    n, group = _check(op, x, weight, scale, bias, residual)
    k = int(x.shape[-1])
    target = runtime.target(x.device)
    rows = x.numel() // k if k else 0
    if isinstance(rows, torch.SymInt):
        raise launching.Untraceable("tiles of a symbolic number")
    copied = weight.stride(1) != 1
    weight = weight.contiguous() if copied else weight
    c = _choose(op, rows, n, k, group, x.dtype, target, _aligned(weight), config)
    if copied and c.kernel == "gemv_imma":  # it loads its first weights before the kernel ahead has ended
        c = dataclasses.replace(c, prefetch=-1)
    traceable = c.kernel not in ("direct", "gemv_imma", "dense") and c.split_k == 1 and c.prefetch < 0
    if isinstance(x, FunctionalTensor) and not traceable:
        raise launching.Untraceable("a kernel of Gluon or of the dense product, counters, or an early launch")
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if k == 0:
        out = out.zero_() if bias is None else out.copy_(bias)
        return out if residual is None else out.copy_(residual if bias is None else bias.float() + residual)
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    kernel = configs.module(c.kernel)
    assert kernel is not None, "no such configuration is chosen, and one that is given is refused"
    o = Operands(
        library.as_rows(x), weight, out.view(-1, n), bias, None if residual is None else residual.view(-1, n),
        weight_scale=scale.contiguous(),
    )  # fmt: skip
    adapters.start(kernel.launch, o, c)
    return out


def _define(op: str) -> Any:
    name = _WEIGHTS[op][0]
    return library.define(
        f"{op}(Tensor x, Tensor {name}, Tensor scale, Tensor? bias, Tensor? residual, str config) -> Tensor",
        launch=functools.partial(_launch, op),
        fake=functools.partial(_fake, op),
    )


_int8_op = _define("int8_linear")
_fp8_op = _define("fp8_weight_linear")
_int4_op = _define("int4_linear")


def _encoded(op: str, config: WeightOnlyConfig | None) -> str:
    if config is None:
        return ""
    if not isinstance(config, WeightOnlyConfig):
        raise TypeError(f"{op}: config is a {type(config).__name__}, expected a rooftile.WeightOnlyConfig or None")
    return configs.encode(config)


def int8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    config: WeightOnlyConfig | None = None,
) -> Tensor:
    """`out = (x @ weight^T) * scale + bias + residual`, for inference: x in floating point, the weight in 8 bits.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one, or the last stride is not 1.
        weight: `(N, K)` int8, as `quantize_int8` gives it; any stride between rows.
        scale: `(N,)` or `(N, 1)`, float32 or of x's dtype.
        bias: `(N,)`, of x's dtype or float32.
        residual: `(..., N)`, of x's dtype, added in float32 before the sum is rounded; contiguous, else it is copied.
        config: how the kernel is launched; by default what was measured for these sizes, or is chosen by them.

    Returns:
        out, `(..., N)`, of x's dtype, contiguous. Sums are float32, and rounded once; of more than 128 rows in bfloat16
        the weight times its scale is rounded, too, in up to 128 MiB of memory. Of one row of x in 16 bits, K a multiple
        of 128 from 1024 to 8064, on sm_90 each number is rounded to 2^-22 of the largest of its 128 first, and where
        one is infinite the result is NaN.

    Raises:
        ValueError: shapes don't match, the configuration can't be used, an argument requires grad (there is no
            derivative), a device is the CPU without the interpreter, or devices differ.
        TypeError: a dtype is not one of those.
    """
    return _int8_op(x, weight, scale, bias, residual, _encoded("int8_linear", config))


def fp8_weight_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    config: WeightOnlyConfig | None = None,
) -> Tensor:
    """`out = (x @ weight^T) * scale + bias + residual`, for inference: x in floating point, the weight in fp8.

    x is multiplied as it is, where `fp8_linear` quantises it first, which costs it all but three bits and lets the
    matrix unit multiply twice as much: that one is for many rows, this one for few, where reading the weight is all.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one, or the last stride is not 1.
        weight: `(N, K)` float8_e4m3fn, as `quantize_tensor(weight, Quantize())` gives it; any stride between rows.
        scale: `(N,)` or `(N, 1)`, float32 or of x's dtype.
        bias: `(N,)`, of x's dtype or float32.
        residual: `(..., N)`, of x's dtype, added in float32 before the sum is rounded; contiguous, else it is copied.
        config: how the kernel is launched; by default what was measured for these sizes, or is chosen by them.

    Returns:
        out, `(..., N)`, of x's dtype, contiguous. Sums are float32, and rounded once; of more than 128 rows in bfloat16
        the weight times its scale is rounded, too, in up to 128 MiB of memory.

    Raises:
        ValueError: shapes don't match, the configuration can't be used, an argument requires grad (there is no
            derivative), a device is the CPU without the interpreter, or devices differ.
        TypeError: a dtype is not one of those.
    """
    return _fp8_op(x, weight, scale, bias, residual, _encoded("fp8_weight_linear", config))


def int4_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    config: WeightOnlyConfig | None = None,
) -> Tensor:
    """`out = x @ (q * scale)^T + bias + residual`, for inference: 4 bits a weight.

        out[m, n] = sum over k of x[m, k] * q[n, k] * scale[n, k // group] + bias[n] + residual[m, n]

    Args:
        x: `(..., K)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one, or the last stride is not 1.
        packed: `(N, K / 2)` uint8, as `quantize_int4` or `pack_int4` gives it for that group; any stride between rows.
        scale: `(N, K / group)`, float32 or of x's dtype; contiguous, else it is copied. The group, 32, 64 or 128, is
            what K over its columns is.
        bias: `(N,)`, of x's dtype or float32.
        residual: `(..., N)`, of x's dtype, added in float32 before the sum is rounded; contiguous, else it is copied.
        config: how the kernel is launched; by default what was measured for these sizes, or is chosen by them.

    Returns:
        out, `(..., N)`, of x's dtype, contiguous. Sums are float32, scales multiply a group's sum, and what comes of it
        is rounded once; of more than 128 rows in bfloat16 the weight is, too, and of one row of x those with groups
        of 128 and K a multiple of 256 from 1024 on as `int8_linear` says. On NVIDIA's GPUs, of one row of x in 16
        bits that holds an infinity, what has a part in it is NaN.

    Raises:
        ValueError: K is no multiple of the group, shapes don't match, the configuration can't be used, an argument
            requires grad (there is no derivative), a device is the CPU without the interpreter, or devices differ.
        TypeError: a dtype is not one of those.
    """
    return _int4_op(x, packed, scale, bias, residual, _encoded("int4_linear", config))
