"""What runs in place of a model's own lines.

Each function asks on every call whether its op may take that place: the modules that it bypasses are what they were
when the model was patched, with no hook on them, and the dtypes are those for which the op returns what the model's own
code would. Otherwise that code runs, and its submodules are called as modules. In eager mode the host launches every
kernel of a decoded token, so these checks are written for few Python calls, not for few lines.

q, k and v (or gate and up) are one GEMM where their weights are adjacent in memory; `patch` has moved them there
(`memory.py`). Each call looks at the weights themselves, below the graph of torch.compile too: there the GEMM is one
op, which looks when it runs. Weights that were moved, swapped or sharded since are therefore multiplied as they are,
one by one, and there is no second copy of them that could be out of date.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling
from torch.nn.modules import module as nn_module

from rooftile.huggingface.families import Norm
from rooftile.huggingface.memory import joined
from rooftile.library import FLOATS
from rooftile.ops.add_rms_norm import add_rms_norm
from rooftile.ops.bias_activation import bias_gelu, bias_silu
from rooftile.ops.gated import gelu_mul, gelu_mul_packed, silu_mul, silu_mul_packed
from rooftile.ops.gemm import gated_mlp as mlp
from rooftile.ops.gemm.config import Activation as ActivationName
from rooftile.ops.gemm.linear import gated_linear, linear
from rooftile.ops.layer_norm import layer_norm
from rooftile.ops.qk_norm_rope import qk_norm_rope
from rooftile.ops.qk_norm_rope.forward import LONGEST
from rooftile.ops.rms_norm import rms_norm
from rooftile.ops.rope import Style, rope

Rotation = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
_PLAIN = (Tensor, nn.Parameter)  # neither quantized nor distributed
_AUTOCAST = ("cuda", "cpu", "xpu")
# Private to PyTorch: whether a hook was registered for all modules.
has_global_hook: Callable[[], object] = getattr(nn_module, "_has_any_global_hook", lambda: False)
# Private too, and a tenth of the time of a question about x's device.
_is_any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


# What is asked first.


def is_ours(method: object) -> bool:
    # Asked in graphs of torch.compile too; PyTorch 2.11's compiler finds no `__func__` by getattr with a default.
    return isinstance(method, types.MethodType) and hasattr(method.__func__, "_rooftile")


def is_plain(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether a call of that module does what its class's forward does, and nothing else."""
    if type(module) is not cls or is_hooked(module):
        return False
    forward = module.__dict__.get("forward")
    return forward is None or is_ours(forward) or is_own(module, "forward")


def is_own(module: nn.Module, name: str) -> bool:
    """Whether the instance's method is its class's own: pickle and accelerate's `unwrap_model` set one, the latter
    without decorators."""
    method, function = module.__dict__.get(name), getattr(type(module), name, None)
    if not isinstance(method, types.MethodType) or method.__self__ is not module or function is None:
        return False
    return method.__func__ in (function, inspect.unwrap(function))


def is_hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "_hf_hook" in module.__dict__
        or has_global_hook()
    )


def is_replaced(layer: Any) -> bool:
    """Whether a call of that layer does nothing but `linear_forward`."""
    return is_plain(layer, nn.Linear) and is_ours(layer.__dict__.get("forward"))


def casts(x: Tensor) -> bool:
    """Whether torch.autocast wants GEMMs of x in a dtype of its own."""
    return x.device.type in _AUTOCAST and torch.is_autocast_enabled(x.device.type)


def takes(x: Tensor, weight: Any, bias: Any) -> bool:
    """Whether a GEMM of these is one of plain tensors in a dtype that the kernels have."""
    if type(x) not in _PLAIN or type(weight) not in _PLAIN or x.dtype not in FLOATS or x.dim() == 0:
        return False
    if bias is not None and (type(bias) not in _PLAIN or bias.dtype != weight.dtype):
        return False
    return x.dtype == weight.dtype or (casts(x) and weight.dtype in FLOATS)


# Norms.


