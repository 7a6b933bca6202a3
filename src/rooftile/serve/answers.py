"""From the engine's streams to the answers of OpenAI's API: as one JSON object, or as events while tokens come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from rooftile.errors import RequestError
from rooftile.serve.chat import ToolCall, ToolParser
from rooftile.serve.metrics import Metrics

TokenBytes = Callable[[int], bytes]

_json = json.JSONEncoder(separators=(",", ":")).encode
_MARK = "\0"  # stands for the text in what is sent around it


def event(made: Any) -> bytes:
    """A server-sent event."""
    return f"data: {_json(made)}\n\n".encode()


class Aborted(RequestError):
    """The engine ended a request before its end, for which OpenAI's API has no reason: the server is shutting down."""


class Choice:
    """One continuation: the stream that it comes from, and what came so far.

    Args:
        index: in the answer.
        stream: of the engine's loop.
        begins: the text before the first token: the prompt, where `echo` asks for it.
        parser: finds tool calls, if any are looked for.
    """

    def __init__(self, index: int, stream: Any, begins: str = "", parser: ToolParser | None = None) -> None:
        self.index, self.stream, self.begins, self.parser = index, stream, begins, parser
        self.text = begins
        self.tokens: list[int] = []
        self.logprobs: list[dict[str, Any]] = []
        self.calls: list[ToolCall] = []
        self.finish_reason: str | None = None
        self.first = 0.0  # when its first token came
        self.around: tuple[str, str] | None = None  # the text of an event that has nothing but text


