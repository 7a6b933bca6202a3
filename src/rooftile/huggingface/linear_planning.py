"""Which linear layers `rooftile.patch` replaces, which of them become one product, and why the others stay."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from rooftile.huggingface import linear, rules
from rooftile.huggingface.activations import Activation
from rooftile.huggingface.families import Attention, Gated
from rooftile.huggingface.linear_memory import ALIGNMENT, joined
from rooftile.huggingface.replacing import _is_hooked as is_hooked
from rooftile.huggingface.replacing import is_plain
from rooftile.huggingface.rewrite import NotRewritable, Rule, Together
from rooftile.library import FLOATS

LINEAR, QKV, GATE_UP = "linear", "q, k, v in one product", "gate, up in one product"


@dataclasses.dataclass(frozen=True)
class Joint:
    """How the code of a class calls several layers as one: the rules, one set or else the next, and their names."""

    kind: str
    rules: tuple[tuple[Rule | Together, ...], ...]
    names: Mapping[str, Callable[..., Any]]


def joint(part: Gated | Attention, activation: tuple[type[nn.Module], Activation] | None) -> Joint | None:
    """`activation`: the class and the ops of one that is computed with the product of gate and up."""
    together = rules.joint_products(part.layers) if len(part.layers) > 1 else ()
    names: dict[str, Callable[..., Any]] = {"products": linear.products}
    if isinstance(part, Attention):
        return Joint(QKV, (together,), names) if together else None
    sets: list[tuple[Rule | Together, ...]] = [together] if together else []
    if activation is not None and part.layers:
        sets.insert(0, rules.gated_products(part.activation, part.layers))
        names |= linear.gated(*activation)
    return Joint(GATE_UP, tuple(sets), names) if sets else None


class Layers:
    """The linear layers of a model: what can be replaced, and what may be moved in memory."""

    def __init__(self, model: nn.Module) -> None:
        self.groups: list[tuple[nn.Parameter, ...]] = []
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self._in_memory = Counter(_storage(t) for t in tensors.values() if _storage(t))
        self._uses = Counter(id(p) for module in model.modules() for p in module._parameters.values())

    def check(self, layer: nn.Module) -> None:
        """
        Raises:
            NotRewritable: the layer is not to be replaced, and why.
        """
        if parametrize.is_parametrized(layer):
            raise NotRewritable("its weight is parametrized")
        if type(layer) is not nn.Linear:
            raise NotRewritable("its class derives from torch.nn.Linear, and may compute something else")
        weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
        if weight is None:
            raise NotRewritable("its weight is no parameter of its own")
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
        """The weights of the layers that are to become one, and their biases.

        Raises:
            NotRewritable: they can't be one product, and why.
        """
        layers: list[Any] = []
        for name in part.layers:
            layer = getattr(module, name, None)
            if not isinstance(layer, nn.Linear):
                cls = type(layer)
                raise NotRewritable(f"its {name} is a {cls.__module__}.{cls.__name__}, expected a torch.nn.Linear")
            try:
                self.check(layer)
            except NotRewritable as reason:
                raise NotRewritable(f"its {name}: {reason}") from None
            if is_hooked(layer):
                raise NotRewritable(f"its {name} has hooks")
            if not is_plain(layer, nn.Linear):
                raise NotRewritable(f"its {name}: its forward is overridden on the instance already")
            layers.append(layer)
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        if len(layers) > 1:
            self._check_together(layers, weights, biases)
        return weights, biases

    def _check_together(self, layers: Sequence[Any], weights: list[Any], biases: list[Any]) -> None:
        if len(biases) not in (0, len(layers)):
            raise NotRewritable("of its layers some have a bias and some have none")
        for what, values in (
            ("dtypes", {w.dtype for w in weights}),
            ("devices", {p.device for p in (*weights, *biases)}),
            ("input sizes", {w.shape[1] for w in weights}),
        ):
            if len(values) > 1:
                raise NotRewritable(f"its layers have several {what}: {', '.join(sorted(map(str, values)))}")
        if weights[0].is_meta:
            raise NotRewritable("its weights are on the meta device: patch when they are there")
        for parameter in (p for group in (weights, biases) if group and joined(group) is None for p in group):
            if parameter.nbytes % ALIGNMENT:
                raise NotRewritable(f"its layers have parameters of no multiple of {ALIGNMENT} bytes")
            if self._uses[id(parameter)] > 1 or self._in_memory[_storage(parameter)] > 1:
                raise NotRewritable("its weights are tied to others, or lie in one memory with others")
            if parameter.untyped_storage().nbytes() != parameter.nbytes or not parameter.is_contiguous():
                raise NotRewritable("its weights are parts of a larger memory, which may be somebody's")
            if not parameter.is_cuda and parameter.is_shared():
                raise NotRewritable("its weights are shared between processes")

    def join(self, weights: list[Any], biases: list[Any]) -> None:
        """Note what is to lie together in memory, and does not yet."""
        self.groups += [tuple(group) for group in (weights, biases) if len(group) > 1 and joined(group) is None]


def _storage(t: Tensor) -> int:
    """Where the memory of a plain tensor begins; 0 for any other, and for one without memory."""
    return t.untyped_storage().data_ptr() if type(t) in (Tensor, nn.Parameter) else 0


def notice_other(module: nn.Module) -> str | None:
    """Why a module that holds matrices, but is no `torch.nn.Linear`, stays; None where there is nothing to say."""
    if isinstance(module, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd | parametrize.ParametrizationList):
        return None
    if any(p is not None and p.dim() > 1 for p in module._parameters.values()):
        return "its products are code of its own, not a torch.nn.Linear's"
    if "Linear" in type(module).__name__ and not any(isinstance(child, nn.Linear) for child in module.modules()):
        return "its class is no torch.nn.Linear"
    return None
