"""`rooftile.patch`: one model instance gets Rooftile's kernels, and can be given back as it was.

A module is changed by putting a `forward` of its own on the instance, in front of its class's; nothing process-wide is
touched. The norms' forward is written here; those of MLPs, attentions and layers are the model's own code with the
lines in question replaced (`rewrite.py`), compiled once per class.

The projections, the attention and every other submodule are still called as modules: adapters (PEFT), hooks, FSDP and
gradient checkpointing work as before. Where a tensor's dtype is not what the kernels would return the same dtype for
(float32 norm weights over a bfloat16 stream, say), the model's own code runs.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from rooftile.huggingface import families
from rooftile.huggingface.families import Attention, Gated, Layer, Norm, Part
from rooftile.huggingface.rewrite import NotRewritable, rebuild
from rooftile.ops.add_rms_norm import add_rms_norm
from rooftile.ops.rms_norm import rms_norm
from rooftile.ops.rope import Style, rope
from rooftile.ops.silu_mul import silu_mul, silu_mul_packed

RMS_NORM, ADD_RMS_NORM, SWIGLU, ROPE = "RMSNorm", "residual add + RMSNorm", "SwiGLU", "RoPE"
KINDS = (RMS_NORM, ADD_RMS_NORM, SWIGLU, ROPE)
HOOKED = "_old_forward"  # where accelerate keeps the forward that its hooks wrap


@dataclasses.dataclass(frozen=True)
class Left:
    """Something that the patch did not replace: how many of them, and why."""

    kind: str
    what: str
    count: int
    reason: str

    def __str__(self) -> str:
        return f"{self.count} {self.kind} ({self.what}): {self.reason}"


@dataclasses.dataclass
class _Change:
    """A method put on one module instance, in front of its class's. `kinds` counts what the method replaces."""

    module: nn.Module
    name: str
    method: str
    function: Callable[..., Any]
    kinds: dict[str, int]

    def apply(self) -> None:
        # accelerate's hooks stay in front: they call what stands under _old_forward.
        hooked = self.method == "forward" and HOOKED in self.module.__dict__
        setattr(self.module, HOOKED if hooked else self.method, types.MethodType(self.function, self.module))

    def slot(self) -> str:
        """Where the method stands now: hooks may have come or gone since."""
        for slot in (self.method, HOOKED):
            if getattr(self.module.__dict__.get(slot), "__func__", None) is self.function:
                return slot
        raise RuntimeError(
            f"PatchHandle.undo: {self.name}.{self.method} was overridden after the patch; remove that override first"
        )

    def revert(self, module: nn.Module, slot: str) -> None:
        if slot == HOOKED:
            setattr(module, slot, types.MethodType(getattr(type(module), self.method), module))
        else:
            delattr(module, slot)


class PatchHandle:
    """What `rooftile.patch` did to a model.

    Attributes:
        replaced: how many of each kind: `"RMSNorm"`, `"SwiGLU"`, `"RoPE"`, and `"residual add + RMSNorm"` for the adds
            that were fused with the RMSNorm behind them (which is one of those under `"RMSNorm"`, too).
        modules: by kind, the names of the modules in which it was replaced.
        left: what was not replaced, with the reason.
        active: False once it was undone.

    As a context manager it undoes the patch when the block is left, also by an exception.
    """

    def __init__(self, model: nn.Module, changes: list[_Change], left: tuple[Left, ...]) -> None:
        self.replaced: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.modules: dict[str, tuple[str, ...]] = dict.fromkeys(KINDS, ())
        for change in changes:
            for kind, count in change.kinds.items():
                self.replaced[kind] += count
                self.modules[kind] += (change.name,)
        self.left = left
        self.active = True
        self._model = model
        self._changes = changes

    def undo(self) -> None:
        """Put the model back as it was: the same methods, so the same results to the bit. A second call does nothing.

        Raises:
            RuntimeError: a module's `forward` was overridden after the patch by something other than accelerate's
                hooks; nothing is changed then.
        """
        if not self.active:
            return
        slots = [(change, change.slot()) for change in self._changes]
        for change, slot in slots:
            change.revert(change.module, slot)
        # Copies that a wrapper made since (PEFT's modules_to_save) carry the patch, and lose it, too.
        changes: dict[object, _Change] = {change.function: change for change in self._changes}
        for module in self._model.modules():
            for slot, method in list(module.__dict__.items()):
                if (copied := changes.get(getattr(method, "__func__", None))) is not None:
                    copied.revert(module, slot)
        self.active = False

    def __enter__(self) -> PatchHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in self.replaced.items())
        return f"<PatchHandle {'active' if self.active else 'undone'}: {counts}>"

    def __str__(self) -> str:
        replaced = [f"replaced: {count} {kind}" for kind, count in self.replaced.items() if count]
        return "\n".join([*replaced, *(f"left: {left}" for left in self.left)])


