"""Rank 0 leads: the calls that its runner gets are broadcast, and the other ranks make them, too.

So one rank alone has requests, a scheduler and a tokenizer. Calls that launch nothing wait until the next one that
does, and go with it in one message. The sequences of a call are named by their slots, which are the same on every rank,
as pages are: they follow from the calls. A mask is asked on rank 0, at each token, which tells the others what it said.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from rooftile.engine.paged_cache import PagedSequence
from rooftile.engine.ranks import Ranks
from rooftile.engine.runner import Runner
from rooftile.engine.sampling import Sampling, TokenMask

if TYPE_CHECKING:
    from rooftile.engine.engine import Engine

_LAUNCHES = ("prefill", "decode", "verify", "extend", "logits", "warm_up")
_LATER = ("share", "free", "shorten", "compact", "cache.name", "cache.forget")
_ALONE = ("bucket", "cache.find", "cache.unused", "cache.has_room")  # they change nothing
_RAISED = "raised"


class _ReceivedMask:
    """A mask of rank 0 on the other ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def mask(self) -> Tensor:
        found, error = pickle.loads(self._ranks.receive())
        if error is not None:
            raise RuntimeError(error)
        return cast("Tensor", found)

    def advance(self, token: int) -> None:
        pass


class BroadcastMask:
    """A mask on rank 0, which tells the other ranks what it says."""

    def __init__(self, mask: TokenMask, ranks: Ranks) -> None:
        self._mask, self._ranks, self.advance = mask, ranks, mask.advance

    def mask(self) -> Tensor:
        try:
            words = self._mask.mask()
        except Exception as error:
            self._ranks.send(pickle.dumps((None, repr(error))))
            raise
        told = (words, None) if isinstance(words, Tensor) else (None, "mask: no tensor")
        self._ranks.send(pickle.dumps(told))
        return words


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, PagedSequence):
            return obj.slot
        return "mask" if isinstance(obj, BroadcastMask) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, message: bytes, runner: Runner, ranks: Ranks) -> None:
        super().__init__(io.BytesIO(message))
        self._runner, self._ranks = runner, ranks

    def persistent_load(self, pid: Any) -> Any:
        if pid == "mask":
            return _ReceivedMask(self._ranks)
        return next(s for s in self._runner.cache.sequences if s.slot == pid)


class _Leading:
    """An object whose calls all ranks make."""

    def __init__(self, of: Any, prefix: str, call: Callable[..., Any]) -> None:
        self._of, self._prefix, self._call = of, prefix, call

    def __getattr__(self, name: str) -> Any:
        value, named = getattr(self._of, name), self._prefix + name
        if named in (*_LAUNCHES, *_LATER):
            return lambda *args, **options: self._call(named, value, args, options)
        if inspect.ismethod(value) and named not in _ALONE:
            raise AttributeError(f"{named}: other ranks would not make this call, expected one that leading.py lists")
        return value


class _Leader:
    """What rank 0 tells the others."""

    def __init__(self, runner: Runner, ranks: Ranks) -> None:
        self._ranks, self._messages = ranks, list[bytes | str]()
        self._lost: BaseException | None = None  # what was raised while others may wait in the middle of a call
        self.runner = cast("Runner", _Leading(runner, "", self._call))
        vars(self.runner)["cache"] = _Leading(runner.cache, "cache.", self._call)

    def _call(self, name: str, function: Callable[..., Any], args: Any, options: Any) -> Any:
        if isinstance(self._lost, Exception) or (self._lost and name in _LAUNCHES):  # Ctrl-C: all else ends in order
            what = f"Engine: {name} follows an error that other ranks may not have seen: start all anew"
            raise RuntimeError(what) from self._lost
        written = io.BytesIO()
        _Pickler(written).dump((name, args, options))
        self._messages.append(written.getvalue())
        try:
            if name in _LAUNCHES:
                self._send()
            return function(*args, **options)
        except ValueError:  # found before anything ran, and so on the other ranks
            self._messages.append(_RAISED)
            raise
        except BaseException as error:
            self._lost = error
            raise

    def _send(self, last: bool = False) -> None:
        messages, self._messages = self._messages, []
        self._ranks.send(pickle.dumps((messages, last)))

    def with_broadcast_mask(self, sampling: Sampling) -> Sampling:
        """The options, with a mask that the other ranks hear of."""
        if sampling.mask is None:
            return sampling
        return dataclasses.replace(sampling, mask=BroadcastMask(sampling.mask, self._ranks))

    def end(self) -> None:
        if self._lost is None:  # else nobody may receive it
            self._send(last=True)


def _function_of(runner: Runner, name: str) -> Callable[..., Any]:
    assert name in (*_LAUNCHES, *_LATER), name
    of: Any = runner
    for part in name.split("."):
        of = getattr(of, part)
    function: Callable[..., Any] = of
    return function


@contextlib.contextmanager
def leading(engine: Engine) -> Iterator[None]:
    """On rank 0 of several: the other ranks, which `follow`, make the calls of this one's runner.

    On a single rank, nothing.
    """
    runner = engine.runner
    if runner.ranks is None:
        yield
        return
    leader = _Leader(runner, runner.ranks)
    engine.runner, engine._broadcasts = leader.runner, leader.with_broadcast_mask
    try:
        yield
    finally:
        engine.runner, engine._broadcasts = runner, None
        leader.end()


def follow(engine: Engine) -> None:
    """On the other ranks: make rank 0's calls, until it ends.

    Raises:
        RuntimeError: a call has raised here and not on rank 0, or the other way round; or the connection is lost.
    """
    runner, ranks = engine.runner, engine.runner.ranks
    assert ranks is not None, "there are several ranks"
    error: Exception | None = None
    while True:
        messages, last = pickle.loads(ranks.receive())
        for message in messages:
            if (message == _RAISED) != (error is not None):
                what = f"raised {error!r}, and rank 0 did not" if error else "raised nothing, and rank 0 did"
                raise RuntimeError(f"Engine: rank {ranks.rank} {what}") from error
            error = None
            if message == _RAISED:
                continue
            name, args, options = _Unpickler(message, runner, ranks).load()
            try:
                _function_of(runner, name)(*args, **options)
            except ValueError as raised:  # found before anything ran, and so on rank 0
                error = raised
        if last:
            return
