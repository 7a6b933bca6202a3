"""What `rooftile.patch` will change in a model, and what it leaves, decided before anything is changed."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rooftile.huggingface import replacing, rules
from rooftile.huggingface.activations import KNOWN, Activation, ops_of
from rooftile.huggingface.families import Activated, Attention, Gated, Layer, LayerNorm, Norm, Part, part_of
from rooftile.huggingface.rewrite import NotRewritable, Rebuilt, rebuild

RMS_NORM, ADD_RMS_NORM, LAYER_NORM = "RMSNorm", "residual add + RMSNorm", "LayerNorm"
SWIGLU, GEGLU, BIAS_ACTIVATION = "SwiGLU", "GeGLU", "bias + activation"
ROPE, QK_NORM_ROPE, ATTENTION = "RoPE", "QK-norm + RoPE", "attention"
KINDS = (RMS_NORM, ADD_RMS_NORM, LAYER_NORM, SWIGLU, GEGLU, BIAS_ACTIVATION, ROPE, QK_NORM_ROPE, ATTENTION)
GATED = "gated activation"  # one that is neither SwiGLU nor GeGLU
HOOKED = "_old_forward"  # where accelerate keeps the forward that its hooks wrap


@dataclasses.dataclass(frozen=True)
class Replacement:
    """The method that takes another's place on a module, and how many of `kind` it replaces."""

    module: nn.Module
    name: str
    method: str
    function: Callable[..., Any]
    kind: str
    count: int


class Plan:
    """Goes from module to module. `left` counts what stays, by kind, class and reason."""

    def __init__(self, wanted: dict[str, bool]) -> None:
        self.wanted = wanted
        self.replacements: list[Replacement] = []
        self.left: Counter[tuple[str, str, str]] = Counter()
        # Norms that their layer or attention computes; it stands before them among a model's modules.
        self._fused: set[nn.Module] = set()
        # A function per class, not per module: torch.compile traces one code object once.
        self._functions: dict[object, Any] = {}

    def add(self, name: str, module: nn.Module, part: Part) -> None:
        what = type(module).__name__
        for kind in _kinds(module, part):
            if not self.wanted[kind]:
                if module not in self._fused:
                    self.left[kind, what, "switched off by the caller"] += 1
                return
            try:
                method, current = _method(module, part)
                function, count = self._function(kind, module, part, current)
            except NotRewritable as reason:
                self.left[kind, what, str(reason)] += 1
                continue
            self.replacements.append(Replacement(module, name, method, function, kind, count))
            break
        else:
            return
        if isinstance(part, Layer):
            self.left[
                "residual add",
                what,
                "the add that closes a layer makes the layer's output; the norm behind it belongs to the next layer",
            ] += 1

    def notice_norm(self, module: nn.Module) -> None:
        """One whose part is not known."""
        name = type(module).__name__
        if isinstance(part_of(module), LayerNorm):
            self.left[LAYER_NORM, name, "it stands in no model of Rooftile's table of families"] += 1
        elif name.endswith("Norm"):
            self.left["norm", name, "its class is not in Rooftile's table of families"] += 1

    def _function(
        self, kind: str, module: nn.Module, part: Part, current: Callable[..., Any]
    ) -> tuple[Callable[..., Any], int]:
        key: tuple[object, ...] = (type(module), kind)
        make: Callable[[], Callable[..., Any] | Rebuilt]
        norms: list[Any] = []
        if isinstance(part, Norm):
            make = functools.partial(replacing.norm_forward, part, current)
        elif isinstance(part, LayerNorm):
            if len(shape := module.normalized_shape) != 1:  # type: ignore[arg-type]
                raise NotRewritable(f"it is over the last {len(shape)} dimensions, not one")  # type: ignore[arg-type]
            make = functools.partial(replacing.layer_norm_forward, current)
        elif isinstance(part, Gated | Activated):
            cls, ops = _activation(module, part)
            key += (cls, ops)
            build = _gated if isinstance(part, Gated) else _activated
            make = functools.partial(build, part.activation, current, cls, ops)
        elif isinstance(part, Attention):
            if kind == ROPE:
                make = functools.partial(_rope, part, current)
            else:
                norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
                norm = _one_norm(norms, "the norms of q and k are")
                key += norm
                make = functools.partial(_qk_norm_rope, part, current, *norm)
        else:
            if part.without:
                raise NotRewritable(part.without)
            names = self._once((type(module), "norms"), functools.partial(_norm_names, current))
            norms = [getattr(module, name, None) for name in names]
            norm = _one_norm(norms, f"what stands behind the add ({', '.join(names)}) is")
            key += norm
            make = functools.partial(_add_norm, current, *norm)
        made = self._once(key, lambda: _finished(make(), current))
        self._fused.update(norm for norm in norms if replacing.is_plain(norm, type(norm)))
        return made

    def _once(self, key: object, make: Callable[[], Any]) -> Any:
        """The result of `make`, or the reason that it raised, remembered."""
        if key not in self._functions:
            try:
                self._functions[key] = make()
            except NotRewritable as reason:
                self._functions[key] = reason
        if isinstance(found := self._functions[key], NotRewritable):
            raise found
        return found


