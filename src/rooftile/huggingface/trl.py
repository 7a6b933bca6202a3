"""TRL's trainers: the log-probabilities that their losses are made of, by `rooftile.linear_cross_entropy`.

`SFTTrainer`, `DPOTrainer`, `KTOTrainer`, `GRPOTrainer` and `RLOOTrainer` of TRL 1.16 call `add_fused_lm_head`, which
sets a forward on the model's instance. Asked for `fused_lm_head=True` it returns a log-probability of each label
instead of logits. Its head is one call of `_ChunkedLogProbFunction.apply`, a global of TRL's module. `fuse_head` sets
the same function over other globals, in which that name is a head of ours; TRL's module and other models do not change.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from typing import Any

import torch
from torch import Tensor

from rooftile.huggingface.replacing import takes
from rooftile.ops.fused_head.linear_cross_entropy import linear_cross_entropy

__all__ = ["fuse_head"]

_HEAD = "_ChunkedLogProbFunction"
_OPTIONAL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # what TRL's head may return besides, in order
_SIGNATURE = (
    "(ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None, logit_scale=1.0, "
    f"outputs={_OPTIONAL})"
)  # of its forward, by which `apply` is called
_ENTROPY_IN_LOSS = ("entropy_coef", "use_adaptive_entropy")  # of GRPOConfig


class Head:
    """What stands for TRL's `_ChunkedLogProbFunction`, which it calls where a kernel of ours lacks something."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk_size: int,
        softcap: float | None = None, logit_scale: float = 1.0, outputs: tuple[str, ...] = _OPTIONAL,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """The log-probability of each target, and those of `_OPTIONAL` that are among `outputs`, without gradients.

        Of logits `softcap(hidden @ weight^T + bias, scaled by logit_scale) / temperature`.
        """
        uncommon = "log_sum_sq_probs" in outputs or ("mean_logits" in outputs and softcap is not None)
        scaled = logit_scale != 1.0 and (bias is not None or softcap is not None)
        parted = hasattr(weight, "ds_id")  # ZeRO-3 gathers the weight for TRL's own backward, not for ours
        if uncommon or scaled or parted or not takes(hidden, weight, bias):
            return self.theirs.apply(
                hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs
            )
        temperature /= logit_scale
        losses, stats = linear_cross_entropy(
            hidden, weight, targets, bias, reduction="none", softcap=softcap, temperature=temperature, return_stats=True
        )
        found: dict[str, Tensor] = {"entropy": stats.entropy, "is_top1": stats.argmax == targets}
        if "mean_logits" in outputs:
            with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
                mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
                found["mean_logits"] = (mean if bias is None else mean + bias.float().mean()) / temperature
        return (-losses, *(found[name] if name in outputs else None for name in _OPTIONAL))


def fuse_head(trainer: Any) -> None:
    """Let a TRL trainer's model compute the log-probabilities and entropies of its loss by Rooftile's fused head.

        trainer = trl.GRPOTrainer(model, ..., callbacks=[rooftile.PatchCallback()])
        fuse_head(trainer)
        trainer.train()

    The head is fused whether or not the layers are patched. The reference model keeps TRL's own head, which has no
    logits in memory either.

    Args:
        trainer: an SFT, DPO, KTO, GRPO or RLOO trainer, before `train()`.

    Raises:
        ValueError: its model has no forward of TRL's with a fused head (another version of TRL, a model that was
            patched after the trainer was made, or accelerate has wrapped the forward: `train()` was called); or that
            head has another signature than TRL 1.16's; or the entropy is part of its loss.
    """
    for name in _ENTROPY_IN_LOSS:
        if value := getattr(trainer.args, name, None):
            raise ValueError(f"fuse_head: {name} is {value}, expected 0 or False: the head's entropy has no gradient")
    fused = 0
    for module in trainer.model.modules():
        forward = getattr(module.__dict__.get("forward"), "__func__", None)
        if not isinstance(forward, types.FunctionType) or _HEAD not in forward.__code__.co_names:
            continue
        theirs = forward.__globals__[_HEAD]
        if not isinstance(theirs, Head):
            _check_signature(theirs)
            names = {**forward.__globals__, _HEAD: Head(theirs)}
            new = types.FunctionType(
                forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
            )
            new.__kwdefaults__ = forward.__kwdefaults__
            module.forward = types.MethodType(functools.update_wrapper(new, forward), module)
        fused += 1
    if not fused:
        raise ValueError(
            f"fuse_head: the model of {type(trainer).__name__} has no forward of add_fused_lm_head ({_trl()}), "
            "expected a trainer of TRL 1.16 that has one, before its train(), and a model that was patched before it, "
            "or by PatchCallback"
        )


def _check_signature(theirs: Any) -> None:
    """Raises ValueError unless `Head.apply` takes what TRL gives its head, and returns what TRL expects."""
    forward, found = getattr(theirs, "forward", None), "no signature"
    if callable(forward):
        signature = inspect.signature(forward)
        plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        found = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    if found != _SIGNATURE:
        raise ValueError(
            f"fuse_head: {_HEAD}.forward ({_trl()}) has {found}, expected {_SIGNATURE}, as in TRL 1.16: install a TRL "
            "whose head has it, or train without fuse_head"
        )


def _trl() -> str:
    return f"TRL {getattr(sys.modules.get('trl'), '__version__', 'of an unknown version')}"
