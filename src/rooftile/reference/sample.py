"""The next token of each row of logits: greedy, or drawn from what top-k, top-p and min-p keep, by Gumbel noise."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and lower 32 bits of the product of two 32-bit integers, which int64 can't hold."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & _WORD


def philox(seed: Tensor, counter: Tensor, position: Tensor) -> tuple[Tensor, ...]:
    """Four words of 32 bits for each counter: ten rounds of Philox-4x32 (Salmon et al. 2011)."""
    zero = torch.zeros_like(counter + position + seed)
    c = [counter + zero, (position & _WORD) + zero, zero, zero]
    key = [(seed & _WORD) + zero, ((seed >> 32) & _WORD) + zero]
    for _ in range(10):
        high_a, low_a = _product(0xD2511F53, c[0])
        high_b, low_b = _product(0xCD9E8D57, c[2])
        c = [high_b ^ c[1] ^ key[0], low_b, high_a ^ c[3] ^ key[1], low_a]
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    return tuple(c)


def uniform(n_cols: int, seed: Tensor, position: Tensor) -> Tensor:
    """Uniform float32 values in (0, 1): row i's depend on seed[i], position[i] and the column."""
    counter = torch.arange(-(-n_cols // 4), device=seed.device)
    words = torch.stack(philox(seed[:, None], counter, position[:, None].long()), dim=-1).flatten(1)[:, :n_cols]
    return ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def gumbel(u: Tensor) -> Tensor:
    return -torch.log(-torch.log1p(-u))


@functools.lru_cache(maxsize=2)
def _noise_of(n_cols: int, seed: int, position: int, device: torch.device) -> Tensor:
    """One row of noise, drawn once: what is timed beside the kernel need not draw it."""
    seeds, positions = (torch.full((1,), x, device=device) for x in (seed, position))
    return gumbel(uniform(n_cols, seeds, positions))


# As `torch.compiler.assume_constant_result` does, which imports torch._dynamo: that takes as long as PyTorch itself.
_noise_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _column(value: Any, like: Tensor) -> Tensor:
    """A parameter as a column: an entry for each row."""
    if isinstance(value, Tensor):
        return value[:, None]
    return torch.full((1, 1), value, device=like.device, dtype=like.dtype if isinstance(value, float) else None)


def bits(seen: Tensor, n_cols: int) -> Tensor:
    """The tokens of each row that were seen, a bool each."""
    return ((seen[:, :, None] >> torch.arange(32, device=seen.device)) & 1).flatten(1)[:, :n_cols] != 0


def penalised(logits: Tensor, penalty: Any, seen: Tensor | None) -> Tensor:
    if seen is None:
        return logits
    penalty = _column(penalty, logits).to(logits.dtype)
    return torch.where(bits(seen, logits.shape[1]), torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def changed(
    logits: Tensor,
    repetition_penalty: Any = 1.0,
    presence_penalty: Any = 0.0,
    frequency_penalty: Any = 0.0,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
    logit_bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The logits to sample from, before the temperature."""
    z = logits
    if mask is not None:
        z = torch.where(bits(mask, z.shape[1]), z, -torch.inf)
    if logit_bias is not None:
        z = z + logit_bias
    z = penalised(z, repetition_penalty, seen)
    if counts is not None:
        frequency, presence = (_column(x, z).to(z.dtype) for x in (frequency_penalty, presence_penalty))
        z = z - frequency * counts - presence * (counts > 0)
    return z


def kept(z: Tensor, top_k: Any, top_p: Any, min_p: Any) -> Tensor:
    """Which of the logits (after the temperature) may be drawn: a stable sort, equals in the order of their index."""
    n_cols = z.shape[1]
    ordered, index = z.sort(dim=-1, descending=True, stable=True)
    k = _column(top_k, z)
    keep = torch.ones_like(z, dtype=torch.bool) & ((torch.arange(n_cols, device=z.device) < k) | (k <= 0))
    p = torch.softmax(ordered.masked_fill(~keep, -torch.inf), dim=-1)
    top_p = _column(top_p, z)
    keep &= (p.cumsum(-1) - p < top_p) | (top_p >= 1)
    keep[:, :1] = True
    min_p = _column(min_p, z)
    keep &= p >= min_p.clamp(max=1) * p[:, :1]
    return torch.zeros_like(keep).scatter(-1, index, keep)


def sample(
    logits: Tensor,
    *,
    temperature: Any = 0.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    repetition_penalty: Any = 1.0,
    presence_penalty: Any = 0.0,
    frequency_penalty: Any = 0.0,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
    logit_bias: Tensor | None = None,
    mask: Tensor | None = None,
    seeds: Any = 0,
    positions: Any = 0,
) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities, in the logits' dtype: give it float64 for the truth. NaN counts as the largest."""
    n_rows, n_cols = logits.shape
    z = changed(logits, repetition_penalty, presence_penalty, frequency_penalty, seen, counts, logit_bias, mask)
    nan = z.isnan()
    best = torch.where(nan.any(-1), nan.long().argmax(-1), z.argmax(-1))
    temperature = _column(temperature, logits)
    draws = (temperature > 0) & ~nan.any(-1, keepdim=True) & (z.amax(-1, keepdim=True) > -torch.inf)
    scaled = z / torch.where(draws, temperature, 1)
    keep = kept(scaled, top_k, top_p, min_p)
    seed, position = (_column(x, logits).long().expand(n_rows, 1)[:, 0] for x in (seeds, positions))
    score = scaled + gumbel(uniform(n_cols, seed, position).to(logits.dtype))
    tokens = torch.where(draws[:, 0], score.masked_fill(~keep, -torch.inf).argmax(-1), best)
    return tokens, torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, None])[:, 0]


def sample_(
    tokens: Tensor,
    logprobs: Tensor,
    logits: Tensor,
    *,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """What tokens, logprobs, seen and counts are afterwards; nothing is written in place."""
    new, logprob = sample(logits, seen=seen, counts=counts, **options)
    return new, logprob, None if seen is None else _with(seen, new), None if counts is None else counted(counts, new)


def counted(counts: Tensor, tokens: Tensor) -> Tensor:
    """The counts with one more of each row's token, at most 32767."""
    more = torch.zeros_like(counts, dtype=torch.int32).scatter(1, tokens[:, None].long(), 1)
    return (counts.int() + more).clamp(max=32767).to(counts.dtype)


def top_logprobs(logits: Tensor, k: int = 20) -> tuple[Tensor, Tensor]:
    """The k most likely tokens and their log-probabilities, by a stable sort. NaN counts as the largest."""
    ordered = logits.sort(dim=-1, descending=True, stable=True)[1][:, :k]
    return ordered, torch.log_softmax(logits, dim=-1).gather(-1, ordered)


def _with(seen: Tensor, tokens: Tensor) -> Tensor:
    return mark_seen_(seen, tokens, torch.arange(len(tokens), device=tokens.device))


def mark_seen_(seen: Tensor, ids: Tensor, row_of: Tensor) -> Tensor:
    """The words as they are afterwards."""
    flags = bits(seen, 32 * seen.shape[1]).index_put(
        (row_of.long(), ids.long()), torch.ones_like(ids, dtype=torch.bool)
    )
    words = (flags.unflatten(1, (-1, 32)).long() << torch.arange(32, device=seen.device)).sum(-1)
    return words.to(torch.int32)


def accept_drafts_(
    accepted: Tensor, tokens: Tensor, lengths: Tensor, drawn: Tensor, ids: Tensor, limits: Tensor,
    seen: Tensor | None = None, counts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """What accepted, tokens, lengths, seen and counts are afterwards."""
    n_tokens = drawn.shape[1]
    live = limits >= 0
    same = (drawn[:, :-1] == ids[:, 1:]) & (torch.arange(n_tokens - 1, device=drawn.device) < limits[:, None])
    n = same.int().cumprod(-1).sum(-1)
    tokens = torch.where(live, drawn.gather(1, n[:, None])[:, 0].to(tokens.dtype), tokens)
    lengths = torch.where(live, lengths - (n_tokens - 1 - n.int()), lengths)
    for i in range(n_tokens):
        taken = (live & (i <= n))[:, None]
        if seen is not None:
            seen = torch.where(taken, _with(seen, drawn[:, i]), seen)
        if counts is not None:
            counts = torch.where(taken, counted(counts, drawn[:, i]), counts)
    return n.int(), tokens, lengths, seen, counts


def eager(
    logits: Tensor,
    *,
    temperature: Any = 0.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    repetition_penalty: Any = 1.0,
    presence_penalty: Any = 0.0,
    frequency_penalty: Any = 0.0,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
    logit_bias: Tensor | None = None,
    mask: Tensor | None = None,
    seeds: Any = 0,
    positions: Any = 0,
) -> tuple[Tensor, Tensor]:
    """As Hugging Face generates: the logits in float32, penalty, temperature, a sort for top-k and top-p, a draw.

    The draw is by the kernel's noise, so that the tokens are the same. Where seed and position are numbers, one row of
    noise serves all, and is drawn before; where parameters are tensors, this is the reference in float32.
    """
    given = (temperature, top_k, top_p, min_p, presence_penalty, frequency_penalty, seeds, positions)
    if any(isinstance(x, Tensor) for x in given) or logits.device.type == "meta":
        return sample(
            logits.float(), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty, seen=seen, counts=counts, logit_bias=logit_bias, mask=mask,
            seeds=seeds, positions=positions,
        )  # fmt: skip
    logits = logits.float()
    z = changed(logits, repetition_penalty, presence_penalty, frequency_penalty, seen, counts, logit_bias, mask)
    if temperature > 0:
        z = z / temperature
        if 0 < top_k < z.shape[1] or top_p < 1:
            z = z.masked_fill(~kept(z, top_k, top_p, 0.0), -torch.inf)
        if min_p > 0:
            p = torch.softmax(z, dim=-1)
            z = z.masked_fill(p < min_p * p.amax(-1, keepdim=True), -torch.inf)
        z = z + _noise_of(z.shape[1], seeds, positions, z.device)
    tokens = z.argmax(-1)
    return tokens, torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, None])[:, 0]


def eager_(
    tokens: Tensor,
    logprobs: Tensor,
    logits: Tensor,
    *,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    new, logprob = eager(logits, seen=seen, counts=counts, **options)
    return new, logprob, None if seen is None else _with(seen, new), None if counts is None else counted(counts, new)


def eager_top_logprobs(logits: Tensor, k: int = 20) -> tuple[Tensor, Tensor]:
    """As servers compute it: a log-softmax in float32, and its k largest."""
    top, tokens = torch.log_softmax(logits.float(), dim=-1).topk(k, dim=-1)
    return tokens, top
