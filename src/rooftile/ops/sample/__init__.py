"""The next token of each row of logits, and its log-probability.

    b = l + bias for the tokens that the mask allows, -inf for the others
    r = b / repetition if b > 0, else b * repetition, for the tokens that the row has seen; b for the others
    z = r - frequency n - presence (n > 0)                          n: how often the row has generated the token
    greedy    argmax z                                              if the temperature is 0
    draw      argmax z / temperature + g over the kept tokens       g: Gumbel noise

The kept tokens: top_k keeps the k largest; of them top_p keeps the fewest, from the largest on, whose probabilities
reach p; of them min_p keeps those with at least min_p times the largest probability. Equal logits are in the order of
their index, so exactly k remain. The noise is Philox's, a function of the row's seed and position and of the token.

Bytes: the logits are read once, and a token and a log-probability are written for each row. A mask is a bit for each
logit, a bias 4 bytes, a count 2; what is not given is not read, and has no code in the kernel. Greedy is one kernel
(greedy.py). Drawing is one kernel too (draw.py). It reads a row several times, all but the first time from the L2: it
does not sort, but searches for the threshold of the kept tokens. `top_logprobs` is a kernel of its own (top.py), and
so is the acceptance of proposed tokens (accept.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.sample import draw, greedy, top
from rooftile.ops.sample.accept import accept_drafts_
from rooftile.ops.sample.parts import Parameters, Tables

import triton  # isort: skip
import triton.language as tl  # isort: skip

__all__ = ["accept_drafts_", "mark_seen_", "sample", "sample_", "top_logprobs"]

# By the name of a parameter, the dtypes that its tensor may have; in the order of the schemas.
INTEGERS = (torch.int32, torch.int64)
PARAMETERS: dict[str, tuple[torch.dtype, ...]] = {
    "temperature": (torch.float32,),
    "top_k": INTEGERS,
    "top_p": (torch.float32,),
    "min_p": (torch.float32,),
    "repetition_penalty": (torch.float32,),
    "presence_penalty": (torch.float32,),
    "frequency_penalty": (torch.float32,),
    "seeds": INTEGERS,
    "positions": INTEGERS,
}
MOST_TOKENS = 1 << 22  # the sum of so many probabilities fits an int64 (draw.py)
_RANGES = {
    "temperature": (0.0, math.inf, "0 or more"),
    "top_p": (math.ulp(0.0), 1.0, "more than 0, and at most 1"),  # 0 would keep nothing: the least float above it
    "min_p": (0.0, 1.0, "0 to 1"),
    "presence_penalty": (-math.inf, math.inf, "a finite number"),
    "frequency_penalty": (-math.inf, math.inf, "a finite number"),
    "top_k": (0, 2**31 - 1, "0 (off) or more, of int32"),
    "seeds": (-(2**63), 2**63 - 1, "an int64"),
    "positions": (0, 2**31 - 1, "0 or more, of int32"),
}


def dtypes_named(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def _check_number(op: str, name: str, value: Any) -> None:
    """Raise unless `value` is a number for all rows within the range of that parameter."""
    whole = PARAMETERS[name][0] != torch.float32
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        kind = "an int" if whole else "a number"
        expected = f"{kind} or a tensor of {dtypes_named(PARAMETERS[name])}"
        raise TypeError(f"{op}: {name} is {library.named(value)}, expected {expected}")
    if name == "repetition_penalty":
        if not 0 < value < math.inf:
            raise ValueError(f"{op}: repetition_penalty is {value}, expected a finite number above 0")
        return
    low, high, accepted = _RANGES[name]
    if not low <= value <= high or value in (math.inf, -math.inf):
        raise ValueError(f"{op}: {name} is {value}, expected {accepted}")


def _check_logits(op: str, logits: Tensor) -> None:
    library.check_floating(op, logits=logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"{op}: logits has shape {tuple(logits.shape)}, expected (B, V), at least one token")
    if logits.shape[1] > MOST_TOKENS:
        raise ValueError(f"{op}: logits has {logits.shape[1]} tokens, expected at most {MOST_TOKENS}")


def _check(op: str, logits: Tensor, tables: Tables, how: Parameters) -> None:
    """Raise unless logits, what changes them, and parameters are valid together."""
    _check_logits(op, logits)
    n_rows, n_cols = logits.shape
    for name, dtypes in PARAMETERS.items():
        value = getattr(how, name)
        if not isinstance(value, Tensor):
            continue
        if value.dtype not in dtypes:
            raise TypeError(f"{op}: {name} has dtype {value.dtype}, expected {dtypes_named(dtypes)}")
        if tuple(value.shape) != (n_rows,):
            raise ValueError(f"{op}: {name} has shape {tuple(value.shape)}, expected ({n_rows},), one for each row")
    seen, counts, bias, mask = tables
    words = (n_rows, library.cdiv(n_cols, 32))
    if seen is not None:
        _check_words(op, seen)
        if tuple(seen.shape) != words:
            raise ValueError(f"{op}: seen has shape {tuple(seen.shape)}, expected {words}, a bit for each token")
    elif how.penalized:
        raise ValueError(f"{op}: seen is None, expected the tokens that repetition_penalty applies to")
    if counts is not None:
        _check_table(op, "counts", counts, torch.int16, (n_rows, n_cols), "a count for each token")
        _check_in_place(op, "counts", counts, "count")
    elif how.counting:
        name = "presence_penalty" if how.presence_penalty != 0 else "frequency_penalty"
        raise ValueError(f"{op}: counts is None, expected the counts of generated tokens that {name} applies to")
    if bias is not None:
        _check_table(op, "logit_bias", bias, torch.float32, (n_rows, n_cols), "a number for each token")
    if mask is not None:
        _check_table(op, "mask", mask, torch.int32, words, "a bit for each token")
        if mask.shape[1] > 1 and mask.stride(1) != 1:
            raise ValueError(f"{op}: mask has a last stride of {mask.stride(1)}, expected 1")


def _check_table(op: str, name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, int], what: str) -> None:
    if x.dtype != dtype:
        raise TypeError(f"{op}: {name} has dtype {x.dtype}, expected {dtypes_named((dtype,))}, {what}")
    if tuple(x.shape) != shape:
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected {shape}, {what}")


def _check_in_place(op: str, name: str, x: Tensor, entry: str) -> None:
    """Raise unless the matrix can be written in place."""
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"{op}: {name} has a last stride of {x.stride(1)}, expected 1")
    if x.shape[0] > 1 and x.stride(0) == 0:
        raise ValueError(f"{op}: {name} is expanded (strides {x.stride()}), expected an address for each {entry}")


def _check_outputs(op: str, tokens: Tensor, logprobs: Tensor, logits: Tensor) -> None:
    """Raise unless tokens and logprobs have an entry for each row of logits and can be written in place."""
    if tokens.dtype not in INTEGERS:
        raise TypeError(f"{op}: tokens has dtype {tokens.dtype}, expected int32 or int64")
    if logprobs.dtype != torch.float32:
        raise TypeError(f"{op}: logprobs has dtype {logprobs.dtype}, expected float32")
    for name, x in (("tokens", tokens), ("logprobs", logprobs)):
        if tuple(x.shape) != (logits.shape[0],):
            raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected ({logits.shape[0]},), as logits' rows")
        if x.shape[0] > 1 and x.stride(0) != 1:
            raise ValueError(f"{op}: {name} has a stride of {x.stride(0)}, expected 1 to be written in place")


# The bits of seen tokens, 32 to a word


@triton.jit(do_not_specialize=["n_ids", "n_rows", "n_words"])
def _mark_kernel(
    seen_ptr, ids_ptr, row_of_ptr, stride_s, stride_i, stride_r, n_ids, n_rows, n_words, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at * stride_i, mask=at < n_ids, other=-1).to(tl.int64)
    rows = tl.load(row_of_ptr + at * stride_r, mask=at < n_ids, other=-1).to(tl.int64)

    inside = (ids >= 0) & (ids < tl.zeros((), tl.int64) + n_words * 32) & (rows >= 0) & (rows < n_rows)
    bits = (tl.full((BLOCK,), 1, tl.int64) << (ids & 31)).to(tl.int32)

    tl.atomic_or(seen_ptr + rows * stride_s + (ids >> 5), bits, mask=inside, sem="relaxed")


@functools.cache
def _mark_launcher(dtypes: tuple[torch.dtype, torch.dtype], block: int) -> launching.KernelLauncher:
    return launching.KernelLauncher(_mark_kernel, {"BLOCK": block}, num_warps=4)


def _check_mark(seen: Tensor, ids: Tensor, row_of: Tensor) -> None:
    _check_words("mark_seen_", seen)
    for name, x in (("ids", ids), ("row_of", row_of)):
        if x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"mark_seen_: {name} has dtype {x.dtype}, expected int32 or int64")
    if ids.dim() != 1:
        raise ValueError(f"mark_seen_: ids has shape {tuple(ids.shape)}, expected one dimension")
    if row_of.shape != ids.shape:
        raise ValueError(
            f"mark_seen_: row_of has shape {tuple(row_of.shape)}, expected {tuple(ids.shape)} to match ids"
        )


def _check_words(op: str, seen: Tensor) -> None:
    """Raise unless `seen` is a matrix of words that can be written in place."""
    if seen.dtype != torch.int32:
        raise TypeError(f"{op}: seen has dtype {seen.dtype}, expected int32, 32 tokens to a word")
    if seen.dim() != 2:
        raise ValueError(f"{op}: seen has shape {tuple(seen.shape)}, expected two dimensions (B, ceil(V / 32))")
    _check_in_place(op, "seen", seen, "word")


def _mark_seen(seen: Tensor, ids: Tensor, row_of: Tensor) -> None:
    _check_mark(seen, ids, row_of)
    if ids.device.type == "cpu" and ids.numel():
        for name, x, n in (("ids", ids, 32 * seen.shape[1]), ("row_of", row_of, seen.shape[0])):
            if int(x.min()) < 0 or int(x.max()) >= n:
                worst = int(x.min()) if int(x.min()) < 0 else int(x.max())
                raise ValueError(f"mark_seen_: {name} holds {worst}, expected 0 to {n - 1}")
    if not (ids.numel() and seen.numel()):
        return
    block = 4096 if runtime.target(seen.device) is runtime.INTERPRETER else 256
    launching.launch(
        _mark_launcher((ids.dtype, row_of.dtype), block),
        library.cdiv(ids.shape[0], block),
        (seen, ids, row_of),
        (seen.stride(0), ids.stride(0), row_of.stride(0)),
        (ids.shape[0], seen.shape[0], seen.shape[1]),
    )


# The ops


def _bind(
    tokens: Tensor, logprobs: Tensor, logits: Tensor, tables: Tables, how: Parameters, writes: bool
) -> Callable[..., None]:
    """The kernel for checked tensors such as these, to be called with them and parameters."""
    n_rows, n_cols = logits.shape
    if isinstance(n_rows, torch.SymInt) or isinstance(n_cols, torch.SymInt):
        raise launching.Untraceable("a grid that depends on the sizes")
    if n_rows == 0:
        return library.start_nothing
    # A table that no parameter uses is not read; `sample_` writes it all the same.
    no_seen = tables.seen is not None and not (how.penalized or writes)
    no_counts = tables.counts is not None and not (how.counting or writes)

    def used(tables: Tables) -> Tables:
        seen, counts, bias, mask = tables
        return Tables(None if no_seen else seen, None if no_counts else counts, bias, mask)

    writes = writes and not (tables.seen is tables.counts is None)
    start = (greedy if how.greedy else draw).prepare(tokens, logprobs, logits, used(tables), how, writes)
    if not (no_seen or no_counts):
        return start
    return lambda tokens, logprobs, logits, tables, how: start(tokens, logprobs, logits, used(tables), how)


def _given(rest: tuple[Any, ...]) -> tuple[Tables, Parameters]:
    """What a schema has after the logits: the tables, then two arguments for each parameter, which are an optional
    tensor, and a number for all rows."""
    n = len(Tables._fields)
    tensors, numbers = rest[n : n + len(PARAMETERS)], rest[n + len(PARAMETERS) :]
    how = Parameters(*[x if t is None else t for t, x in zip(tensors, numbers, strict=True)])
    return Tables(*rest[:n]), how


def _fake_sample(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _check("sample", logits, *_given(rest))
    n = logits.shape[0]
    tokens = torch.empty((n,), dtype=torch.int64, device=logits.device)
    return tokens, torch.empty((n,), dtype=torch.float32, device=logits.device)


def _prepare_sample(logits: Tensor, *rest: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    start = _bind(*_fake_sample(logits, *rest), logits, *_given(rest), writes=False)
    n_rows, device = logits.shape[0], logits.device

    def run(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        tokens = torch.empty((n_rows,), dtype=torch.int64, device=device)
        logprobs = torch.empty((n_rows,), dtype=torch.float32, device=device)
        start(tokens, logprobs, logits, *_given(rest))
        return tokens, logprobs

    return run


def _prepare_in_place(tokens: Tensor, logprobs: Tensor, logits: Tensor, *rest: Any) -> Callable[..., None]:
    _fake_in_place(tokens, logprobs, logits, *rest)
    start = _bind(tokens, logprobs, logits, *_given(rest), writes=True)

    def run(tokens: Tensor, logprobs: Tensor, logits: Tensor, *rest: Any) -> None:
        start(tokens, logprobs, logits, *_given(rest))

    return run


def _fake_in_place(tokens: Tensor, logprobs: Tensor, logits: Tensor, *rest: Any) -> None:
    _check("sample_", logits, *_given(rest))
    _check_outputs("sample_", tokens, logprobs, logits)


_TENSORS = ", ".join(f"Tensor? {name}" for name in PARAMETERS)
_KINDS = {name: "float" if dtypes[0] == torch.float32 else "int" for name, dtypes in PARAMETERS.items()}
_NUMBERS = ", ".join(f"{kind} {name}_of_all" for name, kind in _KINDS.items())

_sample = library.define(
    "sample(Tensor logits, Tensor? seen, Tensor? counts, Tensor? logit_bias, Tensor? mask, "
    f"{_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor)",
    prepare=_prepare_sample,
    varying=2,
    fake=_fake_sample,
)
_sample_in_place = library.define(
    "sample_(Tensor(a!) tokens, Tensor(b!) logprobs, Tensor logits, Tensor(c!)? seen, Tensor(d!)? counts, "
    f"Tensor? logit_bias, Tensor? mask, {_TENSORS}, {_NUMBERS}) -> ()",
    prepare=_prepare_in_place,
    varying=2,
    fake=_fake_in_place,
)
_mark = library.define(
    "mark_seen_(Tensor(a!) seen, Tensor ids, Tensor row_of) -> ()",
    launch=_mark_seen,
    fake=_check_mark,
)


def _arguments(op: str, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The parameters as in the schemas: tensors or None, then numbers of the right type."""
    tensors, numbers = [], []
    for (name, kind), value in zip(_KINDS.items(), given, strict=True):
        tensors.append(value if isinstance(value, Tensor) else None)
        if isinstance(value, Tensor):
            value = 0
        else:
            _check_number(op, name, value)
        numbers.append(float(value) if kind == "float" else value)
    return *tensors, *numbers


