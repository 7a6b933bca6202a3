"""Chats as prompts, by the checkpoint's template, and answers as tool calls.

A template is a Jinja program of the checkpoint. It runs in Jinja's immutable sandbox, with what transformers gives it.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jinja2
from jinja2 import ext, nodes, sandbox

from rooftile.serve.protocol import ChatRequest, Message, NamedTool, Tool

_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class _Generation(ext.Extension):
    """`{% generation %}`, which marks the model's own tokens for training, changes nothing here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(x: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Jinja's own escapes HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _environment() -> sandbox.ImmutableSandboxedEnvironment:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: no JSON: {error}") from None
    return found if isinstance(found, dict) else {}


class ChatTemplate:
    """The chat template of a checkpoint.

    Args:
        sources: Jinja programs by name: `default`, and perhaps `tool_use`, for requests with tools.
        tokens: the special tokens that templates may name, such as `bos_token`.

    Raises:
        ValueError: a program is not valid.
    """

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self.sources, self._tokens = dict(sources), dict(tokens)
        try:
            self._programs = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid: {error}") from None

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[dict[str, str], dict[str, str]]]:
        return ChatTemplate, (self.sources, self._tokens)

    @classmethod
    def load(cls, folder: Path, file: Path | None = None) -> ChatTemplate | None:
        """The template in a checkpoint's folder, or in a file of its own; None if there is none.

        Raises:
            ValueError: it is not valid.
            OSError: the file can't be read.
        """
        config = _read(folder / "tokenizer_config.json")
        tokens = {}
        for name in _TOKENS:
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                tokens[name] = token
        found: Any = config.get("chat_template") or _read(folder / "chat_template.json").get("chat_template")
        if file is None and (folder / "chat_template.jinja").is_file():
            file = folder / "chat_template.jinja"
        if file is not None:
            found = file.read_text(encoding="utf-8")
        if isinstance(found, list):
            found = {each["name"]: each["template"] for each in found}
        if not found:
            return None
        return cls({"default": found} if isinstance(found, str) else found, tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, **more: Any) -> str:
        """The prompt, up to where the model's answer begins.

        Raises:
            ValueError: the template refuses these messages, or fails on them.
        """
        name = "tool_use" if tools and "tool_use" in self._programs else "default"
        program = self._programs.get(name) or next(iter(self._programs.values()))
        given = {**self._tokens, **more, "messages": messages, "tools": tools or None, "add_generation_prompt": True}
        try:
            return program.render(**given)
        except Exception as error:  # a program may fail in any way
            raise ValueError(f"the chat template refuses these messages: {error}") from None

    @property
    def has_tools(self) -> bool:
        """Whether a program names `tools`; one that does not leaves them out of the prompt."""
        return any("tools" in source for source in self.sources.values())

    def dicts(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages as templates expect them: contents are strings, arguments of tool calls objects."""
        knows_developer = any("developer" in source for source in self.sources.values())
        found = []
        for at, message in enumerate(messages):
            made = message.model_dump(exclude_none=True)
            content = message.content
            made["content"] = content if isinstance(content, str) else "\n".join(part.text for part in content or ())
            if message.role == "developer" and not knows_developer:
                made["role"] = "system"
            for call in made.get("tool_calls", ()):
                function = call.get("function")
                if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                    try:
                        function["arguments"] = json.loads(function["arguments"] or "{}")
                    except ValueError as error:
                        raise ValueError(f"messages.{at}.tool_calls has arguments that are no JSON: {error}") from None
            found.append(made)
        return found


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A function that the model calls, and its arguments as JSON."""

    name: str
    arguments: str
    id: str = dataclasses.field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolParser(Protocol):
    """Finds the tool calls in one answer, as its text comes. A call is found when it is whole."""

    def add(self, text: str) -> list[str | ToolCall]: ...

    def end(self) -> list[str | ToolCall]: ...


def _call(found: Any) -> ToolCall | None:
    """A call, written as {"name": ..., "arguments" or "parameters": {...}}."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    return ToolCall(found["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as in Qwen's and Hermes' models."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held = ""
        self._gap = False  # after a call: white space is left out

    def add(self, text: str) -> list[str | ToolCall]:
        found: list[str | ToolCall] = []
        self._held += text
        while (at := self._held.find(self.OPEN)) >= 0:
            self._say(self._held[:at], found)
            self._held = self._held[at:]
            end = self._held.find(self.CLOSE)
            if end < 0:
                return found
            self._close(self._held[len(self.OPEN) : end], self._held[: end + len(self.CLOSE)], found)
            self._held = self._held[end + len(self.CLOSE) :]
        longest = min(len(self._held), len(self.OPEN) - 1)
        keep = next((n for n in range(longest, 0, -1) if self.OPEN.startswith(self._held[-n:])), 0)
        self._say(self._held[: len(self._held) - keep], found)
        self._held = self._held[len(self._held) - keep :]
        return found

    def end(self) -> list[str | ToolCall]:
        """A model may end without closing its last call."""
        found: list[str | ToolCall] = []
        if self._held.startswith(self.OPEN):
            self._close(self._held[len(self.OPEN) :], self._held, found)
        else:
            self._say(self._held, found)
        self._held = ""
        return found

    def _close(self, inner: str, whole: str, found: list[str | ToolCall]) -> None:
        call = _call(_loads(inner.strip()))
        self._gap = call is not None
        found.append(call or whole)

    def _say(self, text: str, found: list[str | ToolCall]) -> None:
        if text := text.lstrip() if self._gap else text:
            self._gap = False
            found.append(text)


class Whole:
    """An answer that is text or calls as a whole. One that begins with `{` or `[` is held back until it ends."""

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._held: str | None = ""

    def add(self, text: str) -> list[str | ToolCall]:
        if self._held is None:
            return [text] if text else []
        self._held += text
        begun = self._held.lstrip()
        if begun[:1] in self.BEGINS or begun[: len(self.TAG)] == self.TAG[: len(begun)]:
            return []
        said, self._held = self._held, None
        return [said]

    BEGINS = ("", "{")

    def end(self) -> list[str | ToolCall]:
        held, self._held = self._held, None
        if not held:
            return []
        calls = self._calls(held.strip().removeprefix(self.TAG))
        return [held] if calls is None else [*calls]

    def _calls(self, text: str) -> list[ToolCall] | None:
        """None for what is text."""
        raise NotImplementedError


class Llama3(Whole):
    """`{"name": ..., "parameters": {...}}`, several with semicolons between, as in Llama 3.1 and later."""

    def _calls(self, text: str) -> list[ToolCall] | None:
        calls, decoder = [], json.JSONDecoder()
        while text := text.lstrip("; \n"):
            try:
                found, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                return None
            has_arguments = isinstance(found, dict) and ("parameters" in found or "arguments" in found)
            call = _call(found) if has_arguments else None
            if call is None:
                return None
            calls.append(call)
            text = text[end:]
        return calls or None


class Required(Whole):
    """An array of calls, to which a grammar holds the model. As in OpenAI's API, one that is cut has cut arguments."""

    BEGINS = ("", "[")
    CUT = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")(?:\s*,\s*"parameters"\s*:\s*(.*))?', re.DOTALL)

    def _calls(self, text: str) -> list[ToolCall]:
        calls, decoder = [], json.JSONDecoder()
        while text := text.lstrip("[], \n\t"):
            try:
                found, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                if (cut := self.CUT.match(text)) is not None:
                    calls.append(ToolCall(json.loads(cut[1]), cut[2] or ""))
                return calls
            if (call := _call(found)) is not None:
                calls.append(call)
            text = text[end:]
        return calls


class Named:
    """The arguments of one function, to which a grammar holds the model."""

    def __init__(self, name: str) -> None:
        self._name, self._held = name, ""

    def add(self, text: str) -> list[str | ToolCall]:
        self._held += text
        return []

    def end(self) -> list[str | ToolCall]:
        return [ToolCall(self._name, self._held)]


FORMATS: dict[str, type[Hermes] | type[Llama3]] = {"hermes": Hermes, "llama3": Llama3}


def format_of(template: ChatTemplate) -> str | None:
    """The format of tool calls that a template writes, or None if it writes none of those known."""
    source = "".join(template.sources.values())
    if Hermes.OPEN in source:
        return "hermes"
    if '"parameters": ' in source or "<|python_tag|>" in source:
        return "llama3"
    return None


def parser_of(request: ChatRequest, format: str | None) -> ToolParser | None:
    """A new parser for one answer; None where calls are not looked for."""
    if not request.tools or request.tool_choice == "none":
        return None
    if isinstance(request.tool_choice, NamedTool):
        return Named(request.tool_choice.function.name)
    if request.tool_choice == "required":
        return Required()
    return None if format is None else FORMATS[format]()


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object"}


def forced_schema(request: ChatRequest) -> dict[str, Any] | None:
    """The JSON schema to which `tool_choice` holds the answer, or None."""
    tools = request.tools or ()
    if isinstance(request.tool_choice, NamedTool):
        name = request.tool_choice.function.name
        return next(_parameters(tool) for tool in tools if tool.function.name == name)
    if request.tool_choice != "required":
        return None
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        parameters = dict(_parameters(tool))
        definitions |= parameters.pop("$defs", {})
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    most = {"maxItems": 1} if request.parallel_tool_calls is False else {}
    schema = {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}
    return {**schema, "$defs": definitions} if definitions else schema
