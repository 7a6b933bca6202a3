"""How an implementation is timed: whole generations, which take turns with those of others, and prompts alone."""

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
LEAST_STEPS = 16  # of a generation that --seconds would cut shorter, and of the first look at an implementation
LEAST_PROMPTS, MOST_PROMPTS = 3, 20
PROMPTS_SHARE = 0.25  # of --seconds, for prompts; one of each generation is among them


@dataclasses.dataclass
class Samples:
    """Seconds of each step, from the end of the one before to its own; of each prefill, and of what the host does."""

    steps: list[float] = dataclasses.field(default_factory=list)
    prompts: list[float] = dataclasses.field(default_factory=list)
    host: list[float] = dataclasses.field(default_factory=list)

    def add(self, other: Samples) -> None:
        self.steps += other.steps
        self.prompts += other.prompts
        self.host += other.host


@dataclasses.dataclass(frozen=True)
class TurnPlan:
    """So many rounds, in each a generation of so many steps, and behind it so many prompts alone."""

    rounds: int
    steps: int
    prompts: int


def plan_turns(look: Samples, whole: int, seconds: float) -> TurnPlan:
    """What fits into the seconds, after a first look: at best whole generations, of `whole` steps."""
    step, prompt = spread(look.steps)[0], spread(look.prompts)[0]
    steps = max(min(LEAST_STEPS, whole), min(whole, int(seconds / step)))
    rounds = max(1, min(ROUNDS, int(seconds / step / steps)))
    prompts = max(LEAST_PROMPTS, min(MOST_PROMPTS, int(PROMPTS_SHARE * seconds / prompt)))
    return TurnPlan(rounds, steps, max(0, math.ceil(prompts / rounds) - 1))


class Stopwatch:
    """Times on the device where the clock measures, else on the host."""

    def __init__(self, clock: Clock, latency: Latency) -> None:
        self._clock, self._latency = clock, latency

    def turn(self, path: Path, steps: int, prompts: int = 0) -> Samples:
        """A generation of so many steps, then prompts alone."""
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
