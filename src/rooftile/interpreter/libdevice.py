"""`triton.language.extra.libdevice` on the CPU.

Stock functions return None under the interpreter. Here each goes to NVIDIA's table of the same name, so that Triton's
own dispatch decides which types are accepted and returned, and the symbol that it picks (`__nv_tanhf`) is computed with
NumPy, in float64 and rounded once: closer to the true value than a GPU is, which has an error of an ulp or two.
"""

import inspect
import math
import re
from collections.abc import Callable

import numpy as np
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as nvidia
from triton.runtime import interpreter

from rooftile.interpreter.dtypes import bits, convert, from_bits, numpy_dtype
from rooftile.interpreter.patching import original, replace

Function = Callable[..., np.ndarray]


def _lanewise(function: Callable[..., float], arguments: int, pole: float = math.nan) -> Function:
    """A function of Python's math module over arrays, with a value where Python raises."""

    def lane(*values: float) -> float:
        try:
            return function(*values)
        except ValueError:
            return pole
        except OverflowError:
            return math.inf

    over = np.frompyfunc(lane, arguments, 1)
    return lambda *arrays: np.asarray(over(*arrays)).astype(np.float64)


def _half_away(x: np.ndarray) -> np.ndarray:
    whole = np.trunc(x)
    return whole + np.where(np.abs(x - whole) >= 0.5, np.copysign(1.0, x), 0.0)


_erf, _erfc = _lanewise(math.erf, 1), _lanewise(math.erfc, 1)

