"""How sequences are sampled: a request's options, and the tables that some of them need on the device."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rooftile.ops.sample import MOST_TOP, top_logprobs


class TokenMask(Protocol):
    """What restricts the tokens of one sequence, such as a grammar."""

    def mask(self) -> Tensor:
        """The tokens that may come next: int32, (ceil(vocab / 32),), on the host.

        Token t is bit t % 32 of word t // 32. Called before each token is drawn.
        """

    def advance(self, token: int) -> None:
        """The token that was drawn."""


# Each option's type, the check of its values, and the words for them.
_NUMBER = (int, float)
_ACCEPTED: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "temperature": (_NUMBER, lambda x: 0 <= x < math.inf, "0 (the most likely token) or more"),
    "top_k": (int, lambda x: 0 <= x < 2**31, "0 (no limit) or more"),
    "top_p": (_NUMBER, lambda x: 0 < x <= 1, "more than 0, and at most 1"),
    "min_p": (_NUMBER, lambda x: 0 <= x <= 1, "0 to 1"),
    "repetition_penalty": (_NUMBER, lambda x: 0 < x < math.inf, "a positive number"),
    "seed": (int, lambda x: -(2**63) <= x < 2**63, "an integer of 64 bits"),
    "presence_penalty": (_NUMBER, lambda x: -2 <= x <= 2, "-2 to 2"),
    "frequency_penalty": (_NUMBER, lambda x: -2 <= x <= 2, "-2 to 2"),
    "top_logprobs": (int, lambda x: 0 <= x <= MOST_TOP, f"0 to {MOST_TOP}"),
}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The sampling options of a sequence: see `rooftile.sample`.

    Attributes:
        presence_penalty, frequency_penalty: -2 to 2, as in OpenAI's API; over the generated tokens, not the prompt's.
        logit_bias: a finite number for each of some tokens, added to their logits.
        mask: what restricts the tokens. Its sequence needs one of its own.
        top_logprobs: how many of the most likely tokens are returned with each token.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    mask: TokenMask | None = None
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        for name, (kind, accepts, said) in _ACCEPTED.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind):
                expected = "an integer" if kind is int else "a number"
                raise TypeError(f"sampling: {name} is {value!r}, expected {expected}")
            if not accepts(value):
                raise ValueError(f"sampling: {name} is {value!r}, expected {said}")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise TypeError(f"sampling: logit_bias is {self.logit_bias!r}, expected numbers by token ids")
            for token, bias in self.logit_bias.items():
                if isinstance(token, bool) or not isinstance(token, int):
                    raise TypeError(f"sampling: logit_bias has {token!r}, expected token ids")
                if isinstance(bias, bool) or not isinstance(bias, _NUMBER):
                    raise TypeError(f"sampling: logit_bias of token {token} is {bias!r}, expected a number")
                if not math.isfinite(bias):
                    raise ValueError(f"sampling: logit_bias of token {token} is {bias!r}, expected a finite number")
            # A copy: the caller may change it while the request waits, and other ranks get it pickled.
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.mask is not None and not callable(getattr(self.mask, "mask", None)):
            raise TypeError(f"sampling: mask is {self.mask!r}, expected an object with mask() and advance(token)")

    def check(self, vocab: int) -> None:
        """Raise ValueError for what a vocabulary of that size does not have."""
        for token in self.logit_bias or ():
            if not 0 <= token < vocab:
                raise ValueError(f"sampling: logit_bias has the token {token}, expected 0 to {vocab - 1}")
        if self.top_logprobs > vocab:
            raise ValueError(f"sampling: top_logprobs is {self.top_logprobs}, expected at most {vocab}, the vocabulary")

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is taken, and no seen token is penalized."""
        return self.temperature == 0 and self.repetition_penalty == 1

    @property
    def counts(self) -> bool:
        """Whether generated tokens are counted."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def plain(self) -> bool:
        """Whether it needs nothing but what the steps' CUDA graphs compute."""
        return not (self.counts or self.logit_bias or self.mask is not None or self.top_logprobs)


_DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "repetition_penalty": torch.float32,
    "seeds": torch.int64,
    "presence_penalty": torch.float32,
    "frequency_penalty": torch.float32,
}
_FORMATS: dict[torch.dtype, Literal["f", "i", "q"]] = {torch.float32: "f", torch.int32: "i", torch.int64: "q"}


def _views(memory: Tensor, n: int) -> dict[str, Tensor]:
    """Views of rows of bytes: for each option, n values."""
    return {
        name: row[: n * dtype.itemsize].view(dtype) for row, (name, dtype) in zip(memory, _DTYPES.items(), strict=True)
    }


class Numbers:
    """The sampling options that are numbers, n of each, in one allocation.

    Attributes:
        of: by name, `(n,)`, on the device.
    """

    def __init__(self, n: int, device: torch.device) -> None:
        stride = 8 * (n + n % 2)
        self._bytes = torch.zeros((len(_DTYPES), stride), dtype=torch.uint8, device=device)
        self.of = _views(self._bytes, n)
        # The same on the host, as memory whose numbers are cheap to set one by one.
        host = bytearray(len(_DTYPES) * stride)
        self._host = torch.frombuffer(host, dtype=torch.uint8).view(self._bytes.shape)
        self._rows = {
            name: memoryview(host)[i * stride : i * stride + n * dtype.itemsize].cast(_FORMATS[dtype])
            for i, (name, dtype) in enumerate(_DTYPES.items())
        }

    def send(self, changed: Mapping[int, Sampling]) -> None:
        """Set those of some rows, and send all in one copy, from memory that is not reused before its end."""
        for name, row in self._rows.items():
            of = operator.attrgetter("seed" if name == "seeds" else name)
            for i, how in changed.items():
                row[i] = of(how)
        memory = torch.empty(self._bytes.shape, dtype=torch.uint8, device="cpu", pin_memory=self._bytes.is_cuda)
        self._bytes.copy_(memory.copy_(self._host), non_blocking=True)


