"""Prompts as one forward pass takes them: a batch of one length, or packed one behind the other; sent in one copy.

Prompts of about one length are padded to one of few lengths, so that a CUDA graph can be kept for each. What is padded
stands behind a prompt's tokens, where causal attention does not see it, and is never written into the cache. Prompts of
unequal lengths are packed, each token with a place in the cache of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Tokens of a forward pass that a graph is kept for. In a lab on an H200 with Llama-3-8B the host took 25 to 31 ms to
# launch one kernel by kernel, and the device 11 for 512 tokens: it is what takes longer from some 1500 on.
GRAPH_TOKENS = 2048
_SHARE = 8  # at most one token of so many is padding, where there are several prompts: a guess


def padded_length(lengths: Sequence[int], capacity: int) -> int | None:
    """The length on the grid that prompts of those lengths are padded to, as a batch for which a graph is kept; None
    where there is none. Never beyond the capacity, behind which there are no angles.

    One token stays one: weights in fewer bits are multiplied by a single row as it is, in fp8 too.
    """
    n, longest = len(lengths), max(lengths)
    step = 1 if longest == 1 else 64 if longest < 1024 else 128
    length = min(-(-longest // step) * step, capacity)
    padding = n * length - sum(lengths)
    return length if n * length <= GRAPH_TOKENS and (n == 1 or _SHARE * padding <= n * length) else None


class Inputs(NamedTuple):
    """What the device knows of prompts: int32, in one piece of memory.

    Attributes:
        ids: of all tokens, a prompt's last again where they are padding.
        rows: the tokens of which logits are wanted; None for all that there are.
        starts, pages, counts: where keys and values go, as `append_kv` takes it. A packed token is a sequence of its
            own, in a cache of one page.
        positions, ends: of packed tokens: the place of each in its prompt, and where prompts begin and the last ends.
    """

    ids: Tensor
    rows: Tensor | None
    starts: Tensor
    pages: Tensor
    counts: Tensor | None
    positions: Tensor | None
    ends: Tensor | None


class PromptBatch:
    """Prompts, laid out on the host.

    Args:
        prompts: tokens of each, one or more.
        pages: of each, in the cache, which has room for all tokens and nothing of them yet.
        page_size, capacity: of the cache.
        every: logits are wanted of every token, not of each prompt's last alone.
        pad: whether they may be padded. Not where an activation of the padding may overflow, as in float16: attention
            multiplies the values behind a token by 0, and infinity times 0 is no number.

    Attributes:
        n: prompts.
        length: of each, with the padding; None where they are packed.
        shape: (n, length), on which all launches depend, where a graph is kept for that length; else None.
        longest: tokens of the longest prompt.
        numbers: all of `Inputs`, int32, in memory that the device can copy while the host goes on.
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
        fields = layout(prompts, pages, page_size, every)
        self._shapes = [None if x is None else x.shape for x in fields]
        # 16 bytes apart: kernels are compiled anew for another alignment.
        self._at = list(
            itertools.accumulate((0 if x is None else x.numel() + -x.numel() % 4 for x in fields), initial=0)
        )
        # New memory each time: the copy of the step before may be under way. PyTorch gives memory out again when what
        # the stream was to copy of it is done.
        self.numbers = torch.zeros(self._at[-1], dtype=torch.int32, device="cpu", pin_memory=pinned)
        for to, x in zip(self._views(self.numbers), fields, strict=True):
            if to is not None and x is not None:
                to.copy_(x)

    def on(self, device: torch.device) -> Inputs:
        """All that the device has to know, in one copy that nobody waits for."""
        return self.of(self.numbers.to(device, non_blocking=True))

    def of(self, numbers: Tensor) -> Inputs:
        """The parts of memory that holds what `numbers` holds."""
        return Inputs(*self._views(numbers))  # type: ignore[arg-type]

    def _views(self, numbers: Tensor) -> list[Tensor | None]:
        return [
            None if shape is None else numbers[at : at + shape.numel()].view(shape)
            for at, shape in zip(self._at, self._shapes, strict=False)
        ]

    def _batch(
        self, prompts: Sequence[Sequence[int]], pages: Sequence[Sequence[int]], page_size: int, every: bool
    ) -> Inputs:
        """By lists, each of which becomes a tensor at once: the device waits for it."""
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


def _int32(numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cpu")
