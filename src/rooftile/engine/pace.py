"""When to launch the next step: late, so that requests which come meanwhile are in it, but before the device waits.

The previous step runs until then. When it ends is predicted: it began as the one before it ended, and takes as long as
steps of its shape took.
"""

from __future__ import annotations

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
_LONGEST = 0.02  # more time to launch a step is that of a compilation
_KEPT = 0.98  # of that time, from step to step: a delay by other threads is remembered for some 50 steps


class Pace:
    """Predicts when a step has to be launched.

    Attributes:
        due: that time, on the clock of `time.perf_counter`; 0 for at once.
    """

    def __init__(self) -> None:
        self._seconds: dict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT))
        self._needed = _LONGEST  # to launch a step
        self.due = 0.0

    def launched(self, step: Readback, previous: Readback | None, since: float) -> None:
        """A step was launched, behind one that is not read yet; the host began with it at `since`."""
        took = time.perf_counter() - (self.due or since)
        waits = previous is None or previous.done
        step.follows = None if waits else previous
        if waits and self.due:
            took = 2 * self._needed  # the prediction was wrong
        self._needed = min(_LONGEST, max(took, _KEPT * self._needed))
        self.due = 0.0

    def read(self, step: Readback, following: Readback | None) -> None:
        """A step's tokens were read; the following one, if it was launched, has begun."""
        if step.follows is not None and step.shape is not None:
            self._seconds[step.shape].append(step.seconds_since(step.follows))
        step.follows, self.due = None, 0.0
        if following is not None and following.follows is step and step.ended is not None:
            recent = self._seconds.get(following.shape, ())
            if len(recent) >= _FEWEST:
                self.due = max(0.0, step.ended + min(recent) - self._needed - _SLACK)
