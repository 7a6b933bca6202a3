"""Matrix products in the place of a model's linear layers: each alone, and several over one input as one.

q, k and v (or gate and up) are one product where their weights lie one behind the other in memory; `patch` has put
them so (`linear_memory.py`). Each call asks the weights themselves, below the graph of torch.compile as well: there the
product is one op, which asks when it runs. So weights that were moved, swapped or sharded since are multiplied as they
are, one by one, and no second copy of them is there that could be out of date.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rooftile.huggingface import replacing
from rooftile.huggingface.activations import GELU, GELU_TANH, SILU, Activation
from rooftile.huggingface.linear_memory import joined
from rooftile.huggingface.replacing import is_ours, is_plain
from rooftile.library import FLOATS
from rooftile.ops.gemm.linear import gated_linear, gated_linear_op, linear, linear_op

_PLAIN = (Tensor, nn.Parameter)  # neither quantised nor distributed
_AUTOCAST = ("cuda", "cpu", "xpu")
_GATES: dict[str, Callable[[Tensor], Tensor]] = {act.name: act.mul_packed for act in (SILU, GELU, GELU_TANH)}


def casts(x: Tensor) -> bool:
    """Whether torch.autocast wants products of x in a dtype of its own."""
    return x.device.type in _AUTOCAST and torch.is_autocast_enabled(x.device.type)


def linear_forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of a `torch.nn.Linear`; `original` is the class's."""

    def forward(self: Any, input: Tensor) -> Tensor:
        if not takes(input, self):
            return original(self, input)
        return linear(input, self.weight, self.bias)

    forward._rooftile = True  # type: ignore[attr-defined]
    return forward


def takes(x: Tensor, layer: Any) -> bool:
    """Whether the product is one of plain tensors in a dtype that the kernels have."""
    weight, bias = layer.weight, layer.bias
    if type(x) not in _PLAIN or type(weight) not in _PLAIN or x.dtype not in FLOATS or x.dim() == 0:
        return False
    if bias is not None and (type(bias) not in _PLAIN or bias.dtype != weight.dtype):
        return False
    return x.dtype == weight.dtype or (casts(x) and weight.dtype in FLOATS)


def is_replaced(layer: Any) -> bool:
    """Whether a call of that layer does nothing but `linear_forward`."""
    return is_plain(layer, nn.Linear) and is_ours(layer.__dict__.get("forward"))


def products(layers: tuple[Any, ...], x: Tensor) -> tuple[Tensor, ...]:
    """`layer(x)` of each layer, as one product where it can be."""
    y = _as_one(layers, x, "")
    if y is None:
        return tuple(layer(x) for layer in layers)
    return y.split([layer.weight.shape[0] for layer in layers], dim=-1)


def gated(cls: type[nn.Module], ops: Activation) -> dict[str, Callable[..., Tensor]]:
    """`act(gate(x)) * up(x)`, of two layers or of one that is both."""
    act_mul, act_mul_packed = replacing.gated(cls, ops).values()

    def gated_product(act: nn.Module, gate: Any, up: Any, x: Tensor) -> Tensor:
        y = _as_one((gate, up), x, ops.name) if is_plain(act, cls) else None
        return act_mul(act, gate(x), up(x)) if y is None else y

    def gated_product_packed(act: nn.Module, gate_up: Any, x: Tensor) -> Tensor:
        if is_plain(act, cls) and is_replaced(gate_up) and takes(x, gate_up):
            return gated_linear(x, gate_up.weight, gate_up.bias, activation=ops.name)
        return act_mul_packed(act, gate_up(x))

    return {"gated_product": gated_product, "gated_product_packed": gated_product_packed}


def linear_act(cls: type[nn.Module], ops: Activation) -> Callable[..., Tensor]:
    """`act(layer(x))` in one kernel."""
    otherwise = replacing.linear_act(cls, ops)

    def linear_act(layer: Any, x: Tensor, act: nn.Module) -> Tensor:
        if is_plain(act, cls) and is_replaced(layer) and takes(x, layer):
            return linear(x, layer.weight, layer.bias, activation=ops.name)
        return otherwise(layer, x, act)

    return linear_act


def _as_one(layers: tuple[Any, ...], x: Tensor, gate: str) -> Tensor | None:
    """The layers' results side by side, or where there is a gate `gate(first half) * second half`; None if they have to
    be called one by one."""
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for layer in layers:
        if not is_replaced(layer) or not takes(x, layer):
            return None
        weights.append(layer.weight)
        if layer.bias is not None:
            biases.append(layer.bias)
    if casts(x) or len(biases) not in (0, len(layers)):
        return None
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights, *biases))
    if torch.compiler.is_compiling():
        y = torch.ops.rooftile_models.linear(x, weights, biases, "" if keep else gate)
    else:
        weight, bias = _joined(weights, biases)
        if weight is None:
            return None
        if not keep:
            return _of_one(x, weight, bias, gate)
        y = _Product.apply(x, len(weights), *weights, *biases)
    return _GATES[gate](y) if gate and keep else y


