"""How implementations are timed: whole generations, in turns with those of the others, and single prompts."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time

from rooftile.bench.e2e.paths import Path
from rooftile.bench.prefill import Latency
from rooftile.bench.rows import spread
from rooftile.bench.timer import Clock
from rooftile.graphs import uncollected

ROUNDS = 5
LEAST_STEPS = 16  # the least of a generation that --seconds cuts short, and the steps of a probe
SAMPLES = 20  # of steps, at least, and of prompts, including those of generations


@dataclasses.dataclass
class Samples:
    """Seconds of each step (from the previous step's end to its own), of each prefill, and of the host's part of it."""

    steps: list[float] = dataclasses.field(default_factory=list)
    prompts: list[float] = dataclasses.field(default_factory=list)
    host: list[float] = dataclasses.field(default_factory=list)

    def add(self, other: Samples) -> None:
        self.steps += other.steps
        self.prompts += other.prompts
        self.host += other.host


@dataclasses.dataclass(frozen=True)
class TurnPlan:
    """Rounds of measuring; each is a generation of `steps` steps followed by `prompts` single prompts."""

    rounds: int
    steps: int
    prompts: int


def plan_turns(look: Samples, whole: int, seconds: float, least: int = SAMPLES) -> TurnPlan:
    """The steps that fit into the seconds, by a first probe: whole generations of `whole` steps if possible. `least`
    samples of both are taken however long they take."""
    step = spread(look.steps)[0]
    steps = max(min(max(LEAST_STEPS, least), whole), min(whole, int(seconds / step)))
    rounds = max(math.ceil(least / steps), min(ROUNDS, int(seconds / step / steps)))
    return TurnPlan(rounds, steps, max(0, math.ceil(least / rounds) - 1))


class Stopwatch:
    """Times on the device where the clock measures, else on the host."""

    def __init__(self, clock: Clock, latency: Latency) -> None:
        self._clock, self._latency = clock, latency

    def turn(self, path: Path, steps: int, prompts: int = 0) -> Samples:
        """A generation of `steps` steps, then single prompts."""
        with uncollected():
            samples = self._generation(path, steps)
        for _ in range(prompts):
            path.reset()
            with uncollected():
                seconds, on_host = self._latency.once(path.prefill)
            samples.add(Samples([], [seconds], [on_host]))
        return samples

    def _generation(self, path: Path, steps: int) -> Samples:
        path.reset()
        if not self._clock.measures:
            times = [time.perf_counter()]
            for call in (path.prefill, *[path.step] * steps):
                call()
                times.append(time.perf_counter())
            prompt, *rest = (b - a for a, b in itertools.pairwise(times))
            return Samples(rest, [prompt], [prompt])
        begin, *events = (self._latency.module.Event(enable_timing=True) for _ in range(steps + 2))
        self._clock.synchronize()  # prompts come to an idle device
        since = time.perf_counter()
        begin.record()
        path.prefill()  # the first steps are queued while it runs
        events[0].record()
        on_host = time.perf_counter() - since
        for event in events[1:]:
            path.step()
            event.record()
        self._clock.synchronize()
        seconds = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise((begin, *events))]
        return Samples(seconds[1:], seconds[:1], [on_host])
