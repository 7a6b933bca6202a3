"""A model's loss from its last hidden states, without the logits: `rooftile.linear_cross_entropy` in its head.

The model's forward asks its head for the loss: it calls the head's module with an `Asked`, and the module returns the
loss instead of logits. So what surrounds a module's call (FSDP, which gathers the weight there, or accelerate's
offloading) happens as before. Whether a module can be asked is decided on every call. Where it can't (an adapter has
taken its place since the patch, a hook expects logits), the model's own lines run. Where the head finds only when it is
called that its weight is not a plain tensor, it computes the loss from logits.

The losses are transformers': `ForCausalLMLoss`, which shifts the labels and divides the sum by `num_items_in_batch` if
that is given, and `torch.nn.CrossEntropyLoss`.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from rooftile.huggingface.replacing import has_global_hook, is_hooked, is_ours, takes
from rooftile.ops.fused_head.linear_cross_entropy import linear_cross_entropy

_OURS = "_rooftile_loss_head"  # of a forward that can be asked for the loss
_HOOKED = "_old_forward"
_STATS = "_rooftile_stats"  # the option of a model's forward that takes `Stats` to its caller
SKIP = "_rooftile_skip_logits"  # where a model keeps `PatchHandle.skip_logits`
IGNORED = -100  # transformers' ignore_index


class Asked(NamedTuple):
    """The loss that is asked of a head. A tuple, so that FSDP's and accelerate's hooks see the tensors in it.

    Attributes:
        target: of each token, in the order of the hidden states.
        num_items: what the sum of the losses is divided by; None is the mean of those that count. No floating-point
            tensor: FSDP would cast it.
        valid_rows: how many targets count at most, if the host knows it: see `linear_cross_entropy`.
        stats: also `Stats`, after the loss.
    """

    target: Tensor
    num_items: Tensor | int | None = None
    ignore_index: int = IGNORED
    softcap: float | None = None
    valid_rows: int | None = None
    stats: bool = False


class Stats(NamedTuple):
    """Means over the targets that count, without gradients; 0 if none does."""

    token_accuracy: Tensor
    token_entropy: Tensor


def _stats(asked: Asked, argmax: Tensor, entropy: Tensor) -> Stats:
    target = asked.target.to(argmax.device).reshape(-1)
    counts = target != asked.ignore_index
    n = counts.sum().clamp(min=1)
    return Stats(((argmax == target) & counts).sum() / n, torch.where(counts, entropy, 0.0).sum() / n)


Found = Tensor | tuple[Tensor, Stats]  # the loss, and what was asked for besides


# The head's side.


def head_forward(original: Callable[..., Tensor]) -> Callable[..., Found]:
    """The forward of a `torch.nn.Linear` that can be asked for the loss; `original` makes logits."""

    def forward(self: Any, input: Tensor, asked: Asked | None = None) -> Found:
        if asked is None:
            return original(self, input)
        weight, bias = self.weight, self.bias
        if takes(input, weight, bias):
            return fused(input, weight, bias, asked)
        return of_logits(original(self, input), asked)

    forward._rooftile = True  # type: ignore[attr-defined]
    return can_be_asked(forward)


def can_be_asked(forward: Callable[..., Found]) -> Callable[..., Found]:
    setattr(forward, _OURS, True)
    return forward


def ask(module: nn.Module, x: Tensor, asked: Asked | None) -> Found:
    """What the module returns of x, or the loss that is asked for."""
    if asked is None:
        return module(x)
    return module(x, asked=asked) if is_head(module) else of_logits(module(x), asked)


def wrapped(module: Any) -> tuple[Any, ...]:
    """The layers of which PEFT's wrapper for `modules_to_save` calls one, with all its arguments; else the module."""
    cls = type(module)
    if cls.__name__ != "ModulesToSaveWrapper" or not cls.__module__.startswith("peft."):
        return (module,)
    return (module.original_module, *module.modules_to_save.values())


def is_head(module: nn.Module) -> bool:
    """Whether that module can be asked for the loss, and no hook of somebody else's expects logits of it."""
    if has_foreign_hooks(module):
        return False
    forward: Any = module.__dict__.get(_HOOKED) or module.__dict__.get("forward")
    if is_ours(forward):
        return hasattr(forward.__func__, _OURS)
    layers = wrapped(module)
    return layers[0] is not module and all(is_head(layer) for layer in layers)


def has_foreign_hooks(module: nn.Module) -> bool:
    """Hooks other than FSDP's, which take any arguments and results, and accelerate's, which are no PyTorch hooks."""
    if not is_hooked(module):
        return False
    if module._backward_hooks or module._backward_pre_hooks or has_global_hook():
        return True
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp") for hook in hooks)


def _check_labels(labels: Tensor, hidden: Tensor) -> None:
    """Raise what `linear_cross_entropy` would say of its target, in the words of the model's caller."""
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"labels: has dtype {labels.dtype}, expected int64 or int32, the ids of tokens")
    if labels.numel() != hidden.shape[:-1].numel():
        shape, expected = tuple(labels.shape), tuple(hidden.shape[:-1])
        raise ValueError(f"labels: has shape {shape}, expected {expected}, a label for each token that the head gets")


