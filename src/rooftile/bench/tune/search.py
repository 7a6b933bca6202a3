"""The search at one problem: every configuration is checked, all are timed a little, the best of them longer.

The times are the benchmark's own: calls captured in a graph, inputs that rotate out of the L2 cache, the finalists in
turns. A configuration's result must be correct before it is timed: every element, in memory filled with NaN beforehand,
and bit-identical in a second run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile import launching
from rooftile.bench.measure import Effort, interleave, rotation
from rooftile.bench.timer import Block, Clock
from rooftile.bench.tune.space import Tunable, label
from rooftile.cases.check import poisoned
from rooftile.graphs import uncollected

PEER = "peer"
FINALISTS = 4
SEMIFINAL = 4  # one in this many goes on to the finals
SURE = 0.995  # of the default's time: a smaller gain keeps the default


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Device time for each configuration in the three rounds."""

    quick: float = 0.002
    longer: float = 0.01
    final: float = 0.05


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search; times are medians in microseconds.

    Attributes:
        config: the fastest correct configuration.
        error: its relative error against a reference in float32.
        default: the configuration that the op chooses by itself; `default_us` is None where it was wrong, or failed.
        tried: configurations that were checked and timed, and how many there are.
        failed: by label, why a configuration was not timed.
    """

    config: Any
    us: float
    error: float
    default: Any
    default_us: float | None
    peer_us: float | None
    tried: int
    space: int
    failed: dict[str, str]
    seconds: float


class Wrong(Exception):
    """A configuration with a wrong result."""


class Dead(Exception):
    """The device no longer works in this process, which must end."""


def brief(error: Exception) -> str:
    """One line of at most 200 characters."""
    text = str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
    return text.strip().partition("\n")[0][:200]


def verify(tunable: Tunable, problem: Any, run: Callable[[], Tensor], reference: Tensor) -> float:
    """The relative error of a call's result.

    Raises:
        Wrong: it is over the limit, or an element is far off, NaN or not written, or a second run differs.
    """
    with poisoned():
        out = run()
        again = run()
    if out.shape != reference.shape:
        raise Wrong(f"the result has shape {tuple(out.shape)}, expected {tuple(reference.shape)}")
    limit = tunable.limit(problem)
    difference = out.float() - reference
    scale = torch.linalg.vector_norm(reference)
    error = float(torch.linalg.vector_norm(difference) / scale)
    if not error <= limit:  # NaN is not
        bad = int((~torch.isfinite(out.float())).sum())
        raise Wrong(f"{bad} elements are NaN or infinite" if bad else f"relative error {error:.1e}, over {limit:.1e}")
    # A norm over the whole output would not show one wrong tile among thousands.
    typical = scale / reference.numel() ** 0.5
    far = difference.abs_() > 4 * limit * (reference.abs() + typical)
    if bool(far.any()):
        raise Wrong(f"{int(far.sum())} of {far.numel()} elements are far off, with a relative error of {error:.1e}")
    if not torch.equal(out, again):
        raise Wrong("two runs differ")
    return error


def _quick(block: Block, clock: Clock, seconds: float) -> float:
    """The median of a few passes without the first: seconds a call."""
    readings = [block.enqueue() for _ in range(2 if clock.measures else 1)]
    clock.synchronize()
    taken = [read() for read in readings]
    passes = max(0, min(20, round(seconds / max(1e-9, taken[-1] * block.calls))))
    readings = [block.enqueue() for _ in range(passes if clock.measures else 0)]
    clock.synchronize()
    return statistics.median([*taken[1:], *(read() for read in readings)] or taken)


class Search:
    """One problem's search: its inputs, its reference and the results so far."""

    def __init__(
        self,
        tunable: Tunable,
        problem: Any,
        clock: Clock,
        device: torch.device,
        seconds: Seconds,
        trying: Callable[[str], None],
    ) -> None:
        self.tunable, self.problem, self.clock, self.device = tunable, problem, clock, device
        self.seconds, self.trying = seconds, trying
        self.failed: dict[str, str] = {}
        self.errors: dict[Any, float] = {}
        self.times: dict[Any, float] = {}
        nbytes = tunable.nbytes(problem)
        copies = rotation(nbytes, clock.l2, 2 * nbytes, clock.free_bytes()) if clock.measures else 1
        numbers = torch.Generator(device).manual_seed(1)
        self.sets = [tunable.draw(problem, device, numbers) for _ in range(copies)]
        self.reference = tunable.reference(problem, self.sets[0])

    def _calls(self, config: Any) -> list[Callable[[], Tensor]]:
        call, problem = self.tunable.call, self.problem
        if config is PEER:
            return [functools.partial(self.tunable.call_peer, problem, inputs) for inputs in self.sets]
        return [functools.partial(call, problem, inputs, config) for inputs in self.sets]

    def _fail(self, name: str, error: Exception) -> None:
        self.failed[name] = brief(error)
        try:
            self.clock.synchronize()
            launching.clear_counters()  # which the next kernel expects to be zero; no graph with them runs again
        except Exception:
            raise Dead(self.failed[name]) from None

    def attempt(self, config: Any) -> None:
        """Check a configuration, and time it briefly if it is correct."""
        name = label(self.tunable, config)
        self.trying(name)
        try:
            calls = self._calls(config)
            error = verify(self.tunable, self.problem, calls[0], self.reference)
            self.times[config] = _quick(self.clock.block(calls), self.clock, self.seconds.quick)
            self.errors[config] = error
        except Exception as error:
            self.times.pop(config, None)
            self._fail(name, error.with_traceback(None))
        self.trying("")

    def race(self, configs: Sequence[Any], seconds: float, least: int = 1) -> dict[Any, float]:
        """The configurations in turns: the median seconds of a call of each that did not fail, of `least` passes or
        more."""
        blocks: dict[str, Block] = {}
        by_name = {PEER if c is PEER else label(self.tunable, c): c for c in configs}
        for name, config in by_name.items():
            with contextlib.suppress(RuntimeError) if config is PEER else contextlib.nullcontext():
                blocks[name] = self.clock.block(self._calls(config))
        effort = Effort(seconds=seconds, least=least) if self.clock.measures else Effort(warmup=0, iters=1)
        found: dict[Any, float] = {}
        with uncollected():
            for name, samples in interleave(blocks, self.clock, effort, random.Random(0)):
                if not isinstance(samples, Exception):
                    found[by_name[name]] = statistics.median(samples)
                elif by_name[name] is not PEER:
                    self._fail(name, samples)
        return found

    def best(self, count: int) -> list[Any]:
        return sorted(self.times, key=lambda c: self.times[c])[:count]


