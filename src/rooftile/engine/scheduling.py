"""Which sequences run: first come, first served, as soon as there are a slot and enough pages.

A sequence is admitted only if the cache has pages for its prompt and all of its new tokens, so it never has to wait or
to be evicted later. It takes the pages as it grows.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rooftile.engine.cache import PagedSequence
from rooftile.engine.runner import Sampling

if TYPE_CHECKING:
    from rooftile.engine.generation import Watch


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt, its options, and its tokens so far.

    Attributes:
        index: of the prompt.
        limit: the most new tokens.
        launched: new tokens whose steps were launched; the host has seen `len(tokens)` of them.
        finish_reason: "stop", "length", "abort" or "error", once it has ended.
        watch: follows its tokens.
        priority: requests with a lower number start first.
        id: of a request that was added to an `AsyncEngine`.
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
    watch: Watch | None = None
    priority: int = 0
    id: str = ""

    @property
    def longest(self) -> int:
        """The most tokens that the cache will hold: the last new token is never written."""
        return len(self.prompt) + self.limit - 1


class Scheduler:
    """The waiting and the running requests.

    Args:
        slots, pages, page_size: of the cache.
        prompt_tokens: the most in one forward pass; a single prompt may have more.
    """

    def __init__(self, slots: int, pages: int, page_size: int, prompt_tokens: int) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._slots, self._page_size, self._prompt_tokens = slots, page_size, prompt_tokens
        self._pages = pages

    def pages_of(self, request: Request) -> int:
        return -(-request.longest // self._page_size)

    def add(self, request: Request) -> None:
        """Let a request wait, behind those that came before it and those of a lower number."""
        at = len(self.waiting)
        while at and self.waiting[at - 1].priority > request.priority:
            at -= 1
        self.waiting.insert(at, request)

    def admit(self) -> list[Request]:
        """Move requests from the head of the queue to the running ones, as long as they fit, and return them."""
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
        """Running requests that get another token."""
        return [r for r in self.running if r.launched < r.limit]

    def remove(self, request: Request) -> None:
        """Take a request out, whether it waits or runs."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