def _joined(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    weight, bias = joined(weights), joined(biases) if biases else None
    return (None, None) if biases and bias is None else (weight, bias)


def _of_one(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str) -> Tensor:
    if gate:
        return gated_linear_op(x, weight, bias, gate, "", False)[0]
    return linear_op(x, weight, bias, None, "", "ieee", "", False)[0]


def _product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], gate: str) -> Tensor:
    """Without gradients."""
    weight, bias = _joined(weights, biases)
    if weight is not None:
        return _of_one(x, weight, bias, gate)
    y = torch.cat([_of_one(x, w, b, "") for w, b in zip_longest(weights, biases)], dim=-1)
    return _GATES[gate](y) if gate else y


def _gradients(dy: Tensor, x: Tensor | None, weights: Sequence[Tensor], biased: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of x (where weights are given), of the weights together (where x is given) and of the biases; else empty."""
    backward = torch.ops.rooftile.linear_backward
    bias = dy.new_empty(dy.shape[-1]) if biased else None  # its shape and dtype are all that is asked of it
    weight = joined(weights) if weights else None
    dx, dw, db = backward(dy, x, weight, bias, None, "", False, "ieee")
    if weights and weight is None:
        pieces = dy.split([w.shape[0] for w in weights], dim=-1)
        each = [backward(p, None, w, None, None, "", False, "ieee")[0] for p, w in zip(pieces, weights, strict=True)]
        dx = sum(each[1:], each[0])
    return dx, dw, db


class _Needs(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    weights: list[bool]
    biases: list[bool]


def _backward(
    gradients: Callable[..., tuple[Tensor, Tensor, Tensor]], dy: Tensor, x: Tensor, weights: list[Tensor], needs: _Needs
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """The gradients of x, each weight and each bias."""
    of_weights, biased = any(needs.weights), any(needs.biases)
    dx, dw, db = gradients(dy, x if of_weights else None, weights if needs.x else [], biased)
    rows = [w.shape[0] for w in weights]
    dws = dw.split(rows) if of_weights else [dw] * len(rows)
    dbs = db.split(rows) if biased else [db] * len(needs.biases)
    return (
        dx if needs.x else None,
        [grad if need else None for grad, need in zip(dws, needs.weights, strict=True)],
        [grad if need else None for grad, need in zip(dbs, needs.biases, strict=True)],
    )


class _Product(torch.autograd.Function):
    """Of x and the layers' own parameters, which are what is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int, *parameters: Tensor) -> Tensor:
        ctx.n = n
        ctx.save_for_backward(x if any(ctx.needs_input_grad[2 : n + 2]) else None, *parameters[:n])
        return _product(x, parameters[:n], parameters[n:], "")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        needs_x, _, *needs = ctx.needs_input_grad
        dx, dws, dbs = _backward(_gradients, dy, x, weights, _Needs(needs_x, needs[: ctx.n], needs[ctx.n :]))
        return dx, None, *dws, *dbs


# In the graphs of torch.compile. A namespace of their own: these are parts of `patch`, not ops for anybody's use.
_LINEAR = torch.library.custom_op(
    "rooftile_models::linear",
    _product,
    mutates_args=(),
    schema="(Tensor x, Tensor[] weights, Tensor[] biases, str gate) -> Tensor",
)
_LINEAR_BACKWARD = torch.library.custom_op(
    "rooftile_models::linear_backward",
    _gradients,
    mutates_args=(),
    schema="(Tensor dy, Tensor? x, Tensor[] weights, bool biased) -> (Tensor, Tensor, Tensor)",
)


@_LINEAR.register_fake
def _(x: Tensor, weights: list[Tensor], biases: list[Tensor], gate: str) -> Tensor:
    n = sum(w.shape[0] for w in weights)
    return x.new_empty((*x.shape[:-1], n // 2 if gate else n))


@_LINEAR_BACKWARD.register_fake
def _(dy: Tensor, x: Tensor | None, weights: list[Tensor], biased: bool) -> tuple[Tensor, Tensor, Tensor]:
    n = dy.shape[-1]
    return (
        dy.new_empty((*dy.shape[:-1], weights[0].shape[1]) if weights else (0,)),
        dy.new_empty((0,) if x is None else (n, x.shape[-1])),
        dy.new_empty((n if biased else 0,)),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, _, gate = inputs
    assert not gate, "a gate's backward needs what the gate was taken of"
    ctx.save_for_backward(x, *weights)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    return *_backward(
        torch.ops.rooftile_models.linear_backward, dy, x, weights, _Needs(*ctx.needs_input_grad[:3])
    ), None


_LINEAR.register_autograd(_differentiate, setup_context=_keep)
