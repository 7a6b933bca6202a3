"""What runs in the place of a model's own lines.

Each function asks first whether its op may take that place: the modules that it would bypass are what they were when
the model was patched, with no hook on them, and the dtypes are those for which the op returns what the model's own
code would. If not, that code runs, its submodules called as modules.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from rooftile.huggingface.activations import Activation
from rooftile.huggingface.families import Norm
from rooftile.library import FLOATS
from rooftile.ops.add_rms_norm import add_rms_norm
from rooftile.ops.layer_norm import layer_norm
from rooftile.ops.qk_norm_rope import qk_norm_rope
from rooftile.ops.qk_norm_rope.common import LONGEST
from rooftile.ops.rms_norm import rms_norm
from rooftile.ops.rope import Style, rope

Rotation = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# PyTorch's own, and not public: whether a hook was registered for all modules.
_has_global_hook: Callable[[], object] = getattr(nn_module, "_has_any_global_hook", lambda: False)


def is_ours(method: object) -> bool:
    # Asked in the graphs of torch.compile, too: that of PyTorch 2.11 finds no `__func__` by getattr with a default.
    return isinstance(method, types.MethodType) and hasattr(method.__func__, "_rooftile")


def is_plain(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether a call of that module does what its class's forward does, and nothing else."""
    if type(module) is not cls or _is_hooked(module):
        return False
    forward = module.__dict__.get("forward")
    return forward is None or is_ours(forward)


def _is_hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "_hf_hook" in module.__dict__
        or _has_global_hook()
    )


def _ops_take(x: Tensor, *others: Tensor | None) -> bool:
    """Whether all of them have one dtype (where they differ the model's own code promotes), and ops have it."""
    return x.dtype in FLOATS and all(other is None or other.dtype == x.dtype for other in others)


def norm_forward(norm: Norm, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    eps, offset, rounding = norm.eps, norm.offset, norm.rounding

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if not _ops_take(hidden_states, weight):
            return original(self, hidden_states)
        return rms_norm(hidden_states, weight, eps=getattr(self, eps), offset=offset, rounding=rounding)

    return forward


def layer_norm_forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if not _ops_take(input, weight, bias):
            return original(self, input)
        if input.dtype != torch.float32 and torch.is_autocast_enabled(input.device.type):  # which may return float32
            return original(self, input)
        return layer_norm(input, weight, bias, eps=self.eps)

    return forward


def add_norm(cls: type[nn.Module], norm: Norm) -> Callable[..., tuple[Tensor, Tensor]]:
    eps, offset, rounding = norm.eps, norm.offset, norm.rounding

    def add_norm(module: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if is_plain(module, cls):
            weight: Any = module.weight
            if _ops_take(x, residual, weight):
                return add_rms_norm(x, residual, weight, eps=getattr(module, eps), offset=offset, rounding=rounding)
        hidden_states = residual + x
        return module(hidden_states), hidden_states

    return add_norm


def gated(cls: type[nn.Module], ops: Activation) -> dict[str, Callable[..., Tensor]]:
    def act_mul(act: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
        if _ops_take(gate, up) and is_plain(act, cls):
            return ops.mul(gate, up)
        return act(gate) * up

    def act_mul_packed(act: nn.Module, gate_up: Tensor) -> Tensor:
        if _ops_take(gate_up) and is_plain(act, cls):
            return ops.mul_packed(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return act(gate) * up

    return {"act_mul": act_mul, "act_mul_packed": act_mul_packed}


def linear_act(cls: type[nn.Module], ops: Activation) -> Callable[..., Tensor]:
    from transformers.pytorch_utils import Conv1D

    def linear_act(linear: Any, x: Tensor, act: nn.Module) -> Tensor:
        if not _ops_take(x) or not is_plain(act, cls):
            return act(linear(x))
        # The bias is added beside the activation where nothing is lost by taking the linear layer apart.
        if is_plain(linear, nn.Linear) and _are_plain(linear.weight, linear.bias):
            h = nn.functional.linear(x, linear.weight)
        elif is_plain(linear, Conv1D) and _are_plain(linear.weight, linear.bias):
            h = x @ linear.weight
        else:
            h = linear(x)
            return ops.bias(h, None) if _ops_take(h) else act(h)
        bias = linear.bias
        # Under autocast the product has another dtype; beside that, ops take float32.
        return ops.bias(h, bias if bias.dtype in (h.dtype, torch.float32) else bias.to(h.dtype))

    return linear_act


def _are_plain(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether both are there, of one dtype, and neither quantised nor distributed."""
    plain = (Tensor, nn.Parameter)
    return bias is not None and type(weight) in plain and type(bias) in plain and weight.dtype == bias.dtype


def rotation(style: Style, original: Rotation | None) -> Rotation:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if original is not None and not _ops_take(q, cos):
            return original(q, k, cos, sin)
        return rope(q, k, cos, sin, style=style)

    return rotate


def norm_rotation(
    cls: type[nn.Module], norm: Norm, style: Style, original: Rotation | None, *, transposed: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`transposed`: q and k come as (B, T, H, D), to be transposed behind the norms."""
    eps, offset, rotate = norm.eps, norm.offset, rotation(style, original)

    def norm_and_rotate(
        q_norm: Any, k_norm: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        if is_plain(q_norm, cls) and is_plain(k_norm, cls) and getattr(q_norm, eps) == getattr(k_norm, eps):
            weights = q_norm.weight, k_norm.weight
            if q.shape[-1] <= LONGEST and _ops_take(q, k, *weights, cos, sin):
                if transposed:
                    q, k = q.transpose(1, 2), k.transpose(1, 2)
                return qk_norm_rope(q, k, *weights, cos, sin, eps=getattr(q_norm, eps), offset=offset, style=style)
        q, k = q_norm(q), k_norm(k)
        return rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin) if transposed else rotate(q, k, cos, sin)

    return norm_and_rotate