# By the symbol without __nv_ and without the letter of its precision.
_FLOAT: dict[str, Function] = {
    **{name: getattr(np, name) for name in ("floor", "ceil", "trunc", "rint", "fabs", "sqrt", "cbrt", "hypot", "fmod")},
    **{name: getattr(np, name) for name in ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p")},
    **{name: getattr(np, name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    **{f"a{name}": getattr(np, f"arc{name}") for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    **{name: getattr(np, name) for name in ("copysign", "signbit", "isnan", "isinf")},
    "nearbyint": np.rint,
    "llrint": np.rint,
    "round": _half_away,
    "llround": _half_away,
    "exp10": lambda x: np.power(10.0, x),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rcbrt": lambda x: 1 / np.cbrt(x),
    "rhypot": lambda x, y: 1 / np.hypot(x, y),
    "sinpi": lambda x: np.sin(np.pi * np.remainder(x, 2.0)),
    "cospi": lambda x: np.cos(np.pi * np.remainder(x, 2.0)),
    "atan2": np.arctan2,
    "pow": np.power,
    "powi": lambda x, n: np.power(x, n.astype(np.float64)),
    "fdivide": np.divide,
    "fdim": lambda x, y: np.where(np.isnan(x) | np.isnan(y), np.nan, np.maximum(x - y, 0)),
    "remainder": _lanewise(math.remainder, 2),
    "fma": lambda x, y, z: x * y + z,
    "ldexp": np.ldexp,
    "scalbn": np.ldexp,
    "logb": lambda x: np.where(x == 0, -np.inf, np.where(np.isinf(x), np.inf, np.frexp(x)[1] - 1.0)),
    "erf": _erf,
    "erfc": _erfc,
    "normcdf": lambda x: 0.5 * _erfc(-x / math.sqrt(2)),
    "lgamma": _lanewise(math.lgamma, 1, pole=math.inf),
    "tgamma": _lanewise(math.gamma, 1),
    "finite": np.isfinite,
    "isfinite": np.isfinite,
    "saturate": lambda x: np.where(np.isnan(x), 0.0, np.clip(x, 0, 1)),
    "add_rn": np.add,
    "sub_rn": np.subtract,
    "mul_rn": np.multiply,
    "div_rn": np.divide,
    "rcp_rn": lambda x: 1 / x,
    "sqrt_rn": np.sqrt,
    "rsqrt_rn": lambda x: 1 / np.sqrt(x),
    "fma_rn": lambda x, y, z: x * y + z,
}


def _width(x: np.ndarray) -> int:
    return 8 * x.dtype.itemsize


# By the whole symbol: functions that depend on bits, or on the operands' precision.
_EXACT: dict[str, Function] = {
    "abs": np.abs,
    "llabs": np.abs,
    "nextafter": np.nextafter,
    "nextafterf": np.nextafter,
    "popc": lambda x: np.vectorize(lambda v: int(v).bit_count(), otypes=[np.int32])(bits(x)),
    "clz": lambda x: np.vectorize(lambda v: _width(x) - int(v).bit_length(), otypes=[np.int32])(bits(x)),
    "ffs": lambda x: np.vectorize(lambda v: (int(v) & -int(v)).bit_length(), otypes=[np.int32])(bits(x)),
    "int_as_float": lambda x: from_bits(x, np.dtype(np.float32)),
    "uint_as_float": lambda x: from_bits(x, np.dtype(np.float32)),
    "float_as_int": lambda x: from_bits(x, np.dtype(np.int32)),
    "float_as_uint": lambda x: from_bits(x, np.dtype(np.uint32)),
    "longlong_as_double": lambda x: from_bits(x, np.dtype(np.float64)),
    "double_as_longlong": lambda x: from_bits(x, np.dtype(np.int64)),
}
_EXACT |= {"popcll": _EXACT["popc"], "clzll": _EXACT["clz"], "ffsll": _EXACT["ffs"]}

_TO_INT = {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}
_CONVERSION = re.compile(r"(?P<source>float|double|u?int|u?ll)2(?P<target>float|double|u?int|u?ll)_(?P<mode>r[nzdu])")


def _find(symbol: str) -> Function | None:
    """The function of a libdevice symbol, over float64 (or integer) arrays; None if there is no replacement."""
    name = symbol.removeprefix("__nv_")
    if name in _EXACT:
        return _EXACT[name]
    if match := _CONVERSION.fullmatch(name):
        to_int = match["target"] not in ("float", "double")
        if to_int:
            return _TO_INT[match["mode"]]
        return np.asarray if match["mode"] == "rn" else None
    stem = name.removeprefix("fast_")
    candidates = [stem, stem.removesuffix("f"), stem.removesuffix("d")]
    if stem.endswith("_rn"):  # fadd_rn and dadd_rn, but fmaf_rn and fma_rn
        candidates += [stem[1:], stem.replace("f_", "_")]
    return next((_FLOAT[candidate] for candidate in candidates if candidate in _FLOAT), None)


def _elementwise(symbol: str, arrays: list[np.ndarray], result: np.dtype) -> np.ndarray:
    function = _find(symbol)
    if function is None:
        raise NotImplementedError(f"Rooftile's interpreter has no stand-in for libdevice's {symbol}")
    if symbol.removeprefix("__nv_") not in _EXACT:
        arrays = [array.astype(np.float64) if array.dtype == np.float32 else array for array in arrays]
    return convert(np.asarray(function(*arrays)), result)


def install() -> None:
    builder = original(interpreter, "InterpreterBuilder")

    @replace(builder, "create_extern_elementwise")
    def create_extern_elementwise(self, lib_name, lib_path, symbol, arguments, result_type, is_pure):
        arrays = [argument.data for argument in arguments]
        result = _elementwise(symbol, arrays, numpy_dtype(result_type.scalar))
        return interpreter.TensorHandle(result, result_type.scalar)

    def stand_in(name: str) -> Callable:
        real = getattr(nvidia, name, None)

        def function(*args, _semantic=None, **kwargs):
            if real is None:
                raise NotImplementedError(f"NVIDIA's libdevice has no {name}, so neither has Rooftile's interpreter")
            return real(*args, **kwargs, _semantic=interpreter.interpreter_semantic)

        function.__name__ = name
        return function

    for name, _ in inspect.getmembers(libdevice, inspect.isfunction):
        function = stand_in(name)
        setattr(libdevice, name, function)
        if hasattr(nvidia, name):  # for kernels that import NVIDIA's table by its own name
            setattr(nvidia, name, function)
