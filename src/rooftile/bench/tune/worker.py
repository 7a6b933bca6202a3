"""Processes of the search. If a configuration ends its process, another one replaces it.

A kernel may hang, write out of bounds, or crash the compiler. Before each run the process reports the configuration,
so that the parent process knows which one failed and can continue without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from rooftile import runtime
from rooftile.bench.tune.search import Dead, Found, Seconds, brief, search
from rooftile.bench.tune.space import TUNABLES, label

PATIENCE = 120.0  # seconds without an answer, after which a process counts as hung


@dataclasses.dataclass(frozen=True)
class Compile:
    """Run a configuration once, so that its kernel is in the disk cache."""

    op: str
    problem: Any
    config: Any


@dataclasses.dataclass(frozen=True)
class Search:
    """Search at a problem. `left` is the time for it in seconds; None is no limit."""

    op: str
    problem: Any
    space: tuple[Any, ...]
    default: Any
    seconds: Seconds
    left: float | None
    known_bad: dict[str, str]


class Died(Exception):
    """The process ended, or was ended; `trying` is the configuration that it ran, or ""."""

    def __init__(self, reason: str, trying: str) -> None:
        super().__init__(reason)
        self.trying = trying


def compile_one(task: Compile, device: torch.device) -> str:
    """The error, or "".

    Raises:
        Dead: the device can't be used any more in this process.
    """
    tunable = TUNABLES[task.op]
    wrong = ""
    try:
        inputs = tunable.draw(task.problem, device, torch.Generator(device).manual_seed(0))
        with torch.no_grad():
            tunable.call(task.problem, inputs, task.config)
    except Exception as error:
        wrong = brief(error)
    try:
        if device.type != "cpu":
            torch.get_device_module(device.type).synchronize(device)
    except Exception as error:
        raise Dead(brief(error)) from None
    return wrong


def run_search(task: Search, clock: Any, device: torch.device, trying: Callable[[str], None]) -> Found:
    until = None if task.left is None else time.monotonic() + task.left
    return search(
        TUNABLES[task.op],
        task.problem,
        task.space,
        task.default,
        clock,
        device,
        seconds=task.seconds,
        until=until,
        known_bad=task.known_bad,
        trying=trying,
    )


def _serve(pipe: Any) -> None:
    """The process's main loop: an answer to each task."""
    from rooftile.bench.timer import clock

    device = runtime.default_device()
    timer = None
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            if isinstance(task, Compile):
                pipe.send(("trying", label(TUNABLES[task.op], task.config)))
                answer: tuple[str, Any] = ("done", compile_one(task, device))
            else:
                timer = timer or clock(device)
                answer = ("done", run_search(task, timer, device, lambda name: pipe.send(("trying", name))))
        except Dead as error:
            pipe.send(("dead", str(error)))
            os._exit(1)  # a context that has failed can't even be taken down
        except Exception as error:
            answer = ("error", brief(error))
        pipe.send(answer)


class Worker:
    """One process, started at the first task and again after it has died."""

    def __init__(self, patience: float = PATIENCE, serve: Callable[[Any], None] = _serve) -> None:
        self.patience, self._serve = patience, serve
        self._process: Any = None
        self._pipe: Any = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=self._serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, task: Any) -> Any:
        """The answer.

        Raises:
            Died: there is none.
            RuntimeError: the process lives, and says that the task failed as a whole.
        """
        if self._process is None:
            self._start()
        trying = ""
        try:
            self._pipe.send(task)
            while self._pipe.poll(self.patience):
                kind, value = self._pipe.recv()
                if kind == "trying":
                    trying = value
                elif kind == "dead":
                    self.stop()
                    raise Died(value, trying)
                elif kind == "error":
                    raise RuntimeError(value)
                else:
                    return value
            reason = f"no answer in {self.patience:.0f} s"
        except (EOFError, OSError):
            self._process.join(10)
            code = self._process.exitcode
            reason = f"the process ended by signal {-code}" if code is not None and code < 0 else f"it ended ({code})"
        self.stop()
        raise Died(reason, trying)

    def stop(self) -> None:
        """End it, now."""
        if self._process is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
            self._process = None


@contextlib.contextmanager
def worker(patience: float = PATIENCE) -> Iterator[Worker]:
    made = Worker(patience)
    try:
        yield made
    finally:
        made.stop()


def compile_ahead(
    tasks: Iterable[Compile], jobs: int, until: float | None, done: Callable[[Compile, str], None]
) -> None:
    """Compile the tasks in `jobs` processes, in their order, until that time by `time.monotonic()`.

    `done` is called with each task and its error, or "".
    """
    waiting = iter(list(tasks))
    lock = threading.Lock()

    def serve() -> None:
        with worker() as process:
            while until is None or time.monotonic() < until:
                with lock:
                    task = next(waiting, None)
                if task is None:
                    return
                try:
                    wrong = process.ask(task)
                except (Died, RuntimeError) as error:
                    wrong = str(error)
                with lock:
                    done(task, wrong)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