def _kinds(module: nn.Module, part: Part) -> tuple[str, ...]:
    """What may be replaced in that module, the first that can be."""
    if isinstance(part, Gated):
        ops = ops_of(getattr(module, part.activation, None))
        return (ops.gated if ops else GATED,)
    if isinstance(part, Attention):
        return (QK_NORM_ROPE, ROPE) if part.qk_norm else (ROPE,)
    return ({Norm: RMS_NORM, LayerNorm: LAYER_NORM, Activated: BIAS_ACTIVATION, Layer: ADD_RMS_NORM}[type(part)],)


def _method(module: nn.Module, part: Part) -> tuple[str, Callable[..., Any]]:
    """Under which name the method is found, and the class's own function."""
    name = part.method if isinstance(part, Gated) else "forward"
    current = getattr(type(module), name, None)
    if current is None:
        raise NotRewritable(f"its class has no {name}")
    if name == "_apply_gate" and getattr(module.config, "_experts_implementation", "eager") == "eager":
        raise NotRewritable("config._experts_implementation is 'eager': it loops over the experts in its own code")
    if name in module.__dict__ and HOOKED not in module.__dict__:
        raise NotRewritable(f"its {name} is overridden on the instance already")
    return name, current


def _activation(module: nn.Module, part: Gated | Activated) -> tuple[type[nn.Module], Activation]:
    activation = getattr(module, part.activation, None)
    ops = ops_of(activation)
    if ops is None:
        raise NotRewritable(f"its activation is {type(activation).__name__}, expected {KNOWN}")
    return type(activation), ops  # type: ignore[return-value]


def _one_norm(modules: Sequence[object], what: str) -> tuple[type[nn.Module], Norm]:
    """The class of those modules, which is one RMSNorm, and its part."""
    classes = {type(module): part_of(module) for module in modules}
    if len(classes) == 1:
        ((cls, part),) = classes.items()
        if isinstance(part, Norm):
            return cls, part  # type: ignore[return-value]
    raise NotRewritable(f"{what} not an RMSNorm of the family")


def _norm_names(current: Callable[..., Any]) -> list[str]:
    """The attributes of the layer that hold the norms behind its residual adds."""
    expressions = [place["NORM"] for place in rebuild(current, rules.ADD_NORM, {"add_norm": None}).places]
    return [e.attr if isinstance(e, ast.Attribute) else ast.unparse(e) for e in expressions]


def _add_norm(current: Callable[..., Any], cls: type[nn.Module], norm: Norm) -> Rebuilt:
    return rebuild(current, rules.ADD_NORM, {"add_norm": replacing.add_norm(cls, norm)})


def _gated(activation: str, current: Callable[..., Any], cls: type[nn.Module], ops: Activation) -> Rebuilt:
    return rebuild(current, rules.gated(activation), replacing.gated(cls, ops))


def _activated(activation: str, current: Callable[..., Any], cls: type[nn.Module], ops: Activation) -> Rebuilt:
    return rebuild(current, rules.activated(activation), {"linear_act": replacing.linear_act(cls, ops)})


def _rope(part: Attention, current: Callable[..., Any]) -> Callable[..., Any]:
    scope = getattr(current, "__globals__", {})
    names = {f"rope_of_{name}": replacing.rotation(style, scope.get(name)) for name, style in part.rope.items()}
    return rebuild(current, [rule for name in part.rope for rule in rules.rope(name)], names).function


def _qk_norm_rope(part: Attention, current: Callable[..., Any], cls: type[nn.Module], norm: Norm) -> Callable[..., Any]:
    scope = getattr(current, "__globals__", {})
    names = {
        f"{prefix}norm_rope_of_{name}": replacing.norm_rotation(
            cls, norm, style, scope.get(name), transposed=bool(prefix)
        )
        for name, style in part.rope.items()
        for prefix in ("", "transposed_")
    }
    return rebuild(current, [rule for name in part.rope for rule in rules.qk_norm_rope(name)], names).function


def _finished(new: Callable[..., Any] | Rebuilt, current: Callable[..., Any]) -> tuple[Callable[..., Any], int]:
    """The method as it goes onto a module, and how many places it replaces."""
    function, count = (new.function, len(new.places)) if isinstance(new, Rebuilt) else (new, 1)
    function = _unless_compiled_for_inference(function, current)
    function._rooftile = True  # type: ignore[attr-defined]
    return function, count


def _unless_compiled_for_inference(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """`ours`, but the model's own code in a graph that torch.compile makes for inference.

    There Inductor fuses these parts with what stands around them and starts the fewest kernels: with ours in their
    place, Qwen2.5-7B's compiled prefill on an H200 took as long at 2048 tokens, 3 % longer at 512 and 19 % at 128. With
    gradients it is ours that are ahead, by the backward of RMSNorm.
    """

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        return ours(self, *args, **kwargs)

    return forward
