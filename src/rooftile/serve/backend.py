"""The engine as the routes see it: `Local` is one in this process, `front.Remote` one in another."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rooftile.serve.guided import Grammars

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class Model:
    """What the routes know of the engine's model.

    Attributes:
        eos: tokens that end a text.
        max_seq_len: the most tokens of a prompt and its answer.
        options: names of what the engine's `add` takes.
    """

    tokenizer: Tokenizer
    vocab: int
    eos: tuple[int, ...]
    max_seq_len: int
    options: frozenset[str]


class Backend(Protocol):
    """An engine, from an event loop."""

    model: Model

    async def compile(self, grammar: str) -> None:
        """Check a grammar, and keep it for the requests that follow.

        Raises:
            ValueError: it is not valid; the message has the reason.
        """

    async def add_all(self, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The streams of several requests, of which all are added or, if anything is raised, none.

        Args:
            calls: the arguments of `AsyncEngine.add` for each, with `grammar` in place of `mask`. All have n.

        Raises:
            QueueFull, ValueError, TypeError, RuntimeError: as `AsyncEngine.add_all`.
        """

    async def state(self) -> tuple[bool, Any]:
        """Whether the engine has failed, and its statistics."""


class Local:
    """An `AsyncEngine` of this process, or what has its methods.

    Raises:
        ValueError: it has no tokenizer.
    """

    def __init__(self, engine: Any) -> None:
        made = engine.engine
        if made.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer.json, and the server needs one")
        config = made.config
        self.engine = engine
        self.model = Model(made.tokenizer, config.vocab, tuple(config.eos), made.max_seq_len, _options_of(engine))
        self.grammars = Grammars(made.tokenizer, config.vocab, config.eos)

    async def compile(self, grammar: str) -> None:
        await asyncio.to_thread(self.grammars.compile, grammar)

    async def add_all(self, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
        return list(self.engine.add_all([self.arguments(**call) for call in calls]))

    def arguments(self, *, grammar: str | None = None, **call: Any) -> dict[str, Any]:
        """Those of `AsyncEngine.add`."""
        if grammar is None:
            return call
        compiled = self.grammars.compile(grammar)
        return {**call, "mask": [compiled.copy() for _ in range(call["n"])]}

    async def state(self) -> tuple[bool, Any]:
        return self.engine.failed, self.engine.stats()


def _options_of(engine: Any) -> frozenset[str]:
    parameters = inspect.signature(engine.add).parameters
    names = set(parameters)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        from rooftile.engine.runner import Sampling

        names |= {field.name for field in dataclasses.fields(Sampling)}
    return frozenset(names)
