"""PEFT's LoRA layers: the layer and its one active adapter by `rooftile.lora_linear`, and a head's loss.

PEFT's `forward` is kept for all else: adapters that are merged, disabled or several at once, a batch with an adapter
for each sample (`adapter_names`), the variants (DoRA and others), and base layers that are not plain. Each call
decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rooftile.huggingface import loss_head
from rooftile.huggingface.replacing import casts, is_plain, takes
from rooftile.library import FLOATS
from rooftile.ops.gemm.linear import linear
from rooftile.ops.gemm.lora_linear import lora_linear

_PLAIN = (Tensor, nn.Parameter)


def is_lora(module: nn.Module) -> bool:
    """Whether that is one of PEFT's LoRA layers, of any kind."""
    cls = type(module)
    return (
        cls.__module__.startswith("peft.tuners.lora.") and hasattr(module, "lora_A") and hasattr(module, "base_layer")
    )


def why_left(layer: Any) -> str | None:
    """Why none of the layer's adapters can be computed by `lora_linear`; None where one can."""
    cls = type(layer)
    if (cls.__module__, cls.__name__) != ("peft.tuners.lora.layer", "Linear"):
        return f"its class is {cls.__module__}.{cls.__name__}, expected peft.tuners.lora.layer.Linear"
    base = layer.base_layer
    if not is_plain(base, nn.Linear):
        return f"its base layer is a {type(base).__module__}.{type(base).__name__}, expected a plain torch.nn.Linear"
    if type(base.weight) not in _PLAIN or base.weight.dtype not in FLOATS:
        kind = f"a {type(base.weight).__name__} of {base.weight.dtype}"
        return f"its base layer's weight is {kind}, expected a plain parameter of float32, float16 or bfloat16"
    reasons = [_why_other_formula(layer, name) for name in layer.lora_A]
    return reasons[0] if reasons and None not in reasons else None


def _why_other_formula(layer: Any, name: str) -> str | None:
    """Why that adapter's result is not `scale * lora_B(lora_A(dropout(x)))` of plain layers."""
    if name in getattr(layer, "lora_variant", ()) or layer.use_dora.get(name):
        return f"its adapter {name!r} is a variant of LoRA, such as DoRA"
    a, b = layer.lora_A[name], layer.lora_B[name]
    if not is_plain(a, nn.Linear) or not is_plain(b, nn.Linear):
        return f"its adapter {name!r} has layers that are not plain torch.nn.Linear"
    if a.bias is not None or b.bias is not None:
        return f"its adapter {name!r} has a bias"
    if not isinstance(layer.scaling[name], (int, float)):
        return f"its adapter {name!r} has a scaling that is a {type(layer.scaling[name]).__name__}, expected a number"
    return None


def _active(layer: Any) -> str | None:
    """The one active adapter; None where there is none, or several."""
    if layer.disable_adapters or layer.merged:
        return None
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    return names[0] if len(names) == 1 else None


class _Operands(NamedTuple):
    """Of `lora_linear`; `dropped` is x after dropout, or None."""

    weight: Tensor
    lora_a: Tensor
    lora_b: Tensor
    bias: Tensor | None
    scale: float
    dropped: Tensor | None


def _operands(layer: Any, x: Tensor) -> _Operands | None:
    """What the layer's result is computed of; None where PEFT's own code has to compute it."""
    name, base = _active(layer), layer.base_layer
    if name is None or not is_plain(base, nn.Linear) or not takes(x, base.weight, base.bias):
        return None
    if _why_other_formula(layer, name) is not None:
        return None
    a, b, dropout = layer.lora_A[name].weight, layer.lora_B[name].weight, layer.lora_dropout[name]
    if type(a) not in _PLAIN or type(b) not in _PLAIN or a.dtype != b.dtype or a.dtype not in FLOATS:
        return None
    if a.dtype != x.dtype and not casts(x):
        # PEFT keeps adapters of 16-bit models in float32, and multiplies x in float32 by them.
        if a.dtype != torch.float32 or not getattr(layer, "cast_input_dtype_enabled", True):
            return None
        a, b = a.to(x.dtype), b.to(x.dtype)
    dropped = None
    if type(dropout) is not nn.Identity and not (type(dropout) is nn.Dropout and not (dropout.training and dropout.p)):
        dropped = dropout(x)
        if dropped.dtype != x.dtype:
            return None
    return _Operands(base.weight, a, b, base.bias, float(layer.scaling[name]), dropped)


def lora_forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of PEFT's `Linear`; `original` is the class's."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = None if args or kwargs else _operands(self, x)
        if found is None:
            return original(self, x, *args, **kwargs)
        weight, a, b, bias, scale, dropped = found
        return lora_linear(x, weight, a, b, bias, scale=scale, lora_input=dropped)

    forward._rooftile = True  # type: ignore[attr-defined]
    return forward


def lora_head_forward(original: Callable[..., Tensor]) -> Callable[..., loss_head.Found]:
    """The forward of PEFT's `Linear` that can be asked for the loss; `original` makes logits."""

    def forward(
        self: Any, x: Tensor, *args: Any, asked: loss_head.Asked | None = None, **kwargs: Any
    ) -> loss_head.Found:
        if asked is None:
            return original(self, x, *args, **kwargs)
        found = None if args or kwargs else _operands(self, x)
        if found is None:
            return loss_head.of_logits(original(self, x, *args, **kwargs), asked)
        weight, a, b, bias, scale, dropped = found
        low = linear(x if dropped is None else dropped, a)
        return loss_head.fused(x, weight, bias, asked, (low, b if scale == 1.0 else scale * b))

    forward._rooftile = True  # type: ignore[attr-defined]
    return loss_head.can_be_asked(forward)
