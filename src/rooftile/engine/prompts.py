"""Prompts as a forward pass takes them: a batch of one length, or packed; sent to the device in one copy.

Prompts of similar length are padded to one of few lengths, so that each can have a CUDA graph. Padding follows a
prompt's tokens: causal attention does not see it, and it is never written into the cache. Prompts of unequal lengths
are packed into one sequence, and each token carries its place in the cache.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# The most tokens of a forward pass that gets a graph. With Llama-3-8B on an H200, launching a pass kernel by kernel
# took the host 25 to 31 ms; the device took 11 ms for 512 tokens and needs longer than the host from about 1500 on.
GRAPH_TOKENS = 2048
_SHARE = 8  # at most 1/8 of the tokens of several prompts may be padding: not measured


def padded_length(lengths: Sequence[int], capacity: int) -> int | None:
    """The length that prompts of those lengths are padded to, as a batch that gets a graph; None where there is none.

    It is never beyond the capacity, where the RoPE tables end. A single token is not padded: quantized weights have
    kernels for one row, which in fp8 do not round it.
    """
    n, longest = len(lengths), max(lengths)
    step = 1 if longest == 1 else 64 if longest < 1024 else 128
    length = min(-(-longest // step) * step, capacity)
    padding = n * length - sum(lengths)
    return length if n * length <= GRAPH_TOKENS and (n == 1 or _SHARE * padding <= n * length) else None


class Inputs(NamedTuple):
    """The prompts on the device: int32 views of one allocation.

    Attributes:
        ids: of all tokens; padding repeats a prompt's last token.
        rows: the tokens whose logits are wanted; None for all.
        starts, pages, counts: where keys and values go, as `append_kv` takes it. Each packed token is a sequence of its
            own, in a cache of one page.
        positions, ends: for packed tokens: each token's position in its prompt, and the prompts' boundaries.
    """

    ids: Tensor
    rows: Tensor | None
    starts: Tensor
    pages: Tensor
    counts: Tensor | None
    positions: Tensor | None
    ends: Tensor | None


class _Laid:
    """Fields of `Inputs`, side by side in memory of the host.

    Attributes:
        numbers: all fields, int32, in (pinned) host memory.
    """

    in_cache = False  # whether the keys that the tokens see are read from the cache

    def _lay(self, fields: Inputs, pinned: bool) -> None:
        self._shapes = [None if x is None else x.shape for x in fields]
        # 16 bytes apart: Triton compiles another kernel for another alignment.
        self._at = list(
            itertools.accumulate((0 if x is None else x.numel() + -x.numel() % 4 for x in fields), initial=0)
        )
        # New memory each time: the previous step's copy may still run. PyTorch reuses pinned memory only after the
        # copies from it have ended.
        self.numbers = torch.zeros(self._at[-1], dtype=torch.int32, device="cpu", pin_memory=pinned)
        for to, x in zip(self._views(self.numbers), fields, strict=True):
            if to is not None and x is not None:
                to.copy_(x)

    def on(self, device: torch.device) -> Inputs:
        """Send everything in one asynchronous copy."""
        return self.of(self.numbers.to(device, non_blocking=True))

    def of(self, numbers: Tensor) -> Inputs:
        """The fields as views of a copy of `numbers`."""
        return Inputs(*self._views(numbers))  # type: ignore[arg-type]

    def _views(self, numbers: Tensor) -> list[Tensor | None]:
        return [
            None if shape is None else numbers[at : at + shape.numel()].view(shape)
            for at, shape in zip(self._at, self._shapes, strict=False)
        ]


class PromptBatch(_Laid):
    """Prompts, laid out on the host.

    Args:
        prompts: the tokens of each, one or more.
        pages: the pages of each, with room for all tokens; nothing has been written into them.
        page_size, capacity: of the cache.
        every: whether logits of every token are wanted, not only of each prompt's last.
        pad: whether padding is allowed. In float16 it is not: an activation of the padding may overflow, attention
            multiplies it by 0, and infinity times 0 is NaN.

    Attributes:
        n: the number of prompts.
        length: of each, with padding; None where they are packed.
        shape: (n, length), which determines all launches, if that length gets a graph; else None.
        longest: tokens of the longest prompt.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        pages: Sequence[Sequence[int]],
        page_size: int,
        capacity: int,
        *,
        every: bool = False,
        pad: bool = True,
        pinned: bool = False,
    ) -> None:
        lengths = [len(p) for p in prompts]
        self.n, self.longest = len(prompts), max(lengths)
        self.length = self.longest if self.longest == min(lengths) else None
        padded = None if every else padded_length(lengths, capacity)
        if padded is not None and (pad or padded == self.length):
            self.length = padded
        else:
            padded = None
        self.shape = None if padded is None else (self.n, padded)
        layout = self._packed if self.length is None else self._batch
        self._lay(layout(prompts, pages, page_size, every), pinned)

    def _batch(
        self, prompts: Sequence[Sequence[int]], pages: Sequence[Sequence[int]], page_size: int, every: bool
    ) -> Inputs:
        """Built as lists, each of which becomes a tensor at once: the device waits for this."""
        assert self.length is not None
        length, counts, blocks = self.length, [len(p) for p in prompts], -(-self.length // page_size)
        ids = [token for p in prompts for token in (*p, *itertools.repeat(p[-1], length - len(p)))]
        rows = [
            row for i, m in enumerate(counts) for row in range(i * length + (0 if every else m - 1), i * length + m)
        ]
        table = [[*p, *itertools.repeat(-1, blocks - len(p))] for p in pages]
        return Inputs(_int32(ids), _int32(rows), _int32([0] * self.n), _int32(table), _int32(counts), None, None)

    def _packed(
        self, prompts: Sequence[Sequence[int]], of_prompts: Sequence[Sequence[int]], page_size: int, every: bool
    ) -> Inputs:
        ids, pages = ([_int32(x) for x in each] for each in (prompts, of_prompts))
        positions = torch.cat([torch.arange(len(x), dtype=torch.int32, device="cpu") for x in ids])
        of_tokens = [p.repeat_interleave(page_size)[: len(x)] for p, x in zip(pages, ids, strict=True)]
        ends = _int32(list(itertools.accumulate((len(x) for x in ids), initial=0)))
        rows = None if every else ends[1:] - 1
        return Inputs(
            torch.cat(ids), rows, positions % page_size, torch.cat(of_tokens)[:, None], None, positions, ends
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Part:
    """New tokens of one sequence.

    Attributes:
        slot: of the sequence.
        start: the position of the first.
        tokens: None for a single one, the newest of that slot, which the device knows.
        pages: of the sequence, with room for them.
        last: whether the logits behind the last one are wanted.
    """

    slot: int
    start: int
    tokens: Sequence[int] | None
    pages: Sequence[int]
    last: bool


class MixedBatch(_Laid):
    """New tokens of sequences, any number of each, whose earlier tokens are in the cache, laid out on the host.

    They are packed in the order of their slots; `ends` has a range for each slot, which may be empty. So the page table
    and the lengths of the cache are what attention needs.

    Args:
        parts: one or more, of different slots.
        page_size: of the cache.
        rounded: the number of slots that are passed for one that is needed: few numbers, so that few launches are
            prepared.

    Attributes:
        rows: the number of logits, those of the first slots; slots whose logits are not wanted have any.
        longest: tokens of the longest part.
    """

    in_cache, length = True, None

    def __init__(
        self, parts: Sequence[Part], page_size: int, rounded: Callable[[int], int], *, pinned: bool = False
    ) -> None:
        parts = sorted(parts, key=lambda part: part.slot)
        ids, positions, pages = list[int](), list[int](), list[int]()
        counts = [0] * rounded(parts[-1].slot + 1)
        rows = [0] * rounded(max((part.slot for part in parts if part.last), default=0) + 1)
        self._runs: list[tuple[int, int, int]] = []  # of newest tokens: their place, the first slot, how many
        for part in parts:
            n = counts[part.slot] = 1 if part.tokens is None else len(part.tokens)
            if part.tokens is None:
                place, first, many = self._runs[-1] if self._runs else (0, 0, 0)
                if many and (place + many, first + many) == (len(ids), part.slot):
                    self._runs[-1] = place, first, many + 1
                else:
                    self._runs.append((len(ids), part.slot, 1))
            ids += (0,) if part.tokens is None else part.tokens
            positions += range(part.start, part.start + n)
            pages += (part.pages[at // page_size] for at in range(part.start, part.start + n))
            if part.last:
                rows[part.slot] = len(ids) - 1
        self.n, self.rows, self.longest = 1, len(rows), max(counts)
        at, ends = _int32(positions), _int32(list(itertools.accumulate(counts, initial=0)))
        fields = Inputs(_int32(ids), _int32(rows), at % page_size, _int32(pages)[:, None], None, at, ends)
        self._lay(fields, pinned)

    def filled(self, device: torch.device, newest: Tensor) -> Inputs:
        """Everything on the device, with the newest tokens of slots where they belong. Nothing waits."""
        inputs = self.on(device)
        for place, slot, n in self._runs:
            inputs.ids[place : place + n].copy_(newest[slot : slot + n])
        return inputs


def _int32(numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cpu")
