"""Which sequences run: first come, first served, when there is a slot, and pages for all that they can get.

A sequence that was let in never has to wait or to be thrown out: its pages are counted when it comes, though it takes
them as it grows.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

from rooftile.engine.cache import PagedSequence
from rooftile.engine.runner import Sampling


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt, what was asked of it, and what has come of it.

    Attributes:
        index: its place among the prompts.
        limit: the most new tokens.
        launched: new tokens that steps were launched for; the host has seen `len(tokens)` of them.
        finish_reason: "stop" or "length", when it has ended.
    """

    index: int
    prompt: Sequence[int]
    limit: int
    sampling: Sampling
    sequence: PagedSequence | None = None
    launched: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None

    @property
    def longest(self) -> int:
        """Tokens that the cache may come to hold: the last new one is never put into it."""
        return len(self.prompt) + self.limit - 1


class Scheduler:
    """The requests that wait, and those that run.

    Args:
        slots, pages, page_size: of the cache.
        prompt_tokens: the most in one forward pass, unless a single prompt has more.
    """

    def __init__(self, slots: int, pages: int, page_size: int, prompt_tokens: int) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._slots, self._page_size, self._prompt_tokens = slots, page_size, prompt_tokens
        self._pages = pages

    def pages_of(self, request: Request) -> int:
        return -(-request.longest // self._page_size)

    def admit(self) -> list[Request]:
        """Those at the head of the queue that can run beside those that do; they run from now on."""
        admitted: list[Request] = []
        tokens = 0
        free = self._pages - sum(self.pages_of(r) for r in self.running)
        while self.waiting and len(self.running) < self._slots:
            request = self.waiting[0]
            tokens += len(request.prompt)
            free -= self.pages_of(request)
            if free < 0 or (admitted and tokens > self._prompt_tokens):
                break
            admitted.append(self.waiting.popleft())
            self.running.append(request)
        return admitted

    def unfinished(self) -> list[Request]:
        """Those that run, and are to get another token."""
        return [r for r in self.running if r.launched < r.limit]

    def remove(self, request: Request) -> None:
        self.running.remove(request)
