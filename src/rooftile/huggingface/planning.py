"""Decides what `rooftile.patch` changes in a model and what it leaves, before anything is changed."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rooftile.huggingface import families, lora, loss_head, replacing
from rooftile.huggingface.families import (
    Activated,
    Attention,
    Gated,
    Layer,
    LayerNorm,
    LossHead,
    Norm,
    Part,
    part_of,
)
from rooftile.huggingface.memory import ALIGNMENT, joined
from rooftile.huggingface.replacing import KNOWN, Activation, ops_of
from rooftile.huggingface.rewrite import NotRewritable, Rebuilt, Rule, Together, UnknownCode, rebuild
from rooftile.library import FLOATS

LINEAR, QKV, GATE_UP = "linear", "q, k, v in one GEMM", "gate, up in one GEMM"
RMS_NORM, ADD_RMS_NORM, LAYER_NORM = "RMSNorm", "residual add + RMSNorm", "LayerNorm"
SWIGLU, GEGLU, BIAS_ACTIVATION = "SwiGLU", "GeGLU", "bias + activation"
ROPE, QK_NORM_ROPE, ATTENTION = "RoPE", "QK-norm + RoPE", "attention"
HEAD_LOSS = "head + cross entropy"
LORA = "LoRA"
KINDS = (
    *(RMS_NORM, ADD_RMS_NORM, LAYER_NORM, SWIGLU, GEGLU, BIAS_ACTIVATION, ROPE, QK_NORM_ROPE, HEAD_LOSS, ATTENTION),
    *(LINEAR, QKV, GATE_UP, LORA),
)
GATED = "gated activation"  # one that is neither SwiGLU nor GeGLU
# The arguments of `patch`, and the kinds that each asks for.
SWITCHES = {
    "rms_norm": (RMS_NORM,),
    "add_rms_norm": (ADD_RMS_NORM,),
    "layer_norm": (LAYER_NORM,),
    "mlp": (SWIGLU, GEGLU, GATED, BIAS_ACTIVATION),
    "rope": (ROPE, QK_NORM_ROPE),
    "linear_cross_entropy": (HEAD_LOSS,),
    "attention": (ATTENTION,),
    "linear": (LINEAR, QKV, GATE_UP),
    "lora": (LORA,),
}
SWITCHED_OFF = "switched off by the caller"
CLOSING_ADD = "the last add of a layer is the layer's output; the norm after it belongs to the next layer"
HOOKED = "_old_forward"  # where accelerate keeps the forward that its hooks wrap
WRAPPED = "_original_forward"  # and the one around which it has put mixed precision
BY_ACCELERATE = (
    "accelerate has wrapped its forward (mixed precision): patch before accelerator.prepare or the first Trainer"
)


@dataclasses.dataclass(frozen=True)
class Joint:
    """How a class's code calls several layers as one.

    `rules` are sets of rules, of which the first that matches is used; `names` are the functions they refer to.
    """

    kind: str
    rules: tuple[tuple[Rule | Together, ...], ...]
    names: Mapping[str, Callable[..., Any]]


def joint(part: Gated | Attention, activation: tuple[type[nn.Module], Activation] | None) -> Joint | None:
    """`activation`: class and ops of the activation that is fused with the GEMM of gate and up, if one is."""
    rotated = isinstance(part, Attention) and bool(part.rope) and not part.qk_norm
    together = families.joint_linears(part.layers, rotated=rotated) if len(part.layers) > 1 else ()
    names: dict[str, Callable[..., Any]] = {
        f.__name__: f for f in (replacing.joint_linear, replacing.joint_linear_of_rotated)
    }
    if isinstance(part, Attention):
        return Joint(QKV, (together,), names) if together else None
    sets: list[tuple[Rule | Together, ...]] = [together] if together else []
    if activation is not None and part.layers:
        sets.insert(0, families.gated_gemms(part.activation, part.layers, part.last))
        names |= replacing.joint_gated(*activation)
    return Joint(GATE_UP, tuple(sets), names) if sets else None


class Layers:
    """The linear layers of a model: which can be replaced, and which may be moved in memory."""

    def __init__(self, model: nn.Module) -> None:
        self.groups: list[tuple[nn.Parameter, ...]] = []
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self._in_memory = Counter(_storage(t) for t in tensors.values() if _storage(t))
        self._uses = Counter(id(p) for module in model.modules() for p in module._parameters.values())

    def check(self, layer: nn.Module) -> None:
        """
        Raises:
            NotRewritable: why the layer can't be replaced.
        """
        if parametrize.is_parametrized(layer):
            raise NotRewritable("its weight is parametrized")
        if type(layer) is not nn.Linear:
            raise NotRewritable("its class derives from torch.nn.Linear, and may compute something else")
        weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
        if weight is None:
            raise NotRewritable("its weight is not a parameter of its own")
        for name, parameter in (("weight", weight), ("bias", bias)):
            if parameter is None:
                continue
            if type(parameter) is not nn.Parameter:
                raise NotRewritable(f"its {name} is a {type(parameter).__name__}, not a plain parameter")
            if parameter.dtype not in FLOATS:
                raise NotRewritable(f"its {name} has dtype {parameter.dtype}, expected float32, float16 or bfloat16")
            if parameter.dtype != weight.dtype:
                raise NotRewritable(f"its bias has dtype {parameter.dtype} beside a weight of {weight.dtype}")
        if weight.shape != (layer.out_features, layer.in_features):
            raise NotRewritable(
                f"its weight has shape {tuple(weight.shape)}, expected ({layer.out_features}, {layer.in_features}): "
                "it is sharded"
            )

    def parameters(self, module: nn.Module, part: Gated | Attention) -> tuple[list[Any], list[Any]]:
        """The weights and the biases of the layers that become one GEMM.

        Raises:
            NotRewritable: why they can't be one GEMM.
        """
        layers: list[Any] = []
        for name in part.layers:
            layer: Any = getattr(module, name, None)
            if lora.is_lora(layer):
                raise NotRewritable(f"its {name} has a LoRA adapter: the layers are multiplied one by one")
            if not isinstance(layer, nn.Linear):
                cls = type(layer)
                raise NotRewritable(f"its {name} is a {cls.__module__}.{cls.__name__}, expected a torch.nn.Linear")
            try:
                self.check(layer)
            except NotRewritable as reason:
                raise NotRewritable(f"its {name}: {reason}") from None
            if replacing.is_hooked(layer):
                raise NotRewritable(f"its {name} has hooks")
            if not replacing.is_plain(layer, nn.Linear):
                raise NotRewritable(f"its {name}: its forward is overridden on the instance already")
            layers.append(layer)
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        if len(layers) > 1:
            self._check_together(layers, weights, biases)
        return weights, biases

    def _check_together(self, layers: Sequence[Any], weights: list[Any], biases: list[Any]) -> None:
        if len(biases) not in (0, len(layers)):
            raise NotRewritable("some of its layers have a bias and some have none")
        for what, values in (
            ("dtypes", {w.dtype for w in weights}),
            ("devices", {p.device for p in (*weights, *biases)}),
            ("input sizes", {w.shape[1] for w in weights}),
        ):
            if len(values) > 1:
                raise NotRewritable(f"its layers have several {what}: {', '.join(sorted(map(str, values)))}")
        if weights[0].is_meta:
            raise NotRewritable("its weights are on the meta device: patch after loading them")
        for parameter in (p for group in (weights, biases) if group and joined(group) is None for p in group):
            if parameter.nbytes % ALIGNMENT:
                raise NotRewritable(f"its layers have parameters whose sizes are not multiples of {ALIGNMENT} bytes")
            if self._uses[id(parameter)] > 1 or self._in_memory[_storage(parameter)] > 1:
                raise NotRewritable("its weights are tied to others, or share a storage with others")
            if parameter.untyped_storage().nbytes() != parameter.nbytes or not parameter.is_contiguous():
                raise NotRewritable("its weights are views of a larger storage, which something else may use")
            if not parameter.is_cuda and parameter.is_shared():
                raise NotRewritable("its weights are shared between processes")

    def join(self, weights: list[Any], biases: list[Any]) -> None:
        """Note which parameters have to become adjacent in memory."""
        self.groups += [tuple(group) for group in (weights, biases) if len(group) > 1 and joined(group) is None]


def _storage(t: Tensor) -> int:
    """The address of a plain tensor's storage; 0 for any other tensor, and for one without memory."""
    return t.untyped_storage().data_ptr() if type(t) in (Tensor, nn.Parameter) else 0


