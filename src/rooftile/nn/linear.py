"""Linear layers: with the weights of `torch.nn.Linear`, and with quantized weights for inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn

from rooftile.ops.gemm.config import Activation, Precision
from rooftile.ops.gemm.fp8_linear import fp8_linear
from rooftile.ops.gemm.linear import gated_linear, linear
from rooftile.ops.gemm.weight_only import int4_linear, int8_linear, quantize_int4, quantize_int8
from rooftile.ops.quantize_tensor import quantize_tensor
from rooftile.quantize import Quantize

if TYPE_CHECKING:
    from typing_extensions import Self


class Linear(nn.Linear):
    """`rooftile.linear` with the parameters of `torch.nn.Linear`; state_dicts load from one into the other.

    Args:
        in_features, out_features, bias, device, dtype: as `torch.nn.Linear`.
        activation: `"silu"`, `"gelu"` or `"gelu_tanh"`, applied to the sums in the same kernel.
        precision: of float32 GEMMs, see `rooftile.linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation | None = None,
        precision: Precision = "ieee",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if precision not in get_args(Precision):
            raise ValueError(f"Linear: precision is {precision!r}, expected one of {', '.join(get_args(Precision))}")
        self.precision: Precision = precision
        if activation not in (None, *get_args(Activation)):
            raise ValueError(
                f"Linear: activation is {activation!r}, expected None or one of {', '.join(get_args(Activation))}"
            )
        self.activation: Activation | None = activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`(..., in_features)` to `(..., out_features)`; a residual is added last."""
        return linear(
            x, self.weight, self.bias, activation=self.activation, residual=residual, precision=self.precision
        )

    def extra_repr(self) -> str:
        activation = f", activation={self.activation!r}" if self.activation else ""
        precision = f", precision={self.precision!r}" if self.precision != "ieee" else ""
        return super().extra_repr() + activation + precision


class GatedLinear(nn.Linear):
    """`rooftile.gated_linear`: gate and up projection of a gated MLP in one GEMM, `act(gate) * up`.

    The weight is `(2 * out_features, in_features)`, the gate's rows first: `torch.cat((gate_proj.weight,
    up_proj.weight))`.

    Args:
        in_features: the last dimension of the input.
        out_features: the last dimension of the output, the MLP's intermediate size.
        bias, device, dtype: as `torch.nn.Linear`.
        activation: `"silu"`, `"gelu"` or `"gelu_tanh"`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation = "silu",
    ) -> None:
        super().__init__(in_features, 2 * out_features, bias, device, dtype)
        self.out_features = out_features
        if activation not in get_args(Activation):
            raise ValueError(
                f"GatedLinear: activation is {activation!r}, expected one of {', '.join(get_args(Activation))}"
            )
        self.activation: Activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """`(..., in_features)` to `(..., out_features)`."""
        return gated_linear(x, self.weight, self.bias, activation=self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}"


class _Quantized(nn.Module):
    """A quantized weight and its scales, as buffers, for inference only.

    Both keep their dtypes when the module is converted (by `.bfloat16()`, say), although PyTorch would convert fp8 like
    every floating-point dtype. The bias is converted.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, weight: Tensor, weight_scale: Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = {"weight": self.weight, "weight_scale": self.weight_scale}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            after = getattr(self, name)
            if after.dtype != tensor.dtype:
                setattr(self, name, tensor.to(after.device))
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _check_linear(name: str, layer: nn.Linear) -> Tensor:
    if not isinstance(layer, nn.Linear):
        raise TypeError(f"{name}: linear is a {type(layer).__name__}, expected a torch.nn.Linear")
    if isinstance(layer, GatedLinear) or getattr(layer, "activation", None) is not None:
        raise ValueError(
            f"{name}: linear is a {type(layer).__name__} with activation={layer.activation!r}, which the quantized "
            "GEMM does not apply; expected a layer without one, followed by the activation"
        )
    return layer.weight.detach()


class FP8Linear(_Quantized):
    """`rooftile.fp8_linear`: weight and input in float8_e4m3fn; the input is quantized on each call.

    Args:
        linear: the layer whose weight is quantized.
        per: what shares a scale of the weight: `"row"`, `"tensor"`, or `"block"` of 128 x 128.
    """

    def __init__(self, linear: nn.Linear, *, per: Literal["row", "tensor", "block"] = "row") -> None:
        weight = _check_linear("FP8Linear", linear)
        if per not in ("row", "tensor", "block"):
            raise ValueError(f"FP8Linear: per is {per!r}, expected row, tensor or block")
        super().__init__(linear, *quantize_tensor(weight, Quantize(torch.float8_e4m3fn, per)))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`(..., in_features)` to `(..., out_features)`, in x's dtype; a residual is added last."""
        return fp8_linear(x, self.weight, self.weight_scale, bias=self.bias, residual=residual)


class Int8Linear(_Quantized):
    """`rooftile.int8_linear`: the weight in int8 with a scale for each row, the input as it is.

    Args:
        linear: the layer whose weight is quantized.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear, *quantize_int8(_check_linear("Int8Linear", linear)))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`(..., in_features)` to `(..., out_features)`, in x's dtype; a residual is added last."""
        return int8_linear(x, self.weight, self.weight_scale, self.bias, residual=residual)


class Int4Linear(_Quantized):
    """`rooftile.int4_linear`: the weight in 4 bits with a scale for each group along a row, the input as it is.

    Args:
        linear: the layer whose weight is quantized; in_features must be divisible by the group.
        group: 32, 64 or 128 elements.
    """

    def __init__(self, linear: nn.Linear, *, group: int = 128) -> None:
        super().__init__(linear, *quantize_int4(_check_linear("Int4Linear", linear), group))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`(..., in_features)` to `(..., out_features)`, in x's dtype; a residual is added last."""
        return int4_linear(x, self.weight, self.weight_scale, self.bias, residual=residual)