class SlotOptions:
    """Of slots whose sampling is not plain: counts of generated tokens, biases, masks, and their most likely tokens.

    A table has a row for each slot. It is allocated when the first sequence needs it: 2 bytes a token of the vocabulary
    for the counts, 4 for the biases, a bit for the masks. For steps with proposals there is a second table of masks,
    with all rows of such a step.

    Args:
        slots, vocab, device: of the runner.
        n_tokens: rows of a slot in a step with proposals.

    Attributes:
        top: of the last step, the first slot, the most likely tokens `(n, k)` and their log-probabilities, for each
            kernel that sampled.
        failed: of the last step, what the masks of slots raised. Their tokens were drawn without them.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device, n_tokens: int = 1) -> None:
        self._slots, self._vocab, self._device = slots, vocab, device
        self._words = -(-vocab // 32)
        self._live: dict[int, Sampling] = {}
        self._tables: dict[str, Tensor] = {}
        self._biased: set[int] = set()  # rows that are not zero
        # By table of masks, how many rows each slot has, and the slots whose first row does not allow all.
        self._rows = {"mask": 1, "mask_of_rows": n_tokens}
        self._masked: dict[str, set[int]] = {name: set() for name in self._rows}
        self.top: list[tuple[int, Tensor, Tensor]] = []
        self.failed: dict[int, Exception] = {}

    def begin(self) -> None:
        """Forget the results of the last step."""
        self.top, self.failed = [], {}

    def live(self, end: int) -> bool:
        """Whether the sampling of any slot before that one is not plain."""
        return any(slot < end for slot in self._live)

    def set(self, slot: int, how: Sampling, generated: Collection[int]) -> None:
        """Begin a sequence, which has generated those tokens so far."""
        self.free(slot)
        if how.counts:
            counts = self._on_host(self._vocab, torch.int16)
            if generated:
                found = torch.bincount(torch.tensor(list(generated), device="cpu"), minlength=self._vocab)
                counts.copy_(found.clamp(max=torch.iinfo(torch.int16).max))
            self._table("counts")[slot].copy_(counts, non_blocking=True)
        if how.logit_bias or slot in self._biased:
            biases = self._on_host(self._vocab, torch.float32)
            for token, bias in (how.logit_bias or {}).items():
                biases[token] = bias
            self._table("logit_bias")[slot].copy_(biases, non_blocking=True)
            (self._biased.add if how.logit_bias else self._biased.discard)(slot)
        if not how.plain:
            self._live[slot] = how

    def free(self, slot: int) -> None:
        self._live.pop(slot, None)

    def move(self, old: int, new: int) -> None:
        """Move a slot's row to another slot, which is free. Its mask is sent anew with each step."""
        how = self._live.pop(old, None)
        if how is not None:
            self._live[new] = how
        if how is not None and how.counts:
            self._table("counts")[new].copy_(self._table("counts")[old])
        if old in self._biased or new in self._biased:
            self._table("logit_bias")[new].copy_(self._table("logit_bias")[old])
            (self._biased.add if old in self._biased else self._biased.discard)(new)

    def of(self, rows: slice, penalties: Mapping[str, Tensor], proposed: bool = False) -> dict[str, Tensor]:
        """What `sample_` takes for those slots, all of which get a token; `penalties` has those by counts.

        In a step with proposals, which a masked slot has none of, the mask has all rows of the step.
        """
        live = {slot: how for slot, how in self._live.items() if rows.start <= slot < rows.stop}
        found: dict[str, Tensor] = {}
        if any(how.counts for how in live.values()):
            found = {"counts": self._table("counts")[rows], **{name: x[rows] for name, x in penalties.items()}}
        if any(how.logit_bias for how in live.values()):
            found["logit_bias"] = self._table("logit_bias")[rows]
        if masks := {slot: how.mask for slot, how in live.items() if how.mask is not None}:
            name = "mask_of_rows" if proposed else "mask"
            n = self._rows[name]
            self._send(masks, name)
            found["mask"] = self._table(name)[rows.start * n : rows.stop * n]
        return found

    def find_top(self, rows: slice, logits: Tensor) -> None:
        """Find the most likely tokens, as many as any of those slots asks for."""
        k = max((how.top_logprobs for slot, how in self._live.items() if rows.start <= slot < rows.stop), default=0)
        if k:
            self.top.append((rows.start, *top_logprobs(logits, k=k)))

    def _send(self, masks: Mapping[int, TokenMask], name: str) -> None:
        """Send the masks of the next token to each slot's first row; all other rows allow all."""
        slots = self._masked[name] | masks.keys()
        first, end = min(slots), max(slots) + 1
        words = self._on_host((end - first, self._words), torch.int32).fill_(-1)
        for slot, mask in masks.items():
            try:
                words[slot - first].copy_(self._checked(mask.mask()))
            except Exception as error:
                self.failed[slot] = error
        rows = self._table(name).view(self._slots, -1, self._words)[first:end, 0]
        if rows.is_contiguous():
            rows.copy_(words, non_blocking=True)
        else:  # of each slot, for a strided copy is a kernel
            for slot in slots:
                rows[slot - first].copy_(words[slot - first], non_blocking=True)
        self._masked[name] = set(masks)

    def _checked(self, words: Tensor) -> Tensor:
        if not isinstance(words, Tensor) or words.dtype != torch.int32 or words.device.type != "cpu":
            came = f"{words.dtype} on {words.device}" if isinstance(words, Tensor) else type(words).__name__
            raise TypeError(f"mask: {came}, expected int32 on the CPU, 32 tokens to a word")
        if tuple(words.shape) != (self._words,):
            raise ValueError(f"mask: has shape {tuple(words.shape)}, expected ({self._words},), a bit for each token")
        inside = (1 << (self._vocab - 1) % 32 + 1) - 1  # bits of the last word
        if not words[:-1].any() and not int(words[-1]) & inside:
            raise ValueError("mask: allows no token, expected one or more")
        return words

    def _table(self, name: str) -> Tensor:
        if name not in self._tables:
            of_masks = name in self._rows
            dtype = torch.int32 if of_masks else {"counts": torch.int16, "logit_bias": torch.float32}[name]
            shape = (self._slots * self._rows[name], self._words) if of_masks else (self._slots, self._vocab)
            self._tables[name] = torch.full(shape, -1 if of_masks else 0, dtype=dtype, device=self._device)
        return self._tables[name]

    def _on_host(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros to be copied from, which are not reused before the copy has ended."""
        return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=self._device.type == "cuda")