def search(
    tunable: Tunable,
    problem: Any,
    space: Sequence[Any],
    default: Any,
    clock: Clock,
    device: torch.device,
    *,
    seconds: Seconds | None = None,
    until: float | None = None,
    known_bad: dict[str, str] | None = None,
    trying: Callable[[str], None] = lambda name: None,
) -> Found:
    """The fastest correct configuration of the space, which includes the default.

    Args:
        space: configurations, the likely ones first.
        until: the `time.monotonic()` after which no more are begun; the default and the first are always tried.
        known_bad: by label, configurations to skip, with the reason.
        trying: called with the label of a configuration before its first run, and with "" after it.

    Raises:
        ValueError: no configuration gives a correct result.
        Dead: the device can't be used any more in this process.
    """
    began = time.monotonic()
    known_bad = known_bad or {}
    seconds = seconds or Seconds()
    configs = list(dict.fromkeys((default, *space)))
    with clock.active(), torch.no_grad():
        s = Search(tunable, problem, clock, device, seconds, trying)
        tried = 0
        for i, config in enumerate(configs):
            if i > 1 and until is not None and time.monotonic() > until:
                break
            if (name := label(tunable, config)) in known_bad:
                s.failed[name] = known_bad[name]
                continue
            s.attempt(config)
            tried += 1
        if not s.times:
            raise ValueError(f"no configuration is right: {next(iter(s.failed.values()), 'none was tried')}")
        if len(s.times) > FINALISTS:
            s.times |= s.race(s.best(max(FINALISTS, len(s.times) // SEMIFINAL)), seconds.longer)
        last = s.best(FINALISTS)
        finalists = [*last, *([default] if default in s.times and default not in last else []), PEER]
        final = s.race(finalists, seconds.final)
        peer = final.pop(PEER, None)
        # Check again after all replays: a race between warps may not show at the first run.
        for config in sorted(final, key=lambda c: final[c]):
            try:
                error = verify(tunable, problem, s._calls(config)[0], s.reference)
            except Exception as wrong:
                s._fail(label(tunable, config), wrong.with_traceback(None))
                del final[config]
            else:
                s.errors[config] = error
                break
        if not final:
            raise ValueError(f"no configuration is right: {next(iter(s.failed.values()))}")
        winner = min(final, key=lambda c: final[c])
        if default in final and final[winner] > SURE * final[default]:
            winner = default
        found = Found(
            config=winner,
            us=1e6 * final[winner],
            error=s.errors[winner],
            default=default,
            default_us=1e6 * final[default] if default in final else None,
            peer_us=None if peer is None else 1e6 * peer,
            tried=tried,
            space=len(configs),
            failed=s.failed,
            seconds=time.monotonic() - began,
        )
        del s
    gc.collect()
    return found
