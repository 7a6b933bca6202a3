"""The next token of each row of logits, and its log-probability.

    z = l / penalty where l > 0, l * penalty elsewhere, of the tokens that the row has seen; l of the others
    greedy    argmax z                                              where the temperature is 0
    draws     argmax z / temperature + g over what is kept          g: Gumbel noise

What is kept: top_k, the k largest; of them top_p, the fewest from the largest on whose probabilities reach p; of them
min_p, those of at least min_p times the largest probability. Equals come in the order of their index: exactly k remain.
The noise is Philox's, a function of the row's seed and position and of the token's index alone.

Bytes: the logits read once, and a token and a log-probability written for each row. Greedy is one kernel that does
that. Drawing is one kernel, too, which reads a row several times over, all but the first time out of the L2: it has no
sort, but searches for the threshold of what is kept (search.py).
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch import Tensor

from rooftile import launching, library, runtime
from rooftile.ops.sample import choose, greedy, seen
from rooftile.ops.sample.checks import PARAMETERS, Parameters, check, check_number, check_outputs
from rooftile.ops.sample.search import sample_kernel
from rooftile.primitives.cta_exchange import resident

__all__ = ["mark_seen_", "sample", "sample_"]

# Low bits of a float32 that came from each dtype are all alike.
_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@functools.cache
def _plan(dtypes: tuple[torch.dtype | None, ...], writes_seen: bool, c: choose.Search) -> launching.KernelLauncher:
    constants = {
        "SHIFT": _SHIFTS[dtypes[0]],  # type: ignore[index]
        "WRITES_SEEN": writes_seen,
        "PIVOTS": c.pivots,
        "LANES": c.lanes,
        "PACK": c.pack,
        "SPLITS": c.most_splits,
    }
    return launching.KernelLauncher(sample_kernel, constants, num_warps=c.num_warps, **resident(c.max_registers))


def _run(
    tokens: Tensor, logprobs: Tensor, logits: Tensor, seen: Tensor | None, how: Parameters, writes_seen: bool
) -> None:
    """Launch it, of what was checked."""
    n_rows, n_cols = logits.shape
    if isinstance(n_rows, torch.SymInt) or isinstance(n_cols, torch.SymInt):
        raise launching.Untraceable("a grid that depends on the sizes")
    if n_rows == 0:
        return
    if not how.penalised and not writes_seen:
        seen = None
    if how.greedy:
        return greedy.launch(tokens, logprobs, logits, seen, how.repetition_penalty, writes_seen)
    logits = library.as_rows(logits)
    c = choose.search(n_rows < choose.FEW, runtime.target(logits.device))
    splits, groups = c.programs(n_rows, n_cols)
    words = torch.empty(n_rows * 2 * splits * 16, dtype=torch.int64, device=logits.device)
    counters = launching.counters(2 * n_rows, logits.device)
    values = [getattr(how, name) for name in PARAMETERS]
    tensors = [v.contiguous() if isinstance(v, Tensor) else None for v in values]
    numbers = tuple(0 if isinstance(v, Tensor) else v for v in values)  # typed by the kernel
    dtypes = (logits.dtype, tokens.dtype, *(None if t is None else t.dtype for t in (seen, *tensors)))
    launching.launch(
        _plan(dtypes, writes_seen, c),
        splits * groups,
        (logits, seen, tokens, logprobs, *tensors, words, counters),
        (logits.stride(0), 0 if seen is None else seen.stride(0), n_cols),
        (n_rows, splits, groups, *numbers),
    )
    return None


def _how(rest: tuple[Any, ...]) -> Parameters:
    """The parameters, of which the schemas have two each: a tensor that may be absent, and a number for all rows."""
    tensors, numbers = rest[: len(PARAMETERS)], rest[len(PARAMETERS) :]
    return Parameters(*(n if t is None else t for t, n in zip(tensors, numbers, strict=True)))


def _fake_sample(logits: Tensor, seen: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    check("sample", logits, seen, _how(rest))
    n = logits.shape[0]
    tokens = torch.empty((n,), dtype=torch.int64, device=logits.device)
    return tokens, torch.empty((n,), dtype=torch.float32, device=logits.device)


def _launch_sample(logits: Tensor, seen: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    tokens, logprobs = _fake_sample(logits, seen, *rest)
    _run(tokens, logprobs, logits, seen, _how(rest), writes_seen=False)
    return tokens, logprobs


def _checked(tokens: Tensor, logprobs: Tensor, logits: Tensor, seen: Tensor, rest: tuple[Any, ...]) -> Tensor | None:
    """The words of seen tokens, or None for those of no dimension; after all checks."""
    given = seen if seen.dim() else None
    check("sample_", logits, given, _how(rest))
    check_outputs("sample_", tokens, logprobs, logits)
    return given


def _launch_in_place(tokens: Tensor, logprobs: Tensor, logits: Tensor, seen: Tensor, *rest: Any) -> None:
    given = _checked(tokens, logprobs, logits, seen, rest)
    _run(tokens, logprobs, logits, given, _how(rest), writes_seen=given is not None)


def _fake_in_place(tokens: Tensor, logprobs: Tensor, logits: Tensor, seen: Tensor, *rest: Any) -> None:
    _checked(tokens, logprobs, logits, seen, rest)


def _without_derivative(op: str) -> library.Autograd:
    def refuse(inputs: tuple[Any, ...]) -> None:
        raise ValueError(f"{op}: an input requires grad, but what is sampled has no derivative; detach it")

    def unreachable(*_: Any) -> NoReturn:
        raise AssertionError(f"{op} is never differentiated")

    return library.Autograd(save=unreachable, backward=unreachable, check=refuse)


_TENSORS = ", ".join(f"Tensor? {name}" for name in PARAMETERS)
_KINDS = {name: "float" if dtypes[0] == torch.float32 else "int" for name, dtypes in PARAMETERS.items()}
_NUMBERS = ", ".join(f"{kind} {name}_of_all" for name, kind in _KINDS.items())

_sample = library.define(
    f"sample(Tensor logits, Tensor? seen, {_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor)",
    launch=_launch_sample,
    fake=_fake_sample,
    autograd=_without_derivative("sample"),
)
_sample_in_place = library.define(
    f"sample_(Tensor(a!) tokens, Tensor(b!) logprobs, Tensor logits, Tensor(c!) seen, {_TENSORS}, {_NUMBERS}) -> ()",
    launch=_launch_in_place,
    fake=_fake_in_place,
    autograd=_without_derivative("sample_"),
)
_mark = library.define(
    "mark_seen_(Tensor(a!) seen, Tensor ids, Tensor row_of) -> ()",
    launch=seen.launch,
    fake=seen.check,
    autograd=_without_derivative("mark_seen_"),
)


def _arguments(op: str, given: dict[str, Any]) -> tuple[Any, ...]:
    """The parameters as the schemas have them: tensors or None, then numbers, each of its kind."""
    numbers = []
    for name, value in given.items():
        if isinstance(value, Tensor):
            value = 0
        else:
            check_number(op, name, value)
        numbers.append(float(value) if _KINDS[name] == "float" else value)
    return *(v if isinstance(v, Tensor) else None for v in given.values()), *numbers


def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 0.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    repetition_penalty: float | Tensor = 1.0,
    seen: Tensor | None = None,
    seeds: int | Tensor = 0,
    positions: int | Tensor = 0,
) -> tuple[Tensor, Tensor]:
    """The next token of each row of logits, drawn from its softmax or the likeliest, and its log-probability.

    In this order: the repetition penalty, the temperature, top_k, top_p of what top_k leaves, min_p of what top_p
    leaves, and a draw from the softmax of the rest. Each parameter but `seen` is one number for all rows, or a tensor
    `(B,)`, a number for each row, on the logits' device. A number out of its range is an error; a tensor's numbers are
    not looked at, and mean what is said below.

    Args:
        logits: `(B, V)`, float32, float16 or bfloat16, V from 1 to 4194304; copied only where the last stride is not 1.
        temperature: what logits are divided by: a finite number, 0 or more, or float32 `(B,)`. 0, the default, takes
            the largest, of equals the first, whatever top_k, top_p, min_p and seeds are; so does less in a tensor.
        top_k: how many of the largest are kept, of equals the first: an int from 0 to 2^31 - 1, or int32 or int64
            `(B,)`. 0, the default, keeps all, and so do V or more; so does less than 0 in a tensor. 1 keeps the largest
            alone.
        top_p: the fewest of the largest whose probabilities reach this are kept, one at least: a number above 0, 1 at
            most, or float32 `(B,)`. 1, the default, keeps all. In a tensor 0 or less keeps one, more than 1 all.
        min_p: what has less than this times the largest probability is dropped: a number from 0 to 1, or float32
            `(B,)`. 0, the default, drops nothing, and so does less in a tensor; 1 drops all but the largest and its
            equals, and so does more in a tensor.
        repetition_penalty: the logits of seen tokens are divided by it where positive, multiplied elsewhere, as Hugging
            Face has it: a finite number above 0, or float32 `(B,)`, all above 0. 1, the default, changes nothing; more
            makes seen tokens less likely, less makes them likelier. Any other than the number 1 needs `seen`.
        seen: int32 `(B, ceil(V / 32))`, a last stride of 1: bit t % 32 of word t // 32 is set for a token that the row
            has seen. See `mark_seen_`. None, the default: no penalty.
        seeds: of the noise: an int of 64 bits, or int32 or int64 `(B,)`; 0 by default. Equal seeds, positions and
            logits give equal tokens, whatever else is in the batch.
        positions: the place of the new token in its sequence, so that each has its noise: an int from 0 to 2^31 - 1, or
            int32 or int64 `(B,)`, in that range; 0 by default. Who leaves it at 0 draws every step with equal noise.

    Returns:
        tokens `(B,)` int64, and their log-probabilities `(B,)` float32: of the softmax of the logits as they came,
        before penalty and temperature.

        NaN counts as the largest logit, as in `torch.argmax`: the first NaN of a row is its token, whatever the
        parameters, and the log-probability is NaN. It is NaN, too, where the largest logit is infinite; of +inf the
        first is the token, and of a row of nothing but -inf it is token 0.

    Raises:
        ValueError: a shape or the stride of `seen` does not fit; a number is out of its range; a penalty comes without
            `seen`; logits or a parameter require grad; devices differ or are the CPU without the interpreter.
        TypeError: an argument is neither a number nor a tensor as said above, or a dtype is not one of those named.

    Sources: top_k Fan et al. 2018 (https://arxiv.org/abs/1805.04833), top_p Holtzman et al. 2020
    (https://arxiv.org/abs/1904.09751), min_p Nguyen et al. 2024 (https://arxiv.org/abs/2407.01082).
    """
    how = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seeds": seeds,
        "positions": positions,
    }
    return _sample(logits, seen, *_arguments("sample", how))


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
    seen: Tensor | None = None,
    seeds: int | Tensor = 0,
    positions: int | Tensor = 0,
) -> None:
    """`sample`, written over `tokens` and `logprobs`; each row's token is added to `seen`, where that is given.

    Takes what `sample` takes, with the same defaults, and:

    Args:
        tokens: `(B,)`, int32 or int64, contiguous.
        logprobs: `(B,)`, float32, contiguous.

    Raises:
        As `sample`, also for tokens and logprobs. Nothing was written then.
    """
    how = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seeds": seeds,
        "positions": positions,
    }
    library.check_tensors("sample_", logits=logits)
    none = torch.empty((), dtype=torch.int32, device=logits.device) if seen is None else seen
    _sample_in_place(tokens, logprobs, logits, none, *_arguments("sample_", how))


def mark_seen_(seen: Tensor, ids: Tensor, row_of: Tensor) -> None:
    """Add tokens to those that rows have seen: bit `ids[i] % 32` of `seen[row_of[i], ids[i] // 32]` is set.

    Args:
        seen: `(B, ceil(V / 32))`, int32, a last stride of 1. Written in place.
        ids: `(n,)`, int32 or int64: tokens, of a prompt say; one may be there more than once.
        row_of: `(n,)`, int32 or int64: the row of each. Ids and rows that `seen` has no place for are left out; where
            they are on the CPU, that is an error.

    Raises:
        ValueError: a shape or stride does not fit; on the CPU an id or row is out of range; devices differ or are the
            CPU without the interpreter.
        TypeError: a dtype is not one of those named.
    """
    _mark(seen, ids, row_of)