def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 0.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    repetition_penalty: float | Tensor = 1.0,
    presence_penalty: float | Tensor = 0.0,
    frequency_penalty: float | Tensor = 0.0,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
    logit_bias: Tensor | None = None,
    mask: Tensor | None = None,
    seeds: int | Tensor = 0,
    positions: int | Tensor = 0,
) -> tuple[Tensor, Tensor]:
    """The next token of each row of logits, drawn from its softmax or the most likely one, and its log-probability.

    The order: mask, logit_bias, repetition penalty, frequency and presence penalty, temperature, top_k, top_p of the
    tokens that top_k keeps, min_p of those that top_p keeps, and a draw from the softmax of the rest: vLLM's order. A
    parameter from temperature to frequency_penalty, seeds and positions are one number for all rows, or a tensor `(B,)`
    on the logits' device with a number for each row. A number out of its range is an error. The values of a tensor are
    not checked; what they mean outside the range is said below.

    Args:
        logits: `(B, V)`, float32, float16 or bfloat16, V from 1 to 4194304; copied only if the last stride is not 1.
        temperature: divides the logits: a finite number, 0 or more, or float32 `(B,)`. 0, the default, takes the
            largest logit, of equal ones the first, whatever top_k, top_p, min_p and seeds are; so does a negative value
            in a tensor.
        top_k: how many of the largest logits are kept, of equal ones the first: an int from 0 to 2^31 - 1, or int32 or
            int64 `(B,)`. 0, the default, keeps all; so do V or more, and a negative value in a tensor.
        top_p: keeps the fewest tokens, from the largest on, whose probabilities reach this, at least one: a number
            above 0 and at most 1, or float32 `(B,)`. 1, the default, keeps all. In a tensor 0 or less keeps one token,
            more than 1 keeps all.
        min_p: drops tokens with less than this times the largest probability: a number from 0 to 1, or float32 `(B,)`.
            0, the default, drops none, like a negative value in a tensor; 1 drops all but the largest and its equals,
            like more than 1 in a tensor.
        repetition_penalty: divides positive logits of seen tokens and multiplies the others, as in Hugging Face: a
            finite number above 0, or float32 `(B,)`, all above 0. 1, the default, changes nothing; more makes seen
            tokens less likely. All but the number 1 need `seen`.
        presence_penalty: is subtracted from the logits of tokens whose count is not zero: a finite number, or float32
            `(B,)`. 0, the default, changes nothing; more makes them less likely. All but the number 0 need `counts`.
        frequency_penalty: times its count, is subtracted from a token's logit: a finite number, or float32 `(B,)`. 0,
            the default, changes nothing. All but the number 0 need `counts`.
        seen: int32 `(B, ceil(V / 32))`, a last stride of 1: bit t % 32 of word t // 32 is set if the row has seen token
            t. See `mark_seen_`. None, the default: no repetition penalty.
        counts: int16 `(B, V)`, a last stride of 1: how often the row has generated each token, without its prompt's.
            A row whose presence_penalty and frequency_penalty are 0 is not read. None, the default: no such penalty.
        logit_bias: float32 `(B, V)`, added to the logits; copied only if the last stride is not 1. None, the default,
            adds nothing. A bias of -inf forbids a token; NaN or +inf makes the logit NaN or +inf.
        mask: int32 `(B, ceil(V / 32))`, a last stride of 1, in the layout of xgrammar and llguidance: tokens whose bit
            t % 32 of word t // 32 is not set get a logit of -inf, even if it was NaN. Bits past V mean nothing. None,
            the default, allows all.
        seeds: of the noise: a 64-bit int, or int32 or int64 `(B,)`; 0 by default. Equal seeds, positions and logits
            give equal tokens, whatever else is in the batch.
        positions: the position of the new token in its sequence, which makes its noise different: an int from 0 to
            2^31 - 1, or int32 or int64 `(B,)` in that range; 0 by default. Steps with equal positions have equal noise.

    Returns:
        tokens `(B,)` int64, and their log-probabilities `(B,)` float32, in the softmax of the given logits, before
        mask, bias, penalties and temperature.

        NaN counts as the largest logit, as in `torch.argmax`: the first NaN of a row is its token, whatever the
        parameters, and the log-probability is NaN. It is also NaN if the largest logit is infinite: the token is then
        the first +inf, or 0 for a row of nothing but -inf. The token is 0, too, if the mask allows none, or none but
        tokens with a logit of -inf; the log-probability is then that of token 0. Where the mask forbids an infinite
        logit, the log-probability of another token is -inf or NaN.

    Raises:
        ValueError: a shape or the stride of a table is wrong; a number is out of its range; there is a penalty without
            `seen` or `counts`; logits, a table or a parameter require grad; devices differ or are the CPU without the
            interpreter.
        TypeError: an argument is neither such a number nor such a tensor, or a dtype is not one of those named.

    Sources: top_k Fan et al. 2018 (https://arxiv.org/abs/1805.04833), top_p Holtzman et al. 2020
    (https://arxiv.org/abs/1904.09751), min_p Nguyen et al. 2024 (https://arxiv.org/abs/2407.01082); presence_penalty,
    frequency_penalty and logit_bias OpenAI's API reference (https://platform.openai.com/docs/api-reference/chat/create)
    and, for the order, vLLM's sampler (https://github.com/vllm-project/vllm/blob/main/vllm/v1/sample/sampler.py).
    """
    penalties = (repetition_penalty, presence_penalty, frequency_penalty)
    how = (temperature, top_k, top_p, min_p, *penalties, seeds, positions)
    return _sample(logits, seen, counts, logit_bias, mask, *_arguments("sample", how))


