"""The activation modules that Rooftile has kernels for, recognised by class."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from torch import Tensor, nn

from rooftile.ops.bias_activation import bias_gelu, bias_silu
from rooftile.ops.gated import gelu_mul, gelu_mul_packed, silu_mul, silu_mul_packed
from rooftile.ops.gemm.config import Activation as Product


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation's ops: `act(gate) * up` of two tensors, of one packed tensor, and `act(x + bias)`.

    `name` is what the matrix products call it.
    """

    name: Product
    gated: str
    mul: Callable[[Tensor, Tensor], Tensor]
    mul_packed: Callable[[Tensor], Tensor]
    bias: Callable[[Tensor, Tensor | None], Tensor]


SILU = Activation("silu", "SwiGLU", silu_mul, silu_mul_packed, bias_silu)
GELU = Activation("gelu", "GeGLU", gelu_mul, gelu_mul_packed, bias_gelu)
GELU_TANH = Activation(
    "gelu_tanh", "GeGLU", *(functools.partial(op, approximate="tanh") for op in (gelu_mul, gelu_mul_packed, bias_gelu))
)

# transformers' own classes, by name. FastGELU rounds the constant of the tanh form; QuickGELU is x * sigmoid(1.702 x).
_TRANSFORMERS = {
    "SiLUActivation": SILU,
    "GELUActivation": GELU,
    "NewGELUActivation": GELU_TANH,
    "AccurateGELUActivation": GELU_TANH,
    "GELUTanh": GELU_TANH,
    "PytorchGELUTanh": GELU_TANH,
}
KNOWN = "SiLU, GELU or GELU's tanh form"


def ops_of(activation: object) -> Activation | None:
    """The ops that compute what this module does, or None where there are none."""
    cls = type(activation)
    if cls is nn.SiLU:
        return SILU
    if cls is nn.GELU:
        return {"none": GELU, "tanh": GELU_TANH}.get(activation.approximate)  # type: ignore[attr-defined]
    return _TRANSFORMERS.get(cls.__name__) if cls.__module__ == "transformers.activations" else None