def notice_other(module: nn.Module) -> str | None:
    """Why a module that has matrices but is not a `torch.nn.Linear` stays; None if that needs no mention."""
    if isinstance(module, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd | parametrize.ParametrizationList):
        return None
    if any(p is not None and p.dim() > 1 for p in module._parameters.values()):
        return "its GEMMs are its own code, not a torch.nn.Linear's"
    if "Linear" in type(module).__name__ and not any(isinstance(child, nn.Linear) for child in module.modules()):
        return "its class is not torch.nn.Linear"
    return None


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A method that replaces another on a module. It replaces `count` of `kind`, and one of `also`.

    With `valid_rows`, it is a model's forward that takes a `valid_rows` option, and leaves out tokens by it.
    """

    module: nn.Module
    name: str
    method: str
    function: Callable[..., Any]
    kind: str
    count: int
    also: str = ""
    valid_rows: bool = False


class PatchPlan:
    """Collects replacements from module to module. `left` counts what stays, by kind, class and reason, and whether
    Rooftile understands the class's code."""

    def __init__(self, wanted: dict[str, bool], layers: Layers | None = None) -> None:
        self.wanted = wanted
        self.layers = layers  # None: linear layers stay as they are
        self.replacements: list[Replacement] = []
        self.left: Counter[tuple[str, str, str, bool]] = Counter()
        # Norms that their layer or attention computes; modules() yields it before them.
        self._fused: set[nn.Module] = set()
        # Linear layers whose models ask them for the loss; modules() yields the model before them.
        self._heads: set[nn.Module] = set()
        # One function per class, not per module: torch.compile traces a code object once.
        self._functions: dict[object, Any] = {}

    def leave(self, kind: str, module: nn.Module, reason: NotRewritable | str) -> None:
        understood = not isinstance(reason, UnknownCode)
        text = str(reason) if understood else f"{reason}; {families.not_understood()}"
        self.left[kind, type(module).__name__, text, understood] += 1

    def add(self, name: str, module: nn.Module, part: Part) -> None:
        if isinstance(part, LossHead):
            self._add_loss(name, module, part)
            return
        joint = self._joint(module, part)
        new = self._replacement(name, module, part, joint)
        if new is not None:
            self.replacements.append(new)
            if isinstance(part, Layer):
                self.leave("residual add", module, CLOSING_ADD)
        elif joint is not None:
            function, _ = self._once((type(module), joint.kind, *joint.key), lambda: _finished(joint.alone, None))
            self.replacements.append(Replacement(module, name, "forward", function, joint.kind, 1))

    def add_linear(self, name: str, module: nn.Module) -> None:
        """Replace a linear layer's forward, or note why it stays."""
        is_head = module in self._heads
        if not isinstance(module, nn.Linear):
            if self.layers is not None and (reason := notice_other(module)):
                self.leave(LINEAR, module, reason)
            return
        what, current = type(module), type(module).forward
        linear = False
        if self.layers is not None:
            try:
                self.layers.check(module)
                _, current = _method(module, None)
                current = self._once((what, LINEAR), functools.partial(replacing.linear_forward, current))
                linear = True
            except NotRewritable as reason:
                self.leave(LINEAR, module, reason)
        if is_head:
            current = self._once((what, HEAD_LOSS, linear), functools.partial(loss_head.head_forward, current))
        if linear or is_head:
            kinds = (LINEAR, HEAD_LOSS if is_head else "") if linear else (HEAD_LOSS, "")
            self.replacements.append(Replacement(module, name, "forward", current, kinds[0], 1, kinds[1]))

    def add_lora(self, name: str, module: nn.Module) -> None:
        """Replace the forward of a LoRA layer, or note why it stays."""
        is_head, wanted = module in self._heads, self.wanted[LORA]
        if not (wanted or is_head) or not lora.is_lora(module):
            return
        what = type(module)
        try:
            if reason := lora.why_left(module):
                raise NotRewritable(reason)
            _, current = _method(module, None)
        except NotRewritable as reason:
            self.leave(LORA, module, reason)
            return
        if wanted:
            current = self._once((what, LORA), functools.partial(lora.lora_forward, current))
        if is_head:
            current = self._once((what, HEAD_LOSS, wanted), functools.partial(lora.lora_head_forward, current))
        kinds = (LORA, HEAD_LOSS if is_head else "") if wanted else (HEAD_LOSS, "")
        self.replacements.append(Replacement(module, name, "forward", current, kinds[0], 1, kinds[1]))

    def _add_loss(self, name: str, model: nn.Module, part: LossHead) -> None:
        """Let a model ask its head for the loss, or note why not."""
        if not self.wanted[HEAD_LOSS]:
            self.leave(HEAD_LOSS, model, SWITCHED_OFF)
            return
        try:
            new, heads = self._loss(name, model, part)
        except NotRewritable as reason:
            self.leave(HEAD_LOSS, model, reason)
            return
        self.replacements += new
        self._heads.update(heads)

    def _loss(self, name: str, model: nn.Module, part: LossHead) -> tuple[list[Replacement], tuple[nn.Module, ...]]:
        """The replaced forwards from the model down to the module that calls the head, and the head's layers.

        Raises:
            NotRewritable: why the model's own loss stays.
        """
        if part.without:
            raise NotRewritable(part.without)
        _, current = _method(model, part)
        made = self._once((type(model), HEAD_LOSS), functools.partial(_asking, current))
        if made.shifts and (reason := loss_head.why_other_loss(model)):
            raise NotRewritable(reason)
        new = [Replacement(model, name, "forward", made.function, HEAD_LOSS, 0, valid_rows=made.shifts)]
        module: Any = model
        path = name
        for layer in part.layer.split("."):
            outer, module, path = module, getattr(module, layer, None), f"{path}.{layer}".lstrip(".")
            if outer is not model:
                _, current = _method(outer, None)
                function = self._once((type(outer), layer), functools.partial(_passing_on, current, layer))
                new.append(Replacement(outer, path.rpartition(".")[0], "forward", function, HEAD_LOSS, 0))
            if module is not None and any(map(loss_head.has_foreign_hooks, {module, *loss_head.wrapped(module)})):
                raise NotRewritable(f"its {part.layer} has hooks")
        heads = loss_head.wrapped(module)
        for head in heads:
            if lora.is_lora(head):
                with _named(part.layer):
                    if (unlike := lora.why_left(head)) is not None:
                        raise NotRewritable(unlike)
                    _method(head, None)
                continue
            if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
                cls = f"{type(head).__module__}.{type(head).__name__}"
                raise NotRewritable(f"its {part.layer} is a {cls}, expected a torch.nn.Linear")
            with _named(part.layer):
                _method(head, None)
                _check_head(head)
        return new, heads

    def _replacement(self, name: str, module: nn.Module, part: Part, joint: _Joined | None) -> Replacement | None:
        for kind in _kinds(module, part):
            if not self.wanted[kind]:
                if module not in self._fused:
                    self.leave(kind, module, SWITCHED_OFF)
                return None
            try:
                method, current = _method(module, part)
                function, count = self._function(kind, module, part, current, joint)
            except NotRewritable as reason:
                self.leave(kind, module, reason)
                continue
            return Replacement(module, name, method, function, kind, count, "" if joint is None else joint.kind)
        return None

    def _joint(self, module: nn.Module, part: Part) -> _Joined | None:
        """How that module's layers become one GEMM, or None."""
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
            self.leave(found.kind, module, reason)
            return None
        self.layers.join(weights, biases)
        return joined

    def notice_norm(self, module: nn.Module) -> None:
        """Note a norm that the table does not know."""
        if isinstance(part_of(module), LayerNorm):
            self.leave(LAYER_NORM, module, "no family of Rooftile's table contains it")
        elif type(module).__name__.endswith("Norm"):
            self.leave("norm", module, "its class is not in Rooftile's table of families")

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
                act = replacing.linear_act if self.layers is None else replacing.gemm_act
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
            norm = _one_norm(norms, f"what follows the add ({', '.join(names)}) is")
            key += norm
            make = functools.partial(_add_norm, current, *norm)
        made = self._once(key, lambda: _finished(make(), current if joint is None else joint.alone.function))
        self._fused.update(norm for norm in norms if replacing.is_plain(norm, type(norm)))
        return made

    def _once(self, key: object, make: Callable[[], Any]) -> Any:
        """The cached result of `make`, or the reason that it raised."""
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
    """The rules by which a method calls one GEMM instead of several, and the method with nothing else replaced."""

    kind: str
    key: tuple[object, ...]
    rules: tuple[Rule | Together, ...]
    names: Mapping[str, Callable[..., Any]]
    alone: Rebuilt