class Answer:
    """The answer to one request.

    Attributes:
        kind, event_kind: the `object` field of the whole answer, and of an event.

    Args:
        base: `id`, `created` and `model`.
        choices: what is generated.
        prompt_tokens: of each prompt.
        logprobs: whether they were asked for.
        ends: tokens that end a text without being a part of it.
        token_bytes: the bytes of one token.
        metrics, started: where the times go, and when the request came.
        token_ids: whether they were asked for.
        usage: whether the last event has it; then all others say that they have none.
    """

    kind = ""
    event_kind = ""

    def __init__(
        self,
        base: dict[str, Any],
        choices: Sequence[Choice],
        *,
        prompt_tokens: Sequence[int],
        logprobs: bool,
        ends: frozenset[int],
        token_bytes: TokenBytes,
        metrics: Metrics,
        started: float,
        token_ids: bool = False,
        usage: bool = False,
    ) -> None:
        self.base, self.choices, self.prompt_tokens = base, choices, sum(prompt_tokens)
        self._prompts = len(prompt_tokens)
        self._logprobs, self._ends, self._token_bytes = logprobs, ends, token_bytes
        self._metrics, self._started, self._token_ids = metrics, started, token_ids
        self._head = {**base, "object": self.event_kind, **({"usage": None} if usage else {})}
        self._plain = not (logprobs or token_ids)  # whether most events have nothing but text
        self._outcome = "aborted"  # until it has another end

    async def chunks(self) -> AsyncGenerator[tuple[Choice, list[Any]], None]:
        """All streams' chunks as they come, recorded in their choice: each time some of one choice.

        Raises:
            RequestError: an error ended a request, or, if it is `Aborted`, the engine did.
        """
        try:
            async with contextlib.aclosing(self._merged()) as merged:
                async for choice, chunks in merged:
                    self._record(choice, chunks)
                    aborted = choice.finish_reason == "abort"
                    yield choice, chunks[:-1] if aborted else chunks  # text that was held back goes with the last one
                    if aborted:
                        raise Aborted("the server is shutting down")
        except Exception as error:
            self._outcome = "aborted" if isinstance(error, Aborted) else "failed"
            raise
        self._outcome = "finished"

    def _record(self, choice: Choice, chunks: Sequence[Any]) -> None:
        now = time.perf_counter()
        for chunk in chunks:
            if chunk.token >= 0:  # the last chunk of a sequence that was aborted has none
                if not choice.tokens:
                    choice.first = now
                    self._metrics.first_token.observe(now - self._started)
                choice.tokens.append(chunk.token)
            choice.finish_reason = chunk.finish_reason
            if chunk.finish_reason is not None:
                self._metrics.finished.labels(chunk.finish_reason).inc()
                self._metrics.whole.observe(now - self._started)
                if len(choice.tokens) > 1:
                    self._metrics.per_token.observe((now - choice.first) / (len(choice.tokens) - 1))

    async def _merged(self) -> AsyncGenerator[tuple[Choice, list[Any]], None]:
        if len(self.choices) == 1:
            (only,) = self.choices
            while chunks := await only.stream.ready():
                yield only, chunks
            return
        queue: asyncio.Queue[tuple[Choice, list[Any] | Exception]] = asyncio.Queue()

        async def pump(choice: Choice) -> None:
            try:
                while chunks := await choice.stream.ready():
                    queue.put_nowait((choice, chunks))
                queue.put_nowait((choice, []))
            except Exception as error:
                queue.put_nowait((choice, error))

        pumps = [asyncio.ensure_future(pump(choice)) for choice in self.choices]
        try:
            left = len(pumps)
            while left:
                choice, got = await queue.get()
                if isinstance(got, Exception):
                    raise got
                if got:
                    yield choice, got
                else:
                    left -= 1
        finally:
            for each in pumps:
                each.cancel()

    async def close(self) -> None:
        """Give back what the streams hold, and count the request. A stream that has ended holds nothing."""
        self._metrics.requests.labels(self._outcome).inc()
        for choice in self.choices:
            await choice.stream.aclose()

    def usage(self) -> dict[str, Any]:
        generated = sum(len(choice.tokens) for choice in self.choices)
        # A prompt is counted once, and so is what was cached of it before the first of its n choices.
        n = len(self.choices) // self._prompts
        cached = [choice.stream.cached_tokens for choice in self.choices]
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": sum(min(cached[i : i + n]) for i in range(0, len(cached), n))},
        }

    def _logprob(self, chunk: Any) -> list[dict[str, Any]]:
        """The entry of a chunk's token; none of a token that only ends the text."""
        if not self._logprobs or chunk.logprob is None or (chunk.finish_reason and chunk.token in self._ends):
            return []
        top = getattr(chunk, "top_logprobs", None) or ()
        return [
            {**self._token(chunk.token, chunk.logprob), "top_logprobs": [self._token(t, value) for t, value in top]}
        ]

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._token_bytes(token)
        # JSON has no infinity: as OpenAI's API, -9999.
        return {
            "token": data.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(data),
        }  # fmt: skip

    def sent(self, choice: Choice, chunks: Sequence[Any]) -> bytes:
        """The events of chunks: perhaps none, while text is held back.

        What is around the text is made once: on one CPU an event takes 1 us, and to make its JSON anew 10.
        """
        parts = []
        for chunk in chunks:
            if not self._plain or choice.parser is not None or chunk.finish_reason is not None:
                parts += [event(made) for made in self.events(choice, chunk)]
            elif chunk.text:
                if choice.around is None:
                    before, _, after = event(self.text_event(choice, _MARK)).decode().rpartition(json.dumps(_MARK))
                    choice.around = before, after
                before, after = choice.around
                parts.append(f"{before}{json.dumps(chunk.text)}{after}".encode())
        return b"".join(parts)

    def events(self, choice: Choice, chunk: Any) -> list[dict[str, Any]]:
        """What is sent for a chunk."""
        raise NotImplementedError

    def text_event(self, choice: Choice, text: str) -> dict[str, Any]:
        """What is sent for a chunk that has nothing but text."""
        raise NotImplementedError

    def openings(self) -> list[dict[str, Any]]:
        """What is sent before the first token."""
        return []

    def whole(self) -> dict[str, Any]:
        """The answer, once `chunks` is exhausted."""
        raise NotImplementedError

    def add(self, choice: Choice, chunk: Any) -> None:
        """Record a chunk for `whole`."""
        raise NotImplementedError

    def last(self) -> dict[str, Any] | None:
        """The event with the usage, if it was asked for."""
        if "usage" not in self._head:
            return None
        return {**self._head, "choices": [], "usage": self.usage()}

    def _ids(self, tokens: list[int]) -> dict[str, Any]:
        return {"token_ids": tokens} if self._token_ids else {}


