"""What sampling accepts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.sample.seen import check_words

# A parameter's name, and the dtypes that its tensor may have; in the order of the schemas.
INTEGERS = (torch.int32, torch.int64)
PARAMETERS: dict[str, tuple[torch.dtype, ...]] = {
    "temperature": (torch.float32,),
    "top_k": INTEGERS,
    "top_p": (torch.float32,),
    "min_p": (torch.float32,),
    "repetition_penalty": (torch.float32,),
    "seeds": INTEGERS,
    "positions": INTEGERS,
}
MOST_TOKENS = 1 << 22  # whose probabilities add up within an int64 (search.py)
_RANGES = {
    "temperature": (0.0, math.inf, "0 or more"),
    "top_p": (math.ulp(0.0), 1.0, "more than 0, and at most 1"),  # 0 would keep nothing: the least number above it
    "min_p": (0.0, 1.0, "0 to 1"),
    "top_k": (0, 2**31 - 1, "0 (off) or more, of int32"),
    "seeds": (-(2**63), 2**63 - 1, "an int64"),
    "positions": (0, 2**31 - 1, "0 or more, of int32"),
}


def dtypes_named(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def check_number(op: str, name: str, value: Any) -> None:
    """Raise unless a parameter that is one number for all rows is one, and within its range."""
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
    if not low <= value <= high or value == math.inf:
        raise ValueError(f"{op}: {name} is {value}, expected {accepted}")


@dataclasses.dataclass(frozen=True)
class Parameters:
    """How each row is sampled: tensors of an entry a row, or numbers for all rows."""

    temperature: Tensor | float
    top_k: Tensor | int
    top_p: Tensor | float
    min_p: Tensor | float
    repetition_penalty: Tensor | float
    seeds: Tensor | int
    positions: Tensor | int

    @property
    def greedy(self) -> bool:
        """Whether it is known on the host that no row draws."""
        return not isinstance(self.temperature, Tensor) and self.temperature == 0

    @property
    def penalised(self) -> bool:
        return isinstance(self.repetition_penalty, Tensor) or self.repetition_penalty != 1


def check(op: str, logits: Tensor, seen: Tensor | None, how: Parameters) -> None:
    """Raise unless rows of logits, their seen tokens and their parameters fit together."""
    library.check_floating(op, logits=logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"{op}: logits has shape {tuple(logits.shape)}, expected (B, V), at least one token")
    n_rows, n_cols = logits.shape
    if n_cols > MOST_TOKENS:
        raise ValueError(f"{op}: logits has {n_cols} tokens, expected at most {MOST_TOKENS}")
    for name, dtypes in PARAMETERS.items():
        value = getattr(how, name)
        if not isinstance(value, Tensor):
            continue
        if value.dtype not in dtypes:
            raise TypeError(f"{op}: {name} has dtype {value.dtype}, expected {dtypes_named(dtypes)}")
        if tuple(value.shape) != (n_rows,):
            raise ValueError(f"{op}: {name} has shape {tuple(value.shape)}, expected ({n_rows},), one for each row")
    if seen is not None:
        check_words(op, seen)
        if tuple(seen.shape) != (n_rows, library.cdiv(n_cols, 32)):
            expected = (n_rows, library.cdiv(n_cols, 32))
            raise ValueError(f"{op}: seen has shape {tuple(seen.shape)}, expected {expected}, a bit for each token")
    elif how.penalised:
        raise ValueError(f"{op}: repetition_penalty is given without seen, the tokens that it is for")


def check_outputs(op: str, tokens: Tensor, logprobs: Tensor, logits: Tensor) -> None:
    """Raise unless tokens and logprobs can be written in place, an entry for each row of logits."""
    if tokens.dtype not in INTEGERS:
        raise TypeError(f"{op}: tokens has dtype {tokens.dtype}, expected int32 or int64")
    if logprobs.dtype != torch.float32:
        raise TypeError(f"{op}: logprobs has dtype {logprobs.dtype}, expected float32")
    for name, x in (("tokens", tokens), ("logprobs", logprobs)):
        if tuple(x.shape) != (logits.shape[0],):
            raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected ({logits.shape[0]},), as logits' rows")
        if x.shape[0] > 1 and x.stride(0) != 1:
            raise ValueError(f"{op}: {name} has a stride of {x.stride(0)}, expected 1 to be written in place")