def _first(current: Callable[..., Any], found: Joint, key: tuple[object, ...]) -> _Joined:
    """With the first set of rules that matches the method."""
    *others, last = found.rules
    for some in others:
        with contextlib.suppress(NotRewritable):
            return _Joined(found.kind, key, some, found.names, rebuild(current, some, found.names))
    return _Joined(found.kind, key, last, found.names, rebuild(current, last, found.names))


@dataclasses.dataclass(frozen=True)
class _Asking:
    """A model's forward that asks its head for the loss; `shifts` if it is the model's `loss_function`."""

    function: Callable[..., Any]
    shifts: bool


def _asking(current: Callable[..., Any]) -> _Asking:
    names = {"causal_loss": loss_head.causal_loss(loss_head.transformers_loss()), "token_loss": loss_head.token_loss}
    new = rebuild(current, families.loss_head(), names)
    function, _ = _finished(loss_head.unless_logits_are_wanted(new.function, current), None)
    return _Asking(function, "KWARGS" in new.places[0])


def _passing_on(current: Callable[..., Any], layer: str) -> Callable[..., Any]:
    new = rebuild(current, families.passed_on(layer), {"ask": loss_head.ask}, "asked")
    return loss_head.can_be_asked(_finished(new, None)[0])


@contextlib.contextmanager
def _named(layer: str) -> Iterator[None]:
    """Reasons that say which layer they are about."""
    try:
        yield
    except NotRewritable as reason:
        raise type(reason)(f"its {layer}: {reason}") from None


