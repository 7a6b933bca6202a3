"""The option `quantize` of ops whose result a GEMM multiplies: its format and its scales."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch
from torch import Tensor

Per = Literal["row", "group", "tensor", "block"]
BLOCK = 128  # the edge of a block, in rows and in columns
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}


@dataclasses.dataclass(frozen=True, eq=False)  # it may hold a tensor
class Quantize:
    """Ask an op for its result in 8 bits, with scales; `dequantize(y_q, scale)` is y up to rounding.

        scale = max(|y|) / largest,   y_q = round(y / scale)

    y is the op's float32 result; it is not rounded to the input's dtype first. `largest` is 448 for float8_e4m3fn,
    57344 for float8_e5m2 and 127 for int8. Rounding is to nearest, ties to even, and saturates; int8 is
    symmetric (never -128). A scale is at least 2^-126, so that zeros give zeros.

    A NaN or an infinity makes the scale of its row (or group) NaN or infinite, and y_q NaN or 0: the whole row or group
    dequantizes to NaN. With a given scale only the NaN itself stays NaN (in int8: 0), and an infinity saturates.

    Args:
        dtype: torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8.
        per: the elements that share a scale. `"row"`: the last dimension, scales of shape `(..., 1)`. `"group"`: every
            `group_size` elements of it, scales of shape `(..., ceil(N / group_size))`; the last group may be shorter.
            `"tensor"`: all elements, by `scale`; only `quantize_tensor` accepts it without one, and then takes the
            tensor's own maximum, a scale of shape `(1,)`. `"block"`, for `quantize_tensor` only: blocks of 128 x 128 of
            a matrix, scales of shape `(ceil(M / 128), ceil(N / 128))`.
        scale: only for `per="tensor"`: a float32 tensor of one positive element on the inputs' device. Its value is not
            checked, since that would synchronize with the device. The op returns it as its scale.
        group_size: for `per="group"`, a power of two from 16 to 4096.

    Raises:
        TypeError: the dtype, or the scale's, is not one of those.
        ValueError: `per`, the scale's shape or the group size is not one of those, or a scale is given where it is
            computed.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    per: Per = "row"
    scale: Tensor | None = None
    group_size: int = 128

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise TypeError(
                f"Quantize: dtype is {self.dtype!r}, expected a torch.dtype, one of {', '.join(map(str, DTYPES))}"
            )
        if self.per not in get_args(Per):
            raise ValueError(f"Quantize: per is {self.per!r}, expected one of {', '.join(get_args(Per))}")
        if self.scale is not None and self.per != "tensor":
            raise ValueError(f"Quantize: per={self.per!r} with a scale, expected none: it is computed")
        if self.scale is not None and not isinstance(self.scale, Tensor):
            raise TypeError(
                f"Quantize: scale is a {type(self.scale).__name__}, expected a float32 tensor of one element on the "
                "inputs' device"
            )
        if self.scale is not None and self.scale.dtype != torch.float32:
            raise TypeError(f"Quantize: scale has dtype {self.scale.dtype}, expected torch.float32")
        if self.scale is not None and self.scale.numel() != 1:
            raise ValueError(f"Quantize: scale has shape {tuple(self.scale.shape)}, expected one element")
        if self.group_size not in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
            raise ValueError(f"Quantize: group_size is {self.group_size!r}, expected a power of two from 16 to 4096")

    @property
    def dtype_name(self) -> str:
        """The dtype without PyTorch's prefix, as in an op's schema and in a kernel."""
        return _NAMES[self.dtype]

    def dequantize(self, y: Tensor, scale: Tensor) -> Tensor:
        """The float32 tensor that y and its scales represent: each element times its scale."""
        if self.per in ("group", "block"):
            span = self.group_size if self.per == "group" else BLOCK
            scale = scale.repeat_interleave(span, dim=-1)[..., : y.shape[-1]]
        if self.per == "block":
            scale = scale.repeat_interleave(BLOCK, dim=-2)[..., : y.shape[-2], :]
        return y.float() * scale


def check_quantize(op: str, quantize: object, *, fused: bool = True) -> None:
    """Raise TypeError for what is no `Quantize`, ValueError for what an op can't do.

    `fused`: the op quantizes its own result, so that no program has seen more of it than its rows.
    """
    if not isinstance(quantize, Quantize):
        raise TypeError(
            f'{op}: quantize is {quantize!r}, expected a rooftile.Quantize, such as Quantize(torch.int8, per="row")'
        )
    if not fused:
        return
    if quantize.per == "block":
        raise ValueError(
            f'{op}: quantize has per="block", which quantize_tensor takes; expected "row", "group" or "tensor" here'
        )
    if quantize.per == "tensor" and quantize.scale is None:
        raise ValueError(
            f'{op}: quantize has per="tensor" with no scale, expected one: the maximum of all rows is known only after '
            "they are written (quantize_tensor accepts it)"
        )
