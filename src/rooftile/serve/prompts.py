"""From a request to what the engine's `add` takes: prompts as tokens, and options. Checks are made here."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from typing import Any

from rooftile.errors import counted
from rooftile.serve import chat, guided, protocol
from rooftile.serve.backend import Backend
from rooftile.serve.errors import ApiError
from rooftile.serve.protocol import ChatRequest, CompletionRequest, Fields, Sampled

log = logging.getLogger("rooftile.serve")

# Texts of more characters, and chats of more messages, are read in a thread, so that the event loop goes on.
_LONG, _MANY = 4096, 64
# Sequences of one request: prompts times n.
_SEQUENCES = 256


@dataclasses.dataclass
class Prompt:
    """The tokens of a prompt, and its text where `echo` asks for it."""

    tokens: list[int]
    text: str = ""


class Prompts:
    """Reads requests for one engine.

    Args:
        engine: which answers them.
        template: of chats; None if there is none.
        max_prompt_tokens: the most tokens of a prompt.
    """

    def __init__(self, engine: Backend, template: chat.ChatTemplate | None, max_prompt_tokens: int | None) -> None:
        self._engine, self._template = engine, template
        model = engine.model
        self._tokenizer, self._vocab, self._length = model.tokenizer, model.vocab, model.max_seq_len
        self._most = min(max_prompt_tokens or self._length, self._length - 1)
        self._takes = model.options

    async def of_completion(self, request: CompletionRequest) -> list[Prompt]:
        """One or several."""
        given: Any = request.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given:
            raise ApiError(400, "prompt is empty", param="prompt")
        self._check_number(len(given) * (request.n or 1))
        prompts = []
        for each in given:
            tokens = await self._encoded(each, "prompt", True) if isinstance(each, str) else self._checked(each)
            text = ""
            if request.echo:
                text = each if isinstance(each, str) else self._tokenizer.decode(each, skip_special_tokens=True)
            prompts.append(Prompt(tokens, text))
        return prompts

    async def of_chat(self, request: ChatRequest) -> Prompt:
        if self._template is None:
            raise ApiError(
                400, "the model has no chat template: use /v1/completions, or start the server with --chat-template"
            )
        self._check_number(request.n or 1)
        tools = None
        if request.tools and request.tool_choice != "none":
            # A grammar holds the model to calls that must be made; others it makes only of tools that it sees.
            if request.tool_choice in (None, "auto") and not self._template.has_tools:
                raise ApiError(
                    400,
                    "the chat template leaves tools out of the prompt: start the server with --chat-template and one "
                    'that names `tools`, or send tool_choice "none"',
                    param="tools",
                )
            tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
        template, long = self._template, len(request.messages) > _MANY

        def render() -> str:
            more = {k: v for k, v in (request.chat_template_kwargs or {}).items() if k not in ("messages", "tools")}
            return template.render(template.dicts(request.messages), tools, **more)

        try:
            text = await asyncio.to_thread(render) if long else render()
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from None
        return Prompt(await self._encoded(text, "messages", False))

    def _check_number(self, n: int) -> None:
        if n > _SEQUENCES:
            raise ApiError(400, f"prompts times n are {n}, expected at most {_SEQUENCES}", param="n")

    async def _encoded(self, text: str, param: str, special: bool) -> list[int]:
        def encode() -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=special).ids

        try:
            tokens = encode() if len(text) <= _LONG else await asyncio.to_thread(encode)
        except Exception as error:  # a lone surrogate, which JSON may escape
            raise ApiError(400, f"{param} can't be tokenized: {error}", param=param) from None
        return self._fits(tokens, param)

    def _checked(self, tokens: list[int]) -> list[int]:
        if tokens and max(tokens) >= self._vocab:
            raise ApiError(400, f"prompt has the token {max(tokens)}, expected less than {self._vocab}", param="prompt")
        return self._fits(tokens, "prompt")

    def _fits(self, tokens: list[int], param: str) -> list[int]:
        if not tokens:
            raise ApiError(400, f"{param} has no tokens", param=param)
        if len(tokens) > self._most:
            raise ApiError(
                400,
                f"{param} has {counted(len(tokens), 'token')}, expected at most {self._most}",
                param=param,
                code="context_length_exceeded",
            )
        return tokens

    def limit(self, request: Sampled, prompt: Prompt) -> int:
        """The most new tokens."""
        room = self._length - len(prompt.tokens)
        param, asked = "max_tokens", getattr(request, "max_tokens", None)
        if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
            param, asked = "max_completion_tokens", request.max_completion_tokens
        if asked is not None and asked > room:
            raise ApiError(
                400,
                f"{param} is {asked}, and the prompt has {counted(len(prompt.tokens), 'token')}: together more than "
                f"the model's length here, {self._length}",
                param=param,
                code="context_length_exceeded",
            )
        return room if asked is None else asked

    def options(self, request: Sampled) -> dict[str, Any]:
        """What `add` takes beside the prompt, `max_new_tokens` and `seed`, and the grammar."""
        _check_extra(request)
        stop: list[str | int] = [request.stop] if isinstance(request.stop, str) else [*(request.stop or ())]
        stop += request.stop_token_ids or ()
        for token in request.stop_token_ids or ():
            if token >= self._vocab:
                raise ApiError(
                    400, f"stop_token_ids has {token}, expected less than {self._vocab}", param="stop_token_ids"
                )
        options: dict[str, Any] = {
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "top_k": max(0, request.top_k or 0),
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "min_p": request.min_p or 0.0,
            "repetition_penalty": 1.0 if request.repetition_penalty is None else request.repetition_penalty,
            "stop": stop,
            "logprobs": wants_logprobs(request),
            "ignore_eos": request.ignore_eos,
            "priority": request.priority or 0,
        }
        top = request.top_logprobs if isinstance(request, ChatRequest) else getattr(request, "logprobs", None)
        # Only where they are asked for: an engine need not have them.
        more: dict[str, Any] = {
            "presence_penalty": request.presence_penalty,
            "frequency_penalty": request.frequency_penalty,
            "logit_bias": self._logit_bias(request.logit_bias),
            "top_logprobs": top,
        }
        for name, value in more.items():
            if not value:
                continue
            if name in self._takes:
                options[name] = value
            elif name != "top_logprobs" or isinstance(request, ChatRequest):
                raise ApiError(400, f"{name} is not supported by this engine", param=name)
            elif value > 1:
                raise ApiError(
                    400, f"logprobs is {value}: this engine gives those of the token alone", param="logprobs"
                )
        return options

    def _logit_bias(self, given: dict[str, float] | None) -> dict[int, float] | None:
        if not given:
            return None
        for token in given:
            if not (token.isascii() and token.isdecimal() and len(token) < 10 and int(token) < self._vocab):
                raise ApiError(
                    400, f"logit_bias has {token[:20]!r}, expected tokens below {self._vocab}", param="logit_bias"
                )
        return {int(token): bias for token, bias in given.items()}

    async def grammar(self, request: Sampled) -> str | None:
        """What the answers must follow; None for any text."""
        forced = chat.forced_schema(request) if isinstance(request, ChatRequest) else None
        format = request.response_format
        param = "response_format" if format is not None else "structured_outputs"
        param = "tool_choice" if forced is not None else param
        try:
            if forced is None:
                grammar = guided.grammar_of(format, request.structured_outputs)
            else:
                grammar = guided.of_schema(forced)
            if grammar is None:
                return None
            if "mask" not in self._takes:
                raise ValueError("this engine has no token mask")
            await self._engine.compile(grammar)
            return grammar
        except (ValueError, ImportError) as error:
            raise ApiError(400, f"{param}: {error}", param=param) from None


def wants_logprobs(request: Sampled) -> bool:
    """In completions 0 asks for those of the tokens alone."""
    if isinstance(request, ChatRequest):
        return bool(request.logprobs)
    return isinstance(request, CompletionRequest) and request.logprobs is not None


def seed_of(request: Sampled) -> int:
    """Drawn where the request gives none."""
    return secrets.randbits(63) if request.seed is None else request.seed


def _check_extra(request: Fields) -> None:
    """Refuse fields that are known and not supported, and log those that are not known."""
    unknown = []
    for name, value in (request.model_extra or {}).items():
        if name in protocol.UNSUPPORTED:
            if value is not None and value not in protocol.UNSUPPORTED[name]:
                instead = f": use {protocol.INSTEAD[name]}" if name in protocol.INSTEAD else ""
                raise ApiError(400, f"{name} is not supported{instead}", param=name)
        elif name not in protocol.HARMLESS:
            unknown.append(ascii(name)[1:-1])  # printable
    if unknown:
        log.warning("fields that are not known are ignored: %s", ", ".join(unknown)[:200])