def _check_head(layer: nn.Linear) -> None:
    weight: Any = layer.weight
    # FSDP's are DTensors now, and plain tensors when the layer is called.
    sharded = type(weight).__module__.startswith("torch.distributed.tensor")
    if type(weight) not in (Tensor, nn.Parameter) and not sharded:
        raise NotRewritable(f"its weight is a {type(weight).__name__}, not a plain parameter")
    if weight.dtype not in FLOATS:
        raise NotRewritable(f"its weight has dtype {weight.dtype}, expected float32, float16 or bfloat16")


def _kinds(module: nn.Module, part: Part) -> tuple[str, ...]:
    """The kinds that may be replaced in that module; the first that can be is."""
    if isinstance(part, Gated):
        ops = ops_of(getattr(module, part.activation, None))
        return (ops.gated if ops else GATED,)
    if isinstance(part, Attention):
        return ((QK_NORM_ROPE, ROPE) if part.qk_norm else (ROPE,)) if part.rope else ()
    return ({Norm: RMS_NORM, LayerNorm: LAYER_NORM, Activated: BIAS_ACTIVATION, Layer: ADD_RMS_NORM}[type(part)],)


def _method(module: nn.Module, part: Part | None) -> tuple[str, Callable[..., Any]]:
    """The method's name, and the class's function."""
    name = part.method if isinstance(part, Gated) else "forward"
    current = getattr(type(module), name, None)
    if current is None:
        raise UnknownCode(f"its class has no {name}")
    if name == "_apply_gate" and getattr(module.config, "_experts_implementation", "eager") == "eager":
        raise NotRewritable("config._experts_implementation is 'eager': it loops over the experts in its own code")
    if name in module.__dict__ and HOOKED not in module.__dict__ and not replacing.is_own(module, name):
        raise NotRewritable(
            BY_ACCELERATE if WRAPPED in module.__dict__ else f"its {name} is overridden on the instance already"
        )
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
    """The layer's attributes with the norms that follow its residual adds."""
    expressions = [place["NORM"] for place in rebuild(current, families.ADD_NORM, {"add_norm": None}).places]
    return [e.attr if isinstance(e, ast.Attribute) else ast.unparse(e) for e in expressions]


