"""When to launch the next step: late, so that requests which come meanwhile are in it, but before the device waits.

The previous step runs until then. When it ends is predicted: it began as the one before it ended, and takes as long as
steps of its shape took.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rooftile.engine.generation import Readback

# Of so many recent steps of a shape, the shortest is expected: too short a prediction costs nothing, the next step is
# launched earlier. A single one is not enough, because the first of a shape may have waited for the host.
_RECENT, _FEWEST = 8, 2
_SLACK = 3e-4  # seconds between the launch and the end of the previous step
_LONGEST = 0.1  # to launch a step, kernel by kernel: more is compilation
_KEPT = 0.97  # of that time, from step to step: a delay by other threads is remembered for some 30 steps


class Pace:
    """Predicts when a step has to be launched."""

    def __init__(self) -> None:
        self._seconds: dict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))
        # What the host needs to launch a step, by whether it computes prompts: their tokens are laid out.
        self._needed = {False: _LONGEST, True: _LONGEST}
        self._end = 0.0  # of the step that runs
        self._planned = math.inf  # when the host will go on, if it has to wait

    def plan(self, prompts: bool) -> float:
        """When to launch a step, which computes prompts or not, on `time.perf_counter`'s clock; 0 for at once."""
        due = max(0.0, self._end - self._needed[prompts] - _SLACK)
        self._planned = due if due > time.perf_counter() else math.inf
        return due

    def launched(self, step: Readback, previous: Readback | None, since: float, prompts: bool) -> None:
        """A step was launched, behind one that is not read yet; the host began with it at `since`."""
        needed, planned = self._needed[prompts], self._planned
        # The host may go on later than planned: another thread has the interpreter.
        took = time.perf_counter() - min(since, planned)
        late = previous is None or previous.done
        if late and planned <= since:  # whatever was wrong; not where a prompt came late
            took = max(took, 2 * needed)
        self._needed[prompts] = min(_LONGEST, max(took, _KEPT * needed))
        step.follows, self._end, self._planned = None if late else previous, 0.0, math.inf

    def read(self, step: Readback, following: Readback | None) -> None:
        """A step's tokens were read; the following one, if it was launched, has begun."""
        if step.follows is not None and step.shape is not None:
            self._seconds[step.shape].append(step.seconds_since(step.follows))
        step.follows, self._end = None, 0.0
        if following is not None and following.follows is step and step.ended is not None:
            recent = self._seconds.get(following.shape, ())
            if len(recent) >= _FEWEST:
                self._end = step.ended + min(recent)
