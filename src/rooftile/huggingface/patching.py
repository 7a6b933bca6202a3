"""`rooftile.patch`: one model instance gets Rooftile's kernels, and `undo` restores it.

A module is changed by setting a `forward` on the instance, which hides its class's; nothing process-wide is touched.
The norms get a new forward; those of MLPs, attentions and layers are the model's own code with the
lines in question replaced (`rewrite.py`), compiled once per class. `families.py` says which classes and lines it knows,
`planning.py` decides what is changed, `replacing.py` holds what runs in place of the model's lines, and `memory.py`
makes weights adjacent that are to be one GEMM.

Submodules are still called as modules, except for plain ones whose work is fused: adapters (PEFT), hooks, FSDP and
gradient checkpointing work as before. The model's own code runs where dtypes differ such that it would return another
dtype than the kernels (float32 norm weights with bfloat16 inputs, say), and for dtypes that the kernels lack (float64).
"""

from __future__ import annotations

import copy
import dataclasses
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from rooftile.errors import checks_keywords, did_you_mean
from rooftile.huggingface import families, lora, loss_head
from rooftile.huggingface.attention import Switch
from rooftile.huggingface.memory import Memory
from rooftile.huggingface.planning import (
    ATTENTION,
    BY_ACCELERATE,
    HEAD_LOSS,
    HOOKED,
    KINDS,
    SWITCHES,
    WRAPPED,
    Layers,
    PatchPlan,
    Replacement,
)
from rooftile.huggingface.replacing import is_ours, is_own

_HANDLE = "_rooftile_patch"  # where a patched model keeps its handle


@dataclasses.dataclass(frozen=True)
class Left:
    """What the patch did not replace: a count and a reason.

    `understood` is False where the code of this version of transformers is not as Rooftile knows it, and True where
    Rooftile leaves it by design.
    """

    kind: str
    what: str
    count: int
    reason: str
    understood: bool = True

    def __str__(self) -> str:
        return f"{self.count} {self.kind} ({self.what}): {self.reason}"


def _apply(new: Replacement) -> None:
    # accelerate's hooks stay: they call what is stored as _old_forward.
    hooked = new.method == "forward" and HOOKED in new.module.__dict__
    setattr(new.module, HOOKED if hooked else new.method, types.MethodType(new.function, new.module))


def _slot(new: Replacement) -> str | None:
    """Where the method is now: hooks may have been added or removed since. None where it is no attribute of the module
    any more, or is inside accelerate's mixed precision, which calls a replaced model of which nothing else is replaced:
    that runs the model's own lines."""
    module = new.module.__dict__
    for slot in (new.method, HOOKED):
        if getattr(module.get(slot), "__func__", None) is new.function:
            return slot
    override = module.get(new.method)
    if override is None or is_own(new.module, new.method):  # accelerate's unwrap_model took the patch away, too
        return None
    function: Any = getattr(override, "__func__", override)
    if new.kind == HEAD_LOSS and WRAPPED in module:
        inner = function
        while inner is not None and inner is not new.function:
            inner = getattr(inner, "__wrapped__", None)
        if inner is not None:
            return None
    where = new.name or type(new.module).__name__
    by = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', type(function).__name__)}"
    raise RuntimeError(
        f"PatchHandle.undo: {where}.{new.method} was overridden after the patch, by {by}; remove that override first"
    )


def _revert(new: Replacement, module: nn.Module, slot: str) -> None:
    if slot == new.method:
        delattr(module, slot)
    else:
        setattr(module, slot, types.MethodType(getattr(type(module), new.method), module))