def _add_norm(current: Callable[..., Any], cls: type[nn.Module], norm: Norm) -> Rebuilt:
    return rebuild(current, families.ADD_NORM, {"add_norm": replacing.add_norm(cls, norm)})


def _rebuilt(
    current: Callable[..., Any], some: Sequence[Rule], names: Mapping[str, Any], joint: _Joined | None
) -> Rebuilt:
    """Rebuilt, with the rules of the joint GEMMs first; their places are not counted."""
    if joint is None:
        return rebuild(current, some, names)
    places = len(rebuild(current, some, names).places)
    new = rebuild(current, [*joint.rules, *some], {**joint.names, **names})
    return dataclasses.replace(new, places=new.places[:places])


def _gated(
    activation: str, current: Callable[..., Any], cls: type[nn.Module], ops: Activation, joint: _Joined | None
) -> Rebuilt:
    return _rebuilt(current, families.gated(activation), replacing.gated(cls, ops), joint)


def _activated(activation: str, current: Callable[..., Any], linear_act: Callable[..., Any]) -> Rebuilt:
    return rebuild(current, families.activated(activation), {"linear_act": linear_act})


def _rope(part: Attention, current: Callable[..., Any], joint: _Joined | None) -> Callable[..., Any]:
    scope = getattr(inspect.unwrap(current), "__globals__", {})
    names = {f"rope_of_{name}": replacing.rotation(style, scope.get(name)) for name, style in part.rope.items()}
    return _rebuilt(current, [rule for name in part.rope for rule in families.rope(name)], names, joint).function