def fused(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, asked: Asked, adapter: tuple[Tensor, Tensor] | None = None
) -> Found:
    """The loss without logits; `adapter` is that of `linear_cross_entropy`, low in hidden's leading shape."""
    if adapter is not None:
        adapter = adapter[0].reshape(-1, adapter[0].shape[-1]), adapter[1]
    _check_labels(asked.target, hidden)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    target = asked.target.to(hidden.device).reshape(-1)
    options: dict[str, Any] = {
        "ignore_index": asked.ignore_index, "softcap": asked.softcap, "valid_rows": asked.valid_rows, "adapter": adapter
    }  # fmt: skip
    shape: torch.Size | tuple[()] = ()
    if asked.num_items is not None:
        items = _on_device(asked.num_items, hidden)
        # The weight of each token instead of a division: then the gradients need no other pass.
        share = (1.0 / items.float()).reshape(1).expand(target.shape)
        options |= {"token_weights": share, "reduction": "sum"}
        shape = items.shape
    if not asked.stats:
        loss = linear_cross_entropy(hidden, weight, target, bias, **options)
        return loss.reshape(shape) if shape else loss
    loss, found = linear_cross_entropy(hidden, weight, target, bias, return_stats=True, **options)
    return loss.reshape(shape) if shape else loss, _stats(asked, found.argmax, found.entropy)


def of_logits(logits: Tensor, asked: Asked) -> Found:
    logits = logits.float()
    if asked.softcap is not None:
        logits = torch.tanh(logits / asked.softcap) * asked.softcap
    reduction = "mean" if asked.num_items is None else "sum"
    logits = logits.flatten(0, -2)
    loss = nn.functional.cross_entropy(
        logits, asked.target.to(logits.device).reshape(-1), ignore_index=asked.ignore_index, reduction=reduction
    )
    loss = loss if asked.num_items is None else loss / _on_device(asked.num_items, loss)
    if not asked.stats:
        return loss
    logprobs = logits.detach().log_softmax(-1)
    return loss, _stats(asked, logits.argmax(-1), -(logprobs.exp() * logprobs).sum(-1))


def _on_device(number: Tensor | int, like: Tensor) -> Tensor:
    """As a tensor on that device; the host does not wait."""
    return number.to(like.device) if isinstance(number, Tensor) else like.new_full((), number, dtype=torch.int64)


# The model's side. Where the result is None, the model's own lines run.


def token_loss(head: nn.Module, hidden: Tensor, labels: Tensor | None) -> Tensor | None:
    """The mean over the tokens with a label: `torch.nn.CrossEntropyLoss`."""
    return None if labels is None or not is_head(head) else head(hidden, asked=Asked(labels))


def causal_loss(shifted_loss: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """transformers' `ForCausalLMLoss`, which is `shifted_loss`."""

    def causal_loss(
        model: Any, head: nn.Module, hidden: Tensor, labels: Tensor | None, options: Mapping[str, Any], *,
        divisor: float | None = None, softcap: float | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Of logits divided by `divisor` and capped at `softcap`.

        `valid_rows` of the call's options leaves out tokens, except in graphs: each number would be compiled for.
        """
        if labels is None or not is_head(head) or model.loss_function is not shifted_loss:
            return None
        items = options.get("num_items_in_batch")
        after = items if isinstance(items, Tensor) and items.is_floating_point() else None
        ignore_index = options.get("ignore_index", IGNORED)
        target = options.get("shift_labels")
        if target is None:
            target = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if divisor is not None:
            hidden = hidden / divisor
        valid_rows = None if is_compiling() else options.get("valid_rows")
        stats: list[Stats] | None = options.get(_STATS)
        wanted = stats is not None
        loss = head(
            hidden, asked=Asked(target, items if after is None else 1, ignore_index, softcap, valid_rows, wanted)
        )
        if stats is not None:
            loss, found = loss
            stats.append(found)
        return loss if after is None else loss / after.to(loss.device)

    return causal_loss


def unless_logits_are_wanted(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """The model's forward: `ours` returns no logits where it returns the loss.

    Logits are wanted in evaluation, unless the call or else the handle of the patch says otherwise. The result has
    `Stats` besides, if the call asks for them and the loss was computed without logits.
    """

    @functools.wraps(original)
    def forward(
        self: Any, *args: Any, skip_logits: bool | None = None, return_token_accuracy: bool = False, **kwargs: Any
    ) -> Any:
        if skip_logits is None:
            skip_logits = self.__dict__.get(SKIP, self.training)
        if not skip_logits:
            if return_token_accuracy and not is_compiling():
                warnings.warn(
                    f"{type(self).__name__}: return_token_accuracy=True does nothing where logits are returned; pass "
                    "skip_logits=True too",
                    UserWarning,
                    stacklevel=2,
                )
            return original(self, *args, **kwargs)
        if not return_token_accuracy:
            return ours(self, *args, **kwargs)
        stats: list[Stats] = []
        result = ours(self, *args, **{**kwargs, _STATS: stats})
        if not stats or not isinstance(result, dict):
            return result
        return _with_stats(type(result))(**result, **stats[0]._asdict())

    return forward


@functools.cache
def _with_stats(cls: type) -> Any:
    """That class of transformers' results, with the fields of `Stats`."""
    fields = [(name, Tensor | None, None) for name in Stats._fields]
    return dataclasses.make_dataclass(cls.__name__, fields, bases=(cls,))


# What the plan asks.


def transformers_loss() -> Any:
    """transformers' loss of a causal language model."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss


def why_other_loss(model: Any) -> str:
    """Why the model's own loss must be computed, or an empty string."""
    chosen = hasattr(model, "_loss_function") or getattr(model, "loss_type", None) is not None
    if chosen and (loss := model.loss_function) is not transformers_loss():  # transformers warns of a loss_type of None
        return f"its loss_function is {getattr(loss, '__name__', loss)}, expected transformers' ForCausalLMLoss"
    return ""
