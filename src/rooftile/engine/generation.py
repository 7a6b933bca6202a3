"""What goes into generation and what comes out: prompts as tokens, tokens as text, and where a text ends.

Text is released in whole characters, and never beyond what may be the beginning of a stop string.
"""

from __future__ import annotations

import dataclasses
import operator
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rooftile.engine.runner import Runner
from rooftile.engine.scheduling import Request

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NEW_TOKENS = 128  # for a prompt, where the caller names no limit

Top = list[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Completion:
    """What was generated for one prompt.

    Attributes:
        prompt: its tokens.
        tokens: the new ones, including the one that stopped it.
        text: of the new tokens, without that one; None if the engine has no tokenizer.
        finish_reason: "stop" (an end token, or one of the caller's stops) or "length"; "abort" for a request that was
            aborted.
        logprobs: of each new token, if they were asked for.
        top_logprobs: for each new token the most likely ones with their log-probabilities, if they were asked for.
        proposed, accepted: of speculative decoding, how many tokens were.
    """

    prompt: list[int]
    tokens: list[int]
    text: str | None
    finish_reason: str
    logprobs: list[float] | None
    top_logprobs: list[Top] | None = None
    proposed: int = 0
    accepted: int = 0


class StreamChunk(NamedTuple):
    """One new token of a stream.

    Attributes:
        index: of the prompt; of an `AsyncEngine` that of the continuation, where `add` was asked for several.
        token: its id; -1 in the last chunk of a request that was aborted, which has no token.
        text: what this token adds to the prompt's text. It may be empty; with the last token it includes what was held
            back.
        logprob: if it was asked for.
        finish_reason: with the last token of a prompt, as in `Completion`; else None.
        top_logprobs: the most likely tokens with their log-probabilities, from the most likely on, if they were asked
            for.
    """

    index: int  # type: ignore[assignment]  # of a tuple it is a method
    token: int
    text: str | None
    logprob: float | None
    finish_reason: str | None
    top_logprobs: Top | None = None


def _as_lists(x: Any) -> Any:
    """Lists of the tensors and arrays that tokenizers return."""
    return x.tolist() if hasattr(x, "tolist") else x


def integer(x: object) -> int | None:
    """x as an int, if it is an integer of Python, NumPy or PyTorch; None for anything else, including booleans."""
    if isinstance(x, bool):
        return None
    try:
        return operator.index(x)  # type: ignore[arg-type]
    except TypeError:
        return None


def _tokenized(prompt: str, i: int, tokenizer: Tokenizer | None) -> list[int]:
    assert tokenizer is not None, "texts need one"
    try:
        return list(tokenizer.encode(prompt).ids)
    except Exception as error:  # a lone surrogate
        raise ValueError(f"generate: prompt {i} can't be tokenized, expected Unicode text: {error}") from None


def encoded(prompts: Any, tokenizer: Tokenizer | None, vocab: int) -> list[list[int]]:
    """The tokens of each prompt."""
    prompts = _as_lists(prompts)
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise TypeError(f"generate: prompts is {prompts!r}, expected text or token ids, of one prompt or of several")
    prompts = [_as_lists(p) for p in prompts]
    if prompts and all(isinstance(p, int) for p in prompts):
        prompts = [prompts]
    if not prompts:
        raise ValueError("generate: there is no prompt")
    if any(isinstance(p, str) for p in prompts) and tokenizer is None:
        raise ValueError("generate: a prompt is text, and the engine has no tokenizer: give token ids")
    for i, p in enumerate(prompts):
        if not isinstance(p, Sequence) or isinstance(p, bytes):
            raise TypeError(f"generate: prompt {i} is {p!r}, expected text, or token ids as integers")
    ids: list[list[int]] = []
    for i, prompt in enumerate(prompts):
        found = _tokenized(prompt, i, tokenizer) if isinstance(prompt, str) else [integer(t) for t in prompt]
        if not found:
            raise ValueError(f"generate: prompt {i} is empty, expected one token or more")
        ids.append([])
        for at, token in enumerate(found):
            if token is None:
                raise TypeError(f"generate: prompt {i} has {prompt[at]!r}, expected text, or token ids as integers")
            if not 0 <= token < vocab:
                raise ValueError(f"generate: prompt {i} has the token {token}, expected 0 to {vocab - 1}")
            ids[i].append(token)
    return ids


def stops_of(
    stop: str | int | Sequence[str | int], tokenizer: Tokenizer | None, vocab: int
) -> tuple[set[int], list[str]]:
    """Token ids and strings."""
    if isinstance(stop, str) or integer(stop) is not None:
        stop = [stop]  # type: ignore[list-item]
    if not isinstance(stop, Sequence):
        raise TypeError(f"generate: stop is {stop!r}, expected strings and token ids")
    tokens, strings = set[int](), list[str]()
    for s in stop:
        if isinstance(s, str):
            if not s:
                raise ValueError("generate: stop has an empty string")
            if tokenizer is None:
                raise ValueError(
                    f"generate: stop has the string {s!r}, and the engine has no tokenizer: give token ids"
                )
            strings.append(s)
            continue
        token = integer(s)
        if token is None:
            raise TypeError(f"generate: stop has {s!r}, expected strings and token ids")
        if not 0 <= token < vocab:
            raise ValueError(f"generate: stop has the token {token}, expected 0 to {vocab - 1}")
        tokens.add(token)
    return tokens, strings


# By tokenizer, the texts of single tokens, as far as they were needed; empty if it has none, or no whole characters.
_ALONE: weakref.WeakKeyDictionary[Tokenizer, dict[int, str]] = weakref.WeakKeyDictionary()


def _texts_alone(tokenizer: Tokenizer) -> dict[int, str] | None:
    """The texts of single tokens; None if the text of several may be another than theirs one after the other."""
    if type(tokenizer.decoder).__name__ != "ByteLevel":
        return None
    return _ALONE.setdefault(tokenizer, {})


class Text:
    """The text of one sequence.

    Args:
        tokenizer: of the model.
        stops: non-empty strings; the text ends before the first one.

    Attributes:
        text: what certainly belongs to it.
        stopped: whether a stop string was found; `text` ends before it.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        # The tokens of the newest characters and all after them; the number of the former, and their text: a token may
        # decode differently at the beginning of a text.
        self._recent: list[int] = []
        self._known, self._read = 0, ""
        self._alone = _texts_alone(tokenizer)
        self._released: list[str] = []
        self._held = ""  # what may be the beginning of a stop string
        self.stopped = False

    @property
    def text(self) -> str:
        return "".join(self._released)

    def add(self, token: int) -> str:
        """What the token adds to `text`."""
        if self._alone is not None and len(self._recent) == self._known:
            # Most tokens are whole characters behind whole characters. On one CPU 0.5 us a token, by decoding 2.9.
            if (text := self._alone.get(token)) is None:
                text = self._decode([token])
                text = self._alone[token] = "" if "\ufffd" in text else text
            if text:
                self._recent, self._known, self._read = [token], 1, text
                if self._stops:
                    return self._release(text)
                self._released.append(text)
                return text
        self._recent.append(token)
        now, text = self._decode(self._recent), ""
        # Bytes of an incomplete character decode as U+FFFD. Byte-level tokenizers may later decode such bytes
        # differently; text that was released stays.
        if len(now) > len(self._read) and not now.endswith("\ufffd"):
            text = now[len(self._read) :]
            del self._recent[: self._known]
            self._known, self._read = len(self._recent), self._decode(self._recent)
        return self._release(text)

    def end(self) -> str:
        """Release the rest: the beginning of a stop string, or of a character."""
        if self.stopped:
            return ""
        new, self._held = self._held + self._decode(self._recent)[len(self._read) :], ""
        self._released.append(new)
        return new

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _release(self, new: str) -> str:
        """What of the new characters, and of those held back, comes before a stop string or its possible beginning."""
        if self._stops:
            new = self._held + new
            until = len(new)
            if met := [at for stop in self._stops if (at := new.find(stop)) >= 0]:
                self.stopped, until = True, min(met)
            else:
                for stop in self._stops:
                    longest = min(len(stop) - 1, len(new))
                    begun = next((n for n in range(longest, 0, -1) if new.endswith(stop[:n])), 0)
                    until = min(until, len(new) - begun)
            new, self._held = new[:until], new[until:]
        self._released.append(new)
        return new


class Watch:
    """Follows one request: adds its tokens, releases its text, and sees where it ends.

    Attributes:
        logprobs: whether log-probabilities were asked for.
    """

    def __init__(
        self,
        request: Request,
        ends: Sequence[int],
        stops: tuple[set[int], list[str]],
        tokenizer: Tokenizer | None,
        logprobs: bool,
    ) -> None:
        self._request, self.logprobs = request, logprobs
        self._ends = {*ends, *stops[0]}
        self._text = None if tokenizer is None else Text(tokenizer, stops[1])

    def add(self, token: int, logprob: float | None, top: Top | None = None) -> StreamChunk:
        request, text, new = self._request, self._text, None
        request.tokens.append(token)
        if not self.logprobs:
            logprob = None
        elif logprob is not None:
            request.logprobs.append(logprob)
        if top is not None:
            request.top_logprobs.append(top)
        ended = token in self._ends
        if text is not None:
            new = "" if ended else text.add(token)
            ended = ended or text.stopped
        if ended or len(request.tokens) == request.limit:
            request.finish_reason = "stop" if ended else "length"
            if text is not None:
                new = (new or "") + text.end()
        # Without the function that NamedTuple makes: 0.1 us for each token.
        return tuple.__new__(StreamChunk, (request.index, token, new, logprob, request.finish_reason, top))

    def abort(self) -> StreamChunk:
        """End the request early. The chunk has no token, but what was held back of the text."""
        self._request.finish_reason = "abort"
        return StreamChunk(self._request.index, -1, None if self._text is None else self._text.end(), None, "abort")

    def completion(self) -> Completion:
        request = self._request
        return Completion(
            prompt=list(request.prompt),
            tokens=request.tokens,
            text=None if self._text is None else self._text.text,
            finish_reason=request.finish_reason or "length",
            logprobs=request.logprobs if self.logprobs else None,
            top_logprobs=request.top_logprobs if request.sampling.top_logprobs else None,
            proposed=request.proposed,
            accepted=request.accepted,
        )


class Readback:
    """The copy of a step's tokens to the host. It is queued after the step; only reading waits for it.

    Args:
        proposed: of a step of speculative decoding, how many proposals each request had.

    Attributes:
        waited: seconds that reading waited for the device so far.
        shape: of the step, `Runner.shape`.
        ended: when the device ended the step, on the clock of `time.perf_counter`, if reading waited for it.
        follows: the step before, if the device was still busy with it when this one was launched; until it is read.
    """

    def __init__(
        self,
        runner: Runner,
        requests: Sequence[Request],
        logprobs: bool,
        proposed: Mapping[Request, int] | None = None,
    ) -> None:
        self._requests = requests
        self._sequences = [r.sequence for r in requests if r.sequence is not None]  # while they have their slots
        self._slots = [s.slot for s in self._sequences]
        self._runner, self.proposed, self._rows = runner, proposed, 1
        of: Any = runner
        if proposed is not None:
            assert runner.verifier is not None, "the engine speculates"
            of, self._rows = runner.verifier, runner.verifier.n_tokens
            self._accepted = self._copy(of.accepted)
        self._tokens = self._copy(of.tokens if proposed is None else of.drawn)
        self._logprobs = self._copy(of.logprobs) if logprobs else None
        self._top = [(first, self._copy(tokens), self._copy(of)) for first, tokens, of in runner.options.top]
        self._failed = runner.options.failed
        self.waited, self.shape = 0.0, runner.shape
        self.ended: float | None = None
        self.follows: Readback | None = None
        self._done = None
        if runner.tokens.is_cuda:
            self._done = torch.cuda.Event(enable_timing=True)
            self._done.record(torch.cuda.current_stream(runner.tokens.device))

    @property
    def done(self) -> bool:
        """Whether the device has ended the step."""
        return self._done is None or self._done.query()

    def seconds_since(self, earlier: Readback) -> float:
        """Between the ends of two steps on the device. Both have ended."""
        assert self._done is not None, "only on a device a step follows another"
        assert earlier._done is not None, "as above"
        return earlier._done.elapsed_time(self._done) / 1e3

    def _wait(self) -> None:
        if self._done is not None and not self._done.query():
            since = time.perf_counter()
            self._done.synchronize()
            self.ended = time.perf_counter()
            self.waited += self.ended - since

    @staticmethod
    def _copy(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=True)

    def tokens(self) -> Iterable[tuple[Request, int, float | None, Top | None]]:
        """Each request with its new token, and with the most likely ones, as many as it asked for.

        After a step with proposals a request may come several times in sequence.
        """
        self._wait()
        tokens = self._tokens.tolist()
        logprobs: list[float | None] = [None] * len(tokens) if self._logprobs is None else self._logprobs.tolist()
        if self.proposed is None and not self._top:
            of_slots = ([x[slot] for slot in self._slots] for x in (tokens, logprobs))
            return zip(self._requests, *of_slots, [None] * len(self._slots), strict=True)
        return self._of_rows(tokens, logprobs)

    def _of_rows(
        self, tokens: list[int], logprobs: list[float | None]
    ) -> Iterator[tuple[Request, int, float | None, Top | None]]:
        top: dict[int, Top] = {}
        for first, of_rows, logprobs_of_rows in self._top:
            pairs = zip(of_rows.tolist(), logprobs_of_rows.tolist(), strict=True)
            top |= {first + i: list(zip(*row, strict=True)) for i, row in enumerate(pairs)}
        accepted = [0] * len(tokens) if self.proposed is None else self._accepted.tolist()
        for request, sequence, slot in zip(self._requests, self._sequences, self._slots, strict=True):
            n, k = accepted[slot] + 1, request.sampling.top_logprobs
            if n < self._rows and sequence.slot == slot:  # else it was freed meanwhile
                self._runner.shorten(sequence, self._rows - n)
            for row in range(slot * self._rows, slot * self._rows + n):
                yield request, tokens[row], logprobs[row], top[row][:k] if k else None

    def accepted(self) -> Iterator[tuple[Request, int, int]]:
        """Each request with the numbers of proposals that it had, and that were accepted."""
        if self.proposed is not None:
            self._wait()
            accepted = self._accepted.tolist()
            for request, slot in zip(self._requests, self._slots, strict=True):
                yield request, self.proposed[request], accepted[slot]

    def failed(self) -> dict[Request, Exception]:
        """What the masks of requests raised: their tokens were drawn without them."""
        of, failed = zip(self._requests, self._slots, strict=True), self._failed
        return {request: failed[slot] for request, slot in of if slot in failed} if failed else {}
