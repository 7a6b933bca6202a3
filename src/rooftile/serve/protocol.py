"""What a request may contain, as in OpenAI's API, with vLLM's names for what that API lacks.

Types are strict: "5" is not a number. Unknown fields are ignored, as vLLM does, and logged. A known field that asks for
something the server does not do is refused: `UNSUPPORTED`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from rooftile.errors import counted

Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]


def _shown(x: Any) -> str:
    """A value of JSON, short enough for an error."""
    if isinstance(x, list):
        return f"a list of {len(x)}"
    if isinstance(x, dict):
        return "an object"
    if isinstance(x, str) and len(x) > 40:
        return f"a string of {counted(len(x), 'character')}"
    return json.dumps(x)[:100]


def _expecting(accepted: str) -> WrapValidator:
    """For a union: one error that names all that is accepted, instead of one of pydantic's for each alternative.

    It names the value at which the alternative that got furthest failed.
    """

    def checked(value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            first = {e["loc"][0]: e for e in reversed(error.errors(include_url=False))}  # of each alternative
            furthest = max(first.values(), key=lambda e: e["loc"][1:])
            path = furthest["loc"][1:]
            came = "nothing" if furthest["type"] == "missing" else _shown(furthest["input"])
            at = f" at {'.'.join(map(str, (info.field_name, *path)))}" if path else ""
            raise ValueError(f"expected {accepted}, got {came}{at}") from None

    return WrapValidator(checked)


# Fields of OpenAI's API and of vLLM that are refused, unless they have one of these values, which ask for nothing. null
# is always accepted.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI's.
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none", "medium"),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's.
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),  # of a chat
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
INSTEAD = {
    "function_call": "tool_choice",
    "functions": "tools",
    "reasoning_effort": "chat_template_kwargs",
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), "structured_outputs"),
}
# Fields that change nothing in an answer, and are accepted with any value.
HARMLESS = frozenset(
    {
        "guided_decoding_backend", "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention",
        "request_id", "safety_identifier", "service_tier", "store", "user",
    }
)  # fmt: skip


class Fields(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(Fields):
    include_usage: bool = False


class StructuredOutputs(Fields):
    """vLLM's extension: exactly one of them."""

    model_config = ConfigDict(extra="forbid")  # its options change the answer

    json_schema: Annotated[dict[str, Any] | str | None, _expecting("a JSON schema, as an object or as a string")] = (
        Field(None, alias="json")
    )
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None  # in Lark's syntax

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if sum(x is not None for x in (self.json_schema, self.regex, self.choice, self.grammar)) != 1:
            raise ValueError("expected exactly one of json, regex, choice and grammar")
        return self


class JsonSchema(Fields):
    name: str = ""
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("json_schema needs json_schema.schema")
        return self


class Sampled(Fields):
    """What both kinds of completion take."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=128)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Annotated[
        Stop | Annotated[list[Stop], Field(max_length=16)] | None,
        _expecting("a string of 1 to 1024 characters, or a list of at most 16 of them"),
    ] = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    response_format: ResponseFormat | None = None
    # Not OpenAI's.
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    stop_token_ids: list[Token] | None = Field(None, max_length=64)
    ignore_eos: bool = False
    priority: int | None = Field(None, ge=-(1 << 31), lt=1 << 31)
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _only_streams_have_stream_options(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        return self


class CompletionRequest(Sampled):
    prompt: Annotated[
        str | list[str] | list[Token] | list[list[Token]],
        _expecting("a string, a list of strings, a list of token ids, or a list of such lists"),
    ]
    max_tokens: int | None = Field(16, ge=0, lt=1 << 31)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    best_of: int | None = None

    @model_validator(mode="after")
    def _possible(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of is not supported: expected n")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0: expected a positive number, or echo: true")
        return self


class Function(Fields):
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Fields):
    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    name: str


class NamedTool(Fields):
    type: Literal["function"]
    function: NamedFunction


class Part(Fields):
    type: Literal["text"]
    text: str


class Message(Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[Part] | None, _expecting("a string, or a list of objects with type 'text' and a text")
    ] = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _only_text(cls, content: Any) -> Any:
        """There are no models for images or sound."""
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else part
            if kind != "text":
                raise ValueError(f"has a part of type {str(kind)[:40]!r}, expected a string, or parts of type 'text'")
        return content


class ChatRequest(Sampled):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)  # replaced by max_completion_tokens in OpenAI's API
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | None,
        _expecting("'none', 'auto', 'required', or an object with type 'function' and the name of a function"),
    ] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _possible(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs: true")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice is only allowed with tools")
        if isinstance(self.tool_choice, NamedTool):
            names = [tool.function.name for tool in self.tools or ()]
            if self.tool_choice.function.name not in names:
                raise ValueError(f"tool_choice is {self.tool_choice.function.name!r}, expected one of tools: {names}")
        return self