class PatchHandle:
    """What `rooftile.patch` did to a model.

    Attributes:
        replaced: the count of each kind: `"RMSNorm"`, `"LayerNorm"`, `"SwiGLU"`, `"GeGLU"`, `"RoPE"`,
            `"bias + activation"` for an activation after a linear layer (a plain layer's bias is fused too), and two
            that are fused with RMSNorms, which `"RMSNorm"` counts too (unless `rms_norm=False`):
            `"residual add + RMSNorm"` for adds followed by a norm, and `"QK-norm + RoPE"` for rotations of normalized q
            and k (which `"RoPE"` does not count). `"head + cross entropy"` counts the heads that compute the loss
            without logits, `"attention"` the modules whose attention is Rooftile's, `"linear"` all linear layers, and
            `"q, k, v in one GEMM"` and `"gate, up in one GEMM"` the modules that make one GEMM of several of those, and
            `"LoRA"` PEFT's LoRA layers.
        modules: for each kind, the names of the modules where it was replaced.
        left: what was not replaced, with the reasons. `understood` is False for code that Rooftile does not understand
            in this version of transformers, and True for what it leaves by design.
        switches: the switches of `patch`. `print(handle)` names those that are off, and those that are on but found
            nothing in the model.
        active: False after `undo`.
        skip_logits: whether a model that gets labels returns its loss alone; None, the default, is in training only.
            May be set. The `skip_logits` of a call goes first.

    As a context manager it undoes the patch when the block ends, also by an exception.
    """

    def __init__(
        self,
        model: nn.Module,
        replacements: Sequence[Replacement],
        left: tuple[Left, ...],
        switches: Mapping[str, bool],
        attention: Switch | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.replaced: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.modules: dict[str, tuple[str, ...]] = dict.fromkeys(KINDS, ())
        for new in replacements:
            if new.count:
                self.replaced[new.kind] += new.count
                self.modules[new.kind] += (new.name,)
            if new.also:
                self.replaced[new.also] += 1
                self.modules[new.also] += (new.name,)
        if attention is not None:
            self.replaced[ATTENTION], self.modules[ATTENTION] = len(attention.names), attention.names
        self.left = left
        self.switches = dict(switches)
        self.active = True
        self._model = model
        self._replacements = replacements
        self._attention = attention
        self._memory = memory
        # For `unpatch`. Not set by Module.__setattr__, because it is not a part of the model.
        model.__dict__[_HANDLE] = self

    @property
    def skip_logits(self) -> bool | None:
        return next((m.__dict__[loss_head.SKIP] for m in self._with_loss() if loss_head.SKIP in m.__dict__), None)

    @skip_logits.setter
    def skip_logits(self, skip: bool | None) -> None:
        if skip is not None and not isinstance(skip, bool):
            raise TypeError(f"PatchHandle: skip_logits is {skip!r}, expected True, False or None")
        for module in self._with_loss():
            module.__dict__.pop(loss_head.SKIP, None)
            if skip is not None:
                module.__dict__[loss_head.SKIP] = skip

    @property
    def takes_valid_rows(self) -> bool:
        """Whether the model computes a loss without logits that leaves out tokens by the `valid_rows` of the call."""
        return any(new.valid_rows for new in self._replacements)

    def _with_loss(self) -> Iterator[nn.Module]:
        return (new.module for new in self._replacements if new.kind == HEAD_LOSS and not new.count)

    @staticmethod
    def of(model: nn.Module) -> PatchHandle | None:
        """The handle of the patch of that model, or of a model inside it; None if nothing is patched."""
        return next(_handles(model), None)

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchHandle:
        """A copied model carries the patch, with a handle of its own."""
        new = object.__new__(PatchHandle)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def __copy__(self) -> PatchHandle:
        return self

    def __reduce__(self) -> Any:
        """A pickled model carries no patch: its handle becomes None, and its configurations name the attention that
        they had before."""
        return (type(None), ()) if self._attention is None else (Switch.undo, (self._attention,))

    def undo(self) -> None:
        """Restore the model's own methods; its results are bit-identical to those before. A second call does nothing.

        Weights that were moved next to each other get memory of their own again, a group at a time. What accelerate
        has put around a `forward` since the patch, its hooks or the mixed precision of `Trainer(bf16=True)`, stays.

        Raises:
            RuntimeError: something else has overridden a module's `forward` since the patch. Nothing has changed then.
        """
        if not self.active:
            return
        slots = [(new, _slot(new)) for new in self._replacements]
        self.skip_logits = None
        for new, slot in slots:
            if slot is not None:
                _revert(new, new.module, slot)
        if self._attention is not None:
            self._attention.undo()
        if self._memory is not None:
            self._memory.undo()
        # Copies that a wrapper made since carry the patch too: PEFT's modules_to_save, accelerate's WRAPPED.
        ours: dict[object, Replacement] = {new.function: new for new in self._replacements}
        for module in self._model.modules():
            for slot, method in list(module.__dict__.items()):
                if (copied := ours.get(getattr(method, "__func__", None))) is not None:
                    _revert(copied, module, slot)
        self.active = False
        del self._model.__dict__[_HANDLE]

    def __enter__(self) -> PatchHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in self.replaced.items() if count)
        return f"<PatchHandle {'active' if self.active else 'undone'}: {counts or 'nothing replaced'}>"

    def __str__(self) -> str:
        verb = "replaced" if self.active else "undone; had replaced"
        replaced = [f"{verb}: {count} {kind}" for kind, count in self.replaced.items() if count]
        lines = [*replaced, *(f"left: {left}" for left in self.left)]
        mentioned = {kind for kind, count in self.replaced.items() if count} | {left.kind for left in self.left}
        found_none = [name for name, on in self.switches.items() if on and mentioned.isdisjoint(SWITCHES[name])]
        if found_none:
            hint = "; get_peft_model makes LoRA layers: patch after it" if "lora" in found_none else ""
            lines.append(f"on, but the model has none: {', '.join(found_none)}{hint}")
        if off := [name for name, on in self.switches.items() if not on]:
            adapted = 0 if self.switches["lora"] else sum(map(lora.is_lora, self._model.modules()))
            hint = f" ({adapted} layers; lora=True)" if adapted else ""  # of the last switch
            lines.append(f"off: {', '.join(off)}{hint}")
        return "\n".join(lines)