def sample_(
    tokens: Tensor,
    logprobs: Tensor,
    logits: Tensor,
    *,
    temperature: float | Tensor = 0.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    repetition_penalty: float | Tensor = 1.0,
    presence_penalty: float | Tensor = 0.0,
    frequency_penalty: float | Tensor = 0.0,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
    logit_bias: Tensor | None = None,
    mask: Tensor | None = None,
    seeds: int | Tensor = 0,
    positions: int | Tensor = 0,
) -> None:
    """`sample`, written into `tokens` and `logprobs`. Each row's token is added to `seen` and `counts`, if given.

    A count stays at 32767.

    Arguments are those of `sample`, with the same defaults, and:

    Args:
        tokens: `(B,)`, int32 or int64, contiguous.
        logprobs: `(B,)`, float32, contiguous.

    Raises:
        ValueError, TypeError: as `sample`, also for tokens and logprobs. Nothing is written then.
    """
    penalties = (repetition_penalty, presence_penalty, frequency_penalty)
    how = (temperature, top_k, top_p, min_p, *penalties, seeds, positions)
    _sample_in_place(tokens, logprobs, logits, seen, counts, logit_bias, mask, *_arguments("sample_", how))


def mark_seen_(seen: Tensor, ids: Tensor, row_of: Tensor) -> None:
    """Mark tokens as seen: set bit `ids[i] % 32` of `seen[row_of[i], ids[i] // 32]`.

    Args:
        seen: `(B, ceil(V / 32))`, int32, a last stride of 1. Written in place.
        ids: `(n,)`, int32 or int64: tokens, such as those of a prompt; repeated ones are allowed.
        row_of: `(n,)`, int32 or int64: the row of each token. Ids and rows outside `seen` are skipped; on the CPU they
            are an error.

    Raises:
        ValueError: a shape or stride is wrong; on the CPU an id or row is out of range; devices differ or are the
            CPU without the interpreter.
        TypeError: a dtype is not one of those named.
    """
    _mark(seen, ids, row_of)


