"""Cross entropy of logits with the classes that were right, over a vocabulary of any size.

    loss = w[y] (1 - e) (lse - x[y]) + e / V sum_c w[c] (lse - x[c]) + z lse^2,    lse = log sum exp x

for each row x of V logits, soft-capped first if asked for, and its target y, with class weights w, label smoothing e
and z-loss z. With p = softmax(x) the gradient is

    dx[c] = p[c] (w[y] (1 - e) + e / V sum w + 2 z lse) - [c = y] w[y] (1 - e) - e / V w[c]

Bytes: the logits are read once and the gradient is written once, both in the forward: it is known but for the gradient
of the loss, which is 1 unless the loss is scaled afterwards. The backward then multiplies it in place, or does nothing
where that factor is 1. Without a reduction, in float16 and in compiled graphs the backward reads the logits again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, overload

from torch import Tensor

from rooftile import library, sharding
from rooftile.ops.cross_entropy import backward, distributed, forward
from rooftile.primitives.loss_gradient import gradient_when, scaled

__all__ = ["TokenStats", "cross_entropy"]


class TokenStats(NamedTuple):
    """What one pass over the logits gives of each token besides the loss, without gradients.

    Attributes:
        logprobs: float32, the log-probability of the target; 0 where it is ignored.
        entropy: float32, of the distribution over the vocabulary, in nats; 0 where the target is ignored.
        argmax: int64, the most probable class, the first of equals; -1 where the target is ignored. `argmax == target`
            is the accuracy.
    """

    logprobs: Tensor
    entropy: Tensor
    argmax: Tensor


def _check(inputs) -> None:
    for name, tensor in (("weight", inputs[2]), ("token_weights", inputs[3])):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"cross_entropy: {name} requires grad, but gets no gradient; pass {name}.detach()")


def _save(ctx, inputs, outputs) -> None:
    logits, target, weight, _, *args = inputs
    options = forward.Options(*(*args, False))
    if options.gradient == "none":
        raise ValueError("cross_entropy: gradient is 'none', expected 'now' or 'later' for logits that need one")
    saved = outputs[1]
    ctx.now = options.gradient == "now"
    ctx.mark_non_differentiable(*outputs[2 if ctx.now else 1 :])  # see `scaled`
    ctx.softcap, ctx.smooths = options.softcap, options.label_smoothing > 0
    if ctx.now:
        ctx.save_for_backward(saved)
    else:
        ctx.save_for_backward(logits, target, weight, saved)


def _backward(ctx, dloss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    rest = (None,) * 9
    if dloss is None:
        return None, *rest
    if not ctx.now:
        logits, target, weight, factors = ctx.saved_tensors
        return backward.op(dloss, logits, target, weight, factors, ctx.softcap, ctx.smooths), *rest
    (dlogits,) = ctx.saved_tensors
    return scaled(dlogits, dloss), *rest


_SCHEMA = (
    "cross_entropy{}(Tensor logits, Tensor target, Tensor? weight, Tensor? token_weights, int ignore_index, "
    "float label_smoothing, float z_loss, float softcap, str reduction, str gradient) -> (Tensor, Tensor{})"
)


def _define(name: str, results: str, stats: bool) -> Callable[..., tuple[Tensor, ...]]:
    return library.define(
        _SCHEMA.format(name, results),
        prepare=functools.partial(forward.prepare, stats),
        fake=functools.partial(forward.fake, stats),
        autograd=library.Autograd(_save, _backward, _check),
        called=lambda args: "cross_entropy",
    )


# Two ops, since each tensor that nobody asks for would cost the host some 3 us.
_op = _define("", "", False)
_op_with_stats = _define("_with_stats", ", Tensor, Tensor, Tensor", True)


Reduction = Literal["mean", "sum", "none"]


@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    return_stats: Literal[False] = False,
) -> Tensor: ...


@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    return_stats: Literal[True],
) -> tuple[Tensor, TokenStats]: ...


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, TokenStats]:
    """Cross entropy of logits with target classes, as `torch.nn.functional.cross_entropy` computes it, in float32.

    Of a token with target y, `lse` being the logarithm of the sum of exponentials of its V logits x:

        weight[y] (1 - e) (lse - x[y]) + e / V * sum_c weight[c] (lse - x[c]) + z_loss * lse^2,   e = label_smoothing

    times `token_weights`. "mean" divides the sum over tokens by that of `weight[y] * token_weights`, in which ignored
    tokens have no part. If that is 0, as where all tokens are ignored, the loss and the gradient are 0.

    Args:
        logits: `(..., V)`, float32, float16 or bfloat16; the classes are the last dimension, whatever their number.
            Copied only if the last stride is not 1, or if two strides do not describe the rows: `logits[:, :-1]` is
            read in place.
        target: `(...)`, int64 or int32, the index of each token's class.
        weight: `(V,)`, of any of the three dtypes: a weight of each class. It gets no gradient.
        token_weights: `(...)`, of any of the three dtypes: a weight of each token. It gets no gradient.
        ignore_index: a token with this target is not read. Its loss and gradient are 0, whatever its logits are.
        label_smoothing: from 0 to 1, the part of the target that is spread over all classes
            (Szegedy et al. 2016, https://arxiv.org/abs/1512.00567).
        z_loss: times lse^2, which keeps the logits from drifting (PaLM, https://arxiv.org/abs/2204.02311, section 5).
        softcap: `softcap * tanh(logits / softcap)` takes the place of the logits, as in Gemma 2; None or 0 is no cap.
        reduction: "mean", "sum", or "none" for the loss of each token.
        return_stats: also return `TokenStats`: log-probability, entropy and argmax of each token.

    DTensor logits may be sharded over tokens and over the vocabulary, with all of these options; plain tensors beside
    them count as replicated. The loss and the statistics are DTensor.

    Returns:
        The loss in float32, whatever the dtype of the logits: without dimensions, or `(...)` with "none". With
        `return_stats`, the loss and the statistics. The latter have no gradients: a log-probability that has one is
        `-cross_entropy(..., reduction="none")`.

        A target that is neither a class nor `ignore_index` makes the loss NaN, and the gradient of its row: no memory
        outside the tensors is read, and the host does not wait for the device to look at targets.

        With a reduction, and logits that need a gradient in float32 or bfloat16, the forward writes the gradient, which
        takes memory from then on, and the logits are not kept. The backward multiplies it by the gradient of the loss,
        at the cost of another pass unless that is 1: divide by a number of tokens through `token_weights`, not
        afterwards.

    Raises:
        ValueError: a shape does not match; a number is out of range; weights require grad; reduction is none of the
            three; a device is the CPU without the interpreter, or devices differ.
        TypeError: a dtype is none of those named.
    """
    if type(ignore_index) is not int or not -(2**63) <= ignore_index < 2**63:  # a call costs the host more
        library.check_int64("cross_entropy", ignore_index=ignore_index)
    if not isinstance(return_stats, bool):
        raise TypeError(f"cross_entropy: return_stats is {library.named(return_stats)}, expected a bool")
    cap = 0.0 if softcap is None else softcap
    learns = isinstance(logits, Tensor) and logits.requires_grad
    gradient = gradient_when(learns, reduction, logits.dtype) if learns else "none"
    args = (ignore_index, label_smoothing, z_loss, cap, reduction, gradient)
    if sharding.is_distributed(logits):
        options = forward.Options(*args, return_stats)
        loss, *stats = distributed.cross_entropy(cross_entropy, logits, target, weight, token_weights, options)
        return (loss, TokenStats(*stats)) if return_stats else loss
    if not return_stats:
        return _op(logits, target, weight, token_weights, *args)[0]
    loss, _, *stats = _op_with_stats(logits, target, weight, token_weights, *args)
    return loss, TokenStats(*stats)