def norm_forward(norm: Norm, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    eps, offset, rounding = norm.eps, norm.offset, norm.rounding

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight, dtype = self.weight, hidden_states.dtype
        if dtype not in FLOATS or weight.dtype != dtype:  # the model's own code promotes
            return original(self, hidden_states)
        return rms_norm(hidden_states, weight, eps=getattr(self, eps), offset=offset, rounding=rounding)

    return forward


def layer_norm_forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, input: Tensor) -> Tensor:
        weight, bias, dtype = self.weight, self.bias, input.dtype
        if dtype not in FLOATS or any(p is not None and p.dtype != dtype for p in (weight, bias)):
            return original(self, input)
        if dtype != torch.float32 and torch.is_autocast_enabled(input.device.type):  # which may return float32
            return original(self, input)
        return layer_norm(input, weight, bias, eps=self.eps)

    return forward


def add_norm(cls: type[nn.Module], norm: Norm) -> Callable[..., tuple[Tensor, Tensor]]:
    eps, offset, rounding = norm.eps, norm.offset, norm.rounding

    def add_norm(module: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if is_plain(module, cls):
            weight: Any = module.weight
            if x.dtype in FLOATS and x.dtype == residual.dtype == weight.dtype:
                return add_rms_norm(x, residual, weight, eps=getattr(module, eps), offset=offset, rounding=rounding)
        hidden_states = residual + x
        return module(hidden_states), hidden_states

    return add_norm


# Activations.


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation's ops: `act(gate) * up` of two tensors, of one packed tensor, and `act(x + bias)`.

    `name` is what the GEMMs call it, and `gated` the kind of the gated form.
    """

    name: ActivationName
    gated: str
    mul: Callable[[Tensor, Tensor], Tensor]
    mul_packed: Callable[[Tensor], Tensor]
    bias: Callable[[Tensor, Tensor | None], Tensor]


SILU = Activation("silu", "SwiGLU", silu_mul, silu_mul_packed, bias_silu)
GELU = Activation("gelu", "GeGLU", gelu_mul, gelu_mul_packed, bias_gelu)
GELU_TANH = Activation(
    "gelu_tanh",
    "GeGLU",
    *(functools.partial(op, activation="gelu_tanh") for op in (gelu_mul, gelu_mul_packed, bias_gelu)),
)
_GATES: dict[str, Callable[[Tensor], Tensor]] = {act.name: act.mul_packed for act in (SILU, GELU, GELU_TANH)}

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


def gated(cls: type[nn.Module], ops: Activation) -> dict[str, Callable[..., Tensor]]:
    def act_mul(act: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
        if gate.dtype in FLOATS and gate.dtype == up.dtype and is_plain(act, cls):
            return ops.mul(gate, up)
        return act(gate) * up

    def act_mul_packed(act: nn.Module, gate_up: Tensor) -> Tensor:
        if gate_up.dtype in FLOATS and is_plain(act, cls):
            return ops.mul_packed(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return act(gate) * up

    return {"act_mul": act_mul, "act_mul_packed": act_mul_packed}


def linear_act(cls: type[nn.Module], ops: Activation) -> Callable[..., Tensor]:
    """`act(layer(x))` with the layer's bias added beside the activation; the GEMM is the model's own."""
    from transformers.pytorch_utils import Conv1D

    def linear_act(linear: Any, x: Tensor, act: nn.Module) -> Tensor:
        if x.dtype not in FLOATS or not is_plain(act, cls):
            return act(linear(x))
        # The layer is taken apart only where that loses nothing.
        if is_plain(linear, nn.Linear) and _are_plain(linear.weight, linear.bias):
            h = nn.functional.linear(x, linear.weight)
        elif is_plain(linear, Conv1D) and _are_plain(linear.weight, linear.bias):
            h = x @ linear.weight
        else:
            h = linear(x)
            return ops.bias(h, None) if h.dtype in FLOATS else act(h)
        bias = linear.bias
        # Under autocast the GEMM's result has another dtype; ops take a float32 bias beside it.
        return ops.bias(h, bias if bias.dtype in (h.dtype, torch.float32) else bias.to(h.dtype))

    return linear_act


def _are_plain(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether both exist, have one dtype, and are neither quantized nor distributed."""
    return bias is not None and type(weight) in _PLAIN and type(bias) in _PLAIN and weight.dtype == bias.dtype


# Rotations.


def _narrowed(q: Tensor, *others: Tensor) -> bool:
    """Whether autocast narrows what the model's code returns: float32, which attention casts to q's dtype.

    So it is in a float32 model, whose layers make q of 16 bits, and whose weights and angles are float32.
    """
    dtype = q.dtype
    if not casts(q) or dtype != torch.get_autocast_dtype(q.device.type):
        return False
    return all(t.dtype in (dtype, torch.float32) for t in others)


def rotation(style: Style, original: Rotation | None) -> Rotation:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if original is not None and (q.dtype not in FLOATS or (q.dtype != cos.dtype and not _narrowed(q, cos, sin))):
            return original(q, k, cos, sin)
        return rope(q, k, cos, sin, rotary_dim=cos.shape[-1], style=style)

    return rotate


def norm_rotation(
    cls: type[nn.Module], norm: Norm, style: Style, original: Rotation | None, *, transposed: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`transposed`: q and k come as (B, T, H, D) and are transposed after the norms."""
    eps, offset, rotate = norm.eps, norm.offset, rotation(style, original)

    def norm_and_rotate(
        q_norm: Any, k_norm: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        if is_plain(q_norm, cls) and is_plain(k_norm, cls) and getattr(q_norm, eps) == getattr(k_norm, eps):
            weights, dtype = (q_norm.weight, k_norm.weight), q.dtype
            others = (k, *weights, cos, sin)
            fits = q.shape[-1] <= LONGEST and dtype in FLOATS
            if fits and (all(t.dtype == dtype for t in others) or _narrowed(q, *others)):
                if transposed:
                    q, k = q.transpose(1, 2), k.transpose(1, 2)
                return qk_norm_rope(
                    q, k, *weights, cos, sin,
                    eps=getattr(q_norm, eps), offset=offset, rotary_dim=cos.shape[-1], style=style,
                )  # fmt: skip
        q, k = q_norm(q), k_norm(k)
        return rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin) if transposed else rotate(q, k, cos, sin)

    return norm_and_rotate


# Linear layers.


def linear_forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of a `torch.nn.Linear`; `original` is the class's."""

    def forward(self: Any, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        return linear(input, weight, bias) if takes(input, weight, bias) else original(self, input)

    forward._rooftile = True  # type: ignore[attr-defined]
    return forward


def gemm_act(cls: type[nn.Module], ops: Activation) -> Callable[..., Tensor]:
    """`act(layer(x))` in one kernel."""
    otherwise = linear_act(cls, ops)

    def gemm_act(layer: Any, x: Tensor, act: nn.Module) -> Tensor:
        if is_plain(act, cls) and is_replaced(layer) and takes(x, layer.weight, layer.bias):
            return linear(x, layer.weight, layer.bias, activation=ops.name)
        return otherwise(layer, x, act)

    return gemm_act


def joint_linear(layers: tuple[Any, ...], x: Tensor) -> tuple[Tensor, ...]:
    """`layer(x)` of each layer, by one GEMM where possible."""
    found = _one_gemm(layers, x, "")
    if found is None:
        return tuple(layer(x) for layer in layers)
    y, weights = found
    return y.split([weight.shape[0] for weight in weights], dim=-1)


def joint_linear_of_rotated(layers: tuple[Any, ...], x: Tensor) -> tuple[Tensor, ...]:
    """`joint_linear` of q, k and v. Nobody keeps q and k for a backward, so v is no view that keeps their memory."""
    *others, v = joint_linear(layers, x)
    return (*others, v.clone() if not is_compiling() and v.requires_grad and v._is_view() else v)


def joint_gated(cls: type[nn.Module], ops: Activation) -> dict[str, Callable[..., Tensor]]:
    """`act(gate(x)) * up(x)`, of two layers or of one that is both, alone and with the layer `down` that follows."""
    act_mul, act_mul_packed = gated(cls, ops).values()

    def gated_gemm(act: nn.Module, gate: Any, up: Any, x: Tensor) -> Tensor:
        found = _one_gemm((gate, up), x, ops.name) if is_plain(act, cls) else None
        return act_mul(act, gate(x), up(x)) if found is None else found[0]

    def gated_mlp(act: nn.Module, gate: Any, up: Any, down: Any, x: Tensor) -> Tensor:
        if is_plain(act, cls) and torch.is_grad_enabled() and not is_compiling() and is_replaced(down):
            y = _trained_mlp(gate, up, down, x, ops.name)
            if y is not None:
                return y
        return down(gated_gemm(act, gate, up, x))

    def gated_mlp_packed(act: nn.Module, gate_up: Any, down: Any, x: Tensor) -> Tensor:
        if is_plain(act, cls) and is_replaced(gate_up) and takes(x, gate_up.weight, gate_up.bias):
            weight, bias = gate_up.weight, gate_up.bias
            if is_replaced(down) and takes(x, down.weight, down.bias):
                return mlp.gated_mlp(x, weight, down.weight, bias, down.bias, activation=ops.name)
            return down(gated_linear(x, weight, bias, activation=ops.name))
        return down(act_mul_packed(act, gate_up(x)))

    return {f.__name__: f for f in (gated_gemm, gated_mlp, gated_mlp_packed)}


def _one_gemm(layers: tuple[Any, ...], x: Tensor, gate: str) -> tuple[Tensor, list[Tensor]] | None:
    """The layers' results side by side, or with a gate `gate(first half) * second half`, and the layers' weights; None
    if the layers have to be called one by one."""
    compiling = is_compiling()
    found = _gathered_in_graph(layers, x) if compiling else _gathered(layers, x)
    if found is None or ((compiling or _is_any_autocast()) and casts(x)):
        return None
    weights, biases = found
    if biases and len(biases) != len(weights):
        return None
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights, *biases))
    if compiling:
        y = torch.ops.rooftile_models.linear(x, weights, biases, "" if keep else gate)
    else:
        weight, bias = _joined(weights, biases)
        if weight is None:
            return None
        if not keep:
            return _of_one(x, weight, bias, gate), weights
        y = _JointLinear.apply(x, len(weights), *weights, *biases)
    return (_GATES[gate](y) if gate and keep else y), weights


def _trained_mlp(gate: Any, up: Any, down: Any, x: Tensor, activation: ActivationName) -> Tensor | None:
    """`down(act(gate(x)) * up(x))` by one op; None unless x, gate or up needs a gradient and they are one GEMM."""
    found = None if _is_any_autocast() else _gathered((gate, up), x)
    if found is None or not takes(x, down.weight, down.bias):
        return None
    weights, biases = found
    if len(biases) == 1 or not any(t.requires_grad for t in (x, *weights, *biases)):
        return None
    weight, bias = _joined(weights, biases)
    if weight is None:
        return None
    return _GatedMLP.apply(x, weight, bias, activation, *weights, down.weight, *(biases or (None, None)), down.bias)


_Gathered = tuple[list[Tensor], list[Tensor]]


def _gathered_in_graph(layers: tuple[Any, ...], x: Tensor) -> _Gathered | None:
    """The layers' weights and biases, where calls of the layers are those GEMMs of x and nothing else; else None."""
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for layer in layers:
        if not is_replaced(layer) or not takes(x, layer.weight, layer.bias):
            return None
        weights.append(layer.weight)
        if layer.bias is not None:
            biases.append(layer.bias)
    return weights, biases


def _gathered(layers: tuple[Any, ...], x: Tensor) -> _Gathered | None:
    """The same without a Python call for each question: this is the host's time of every token."""
    dtype = x.dtype
    if type(x) not in _PLAIN or dtype not in FLOATS or x.dim() == 0 or has_global_hook():
        return None
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for layer in layers:
        if type(layer) is not nn.Linear:
            return None
        attributes = layer.__dict__
        forward = attributes.get("forward")
        if (
            type(forward) is not types.MethodType
            or not hasattr(forward.__func__, "_rooftile")
            or attributes["_forward_hooks"]
            or attributes["_forward_pre_hooks"]
            or attributes["_backward_hooks"]
            or attributes["_backward_pre_hooks"]
            or "_hf_hook" in attributes
        ):
            return None
        parameters = attributes["_parameters"]
        weight = parameters.get("weight")
        if weight is None:  # a view, say, that a wrapper has put in its place
            weight = layer.weight
        if type(weight) not in _PLAIN or weight.dtype != dtype:
            return None
        weights.append(weight)
        bias = parameters.get("bias")
        if bias is None and "bias" not in parameters:
            bias = layer.bias
        if bias is not None:
            if type(bias) not in _PLAIN or bias.dtype != dtype:
                return None
            biases.append(bias)
    return weights, biases


def _joined(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    weight = joined(weights)
    if weight is None or not biases:
        return weight, None
    bias = joined(biases)
    return (None, None) if bias is None else (weight, bias)


def _of_one(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str) -> Tensor:
    return gated_linear(x, weight, bias, activation=gate) if gate else linear(x, weight, bias)  # type: ignore[arg-type]


def _joint(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], gate: str) -> Tensor:
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
    dx, dw, db = backward(dy, x, weight, bias, "ieee")
    if weights and weight is None:
        pieces = dy.split([w.shape[0] for w in weights], dim=-1)
        each = [backward(p, None, w, None, "ieee")[0] for p, w in zip(pieces, weights, strict=True)]
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


class _JointLinear(torch.autograd.Function):
    """Of x and the layers' own parameters, which are what is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int, *parameters: Tensor) -> Tensor:
        ctx.n = n
        ctx.save_for_backward(x if any(ctx.needs_input_grad[2 : n + 2]) else None, *parameters[:n])
        return _joint(x, parameters[:n], parameters[n:], "")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        needs_x, _, *needs = ctx.needs_input_grad
        dx, dws, dbs = _backward(_gradients, dy, x, weights, _Needs(needs_x, needs[: ctx.n], needs[ctx.n :]))
        return dx, None, *dws, *dbs


class _GatedMLP(torch.autograd.Function):
    """`rooftile.gated_mlp` over the layers' own parameters.

    For the backward it keeps gate_up and, where a gradient needs them, x and the layers' own weights. `weight` and
    `bias` are gate's and up's as one tensor each, and are not kept.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, gate: Tensor, up: Tensor,
        down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, down_bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.activation = activation
        y, gate_up = mlp.gated_mlp_op(x, weight, down, bias, down_bias, activation, "ieee", True)
        of_x, _, _, _, of_gate, of_up, *_ = ctx.needs_input_grad
        kept = x if of_gate or of_up else None, *((gate, up) if of_x else (None, None)), down, gate_up
        ctx.save_for_backward(*kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, gate, up, down, gate_up = ctx.saved_tensors
        of_x, _, _, _, of_gate, of_up, of_down, of_gate_bias, of_up_bias, of_down_bias = ctx.needs_input_grad
        weight = None
        if of_x:
            weight = joined((gate, up))
            weight = torch.cat((gate, up)) if weight is None else weight  # moved since the forward
        needs = [of_x, of_gate or of_up, of_down, of_gate_bias or of_up_bias, of_down_bias]
        # The op reads only the shape and dtype of a bias.
        bias = dy.new_empty(gate_up.shape[1]) if needs[3] else None
        down_bias = dy.new_empty(dy.shape[-1]) if of_down_bias else None
        dx, dweight, ddown, dbias, ddown_bias = torch.ops.rooftile.gated_mlp_backward(
            dy, x, weight, down, gate_up, bias, down_bias, ctx.activation, "ieee", needs
        )
        found = (dx, None, None, None, *dweight.chunk(2), ddown, *dbias.chunk(2), ddown_bias)
        return tuple(grad if need else None for grad, need in zip(found, ctx.needs_input_grad, strict=True))


# In the graphs of torch.compile. A namespace of their own: these are parts of `patch`, not ops for anybody's use.
_LINEAR = torch.library.custom_op(
    "rooftile_models::linear",
    _joint,
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