def _handles(model: nn.Module) -> Iterator[PatchHandle]:
    """The patches of the model and of its parts."""
    for module in model.modules():
        if (handle := module.__dict__.get(_HANDLE)) is not None:
            yield handle


def unpatch(model: nn.Module) -> None:
    """Undo `rooftile.patch` without its handle: the same as `handle.undo()` for each patch in the model.

    Args:
        model: a patched model, a copy of one, or a module that contains one.

    Raises:
        TypeError: `model` is not a `torch.nn.Module`.
        ValueError: nothing in it is patched.
        RuntimeError: as `PatchHandle.undo`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unpatch: model is a {type(model).__name__}, expected a torch.nn.Module")
    handles = list(_handles(model))
    if not handles:
        raise ValueError(
            f"unpatch: {type(model).__name__} is not patched, expected a model that rooftile.patch changed"
        )
    for handle in handles:
        handle.undo()


def check_switches(caller: str, switches: Mapping[str, object]) -> None:
    """
    Raises:
        TypeError: `patch` has no such switch, or one is not a bool.
    """
    for name, value in switches.items():
        if name not in SWITCHES:
            raise TypeError(f"{caller}: {name} is not a switch of rooftile.patch; {did_you_mean(name, SWITCHES)}")
        if not isinstance(value, bool):
            raise TypeError(f"{caller}: {name} is {value!r}, expected True or False")


@checks_keywords
def patch(
    model: nn.Module,
    *,
    rms_norm: bool = True,
    add_rms_norm: bool = True,
    layer_norm: bool = True,
    mlp: bool = True,
    rope: bool = True,
    linear_cross_entropy: bool = True,
    attention: bool = False,
    linear: bool = False,
    lora: bool = False,
) -> PatchHandle:
    """Compute norms, activations, RoPE, the loss, attention and GEMMs of *this* model by Rooftile's kernels.

    Args:
        model: a transformers model or a module that contains one (a PEFT model, say), of a family that Rooftile knows.
            Its parameters, state_dict and class do not change, nor does its configuration, except by `attention`. Other
            instances are not touched.
            Patch before `torch.compile`. In graphs compiled for inference the model's own code stays, because Inductor
            fuses it better.
            A deep copy carries the patch; a pickled model does not.
        rms_norm: replace RMSNorm modules. Norms that are fused with an add or a rotation do not depend on this switch.
        add_rms_norm: fuse a residual add with the RMSNorm that follows it in one layer's code.
        layer_norm: replace `torch.nn.LayerNorm` modules inside the model.
        mlp: replace `act(gate) * up`, and `act(linear(x))` in MLPs without a gate, where `act` is SiLU, GELU or GELU's
            tanh form. In the latter the linear layer's bias is added in the activation's kernel.
        rope: replace the rotation of q and k by one launch, which includes per-head norms of q and k.
        linear_cross_entropy: in training, where the model gets labels, compute its loss by
            `rooftile.linear_cross_entropy`, without the logits: `logits` of the output is None. In evaluation logits
            are returned. `model(..., skip_logits=False)` asks for them in training too, and `skip_logits=True` for the
            loss alone in evaluation. The loss is the same as transformers': `num_items_in_batch`, `shift_labels`,
            `ignore_index`, soft caps and scaling of logits, and tied weights are kept. A loss that you set as
            `model.loss_function` is left.
        attention: compute attention by `rooftile.attention` and `rooftile.decode_attention`, as
            `attn_implementation="rooftile"` does (see `rooftile.register_attention`). This changes the model's
            configuration, and so every model that shares the configuration object. `output_attentions=True` then gives
            a warning and no weights.
        linear: compute every `torch.nn.Linear` of the model by `rooftile.linear`: the projections of q, k and v as one
            GEMM, gate and up with their activation as one kernel. Their weights are moved next to each other in memory,
            group by group: parameters stay the same objects with the same values, and memory grows by one group during
            the copy. Patch the model on its final device: weights that are moved or converted later are no longer
            adjacent, and are multiplied one by one.
        lora: compute PEFT's LoRA layers by `rooftile.lora_linear`: the layer and its one active adapter. Adapters that
            PEFT keeps in float32 beside 16-bit layers are multiplied in the layer's dtype, as under autocast. PEFT's
            own code computes the others: merged, disabled or several active adapters, DoRA, and quantized layers.

    Returns:
        A `PatchHandle`: it counts what was replaced, lists what was left and why, and reverts with `.undo()` or as a
        context manager.

    Raises:
        TypeError: `model` is not a `torch.nn.Module`, or a switch is not a bool.
        ValueError: it has no module of a known family, or is patched or compiled already.

    Warns:
        UserWarning: Rooftile does not understand some code of this version of transformers, and leaves it; or leaves
            the loss, because accelerate has wrapped the model's forward.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model is a {type(model).__name__}, expected a torch.nn.Module")
    switches = {
        "rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "layer_norm": layer_norm, "mlp": mlp, "rope": rope,
        "linear_cross_entropy": linear_cross_entropy, "attention": attention, "linear": linear,
        "lora": lora,
    }  # fmt: skip
    check_switches("patch", switches)
    wanted = {kind: switches[name] for name, kinds in SWITCHES.items() for kind in kinds}
    plan = PatchPlan(wanted, Layers(model) if linear else None)
    if any(True for _ in _handles(model)):
        raise ValueError(
            "patch: model is patched already; undo that patch first, by its handle or rooftile.unpatch(model)"
        )
    known = False
    for name, module, part in families.parts_of(model):
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            raise ValueError(f"patch: {name or 'the model'} is compiled already; patch it first, then compile it")
        if any(is_ours(method) for method in module.__dict__.values()):
            raise ValueError(
                f"patch: model is patched already ({name or type(module).__name__}); undo that patch first, by its "
                "handle or rooftile.unpatch(model)"
            )
        if part is None:
            plan.notice_norm(module)
        else:
            known = True
            plan.add(name, module, part)
        plan.add_linear(name, module)
        plan.add_lora(name, module)
    if not known:
        raise ValueError(
            f"patch: {type(model).__name__} is not a model that Rooftile knows; "
            f"known are transformers' {', '.join(families.TITLES)}"
        )
    left = tuple(Left(kind, what, n, reason, known) for (kind, what, reason, known), n in plan.left.items())
    memory = None if plan.layers is None else Memory(plan.layers.groups)
    switch = Switch(model) if attention else None
    if switch is not None and not switch.names:
        left += (Left(ATTENTION, type(model).__name__, 1, "it does not ask transformers for an attention by name"),)
    handle = PatchHandle(model, plan.replacements, left, switches, switch, memory)
    for new in plan.replacements:
        _apply(new)
    unknown = [f"{item.kind} ({item.what})" for item in left if not item.understood]
    wrapped = [f"{item.kind} ({item.what})" for item in left if item.reason == BY_ACCELERATE]
    for items, reason in (
        (unknown, f"{families.not_understood()}. print(handle) gives the reasons"),
        (wrapped, BY_ACCELERATE),
    ):
        if items:
            # For the caller of `patch`, which `checks_keywords` calls.
            warnings.warn(f"rooftile.patch leaves {', '.join(items)}: {reason}", UserWarning, stacklevel=3)
    return handle