# The most likely tokens

MOST_TOP = 20  # as OpenAI's API


def _fake_top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    _check_logits("top_logprobs", logits)
    library.check_int64("top_logprobs", k=k)
    most = min(MOST_TOP, logits.shape[1])
    if not 1 <= k <= most:
        raise ValueError(f"top_logprobs: k is {k}, expected 1 to {most}")
    shape = (logits.shape[0], k)
    tokens = torch.empty(shape, dtype=torch.int64, device=logits.device)
    return tokens, torch.empty(shape, dtype=torch.float32, device=logits.device)


def _prepare_top(logits: Tensor, k: int) -> Callable[..., tuple[Tensor, Tensor]]:
    _fake_top(logits, k)
    start = top.prepare(logits, k) if logits.shape[0] else library.start_nothing
    shape, device = (logits.shape[0], k), logits.device

    def run(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        tokens = torch.empty(shape, dtype=torch.int64, device=device)
        logprobs = torch.empty(shape, dtype=torch.float32, device=device)
        start(tokens, logprobs, logits)
        return tokens, logprobs

    return run


_top = library.define("top_logprobs(Tensor logits, int k) -> (Tensor, Tensor)", prepare=_prepare_top, fake=_fake_top)


def top_logprobs(logits: Tensor, *, k: int = MOST_TOP) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of each row of logits, from the most likely on, and their log-probabilities.

    log_softmax(logits) of the k largest. Of equal logits the first come first.

    Args:
        logits: `(B, V)`, float32, float16 or bfloat16, V from 1 to 4194304; copied only if the last stride is not 1.
        k: 1 to 20, as in OpenAI's API, and at most V; 20 by default.

    Returns:
        tokens `(B, k)` int64 and log-probabilities `(B, k)` float32.

        NaN counts as the largest logit. With a NaN or an infinite largest logit in a row, all its log-probabilities are
        NaN, as those of `sample`.

    Raises:
        ValueError: a shape is wrong or k out of its range; logits requires grad; devices differ or are the CPU without
            the interpreter.
        TypeError: k is not an int, or logits has another dtype.

    Source: `top_logprobs` of OpenAI's API reference (https://platform.openai.com/docs/api-reference/chat/create).
    """
    return _top(logits, k)