def patch(
    model: nn.Module, *, rms_norm: bool = True, add_rms_norm: bool = True, mlp: bool = True, rope: bool = True
) -> PatchHandle:
    """Replace the norms, MLP activations and RoPE of *this* Hugging Face model by Rooftile's kernels.

    Args:
        model: a transformers model or anything that holds one (a PEFT model, say), of a family that Rooftile knows. Its
            parameters, state_dict, class and configuration are unchanged; other instances are not touched.
            Patch before `torch.compile`, which for inference keeps the model's own code: Inductor fuses that better.
            A deep copy carries the patch; what is pickled does not.
        rms_norm: replace RMSNorm modules.
        add_rms_norm: fuse a residual add with the RMSNorm behind it, where both stand in one layer's code.
        mlp: replace `silu(gate) * up`. Other activations are left.
        rope: replace the rotation of q and k, both in one launch.

    Returns:
        A `PatchHandle`: counts what was replaced, says what was left and why, and reverts with `.undo()` or as a
        context manager.

    Raises:
        TypeError: `model` is not a `torch.nn.Module`.
        ValueError: no module of it is of a known family, it is patched already, or it is compiled already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model is a {type(model).__name__}, expected a torch.nn.Module")
    known: list[tuple[str, nn.Module, Part]] = []
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            raise ValueError(f"patch: {name or 'the model'} is compiled already; patch it first, then compile it")
        if any(_is_ours(method) for method in module.__dict__.values()):
            raise ValueError(
                f"patch: model is patched already ({name or type(module).__name__}); undo that patch first"
            )
        if (part := families.part_of(module)) is not None:
            known.append((name, module, part))
    if not known:
        raise ValueError(
            f"patch: {type(model).__name__} is no model that Rooftile knows; "
            f"known are transformers' {', '.join(families.TITLES)}"
        )
    plan = _Plan({RMS_NORM: rms_norm, ADD_RMS_NORM: add_rms_norm, SWIGLU: mlp, ROPE: rope})
    for name, module, part in known:
        plan.add(name, module, part)
    plan.notice_unknown_norms(model)
    handle = PatchHandle(model, plan.changes, plan.leftovers())
    for change in plan.changes:
        change.apply()
    return handle


def _is_ours(method: object) -> bool:
    return hasattr(getattr(method, "__func__", None), "_rooftile")


class _Plan:
    """Decides, module by module, what changes; nothing is changed while it is made."""

    def __init__(self, wanted: dict[str, bool]) -> None:
        self.wanted = wanted
        self.changes: list[_Change] = []
        self._left: Counter[tuple[str, str, str]] = Counter()
        # A function per class, not per module: torch.compile traces one code object once.
        self._functions: dict[object, Any] = {}

    def add(self, name: str, module: nn.Module, part: Part) -> None:
        kind = {Norm: RMS_NORM, Gated: SWIGLU, Attention: ROPE, Layer: ADD_RMS_NORM}[type(part)]
        what = type(module).__name__
        try:
            if not self.wanted[kind]:
                raise NotRewritable("switched off by the caller")
            method, current = self._method(module, part)
            function, count = self._function(module, part, current)
        except NotRewritable as reason:
            self._leave(kind, what, str(reason))
            return
        self.changes.append(_Change(module, name, method, function, {kind: count}))
        if isinstance(part, Layer):
            self._leave(
                "residual add",
                what,
                "the add that closes a layer makes the layer's output; the norm behind it belongs to the next layer",
            )

    def leftovers(self) -> tuple[Left, ...]:
        return tuple(Left(kind, what, count, reason) for (kind, what, reason), count in self._left.items())

    def notice_unknown_norms(self, model: nn.Module) -> None:
        for module in model.modules():
            name = type(module).__name__
            if name.endswith("Norm") and families.part_of(module) is None:
                self._leave("norm", name, "its class is not in Rooftile's table of families")

    def _leave(self, kind: str, what: str, reason: str) -> None:
        self._left[kind, what, reason] += 1

    @staticmethod
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

    def _function(self, module: nn.Module, part: Part, current: Callable[..., Any]) -> tuple[Callable[..., Any], int]:
        if isinstance(part, Layer):
            return self._layer(module, current)
        if isinstance(part, Gated):
            activation = getattr(module, part.activation, None)
            if not _is_silu(activation):
                raise NotRewritable(f"its activation is {type(activation).__name__}, not SiLU")
        return self._once((type(module), type(part)), lambda: _build(part, current))

    def _layer(self, layer: nn.Module, current: Callable[..., Any]) -> tuple[Callable[..., Any], int]:
        names = self._once((type(layer), "norms"), lambda: _norm_names(current))
        norms = [(type(norm), families.part_of(norm)) for norm in (getattr(layer, name, None) for name in names)]
        if len(set(norms)) != 1 or not isinstance(norms[0][1], Norm):
            raise NotRewritable(f"what stands behind the add ({', '.join(names)}) is not an RMSNorm of the family")
        cls, norm = cast("tuple[type[nn.Module], Norm]", norms[0])
        return self._once((type(layer), cls), lambda: _build(Layer(), current, _add_norm(cls, norm)))

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


def _is_silu(activation: object) -> bool:
    # transformers has a class of its own for it.
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"


def _build(part: Part, current: Callable[..., Any], add_norm: Callable[..., Any] | None = None) -> tuple[Any, int]:
    """The method that takes `current`'s place, and how many places it replaces."""
    count = 1
    if isinstance(part, Norm):
        function = _norm_forward(part, current)
    elif isinstance(part, Gated):
        rebuilt = rebuild(
            current, families.gated_rules(part.activation), {"silu_mul": _silu_mul, "silu_mul_packed": silu_mul_packed}
        )
        function, count = rebuilt.function, len(rebuilt.places)
    elif isinstance(part, Attention):
        rules = [families.rope_rule(name) for name in part.rope]
        originals = {name: getattr(current, "__globals__", {}).get(name) for name in part.rope}
        names = {f"rope_of_{name}": _rotate(style, originals[name]) for name, style in part.rope.items()}
        function = rebuild(current, rules, names).function
    else:
        rebuilt = rebuild(current, families.ADD_NORM, {"add_norm": add_norm})
        function, count = rebuilt.function, len(rebuilt.places)
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


