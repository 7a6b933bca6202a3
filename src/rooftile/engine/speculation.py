"""Speculative decoding on the host: where proposals come from, and when a step with them is worth its time.

A step of speculative decoding computes the newest token of each sequence and some proposals for the tokens after it,
and yields as many tokens as the model accepts, plus one: see `rooftile.accept_drafts_`. Proposals change how many steps
a text takes, not what is in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rooftile.engine.cache import check_positive

if TYPE_CHECKING:
    from rooftile.engine.engine import Engine
    from rooftile.engine.scheduling import Request

MOST_PROPOSALS = 15  # with the newest token 16, the most new tokens that `decode_attention` takes

# A request rests, which means that its steps are plain and the device need not wait for the host: after a search
# without a match; and while too few of its steps accept a proposal, twice as long each time. A step of five tokens
# of Llama-3-8B takes some 15 % longer on an H100 than one of a single token (results/h100/e2e/speculation): one step in
# seven has to accept one. The share is a moving average, which a half reaches by chance: so the limit is half of that.
# From a half, it falls below after nine failures.
_AFTER_NO_MATCH = 3
_FIRST_REST, _LONGEST_REST = 16, 64
_LEAST_SHARE = 0.08
_NEWEST = 0.2  # the weight of the newest step in the average
_SHARE = 4  # one sequence in so many has to have proposals: a step computes as many tokens of each. Not measured.


class Proposer(Protocol):
    """What proposes tokens on the host."""

    @property
    def tokens(self) -> int:
        """The most proposals of a step."""

    def begin(self, prompt: Sequence[int]) -> Proposals:
        """What proposes the tokens after that prompt."""


class Proposals(Protocol):
    """What proposes tokens of one sequence."""

    def propose(self, generated: Sequence[int], n: int) -> list[int]:
        """At most n tokens that may come after the prompt and what was generated so far."""


@dataclasses.dataclass(frozen=True)
class NGram:
    """Prompt lookup: proposes what came after the last occurrence of the newest tokens, in the prompt or the text.

    It helps where a text repeats its prompt or itself: code that is edited, summaries, answers that quote, JSON.

    Args:
        tokens: proposals of a step, 1 to 15.
        max_match, min_match: how many of the newest tokens have to occur before; the longest match is taken.

    Raises:
        ValueError: a number is out of range.
        TypeError: tokens is no integer.

    Source: prompt lookup decoding, Saxena 2023 (https://github.com/apoorvumang/prompt-lookup-decoding).
    """

    tokens: int = 4
    max_match: int = 3
    min_match: int = 2

    def __post_init__(self) -> None:
        _check_tokens("NGram", self.tokens)
        check_positive("NGram", max_match=self.max_match, min_match=self.min_match)
        if self.min_match > self.max_match:
            raise ValueError(
                f"NGram: min_match is {self.min_match}, expected at most max_match, which is {self.max_match}"
            )

    def begin(self, prompt: Sequence[int]) -> _Index:
        return _Index(prompt, self.max_match, self.min_match)


@dataclasses.dataclass(frozen=True)
class Draft:
    """A smaller model of the same vocabulary proposes its most likely tokens.

    It holds keys and values of all tokens beside the model's, in as many pages, and runs in the same CUDA graph.

    Args:
        model: the folder of a checkpoint, its id on the Hugging Face Hub, or an `Engine`, of which the weights are
            used.
        tokens: proposals of a step, 1 to 15.
        quantize: of a checkpoint's weights, as in `Engine.from_pretrained`.

    Raises:
        ValueError: tokens is out of range, or quantize is given beside an `Engine`. The engine that takes this raises
            if the vocabulary or the device is another.
        TypeError: an argument has another type.
    """

    model: str | Path | Engine
    tokens: int = 4
    quantize: Any = None

    def __post_init__(self) -> None:
        from rooftile.engine.engine import Engine

        _check_tokens("Draft", self.tokens)
        if not isinstance(self.model, (str, Path, Engine)):
            raise TypeError(f"Draft: model is {self.model!r}, expected a checkpoint's folder or an Engine")
        if isinstance(self.model, Engine) and self.quantize is not None:
            raise ValueError(
                f"Draft: quantize is {self.quantize!r} beside an Engine, expected None: its weights are used as they "
                "are"
            )


Speculate = NGram | Draft | Proposer


def _check_tokens(name: str, tokens: object) -> None:
    if isinstance(tokens, bool) or not isinstance(tokens, int):
        raise TypeError(f"{name}: tokens is {tokens!r}, expected an integer")
    if not 1 <= tokens <= MOST_PROPOSALS:
        raise ValueError(f"{name}: tokens is {tokens}, expected 1 to {MOST_PROPOSALS}")


def proposals_of(speculate: Speculate | None) -> int:
    """The most proposals of a step, checked; 0 without speculation."""
    if speculate is None:
        return 0
    if not isinstance(speculate, Draft) and not callable(getattr(speculate, "begin", None)):
        raise TypeError(f"Engine: speculate is {speculate!r}, expected rooftile.NGram, rooftile.Draft or None")
    _check_tokens("Engine: speculate", speculate.tokens)
    return speculate.tokens


def parse(text: str) -> NGram | Draft:
    """What `ngram`, `ngram:TOKENS`, `draft:PATH` or `draft:PATH:TOKENS` names, as the command line takes it.

    Raises:
        ValueError: it names nothing.
    """
    kind, _, rest = text.partition(":")
    if kind == "ngram" and (not rest or rest.isdecimal()):
        return NGram(int(rest)) if rest else NGram()
    if kind == "draft" and rest:
        path, _, tokens = rest.rpartition(":")
        return Draft(path, int(tokens)) if path and tokens.isdecimal() else Draft(rest)
    raise ValueError(f"{text!r} is no speculation, expected ngram, ngram:TOKENS, draft:PATH or draft:PATH:TOKENS")


class _Index:
    """The tokens of a sequence, and for its n-grams the places after their last occurrences."""

    def __init__(self, prompt: Sequence[int], longest: int, shortest: int) -> None:
        self._prompt, self._lengths = len(prompt), range(longest, shortest - 1, -1)
        self._all: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        for token in prompt:
            self._add(token)

    def _add(self, token: int) -> None:
        at = len(self._all)
        for n in self._lengths:
            if n <= at:
                self._after[tuple(self._all[at - n :])] = at
        self._all.append(token)

    def propose(self, generated: Sequence[int], n: int) -> list[int]:
        for token in generated[len(self._all) - self._prompt :]:
            self._add(token)
        end = len(self._all)
        for length in self._lengths:
            at = self._after.get(tuple(self._all[-length:])) if length <= end else None
            if at is not None:
                found: list[int] = []
                for i in range(at, at + n):  # a text that repeats itself goes on with what is proposed
                    found.append(self._all[i] if i < end else found[i - end])
                return found
        return []


@dataclasses.dataclass
class Guess:
    """Of a request: what proposes its tokens, and how it went.

    Attributes:
        rest: steps that it rests.
        share: of its newest steps with proposals, those that accepted one.
        last_rest: how long it last rested because that was small; 0 after a step that accepted a proposal.
    """

    proposals: Proposals
    rest: int = 0
    share: float = 0.5
    last_rest: int = 0


class _Anything:
    """Stands for what a draft model proposes, on the device."""

    def propose(self, generated: Sequence[int], n: int) -> list[int]:
        return [0] * n


class Speculation:
    """Proposals for the requests of a loop.

    Args:
        source: where they come from.
        vocab: tokens of the vocabulary.
    """

    def __init__(self, source: Speculate, vocab: int) -> None:
        self._source, self._vocab = source, vocab

    def _guess(self, request: Request) -> Guess:
        if request.guess is None:
            source = self._source
            request.guess = Guess(_Anything() if isinstance(source, Draft) else source.begin(request.prompt))
        return request.guess

    def wants(self, requests: Sequence[Request]) -> bool:
        """Whether any of those requests does not rest. A mask needs each token before the next: those with one do."""
        # Of all, while the device runs.
        guesses = [self._guess(r) for r in requests if r.decoding and r.sampling.mask is None]
        return any(guess.rest == 0 for guess in guesses)

    def propose(self, requests: Sequence[Request]) -> dict[Request, list[int]] | None:
        """Proposals for requests whose tokens are all known; None if a plain step is faster.

        Raises:
            ValueError: the source proposes too many tokens, or some outside of the vocabulary.
        """
        found: dict[Request, list[int]] = {}
        for request in requests:
            if request.sampling.mask is not None:
                found[request] = []
                continue
            useful = min(self._source.tokens, request.limit - len(request.tokens) - 1)
            tokens = self._guess(request).proposals.propose(request.tokens, useful) if useful > 0 else []
            if len(tokens) > max(0, useful) or any(not 0 <= token < self._vocab for token in tokens):
                raise ValueError(
                    f"Engine: speculate proposes the tokens {tokens}, expected at most {useful} from 0 to "
                    f"{self._vocab - 1}"
                )
            found[request] = tokens
        return found if _SHARE * sum(map(bool, found.values())) >= len(found) else None

    def no_match(self, requests: Sequence[Request]) -> None:
        """There is no step with proposals."""
        if not isinstance(self._source, Draft):
            for guess in (self._guess(r) for r in requests if r.sampling.mask is None):
                guess.rest = max(guess.rest, _AFTER_NO_MATCH)

    def plain(self, requests: Sequence[Request]) -> None:
        """A plain step of those requests was launched."""
        for request in requests:
            if request.guess is not None and request.guess.rest:
                request.guess.rest -= 1

    def verified(self, request: Request, proposed: int, accepted: int) -> None:
        """So many of the proposals for a request were accepted."""
        request.proposed += proposed
        request.accepted += accepted
        if not proposed or isinstance(self._source, Draft):
            return  # a draft model that does not see each token has gaps in its cache
        guess = self._guess(request)
        guess.share += _NEWEST * ((accepted > 0) - guess.share)
        guess.rest = 0
        if accepted:
            guess.last_rest = 0
        elif guess.share < _LEAST_SHARE:
            guess.rest = guess.last_rest = min(2 * guess.last_rest or _FIRST_REST, _LONGEST_REST)