class CompletionAnswer(Answer):
    kind = event_kind = "text_completion"

    def openings(self) -> list[dict[str, Any]]:
        return [self._event(choice, choice.begins, None, None, []) for choice in self.choices if choice.begins]

    def events(self, choice: Choice, chunk: Any) -> list[dict[str, Any]]:
        logprobs = self._logprobs_of(self._logprob(chunk), [len(choice.text)])
        text = chunk.text or ""
        choice.text += text
        if not (text or logprobs or chunk.finish_reason or self._token_ids):
            return []
        return [self._event(choice, text, logprobs, chunk.finish_reason, [chunk.token])]

    def _event(
        self, choice: Choice, text: str, logprobs: Any, finish_reason: str | None, tokens: list[int]
    ) -> dict[str, Any]:
        made = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head, "choices": [{**made, **self._ids(tokens)}]}

    def text_event(self, choice: Choice, text: str) -> dict[str, Any]:
        return self._event(choice, text, None, None, [])

    def add(self, choice: Choice, chunk: Any) -> None:
        choice.logprobs += [{**entry, "offset": len(choice.text)} for entry in self._logprob(chunk)]
        choice.text += chunk.text or ""

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                "text": choice.text,
                "logprobs": self._logprobs_of(choice.logprobs, [entry["offset"] for entry in choice.logprobs]),
                "finish_reason": choice.finish_reason,
                **self._ids(choice.tokens),
            }
            for choice in self.choices
        ]
        return {**self.base, "object": self.kind, "choices": choices, "usage": self.usage()}

    def _logprobs_of(self, entries: list[dict[str, Any]], offsets: list[int]) -> dict[str, Any] | None:
        """In this API's older form."""
        if not self._logprobs:
            return None
        return {
            "tokens": [_name(entry) for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {_name(each): each["logprob"] for each in (entry, *entry["top_logprobs"])} for entry in entries
            ],
            "text_offset": offsets[: len(entries)],
        }


def _name(entry: dict[str, Any]) -> str:
    """A token's text; of a part of a character its bytes, as in OpenAI's API, because such texts are all alike."""
    data = bytes(entry["bytes"])
    if entry["token"].encode() == data:
        return str(entry["token"])
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatAnswer(Answer):
    kind, event_kind = "chat.completion", "chat.completion.chunk"

    def openings(self) -> list[dict[str, Any]]:
        return [self._event(choice, {"role": "assistant", "content": ""}) for choice in self.choices]

    def _pieces(self, choice: Choice, chunk: Any) -> list[str | ToolCall]:
        """Text and calls that a chunk completes."""
        text = chunk.text or ""
        if choice.parser is None:
            return [text] if text else []
        found = choice.parser.add(text)
        return [*found, *choice.parser.end()] if chunk.finish_reason is not None else found

    def _finish_reason(self, choice: Choice, reason: str | None) -> str | None:
        return "tool_calls" if choice.calls and reason == "stop" else reason

    def events(self, choice: Choice, chunk: Any) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        for piece in self._pieces(choice, chunk):
            if isinstance(piece, str):
                made.append(self.text_event(choice, piece))
            else:
                delta = {"tool_calls": [{"index": len(choice.calls), **piece.json()}]}
                choice.calls.append(piece)
                made.append(self._event(choice, delta))
        logprobs = self._logprob(chunk)
        if not made and (logprobs or chunk.finish_reason is not None or self._token_ids):
            made.append(self._event(choice, {}))
        if made:
            made[0]["choices"][0] |= self._ids([chunk.token])
            if logprobs:
                made[0]["choices"][0]["logprobs"] = {"content": logprobs, "refusal": None}
            made[-1]["choices"][0]["finish_reason"] = self._finish_reason(choice, chunk.finish_reason)
        return made

    def _event(self, choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head, "choices": [made]}

    def text_event(self, choice: Choice, text: str) -> dict[str, Any]:
        return self._event(choice, {"content": text})

    def add(self, choice: Choice, chunk: Any) -> None:
        choice.logprobs += self._logprob(chunk)
        for piece in self._pieces(choice, chunk):
            if isinstance(piece, str):
                choice.text += piece
            else:
                choice.calls.append(piece)

    def whole(self) -> dict[str, Any]:
        choices = []
        for choice in self.choices:
            message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
            if choice.calls:
                message |= {"content": choice.text or None, "tool_calls": [call.json() for call in choice.calls]}
            choices.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": {"content": choice.logprobs, "refusal": None} if self._logprobs else None,
                    "finish_reason": self._finish_reason(choice, choice.finish_reason),
                    **self._ids(choice.tokens),
                }
            )
        return {**self.base, "object": self.kind, "choices": choices, "usage": self.usage()}
