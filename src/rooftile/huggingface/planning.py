"""What `rooftile.patch` will change in a model, and what it leaves, decided before anything is changed."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rooftile.huggingface import replacing, rules
from rooftile.huggingface.activations import KNOWN, Activation, ops_of
from rooftile.huggingface.families import Activated, Attention, Gated, Layer, LayerNorm, Norm, Part, part_of
from rooftile.huggingface.linear import linear_act, linear_forward
from rooftile.huggingface.linear_planning import GATE_UP, LINEAR, QKV, Joint, Layers, joint, notice_other
from rooftile.huggingface.rewrite import NotRewritable, Rebuilt, Rule, Together, rebuild

RMS_NORM, ADD_RMS_NORM, LAYER_NORM = "RMSNorm", "residual add + RMSNorm", "LayerNorm"
SWIGLU, GEGLU, BIAS_ACTIVATION = "SwiGLU", "GeGLU", "bias + activation"
ROPE, QK_NORM_ROPE, ATTENTION = "RoPE", "QK-norm + RoPE", "attention"
KINDS = (
    *(RMS_NORM, ADD_RMS_NORM, LAYER_NORM, SWIGLU, GEGLU, BIAS_ACTIVATION, ROPE, QK_NORM_ROPE, ATTENTION),
    *(LINEAR, QKV, GATE_UP),
)
GATED = "gated activation"  # one that is neither SwiGLU nor GeGLU
CLOSING_ADD = "the add that closes a layer makes the layer's output; the norm behind it belongs to the next layer"
HOOKED = "_old_forward"  # where accelerate keeps the forward that its hooks wrap


@dataclasses.dataclass(frozen=True)
class Replacement:
    """The method that takes another's place on a module, and how many of `kind` it replaces; one of `also`, too."""

    module: nn.Module
    name: str
    method: str
    function: Callable[..., Any]
    kind: str
    count: int
    also: str = ""


class Plan:
    """Goes from module to module. `left` counts what stays, by kind, class and reason."""

    def __init__(self, wanted: dict[str, bool], layers: Layers | None = None) -> None:
        self.wanted = wanted
        self.layers = layers  # None: linear layers stay as they are
        self.replacements: list[Replacement] = []
        self.left: Counter[tuple[str, str, str]] = Counter()
        # Norms that their layer or attention computes; it stands before them among a model's modules.
        self._fused: set[nn.Module] = set()
        # A function per class, not per module: torch.compile traces one code object once.
        self._functions: dict[object, Any] = {}

    def add(self, name: str, module: nn.Module, part: Part) -> None:
        joint = self._joint(module, part)
        new = self._replacement(name, module, part, joint)
        if new is not None:
            self.replacements.append(new)
            if isinstance(part, Layer):
                self.left["residual add", type(module).__name__, CLOSING_ADD] += 1
        elif joint is not None:
            function, _ = self._once((type(module), joint.kind, *joint.key), lambda: _finished(joint.alone, None))
            self.replacements.append(Replacement(module, name, "forward", function, joint.kind, 1))

    def add_linear(self, name: str, module: nn.Module) -> None:
        """A linear layer's own forward, or why it stays."""
        if self.layers is None:
            return
        if not isinstance(module, nn.Linear):
            if reason := notice_other(module):
                self.left[LINEAR, type(module).__name__, reason] += 1
            return
        try:
            self.layers.check(module)
            method, current = _method(module, None)
        except NotRewritable as reason:
            self.left[LINEAR, type(module).__name__, str(reason)] += 1
            return
        function = self._once((type(module), LINEAR), lambda: linear_forward(current))
        self.replacements.append(Replacement(module, name, method, function, LINEAR, 1))

    def _replacement(self, name: str, module: nn.Module, part: Part, joint: _Joined | None) -> Replacement | None:
        what = type(module).__name__
        for kind in _kinds(module, part):
            if not self.wanted[kind]:
                if module not in self._fused:
                    self.left[kind, what, "switched off by the caller"] += 1
                return None
            try:
                method, current = _method(module, part)
                function, count = self._function(kind, module, part, current, joint)
            except NotRewritable as reason:
                self.left[kind, what, str(reason)] += 1
                continue
            return Replacement(module, name, method, function, kind, count, "" if joint is None else joint.kind)
        return None

    def _joint(self, module: nn.Module, part: Part) -> _Joined | None:
        """How that module's layers become one product, where they do."""
        if self.layers is None or not isinstance(part, Gated | Attention):
            return None
        activation = None
        if isinstance(part, Gated) and self.wanted[_kinds(module, part)[0]]:
            with contextlib.suppress(NotRewritable):
                activation = _activation(module, part)
        found = joint(part, activation)
        if found is None:
            return None
        try:
            _, current = _method(module, part)
            weights, biases = self.layers.parameters(module, part)
            key = (type(module), found.kind, activation, "rules")
            joined = self._once(key, lambda: _first(current, found, (activation,)))
        except NotRewritable as reason:
            self.left[found.kind, type(module).__name__, str(reason)] += 1
            return None
        self.layers.join(weights, biases)
        return joined

    def notice_norm(self, module: nn.Module) -> None:
        """One whose part is not known."""
        name = type(module).__name__
        if isinstance(part_of(module), LayerNorm):
            self.left[LAYER_NORM, name, "it stands in no model of Rooftile's table of families"] += 1
        elif name.endswith("Norm"):
            self.left["norm", name, "its class is not in Rooftile's table of families"] += 1

    def _function(
        self, kind: str, module: nn.Module, part: Part, current: Callable[..., Any], joint: _Joined | None
    ) -> tuple[Callable[..., Any], int]:
        key: tuple[object, ...] = (type(module), kind, joint and joint.key)
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
            if isinstance(part, Gated):
                make = functools.partial(_gated, part.activation, current, cls, ops, joint)
            else:
                act = replacing.linear_act if self.layers is None else linear_act
                make = functools.partial(_activated, part.activation, current, act(cls, ops))
        elif isinstance(part, Attention):
            if kind == ROPE:
                make = functools.partial(_rope, part, current, joint)
            else:
                norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
                norm = _one_norm(norms, "the norms of q and k are")
                key += norm
                make = functools.partial(_qk_norm_rope, part, current, *norm, joint)
        else:
            if part.without:
                raise NotRewritable(part.without)
            names = self._once((type(module), "norms"), functools.partial(_norm_names, current))
            norms = [getattr(module, name, None) for name in names]
            norm = _one_norm(norms, f"what stands behind the add ({', '.join(names)}) is")
            key += norm
            make = functools.partial(_add_norm, current, *norm)
        made = self._once(key, lambda: _finished(make(), current if joint is None else joint.alone.function))
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


