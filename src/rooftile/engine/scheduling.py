"""Which sequences run, and how many tokens each gets in a step.

A step has one token of each sequence that decodes, and parts of prompts up to a number of tokens. A sequence is
admitted as soon as there are pages for its prompt. Where pages run out later, the sequence that came last gives its
pages back and is computed again.
"""

from __future__ import annotations

import bisect
import dataclasses
import operator
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rooftile.engine.paged_cache import PagedSequence
from rooftile.engine.prefix import page_names
from rooftile.engine.prompts import slots_of
from rooftile.engine.runner import Runner, Sampling

if TYPE_CHECKING:
    from rooftile.engine.generation import Top, Watch
    from rooftile.engine.speculation import Guess


_RANK = operator.attrgetter("priority", "order")


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt, its options, and its tokens so far.

    Attributes:
        index: of the prompt.
        limit: the most new tokens.
        filled: the tokens to compute before the next one is drawn: the prompt, and what was drawn before the sequence
            gave its pages back.
        names: of the full pages of its tokens, as far as they were needed.
        decoding: whether each of its steps is a single token: all of `filled` is computed.
        launched: new tokens whose steps were launched; the host has seen `len(tokens)` of them.
        finish_reason: "stop", "length", "abort" or "error", once it has ended.
        watch: follows its tokens.
        priority, order: requests with a lower number start first, and among equals the one that came first.
        id: of a request that was added to an `AsyncEngine`.
        cached: tokens of its prompt that were found in the prefix cache when it first started.
        queried: whether they were counted.
        guess: what proposes its tokens, in speculative decoding.
        proposed, accepted: how many tokens were.
    """

    index: int
    prompt: Sequence[int]
    limit: int
    sampling: Sampling
    sequence: PagedSequence | None = None
    filled: Sequence[int] = ()
    names: list[bytes] = dataclasses.field(default_factory=list)
    decoding: bool = False
    launched: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[Top] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    watch: Watch | None = None
    priority: int = 0
    order: int = 0
    id: str = ""
    cached: int = 0
    queried: bool = False
    guess: Guess | None = None
    proposed: int = 0
    accepted: int = 0

    @property
    def longest(self) -> int:
        """The most tokens that the cache will hold: the last new token is never written."""
        return len(self.prompt) + self.limit - 1

    @property
    def computed(self) -> int:
        """Tokens in the cache."""
        return 0 if self.sequence is None else self.sequence.length


class Scheduler:
    """The waiting and the running requests.

    Args:
        runner: of the engine.
        step_tokens: the most of a step, more than there are slots.
        prefix_cache: whether requests share the pages of equal beginnings.

    Attributes:
        preemptions: how often a running request gave its pages back.
        prefix_hit_tokens, prefix_query_tokens: how many tokens of prompts were found in the cache, of how many.
    """

    def __init__(self, runner: Runner, step_tokens: int, prefix_cache: bool) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of their ranks
        self._runner, self._cache, self._prefix_cache = runner, runner.cache, prefix_cache
        self._slots, self._page_size, self._step_tokens = runner.max_batch, runner.cache.page_size, step_tokens
        self._added = self.preemptions = self.prefix_hit_tokens = self.prefix_query_tokens = 0

    @property
    def full(self) -> bool:
        """Whether a request that is added now finds no slot in the next step."""
        return len(self.running) + len(self.waiting) >= self._slots

    def add(self, request: Request) -> None:
        """Let a request wait, behind those of the same priority that came before it."""
        request.order, self._added = self._added, self._added + 1
        self._queue(request)

    def _queue(self, request: Request) -> None:
        at = len(self.waiting)
        while at and _RANK(self.waiting[at - 1]) > _RANK(request):
            at -= 1
        self.waiting.insert(at, request)

    def plan(self) -> dict[Request, int]:
        """The requests of the next step, with the number of tokens that are computed of each.

        Those that run come first, in the order of their ranks; then those that wait.

        A request whose next page is computed in this very step, for another one, is held back: it finds the page in the
        next step. Those behind it may start, but leave it a slot and pages. Otherwise none overtakes another.
        """
        work: dict[Request, int] = {}
        given_way = self.preemptions
        running = [r for r in self.running if r.launched < r.limit]
        prompts = [r for r in running if not r.decoding]
        # Newest tokens take the rows of all slots up to the last one that gets a token.
        last = max([r.sequence.slot for r in running if r.sequence is not None], default=-1)
        decoding = len(prompts) < len(running)
        budget = self._step_tokens - (slots_of(last + 1, self._slots) if decoding else 0)
        free, size = self._cache.free_pages, self._page_size  # free: without those that the step takes
        for request in running:
            if self.preemptions > given_way and request not in self.running:
                continue
            sequence, n = request.sequence, 1
            if not request.decoding:
                n = min(len(request.filled) - request.computed, budget)
                if not n:
                    continue
                budget -= n
            if sequence is None or sequence.length + n > len(sequence.pages) * size:
                missing = self._missing(request, n)
                if missing > free:
                    if not self._make_room(request, missing, work):
                        continue
                    free = self._left(work)
                free -= missing
            work[request] = n
        if self.preemptions == given_way:
            self._start(budget, last if decoding else None, {r: work[r] for r in prompts if r in work}, work)
        return work

    def _start(
        self, budget: int, last: int | None, prompts: dict[Request, int], work: dict[Request, int]
    ) -> None:  # fmt: skip
        """Start requests that wait, as long as there are tokens of the budget, slots and pages for them.

        Args:
            last: the last slot with a row, if the step has newest tokens: rows of new slots beyond it count, too.
            prompts: the tokens of prompts that the step has so far.
        """
        slots = self._slots - len(self.running)
        if not (self.waiting and budget > 0 and slots):
            return
        coming = {name for request, n in prompts.items() for name in self._coming(request, n)}
        promised = sum([self._promised(r, work.get(r, 0)) for r in self.running])
        for request in list(self.waiting):
            if last is not None:  # a new sequence takes the first free slot
                before, last = last, max(last, len(self.running))
                budget -= slots_of(last + 1, self._slots) - slots_of(before + 1, self._slots)
            if not (budget > 0 and slots):
                return
            pages, following = self._found(request)
            if following not in coming:
                if not self._admitted(request, pages, promised):
                    return
                n = work[request] = min(len(request.filled) - request.computed, budget)
                budget -= n
                coming.update(self._coming(request, n))
            slots -= 1
            promised += self._promised(request, work.get(request, 0))

    def _promised(self, request: Request, n: int) -> int:
        """The pages kept for a request that gets n tokens: for the rest of its prompt, and one more if it needs it."""
        sequence, size = request.sequence, self._page_size
        computed, held = (0, 0) if sequence is None else (sequence.length, len(sequence.pages))
        tokens = max(len(request.filled), computed + n) + size
        most = len(request.prompt) + request.limit - 1
        return max(0, -(-(most if most < tokens else tokens) // size) - held)

    def _coming(self, request: Request, n: int) -> list[bytes]:
        """The names of the pages that the next n tokens of a request complete."""
        return request.names[request.computed // self._page_size : (request.computed + n) // self._page_size]

    def _found(self, request: Request) -> tuple[list[int], bytes | None]:
        """The pages of a waiting request that are in the cache, and the name of the page after them, if it has one."""
        if len(request.filled) != len(request.prompt) + len(request.tokens):
            request.filled = [*request.prompt, *request.tokens]
        if not self._prefix_cache:
            return [], None
        request.names = page_names(request.filled, self._page_size, request.names)
        # Of the last token at least the logits are needed.
        names = request.names[: (len(request.filled) - 1) // self._page_size]
        pages = self._cache.find(names)
        return pages, names[len(pages)] if len(pages) < len(names) else None

    def _missing(self, request: Request, n: int) -> int:
        """The pages that a request needs for n more tokens, beside those it has."""
        held = 0 if request.sequence is None else len(request.sequence.pages)
        return max(0, -(-(request.computed + n) // self._page_size) - held)

    def _left(self, work: dict[Request, int]) -> int:
        """The free pages that a step leaves."""
        return self._cache.free_pages - sum([self._missing(r, n) for r, n in work.items()])

    def _make_room(self, request: Request, missing: int, work: dict[Request, int]) -> bool:
        """Find so many pages for a request; false if it had to give its own back.

        Those that came last give way first. Steps that were launched go on: a freed page is written by later ones.
        """
        while missing > self._left(work):
            last = self.running.pop()
            self.preemptions += 1
            work.pop(last, None)
            self.remember(last)
            if last.sequence is not None:
                self._runner.free(last.sequence)
            last.sequence, last.decoding = None, False
            self._queue(last)
            if last is request:
                return False
        return True

    def _admitted(self, request: Request, pages: list[int], promised: int) -> bool:
        """Admit a request, which shares those pages, if there are pages for its prompt beside those promised."""
        if self.running:
            needed = -(-len(request.filled) // self._page_size) - len(pages) + self._cache.unused(pages)
            if needed > self._cache.free_pages - promised:
                return False
        if self._prefix_cache and not request.queried:
            request.queried = True
            self.prefix_query_tokens += len(request.filled)
            request.cached = len(pages) * self._page_size
            self.prefix_hit_tokens += request.cached
        if pages:
            request.sequence = self._runner.share(pages)
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=_RANK)
        return True

    def launched(self, request: Request) -> None:
        """The tokens that were planned for a request are computed by a step that was launched."""
        request.decoding = request.computed >= len(request.filled)
        self.remember(request)

    def remember(self, request: Request) -> None:
        """Name the full pages of a request whose tokens the host knows, for others that begin with the same tokens."""
        if self._prefix_cache and request.sequence is not None:
            tokens = [*request.prompt, *request.tokens][: request.computed]
            request.names = page_names(tokens, self._page_size, request.names)
            self._cache.name(request.sequence, request.names[: len(tokens) // self._page_size])

    def remove(self, request: Request) -> None:
        """Take a request out, whether it waits or runs."""
        self.remember(request)
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
