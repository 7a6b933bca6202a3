"""The loop of generation: launch a step, then read the tokens of the previous one. `Pace` says when to launch.

A step of speculative decoding is launched after the tokens of the previous one were read, because proposals depend on
them, and is read before the next step is launched, because it decides how long the sequences are.

`Engine.generate` runs it until its prompts have ended; `AsyncEngine` runs it in a thread, with requests as they come.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence

from rooftile.engine.generation import Readback, StreamChunk
from rooftile.engine.pace import Pace
from rooftile.engine.paged_cache import PagedSequence
from rooftile.engine.runner import Runner, Sampling
from rooftile.engine.scheduling import Request, Scheduler
from rooftile.engine.speculation import Speculation

Event = tuple[Request, StreamChunk | Exception]


class Loop:
    """Steps of a scheduler's requests. One thread at a time may use it.

    Args:
        runner: of the engine.
        scheduler: its requests have a `watch`.
        speculation: where proposals come from, if the runner takes any.

    Attributes:
        steps, prompt_tokens, generated_tokens: how many were launched, computed and read so far.
        proposed_tokens, accepted_tokens: of speculative decoding.
        host_seconds: what the steps took without waiting for the device.
        events: of the newest step; where it has raised, what it had read before.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, speculation: Speculation | None = None) -> None:
        self.runner, self.scheduler, self._speculation = runner, scheduler, speculation
        self._launched, self._pace = deque[Readback](), Pace()
        self.steps = self.prompt_tokens = self.generated_tokens = 0
        self.proposed_tokens = self.accepted_tokens = 0
        self.host_seconds = 0.0
        self.events: list[Event] = []

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    @property
    def due(self) -> float:
        """When the next step should be launched, on the clock of `time.perf_counter`; 0 for at once, inf for no step.

        Requests that are added until then are in it.
        """
        if not self.busy:
            return math.inf
        if self.scheduler.full or self.runner.ranks is not None:  # how late other ranks launch isn't known
            return 0.0
        return self._pace.plan(bool(self.scheduler.waiting) or not all(r.decoding for r in self.scheduler.running))

    def step(self) -> list[Event]:
        """Launch the next step, and read the previous one: the new chunk of each request, or its error.

        A request that has ended has given back its slot and pages. If anything is raised, `clear` gives back all.
        """
        since, events = time.perf_counter(), list[Event]()
        self.events = events
        running, speculation = self.scheduler.running, self._speculation
        speculates = speculation is not None and speculation.wants(running)
        verifies = bool(self._launched) and self._launched[-1].proposed is not None
        masked = any([r.sampling.mask is not None for r in running])  # noqa: C419  # a generator is a call for each
        if speculates or verifies or masked:
            self._read(0, events)  # proposals and masks depend on the token before
        launched = self._launch(speculates, since)
        self._read(launched, events)
        self.host_seconds += time.perf_counter() - since
        return events

    def _read(self, left: int, events: list[Event]) -> None:
        """Read the tokens of all steps but the last ones."""
        while len(self._launched) > left:
            read = self._launched.popleft()
            for request, proposed, accepted in read.accepted():
                if request.finish_reason is None and self._speculation is not None:
                    request.launched += accepted
                    self.proposed_tokens += proposed
                    self.accepted_tokens += accepted
                    self._speculation.verified(request, proposed, accepted)
            failed = read.failed()
            for request, token, logprob, top in read.tokens():
                if request.finish_reason is not None:
                    continue  # its end was not known when the step was launched
                assert request.watch is not None
                try:
                    if failed and request in failed:
                        raise failed[request]
                    if (mask := request.sampling.mask) is not None:
                        mask.advance(token)
                    events.append((request, request.watch.add(token, logprob, top)))
                    self.generated_tokens += 1
                except Exception as error:
                    request.finish_reason = "error"
                    events.append((request, error))
                if request.finish_reason is not None:
                    self.remove(request)
            self.host_seconds -= read.waited
            self._pace.read(read, self._launched[0] if self._launched else None)

    def _launch(self, speculates: bool, since: float) -> bool:
        """Launch a step, begun at `since`, if there is any work. With `speculates`, all earlier tokens are known."""
        runner, scheduler = self.runner, self.scheduler
        work = scheduler.plan()
        if not work:
            return False
        self.steps += 1
        prompts = [r for r in work if not r.decoding]
        ended = [r.sequence for r in scheduler.running if r.launched >= r.limit and r.sequence is not None]
        runner.compact(ended, begun=sum(r.sequence is None for r in prompts))
        self.prompt_tokens += sum([work[r] for r in prompts])
        proposals = None
        if not prompts:
            proposals = self._proposals(list(work)) if speculates else None
            if proposals is None:
                runner.decode([r.sequence for r in work if r.sequence is not None])
            else:
                runner.verify({r.sequence: tokens for r, tokens in proposals.items() if r.sequence is not None})
        else:
            self._extend(work)
        for request in prompts:
            scheduler.launched(request)
        unfinished = {r for r in prompts if not r.decoding}  # a part of whose prompt is left
        requests = [r for r in work if r not in unfinished]
        logprobs = False
        for request in requests:
            request.launched += 1
            logprobs |= request.watch is not None and request.watch.logprobs
        proposed = None if proposals is None else {r: len(tokens) for r, tokens in proposals.items()}
        # A step without a new token is read, too: else all steps of a long prompt would be launched at once.
        read, previous = Readback(runner, requests, logprobs, proposed), self._launched[-1] if self._launched else None
        self._launched.append(read)
        self._pace.launched(read, previous, since, bool(prompts))
        if self._speculation is not None and proposals is None:
            self._speculation.plain(requests)
        return True

    def _proposals(self, requests: list[Request]) -> dict[Request, list[int]] | None:
        """Proposals for requests that decode; None if the step is a plain one."""
        speculation, verifier = self._speculation, self.runner.verifier
        assert speculation is not None, "the loop speculates"
        assert verifier is not None, "and so does the runner"
        found = speculation.propose(requests)
        sequences = [r.sequence for r in requests if r.sequence is not None]
        if found is None or not self.runner.cache.has_room(sequences, verifier.n_tokens):
            speculation.no_match(requests)
            return None
        return found

    def _extend(self, work: dict[Request, int]) -> None:
        new: dict[PagedSequence, Sequence[int] | None] = {}
        begun: dict[PagedSequence, tuple[Sequence[int], Sampling, Sequence[int]]] = {}
        for request, n in work.items():
            sequence, filled = request.sequence, request.filled
            if sequence is None:
                sequence = request.sequence = self.runner.share([])
            at = sequence.length
            if request.decoding:
                new[sequence] = None
                continue
            new[sequence] = filled[at : at + n]
            if at + n == len(filled):
                begun[sequence] = filled, request.sampling, request.tokens
        self.runner.extend(new, begun)

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is. Its slot and pages are free for the next step."""
        self.scheduler.remove(request)
        sequence, request.sequence = request.sequence, None
        if sequence is not None:
            self.runner.free(sequence)

    def clear(self) -> None:
        """Take all requests out, and forget what the cache holds: weights may change, or a step have failed midway."""
        self._launched.clear()
        for request in [*self.scheduler.waiting, *self.scheduler.running]:
            self.remove(request)
        self.runner.cache.forget()