@dataclasses.dataclass(frozen=True)
class _Joined:
    """The rules by which a method makes one product of several, and the method with nothing else replaced."""

    kind: str
    key: tuple[object, ...]
    rules: tuple[Rule | Together, ...]
    names: Mapping[str, Callable[..., Any]]
    alone: Rebuilt


def _first(current: Callable[..., Any], found: Joint, key: tuple[object, ...]) -> _Joined:
    """By the first set of rules that the method has a place for."""
    *others, last = found.rules
    for some in others:
        with contextlib.suppress(NotRewritable):
            return _Joined(found.kind, key, some, found.names, rebuild(current, some, found.names))
    return _Joined(found.kind, key, last, found.names, rebuild(current, last, found.names))


def _kinds(module: nn.Module, part: Part) -> tuple[str, ...]:
    """What may be replaced in that module, the first that can be."""
    if isinstance(part, Gated):
        ops = ops_of(getattr(module, part.activation, None))
        return (ops.gated if ops else GATED,)
    if isinstance(part, Attention):
        return ((QK_NORM_ROPE, ROPE) if part.qk_norm else (ROPE,)) if part.rope else ()
    return ({Norm: RMS_NORM, LayerNorm: LAYER_NORM, Activated: BIAS_ACTIVATION, Layer: ADD_RMS_NORM}[type(part)],)


def _method(module: nn.Module, part: Part | None) -> tuple[str, Callable[..., Any]]:
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


def _rebuilt(
    current: Callable[..., Any], some: Sequence[Rule], names: Mapping[str, Any], joint: _Joined | None
) -> Rebuilt:
    """With the products made one first, which are no places of the rules."""
    if joint is None:
        return rebuild(current, some, names)
    places = len(rebuild(current, some, names).places)
    new = rebuild(current, [*joint.rules, *some], {**joint.names, **names})
    return dataclasses.replace(new, places=new.places[:places])


def _gated(
    activation: str, current: Callable[..., Any], cls: type[nn.Module], ops: Activation, joint: _Joined | None
) -> Rebuilt:
    return _rebuilt(current, rules.gated(activation), replacing.gated(cls, ops), joint)


def _activated(activation: str, current: Callable[..., Any], linear_act: Callable[..., Any]) -> Rebuilt:
    return rebuild(current, rules.activated(activation), {"linear_act": linear_act})


def _rope(part: Attention, current: Callable[..., Any], joint: _Joined | None) -> Callable[..., Any]:
    scope = getattr(current, "__globals__", {})
    names = {f"rope_of_{name}": replacing.rotation(style, scope.get(name)) for name, style in part.rope.items()}
    return _rebuilt(current, [rule for name in part.rope for rule in rules.rope(name)], names, joint).function


def _qk_norm_rope(
    part: Attention, current: Callable[..., Any], cls: type[nn.Module], norm: Norm, joint: _Joined | None
) -> Callable[..., Any]:
    scope = getattr(current, "__globals__", {})
    names = {
        f"{prefix}norm_rope_of_{name}": replacing.norm_rotation(
            cls, norm, style, scope.get(name), transposed=bool(prefix)
        )
        for name, style in part.rope.items()
        for prefix in ("", "transposed_")
    }
    return _rebuilt(current, [rule for name in part.rope for rule in rules.qk_norm_rope(name)], names, joint).function


def _finished(new: Callable[..., Any] | Rebuilt, compiled: Callable[..., Any] | None) -> tuple[Callable[..., Any], int]:
    """The method as it goes onto a module, and how many places it replaces. `compiled` takes its place in a graph that
    torch.compile makes for inference."""
    function, count = (new.function, len(new.places)) if isinstance(new, Rebuilt) else (new, 1)
    if compiled is not None:
        function = _unless_compiled_for_inference(function, compiled)
    function._rooftile = True  # type: ignore[attr-defined]
    return function, count


def _unless_compiled_for_inference(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """`ours`, but the model's own code (its products aside) in a graph that torch.compile makes for inference.

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