def _qk_norm_rope(
    part: Attention, current: Callable[..., Any], cls: type[nn.Module], norm: Norm, joint: _Joined | None
) -> Callable[..., Any]:
    scope = getattr(inspect.unwrap(current), "__globals__", {})
    names = {
        f"{prefix}norm_rope_of_{name}": replacing.norm_rotation(
            cls, norm, style, scope.get(name), transposed=bool(prefix)
        )
        for name, style in part.rope.items()
        for prefix in ("", "transposed_")
    }
    return _rebuilt(
        current, [rule for name in part.rope for rule in families.qk_norm_rope(name)], names, joint
    ).function


def _finished(new: Callable[..., Any] | Rebuilt, compiled: Callable[..., Any] | None) -> tuple[Callable[..., Any], int]:
    """The method that is set on a module, and the number of places it replaces. In graphs that torch.compile makes for
    inference `compiled` runs instead."""
    function, count = (new.function, len(new.places)) if isinstance(new, Rebuilt) else (new, 1)
    if compiled is not None:
        function = _unless_compiled_for_inference(function, compiled)
    function._rooftile = True  # type: ignore[attr-defined]
    return function, count


def _unless_compiled_for_inference(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """`ours`, but in graphs that torch.compile makes for inference the model's own code, except for its GEMMs.

    There Inductor fuses these parts with their surroundings into fewer kernels. With ours instead, Qwen2.5-7B's
    compiled prefill on an H200 took the same time at 2048 tokens, 3 % more at 512 and 19 % more at 128. With gradients
    ours are faster, thanks to RMSNorm's backward.
    """

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        return ours(self, *args, **kwargs)

    return forward