def _norm_names(current: Callable[..., Any]) -> list[str]:
    """The attributes of the layer that hold the norms behind its residual adds."""
    expressions = [place["NORM"] for place in rebuild(current, families.ADD_NORM, {"add_norm": None}).places]
    return [e.attr if isinstance(e, ast.Attribute) else ast.unparse(e) for e in expressions]


def _norm_forward(norm: Norm, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    eps, offset, rounding = norm.eps, norm.offset, norm.rounding

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if hidden_states.dtype != weight.dtype:  # the model's own code promotes
            return original(self, hidden_states)
        return rms_norm(hidden_states, weight, eps=getattr(self, eps), offset=offset, rounding=rounding)

    forward.__qualname__, forward.__doc__ = original.__qualname__, original.__doc__
    return forward


def _add_norm(cls: type[nn.Module], norm: Norm) -> Callable[..., tuple[Tensor, Tensor]]:
    eps, offset, rounding = norm.eps, norm.offset, norm.rounding

    def add_norm(module: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        # A norm that someone wrapped or hooked since is called as the module it is.
        if type(module) is cls and x.dtype == residual.dtype and not _is_hooked(module):
            weight: Any = module.weight
            if x.dtype == weight.dtype:
                return add_rms_norm(x, residual, weight, eps=getattr(module, eps), offset=offset, rounding=rounding)
        hidden_states = residual + x
        return module(hidden_states), hidden_states

    return add_norm


def _is_hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "_hf_hook" in module.__dict__
    )


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    if gate.dtype != up.dtype:
        return nn.functional.silu(gate) * up
    return silu_mul(gate, up)


def _rotate(
    style: Style, original: Callable[..., tuple[Tensor, Tensor]] | None
) -> Callable[..., tuple[Tensor, Tensor]]:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if q.dtype != cos.dtype and original is not None:  # the model's own code promotes
            return original(q, k, cos, sin)
        return rope(q, k, cos, sin, style=style)

    return rotate
