"""Losses over log-probabilities of tokens, for preferences (DPO, ORPO, SimPO, KTO) and for policy gradients (GRPO).

Each takes the last hidden states and the head's weight, as `linear_cross_entropy` does. That op computes the
log-probability of each label and its gradients by chunks of tokens, so logits are never in memory whole. What a loss
does with one number a token, or a sequence, is plain PyTorch.

`hidden[:, t]` predicts `labels[:, t]`: of a model's output pass `hidden[:, :-1]` and `labels[:, 1:]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rooftile import library
from rooftile.ops.fused_head.linear_cross_entropy import linear_cross_entropy
from rooftile.ops.gemm.config import Precision

if TYPE_CHECKING:
    from typing_extensions import Unpack

DPOLoss = Literal["sigmoid", "ipo", "hinge"]
GRPOLoss = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
SamplingLevel = Literal["token", "sequence"]
_LARGEST_LOG = 70.0  # sums of 100 million of its exponentials are finite; past 88.7 it is inf, and 0 * inf is NaN


class HeadOptions(TypedDict, total=False):
    """The keyword arguments that all losses hand to `linear_cross_entropy`, which describes them."""

    ignore_index: int
    softcap: float | None
    chunk_bytes: int | None
    valid_rows: int | None
    float32_weight_gradient: bool
    precision: Precision
    adapter: tuple[Tensor, Tensor] | None


class PolicyLoss(NamedTuple):
    """What a loss returns.

    Attributes:
        loss: float32, without dimensions.
        logps: float32, without a gradient: the log-probabilities that the loss was computed from, for metrics such as
            rewards. Of each sequence, `(B,)`; `grpo_loss` has those of the tokens, `(B, T)`.
    """

    loss: Tensor
    logps: Tensor


def _check_shape(op: str, name: str, tensor: Tensor | None, *expected: tuple[int, ...]) -> None:
    if tensor is None:
        return
    library.check_tensors(op, **{name: tensor})
    # Not `in`: where sizes are symbols, Dynamo takes it for False.
    if not any(tuple(tensor.shape) == shape for shape in expected):
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected {' or '.join(map(str, expected))}")


_HEAD = tuple(HeadOptions.__annotations__)


def _check_head(op: str, head: Mapping[str, object]) -> None:
    for name in head:
        if name not in _HEAD:
            raise TypeError(
                f"{op}: unexpected keyword argument {name!r}, expected one of its own or of {', '.join(_HEAD)}"
            )


def _check_sequences(
    op: str, hidden: Tensor, labels: Tensor, head: Mapping[str, object], *, pairs: bool = False
) -> None:
    _check_head(op, head)
    library.check_tensors(op, hidden=hidden, labels=labels)
    if hidden.dim() != 3 or (pairs and hidden.shape[0] % 2):
        rows = "2B" if pairs else "B"
        raise ValueError(f"{op}: hidden has shape {tuple(hidden.shape)}, expected ({rows}, T, H)")
    _check_shape(op, "labels", labels, tuple(hidden.shape[:2]))


def _check_range(op: str, least: float = 0.0, most: float = float("inf"), **given: float) -> None:
    library.check_numbers(op, **given)
    for name, value in given.items():
        if not least <= value <= most:
            limits = f"{least:g} or more" if most == float("inf") else f"from {least:g} to {most:g}"
            raise ValueError(f"{op}: {name} is {value}, expected a number {limits}")


def _check_positive(op: str, **given: float) -> None:
    library.check_numbers(op, **given)
    for name, value in given.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{op}: {name} is {value}, expected a finite number above 0")


def _check_word(op: str, name: str, value: str, accepted: object) -> None:
    words = get_args(accepted)
    if value not in words:
        raise ValueError(f"{op}: {name} is {value!r}, expected one of {', '.join(words)}")


def _logps(
    op: str, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, head: HeadOptions,
    temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """`token_logps`, whose errors name the function that the user called, and its argument."""
    _check_positive(op, temperature=temperature)
    try:
        return -linear_cross_entropy(hidden, weight, labels, bias, reduction="none", temperature=temperature, **head)
    except (TypeError, ValueError) as error:
        name, _, rest = str(error).partition("linear_cross_entropy: ")
        if name or not rest or type(error) not in (TypeError, ValueError):
            raise  # none of its own checks
        argument, space, said = rest.partition(" ")
        renamed = "labels" if argument == "target" else argument
        raise type(error)(f"{op}: {renamed}{space}{said}") from None


def token_logps(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    **head: Unpack[HeadOptions],
) -> Tensor:
    """The log-probability of each label, `log_softmax((hidden @ weight^T + bias) / temperature)[label]`.

    Gradients flow to hidden, weight and bias.

    Args:
        hidden: `(..., H)`, float32, float16 or bfloat16: the last hidden states.
        weight: `(V, H)` of hidden's dtype, the head's.
        labels: `(...)`, int64 or int32. Where a label is `ignore_index` the log-probability is 0.
        bias: `(V,)`.
        temperature: of the policy that sampled, 1e-30 or more.
        head: ignore_index, softcap, chunk_bytes, valid_rows, float32_weight_gradient, precision and adapter, as in
            `linear_cross_entropy`.

    Returns:
        `(...)`, float32.

    Raises:
        ValueError, TypeError: as `linear_cross_entropy`, and if temperature is not above 0.
    """
    _check_head("token_logps", head)
    return _logps("token_logps", hidden, weight, labels, bias, head, temperature)


def sequence_logps(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, *, temperature: float = 1.0,
    **head: Unpack[HeadOptions],
) -> Tensor:  # fmt: skip
    """The log-probability of each sequence, `(B,)`: the sum of `token_logps` over the T tokens of `(B, T, H)`.

    Under `torch.no_grad()`, with the reference model's hidden states and weight, it gives the `ref_logps` of losses.
    """
    _check_sequences("sequence_logps", hidden, labels, head)
    return _logps("sequence_logps", hidden, weight, labels, bias, head, temperature).sum(-1)


def _lengths(labels: Tensor, head: HeadOptions) -> Tensor:
    """How many labels of each sequence count."""
    return (labels != head.get("ignore_index", -100)).sum(-1)


def _mean(losses: Tensor, counts: Tensor) -> Tensor:
    """The mean of the losses that count; 0 if none does."""
    return torch.where(counts, losses, 0.0).sum() / counts.sum().clamp(min=1)


def _preferred(margin: Tensor, label_smoothing: float) -> Tensor:
    """-log sigmoid(margin), the label being wrong with probability `label_smoothing`."""
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def dpo_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ref_logps: Tensor | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: DPOLoss = "sigmoid",
    **head: Unpack[HeadOptions],
) -> PolicyLoss:
    """Direct preference optimization (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290), the mean over pairs of

        sigmoid  -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d),   e = label_smoothing
        hinge    max(0, 1 - beta d)
        ipo      (d - 1 / (2 beta))^2, of log-probabilities a token

    with `d = (logp chosen - ref_logp chosen) - (logp rejected - ref_logp rejected)`. hinge is SLiC's
    (https://arxiv.org/abs/2305.10425), ipo that of Azar et al. 2023 (https://arxiv.org/abs/2310.12036), and
    label_smoothing the conservative DPO of Mitchell 2023.

    Args:
        hidden: `(2B, T, H)`: first the B chosen sequences, then the B rejected ones, in the same order.
        weight: `(V, H)` of hidden's dtype.
        labels: `(2B, T)`; prompt and padding are `ignore_index`. A pair of which a sequence has no label that counts is
            left out of the mean.
        bias: `(V,)`.
        ref_logps: `(2B,)`, `sequence_logps` of the reference model, without a gradient; None counts as 0.
        beta: above 0; how far the policy may move from the reference.
        label_smoothing: from 0 to 0.5, of "sigmoid" alone.
        head: as in `token_logps`.

    Returns:
        `PolicyLoss`, with `logps` of `(2B,)`. The implicit rewards are `beta * (logps - ref_logps)`.

    Raises:
        ValueError: a shape does not match, a number is out of range, or loss_type is another word.
        TypeError: a dtype or a type is none of those named.
    """
    op = "dpo_loss"
    _check_sequences(op, hidden, labels, head, pairs=True)
    _check_shape(op, "ref_logps", ref_logps, tuple(labels.shape[:1]))
    _check_positive(op, beta=beta)
    _check_range(op, most=0.5, label_smoothing=label_smoothing)
    _check_word(op, "loss_type", loss_type, DPOLoss)
    if label_smoothing and loss_type != "sigmoid":
        raise ValueError(f"{op}: label_smoothing is {label_smoothing}, expected 0 with loss_type {loss_type!r}")
    logps, lengths = _logps(op, hidden, weight, labels, bias, head).sum(-1), _lengths(labels, head)
    ratios = logps if ref_logps is None else logps - ref_logps.detach()
    if loss_type == "ipo":
        ratios = ratios / lengths.clamp(min=1)
    chosen, rejected = ratios.chunk(2)
    pairs = lengths.view(2, -1).all(0)
    margin = torch.where(pairs, chosen - rejected, 0.0)  # a NaN here would reach gradients as 0 * NaN
    if loss_type == "ipo":
        losses = (margin - 1 / (2 * beta)).square()
    elif loss_type == "hinge":
        losses = torch.relu(1 - beta * margin)
    else:
        losses = _preferred(beta * margin, label_smoothing)
    return PolicyLoss(_mean(losses, pairs), logps.detach())


def _averages(logps: Tensor, lengths: Tensor) -> Tensor:
    """The log-probability a token; of a sequence without one, which has no part in a loss, any number below 0."""
    return torch.where(lengths > 0, logps / lengths.clamp(min=1), -1.0)


def orpo_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    beta: float = 0.1,
    **head: Unpack[HeadOptions],
) -> PolicyLoss:
    """Odds ratio preference optimization (Hong et al. 2024, https://arxiv.org/abs/2403.07691).

        -mean over chosen tokens of logp - beta * mean over pairs of log sigmoid(log_odds(chosen) - log_odds(rejected))

    with `log_odds = a - log(1 - exp(a))` of the average a of a sequence's log-probabilities. In `log(1 - exp(a))`,
    which would be -inf at 0, an average above -1.2e-7 counts as that.

    Args:
        hidden, weight, labels, bias, head: as in `dpo_loss`: `(2B, T, H)`, first the chosen sequences.
        beta: the weight of the second term (lambda in the paper), 0 or more.

    Returns:
        `PolicyLoss`, with `logps` of `(2B,)`.

    Raises:
        ValueError, TypeError: as `dpo_loss`.
    """
    op = "orpo_loss"
    _check_sequences(op, hidden, labels, head, pairs=True)
    _check_range(op, beta=beta)
    logps, lengths = _logps(op, hidden, weight, labels, bias, head).sum(-1), _lengths(labels, head)
    averages = _averages(logps, lengths)
    odds = averages - torch.log(-torch.expm1(averages.clamp(max=-torch.finfo(torch.float32).eps)))
    better, worse = odds.chunk(2)
    preference = _mean(-logsigmoid(better - worse), lengths.view(2, -1).all(0))
    n_pairs = labels.shape[0] // 2
    likelihood = -logps[:n_pairs].sum() / lengths[:n_pairs].sum().clamp(min=1)
    return PolicyLoss(likelihood + beta * preference, logps.detach())


def simpo_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    beta: float = 2.0,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
    **head: Unpack[HeadOptions],
) -> PolicyLoss:
    """SimPO (Meng et al. 2024, https://arxiv.org/abs/2405.14734), the mean over pairs of

        -(1 - e) log sigmoid(m) - e log sigmoid(-m),   m = beta (chosen - rejected) - gamma,   e = label_smoothing

    of the averages of each sequence's log-probabilities. It needs no reference model.

    Args:
        hidden, weight, labels, bias, head: as in `dpo_loss`: `(2B, T, H)`, first the chosen sequences.
        beta: above 0.
        gamma: the margin, 0 or more.
        label_smoothing: from 0 to 0.5.

    Returns:
        `PolicyLoss`, with `logps` of `(2B,)`, sums.

    Raises:
        ValueError, TypeError: as `dpo_loss`.
    """
    op = "simpo_loss"
    _check_sequences(op, hidden, labels, head, pairs=True)
    _check_positive(op, beta=beta)
    _check_range(op, gamma=gamma)
    _check_range(op, most=0.5, label_smoothing=label_smoothing)
    logps, lengths = _logps(op, hidden, weight, labels, bias, head).sum(-1), _lengths(labels, head)
    chosen, rejected = _averages(logps, lengths).chunk(2)
    losses = _preferred(beta * (chosen - rejected) - gamma, label_smoothing)
    return PolicyLoss(_mean(losses, lengths.view(2, -1).all(0)), logps.detach())


def kto_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    desirable: Tensor,
    bias: Tensor | None = None,
    *,
    ref_logps: Tensor | None = None,
    kl: Tensor | float = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    **head: Unpack[HeadOptions],
) -> PolicyLoss:
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306), the mean of

        desirable    desirable_weight * (1 - sigmoid(beta (logp - ref_logp - kl)))
        undesirable  undesirable_weight * (1 - sigmoid(beta (kl - logp + ref_logp)))

    over sequences. With `kl=0` it is TRL's "apo_zero_unpaired".

    Args:
        hidden: `(B, T, H)`.
        weight: `(V, H)` of hidden's dtype.
        labels: `(B, T)`; prompt and padding are `ignore_index`. A sequence without a label that counts is left out.
        desirable: `(B,)`, bool.
        bias: `(V,)`.
        ref_logps: `(B,)`, `sequence_logps` of the reference model, without a gradient; None counts as 0.
        kl: a number or a tensor without dimensions: the estimate of KL(policy || reference), which is the mean of
            `logp - ref_logp` over mismatched pairs of prompt and completion. It gets no gradient; less than 0 is 0.
        beta: above 0.
        desirable_weight, undesirable_weight: 0 or more.
        head: as in `token_logps`.

    Returns:
        `PolicyLoss`, with `logps` of `(B,)`.

    Raises:
        ValueError, TypeError: as `dpo_loss`; desirable is not bool.
    """
    op = "kto_loss"
    _check_sequences(op, hidden, labels, head)
    library.check_tensors(op, desirable=desirable)
    _check_shape(op, "desirable", desirable, tuple(labels.shape[:1]))
    if desirable.dtype is not torch.bool:
        raise TypeError(f"{op}: desirable has dtype {desirable.dtype}, expected torch.bool")
    _check_shape(op, "ref_logps", ref_logps, tuple(labels.shape[:1]))
    if isinstance(kl, Tensor):
        _check_shape(op, "kl", kl, ())
        kl = kl.detach().clamp(min=0)
    else:
        library.check_numbers(op, kl=kl)
        kl = max(kl, 0.0)
    _check_positive(op, beta=beta)
    _check_range(op, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    logps, lengths = _logps(op, hidden, weight, labels, bias, head).sum(-1), _lengths(labels, head)
    gain = (logps if ref_logps is None else logps - ref_logps.detach()) - kl
    # 1 - sigmoid(z) is sigmoid(-z), which keeps its digits where it is small.
    good, bad = torch.sigmoid(-beta * gain), torch.sigmoid(beta * gain)
    losses = torch.where(desirable, desirable_weight * good, undesirable_weight * bad)
    return PolicyLoss(_mean(losses, lengths > 0), logps.detach())


def grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    advantages: Tensor,
    bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    beta: float = 0.0,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    loss_type: GRPOLoss = "dapo",
    importance_sampling_level: SamplingLevel = "token",
    max_completion_length: int | None = None,
    num_items_in_batch: Tensor | float | None = None,
    temperature: float = 1.0,
    **head: Unpack[HeadOptions],
) -> PolicyLoss:
    """Group relative policy optimization (Shao et al. 2024, https://arxiv.org/abs/2402.03300).

    The loss of a token with `r = exp(logp - old_logp)` and the advantage A of its sequence is

        -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) + beta (exp(d) - d - 1),   d = ref_logp - logp

    the last term being the k3 estimate of KL(policy || reference). In both exponentials a difference above 70 counts as
    70 and has no gradient: float32 ends at exp(88.7). Sums over tokens that count, of n_i in sequence i of
    B, are divided as TRL does:

        grpo     the mean over sequences of sum_i / max(n_i, 1)
        bnpo     the sum over all, divided by that of n_i
        dr_grpo  the sum over all, divided by B * max_completion_length (https://arxiv.org/abs/2503.20783)
        dapo     the sum over all, divided by num_items_in_batch (https://arxiv.org/abs/2503.14476)

    Args:
        hidden: `(B, T, H)`, of the completions.
        weight: `(V, H)` of hidden's dtype.
        labels: `(B, T)`: the tokens that were sampled. Those that are `ignore_index` do not count.
        advantages: `(B,)` or `(B, T)`, without a gradient.
        bias: `(V,)`.
        mask: `(B, T)`, the completion mask: a token counts where it is not 0. Tensors other than hidden may hold
            anything where a token does not count.
        old_logps: `(B, T)`, log-probabilities of the policy that sampled; None for the policy itself, where r is 1 and
            has a gradient.
        ref_logps: `(B, T)`, log-probabilities of the reference model; needed where beta is not 0.
        importance_sampling_ratio: `(B, T)` or `(B, 1)`, multiplies the first term: the correction for a sampler whose
            log-probabilities differ from `old_logps`.
        beta: 0 or more.
        epsilon_low, epsilon_high: 0 or more.
        delta: r is at most this in the unclipped product (two-sided clipping, https://arxiv.org/abs/2505.07291).
        importance_sampling_level: "sequence" takes for r the exponential of the sequence's mean of `logp - old_logp`
            (GSPO, https://arxiv.org/abs/2507.18071).
        max_completion_length: by default T.
        num_items_in_batch: the tokens of the whole batch for each process, if gradients are accumulated over several
            calls; by default those of this call.
        temperature: divides the logits, as it did in sampling; see `token_logps`.
        head: as in `token_logps`.

    Returns:
        `PolicyLoss`, with `logps` of `(B, T)`, 0 where a token does not count. If none counts, the loss is 0.

    Raises:
        ValueError: a shape does not match, a number is out of range, a word is another, or ref_logps is missing.
        TypeError: a dtype or a type is none of those named.
    """
    op = "grpo_loss"
    _check_sequences(op, hidden, labels, head)
    batch, length = labels.shape
    per_token = (batch, length)
    library.check_tensors(op, advantages=advantages)
    _check_shape(op, "advantages", advantages, (batch,), per_token)
    for name, tensor in (("mask", mask), ("old_logps", old_logps), ("ref_logps", ref_logps)):
        _check_shape(op, name, tensor, per_token)
    _check_shape(op, "importance_sampling_ratio", importance_sampling_ratio, per_token, (batch, 1))
    _check_range(op, beta=beta, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    _check_word(op, "loss_type", loss_type, GRPOLoss)
    _check_word(op, "importance_sampling_level", importance_sampling_level, SamplingLevel)
    if delta is not None:
        _check_positive(op, delta=delta)
    if max_completion_length is not None:
        _check_positive(op, max_completion_length=max_completion_length)
    if isinstance(num_items_in_batch, Tensor):
        _check_shape(op, "num_items_in_batch", num_items_in_batch, ())
        num_items_in_batch = num_items_in_batch.clamp(min=1)
    elif num_items_in_batch is not None:
        _check_positive(op, num_items_in_batch=num_items_in_batch)
    if beta and ref_logps is None:
        raise ValueError(f"{op}: ref_logps is None, expected a tensor of shape {per_token}, as beta is {beta}")

    ignore_index = head.get("ignore_index", -100)
    if mask is not None:
        labels = labels.masked_fill(mask == 0, ignore_index)
    counts = labels != ignore_index
    lengths = counts.sum(-1)

    def counted(t: Tensor) -> Tensor:
        """0 where a token does not count, whatever is there."""
        return torch.where(counts, t, 0.0)

    logps = _logps(op, hidden, weight, labels, bias, head, temperature)
    advantages = counted(advantages.detach() if advantages.dim() == 2 else advantages.detach()[:, None])
    log_ratio = counted(logps - (logps if old_logps is None else old_logps).detach())
    if importance_sampling_level == "sequence":
        log_ratio = (log_ratio.sum(-1) / lengths.clamp(min=1))[:, None]
    ratio = torch.exp(log_ratio.clamp(max=_LARGEST_LOG))
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    if importance_sampling_ratio is not None:
        losses = losses * counted(importance_sampling_ratio.detach())
    if beta and ref_logps is not None:
        behind = counted(ref_logps.detach() - logps).clamp(max=_LARGEST_LOG)
        losses = losses + beta * (torch.expm1(behind) - behind)

    losses = counted(losses)
    if loss_type == "grpo":
        loss = (losses.sum(-1) / lengths.clamp(min=1)).sum() / max(batch, 1)
    elif loss_type == "bnpo":
        loss = losses.sum() / lengths.sum().clamp(min=1)
    elif loss_type == "dr_grpo":
        loss = losses.sum() / max(1, batch * (max_completion_length or length))
    else:
        loss = losses.sum() / (lengths.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
    return PolicyLoss(loss, logps.detach())
