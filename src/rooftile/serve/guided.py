"""Outputs that follow a JSON schema, a regular expression or a grammar, by a mask of the tokens that may come next."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rooftile.errors import to_install
from rooftile.serve.protocol import ResponseFormat, StructuredOutputs

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor


_KEPT = 64  # compiled grammars: clients send the same schema again and again


class GrammarError(RuntimeError):
    """A grammar that was compiled can't be followed further, such as one whose next tokens are too costly to find."""


class Grammar:
    """A `TokenMask` by llguidance, for one sequence. End tokens are allowed where the text may end."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def copy(self) -> Grammar:
        """A mask for another sequence, in the same state."""
        return Grammar(self._matcher.deep_copy())

    def mask(self) -> Tensor:
        import torch  # where a mask is wanted it was imported; the server's front does without

        mask = self._matcher.compute_bitmask()
        self._check()
        return torch.frombuffer(bytearray(mask), dtype=torch.int32)

    def advance(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar can't be followed further: {_reason(self._matcher)}")


def _reason(matcher: Any) -> str:
    """Why a matcher has stopped, without its state: that has the text of the grammar, which must not be logged."""
    said: str = matcher.get_error().partition("<state>")[0]
    return " ".join(said.split())[:500]


class Grammars:
    """Compiles grammars for the tokens of one model.

    Args:
        tokenizer, vocab, eos: of the model.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos: Sequence[int]) -> None:
        self._tokenizer, self._vocab, self._eos = tokenizer, vocab, list(eos)
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._compiled: dict[str, Grammar] = {}

    @functools.cached_property
    def _tokens(self) -> Any:
        """Read at the first use: it takes seconds for a large vocabulary."""
        from llguidance import LLTokenizer

        return LLTokenizer(self._tokenizer.to_str(), n_vocab=self._vocab, eos_token=self._eos or None)

    def compile(self, grammar: str) -> Grammar:
        """A mask that has seen no token, to be copied for each sequence. It takes up to a second; any thread may call.

        Raises:
            ValueError: the grammar is not valid; the message has the reason.
        """
        from llguidance import LLMatcher

        if (found := self._known(grammar)) is not None:
            return found
        with self._compiling:
            if (found := self._known(grammar)) is not None:  # another request had the same
                return found
            matcher = LLMatcher(self._tokens, grammar, log_level=0)
            if matcher.is_error():
                raise ValueError(_reason(matcher) or "no valid grammar")
            matcher.compute_bitmask()  # some grammars fail only here
            if matcher.is_error():
                raise ValueError(f"no token can be the first: {_reason(matcher)}")
            found = Grammar(matcher)
            with self._lock:
                self._compiled[grammar] = found
                if len(self._compiled) > _KEPT:
                    del self._compiled[next(iter(self._compiled))]
        return found

    def _known(self, grammar: str) -> Grammar | None:
        with self._lock:  # not held while another one is compiled
            if (found := self._compiled.pop(grammar, None)) is not None:
                self._compiled[grammar] = found  # the one used last is the last
            return found


def of_schema(schema: dict[str, Any] | str) -> str:
    """The grammar of a JSON schema.

    Raises:
        ValueError: it is none.
    """
    from llguidance import LLMatcher

    text = schema if isinstance(schema, str) else json.dumps(schema)
    # On one line, with a space or none after a comma or colon: a model that prefers white space writes no run of it.
    return LLMatcher.grammar_from_json_schema(
        text, overrides={"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
    )


def grammar_of(format: ResponseFormat | None, structured: StructuredOutputs | None) -> str | None:
    """The grammar that a request asks for, in llguidance's form, or None.

    Raises:
        ValueError: it is none, or there are two.
        ImportError: llguidance is not installed.
    """
    if format is not None and format.type == "text":
        format = None
    if format is None and structured is None:
        return None
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise ImportError(f"structured outputs need llguidance: {to_install('serve')}") from None
    if format is not None and structured is not None:
        raise ValueError("expected response_format or structured_outputs, not both")
    if format is not None:
        schema = format.json_schema.schema_ if format.json_schema is not None else None
        return of_schema(schema if format.type == "json_schema" and schema is not None else {"type": "object"})
    assert structured is not None
    if structured.json_schema is not None:
        return of_schema(structured.json_schema)
    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, structured.choice)))
    assert structured.grammar is not None
    return LLMatcher.grammar_from_lark(structured.grammar)
