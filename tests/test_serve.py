"""The server and the official client, sync and async, unchanged: on an engine without a model, and on a small model."""

import asyncio
import json
import re
import types

import pydantic
import pytest
import torch
from fake_engine import HELLO, FakeEngine, MaskedEngine, expected, prompt_of, serve

import rooftile
from rooftile import byte_model
from rooftile.engine import RequestError
from rooftile.serve import guided
from rooftile.serve.answers import ChatAnswer, Choice, CompletionAnswer
from rooftile.serve.answers import event as event_of
from rooftile.serve.chat import ChatTemplate


@pytest.fixture(scope="module", autouse=True)
def _official_client():
    """Not at the top: to import it takes a second, and all workers import this file."""
    global openai
    import openai


def client_of(server, **more):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, **more)


@pytest.fixture(scope="module")
def engine():
    return FakeEngine()


@pytest.fixture(scope="module")
def client(engine):
    with serve(engine) as server, client_of(server) as client:
        yield client


def refused(error, *parts):
    """The client's exception for a 400, which names what is wrong."""
    assert isinstance(error.value, openai.BadRequestError)
    assert all(part in str(error.value) for part in parts), error.value


class TestModels:
    def test_list_and_retrieve(self, client):
        assert [model.id for model in client.models.list()] == ["small", "alias"]
        assert client.models.retrieve("alias").id == "alias"

    def test_an_unknown_model(self, client):
        with pytest.raises(openai.NotFoundError, match="'large' does not exist, expected 'small' or 'alias'"):
            client.models.retrieve("large")
        with pytest.raises(openai.NotFoundError) as error:
            client.completions.create(model="large", prompt="hello")
        assert error.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError, match="'large' does not exist"):
            client.chat.completions.create(model="large", messages=HELLO)


class TestCompletions:
    def test_text_usage_and_ids(self, client):
        made = client.completions.create(model="small", prompt="hello", max_tokens=64)
        assert made.choices[0].text == expected("hello")
        assert made.choices[0].finish_reason == "stop"
        assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (5, 41, 46)
        assert made.id.startswith("cmpl-")
        assert made.model == "small"
        assert made._request_id

    def test_the_default_length_is_16(self, client):
        (choice,) = client.completions.create(model="small", prompt="hello").choices
        assert (choice.text, choice.finish_reason) == (expected("hello")[:16], "length")

    def test_several_prompts_and_n(self, client):
        made = client.completions.create(model="small", prompt=["a", "b"], n=2, max_tokens=8)
        assert [c.text for c in made.choices] == [expected(p)[:8] for p in "aabb"]
        assert [c.index for c in made.choices] == [0, 1, 2, 3]
        assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (2, 32)

    def test_token_ids_as_prompts(self, client, engine):
        ids = engine.engine.tokenizer.encode("hello").ids
        for prompt in (ids, [ids]):
            made = client.completions.create(
                model="small", prompt=prompt, max_tokens=4, extra_body={"return_token_ids": True}
            )
            assert made.choices[0].text == expected("hello")[:4]
            assert engine.engine.tokenizer.decode(made.choices[0].token_ids) == expected("hello")[:4]

    def test_streams_of_several_choices(self, client):
        texts = {}
        for event in client.completions.create(model="small", prompt=["a", "b"], n=2, max_tokens=64, stream=True):
            (choice,) = event.choices
            texts.setdefault(choice.index, []).append(choice.text)
        assert ["".join(texts[i]) for i in range(4)] == [expected(p) for p in "aabb"]
        assert all(len(pieces) > 30 for pieces in texts.values())

    def test_usage_of_a_stream(self, client):
        options = {"include_usage": True}
        *events, last = client.completions.create(
            model="small", prompt="a", max_tokens=4, stream=True, stream_options=options
        )
        assert all(event.usage is None for event in events)
        assert last.choices == []
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (1, 4)

    @pytest.mark.parametrize("stream", [False, True])
    def test_logprobs(self, client, stream):
        made = client.completions.create(model="small", prompt="a", max_tokens=64, logprobs=1, stream=stream)
        found = [e.choices[0].logprobs for e in made] if stream else [made.choices[0].logprobs]
        tokens = [token for each in found for token in each.tokens]
        assert tokens == [*expected("a")]  # the end token is no part of the text
        assert [offset for each in found for offset in each.text_offset] == list(range(40))
        assert all(value == -0.5 for each in found for value in each.token_logprobs)

    def test_echo(self, client):
        for prompt in ("hello", [104, 105]):
            with_echo, without = (
                client.completions.create(model="small", prompt=prompt, max_tokens=4, echo=echo).choices[0].text
                for echo in (True, False)
            )
            assert with_echo.endswith(without)
            assert len(with_echo) > len(without)
        made = client.completions.create(model="small", prompt="hello", max_tokens=0, echo=True)
        assert (made.choices[0].text, made.usage.completion_tokens) == ("hello", 0)
        events = client.completions.create(model="small", prompt="hello", max_tokens=4, echo=True, stream=True)
        assert "".join(event.choices[0].text for event in events) == "hello" + expected("hello")[:4]

    def test_options_reach_the_engine(self, client, engine):
        client.completions.create(
            model="alias",
            prompt="a",
            max_tokens=3,
            temperature=0.5,
            top_p=0.9,
            seed=7,
            stop=["x", "yz"],
            user="someone",
            extra_body={
                "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [9], "ignore_eos": True,
                "priority": 3,
            },
        )  # fmt: skip
        asked = {
            "max_new_tokens": 3, "temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["x", "yz", 9], "top_k": 5,
            "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True, "priority": 3, "logprobs": False,
        }  # fmt: skip
        assert {name: engine.last[name] for name in asked} == asked
        client.completions.create(model="alias", prompt="a")
        assert (engine.last["temperature"], engine.last["top_p"], engine.last["top_k"]) == (1.0, 1.0, 0)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("max_tokens", -1), ("max_tokens", 0), ("max_tokens", 2**70), ("max_tokens", 1000), ("max_tokens", "5"),
            ("n", 0), ("n", -2), ("n", 10**9), ("temperature", -1), ("temperature", 3), ("temperature", 1e308),
            ("top_p", 0), ("top_p", 1.5), ("seed", 2**64), ("seed", 0.5), ("stop", ""), ("stop", ["a"] * 17),
            ("presence_penalty", 5), ("frequency_penalty", -3), ("logit_bias", {"a": 1}), ("logit_bias", {"264": 1}),
            ("logit_bias", {"1": 101}), ("logprobs", -1), ("logprobs", 100), ("best_of", 5), ("suffix", "x"),
            ("prompt", ""), ("prompt", []), ("prompt", [[]]), ("prompt", [264]), ("prompt", [-1]), ("prompt", 5),
            ("prompt", ["a", 1]), ("prompt", "a" * 600), ("stream_options", {"include_usage": True}),
            ("stop", "a" * 1025), ("logit_bias", {str(i): 1 for i in range(1025)}), ("presence_penalty", -1e308),
        ],
    )  # fmt: skip
    def test_what_is_wrong_is_named(self, client, field, value):
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(**{"model": "small", "prompt": "a", "extra_body": {field: value}})
        refused(error, field)
        assert error.value.param.split(".")[0] == field

    @pytest.mark.parametrize(
        ("field", "value", "came"),
        [
            ("stop", ["a"] * 17, "a list of 17"), ("stop", "a" * 1025, "a string of 1025 characters"),
            ("stop", ["a", 5], "5 at stop.1"), ("stop", {"a": 1}, "an object"), ("prompt", 5, "5"),
            ("prompt", None, "null"), ("prompt", ["a", "b", 1], "1 at prompt.2"),
            ("prompt", [1, "a"], '"a" at prompt.1'), ("prompt", [[1], [2, -1]], "-1 at prompt.1.1"),
        ],
    )  # fmt: skip
    def test_a_field_of_several_types_says_all_of_them_and_what_came(self, client, field, value, came):
        accepted = {
            "stop": "a string of 1 to 1024 characters, or a list of at most 16 of them",
            "prompt": "a string, a list of strings, a list of token ids, or a list of such lists",
        }
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(**{"model": "small", "prompt": "a", "extra_body": {field: value}})
        assert error.value.body["message"] == f"{field}: expected {accepted[field]}, got {came}"
        assert (error.value.body["param"], error.value.body["type"]) == (field, "invalid_request_error")

    @pytest.mark.parametrize(
        ("content", "came"), [(5, "5"), ([{"type": "text"}], "nothing at content.0.text"), ({"a": 1}, "an object")]
    )
    def test_a_message_says_what_content_it_takes(self, client, content, came):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model="small", messages=[*HELLO, {"role": "user", "content": content}])
        accepted = "a string, or a list of objects with type 'text' and a text"
        assert error.value.body["message"] == f"messages.1.content: expected {accepted}, got {came}"

    @pytest.mark.parametrize(
        "extra",
        [
            {"top_k": -5}, {"top_k": 2**40}, {"min_p": 2}, {"min_p": -1}, {"repetition_penalty": 0},
            {"repetition_penalty": 1e308}, {"stop_token_ids": [264]}, {"stop_token_ids": [-1]},
            {"stop_token_ids": [1] * 65}, {"priority": 2**40}, {"priority": -(2**40)},
        ],
    )  # fmt: skip
    def test_extensions_are_checked_too(self, client, extra):
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model="small", prompt="a", extra_body=extra)
        refused(error, *extra)

    @pytest.mark.parametrize("extra", [{"presence_penalty": 1.0}, {"logit_bias": {"5": 1.0}}, {"logprobs": 5}])
    def test_what_the_engine_lacks_is_refused(self, client, extra):
        """The engine of these tests takes none of them."""
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model="small", prompt="a", extra_body=extra)
        refused(error, "this engine", *extra)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("guided_json", {"type": "object"}), ("guided_regex", "a"), ("min_tokens", 3), ("prompt_logprobs", 1),
            ("audio", {"voice": "x"}), ("reasoning_effort", "low"), ("functions", [{"name": "f"}]), ("echo", True),
            ("modalities", ["text", "audio"]), ("web_search_options", {}), ("skip_special_tokens", False),
        ],
    )  # fmt: skip
    def test_fields_that_are_known_and_not_supported_are_refused(self, client, field, value):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model="small", messages=HELLO, extra_body={field: value})
        refused(error, f"{field} is not supported")
        assert error.value.param == field

    def test_fields_that_change_nothing_are_accepted(self, client, caplog):
        made = client.chat.completions.create(
            model="small", messages=HELLO, max_tokens=2, user="someone", metadata={"a": "b"}, store=False,
            service_tier="auto", prediction={"type": "content", "content": "x"}, modalities=["text"],
            extra_body={"min_tokens": 0, "guided_json": None, "use_beam_search": False},
        )  # fmt: skip
        assert made.choices[0].message.content == expected(prompt_of(*HELLO))[:2]
        assert "not known" not in caplog.text

    def test_unknown_fields_are_ignored(self, client):
        made = client.completions.create(model="small", prompt="a", max_tokens=2, extra_body={"no_such": {"a": 1}})
        assert made.choices[0].text == expected("a")[:2]

    def test_an_error_in_a_request_ends_that_one_alone(self):
        engine = FakeEngine(fails=lambda stream, i: i == 2 and len(stream.prompt_tokens) == 3)
        with serve(engine) as server, client_of(server) as client:
            with pytest.raises(openai.InternalServerError, match="failed in the engine"):
                client.completions.create(model="small", prompt="bad")
            with pytest.raises(openai.APIError, match="failed in the engine"):
                list(client.completions.create(model="small", prompt="bad", stream=True))
            assert client.completions.create(model="small", prompt="good").choices[0].text == expected("good")[:16]

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_grammar_that_ends_midway_is_the_requests_fault(self, stream, caplog):
        def fails(stream, i):
            raise RequestError("request-0 ended") from guided.GrammarError("too many expressions")

        refusal = pytest.raises(openai.APIError, match="too many expressions")
        with serve(FakeEngine(fails=fails)) as server, client_of(server) as client, refusal as error:
            list(client.completions.create(model="small", prompt="a", stream=stream))
        assert error.value.code == "grammar_error"
        assert stream or error.value.status_code == 400
        assert not [r for r in caplog.records if r.name == "rooftile.serve" and r.levelname == "ERROR"]


class TestChat:
    def test_the_template_makes_the_prompt(self, client):
        messages = [
            {"role": "system", "content": "short"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]
        made = client.chat.completions.create(model="small", messages=messages)
        plain = prompt_of({"role": "system", "content": "short"}, {"role": "user", "content": "a\nb"})
        assert made.choices[0].message.content == expected(plain)
        assert made.choices[0].finish_reason == "stop"
        assert made.usage.prompt_tokens == len(plain)

    @pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
    def test_a_stream(self, client, name):
        events = list(client.chat.completions.create(model="small", messages=HELLO, stream=True, **{name: 5}))
        assert events[0].choices[0].delta.role == "assistant"
        assert "".join(e.choices[0].delta.content or "" for e in events) == expected(prompt_of(*HELLO))[:5]
        assert [e.choices[0].finish_reason for e in events[-2:]] == [None, "length"]

    def test_the_helper_that_accumulates_a_stream(self, client):
        with client.chat.completions.stream(model="small", messages=HELLO) as stream:
            for _ in stream:
                pass
            assert stream.get_final_completion().choices[0].message.content == expected(prompt_of(*HELLO))

    @pytest.mark.parametrize("stream", [False, True])
    def test_logprobs(self, client, stream):
        made = client.chat.completions.create(model="small", messages=HELLO, logprobs=True, stream=stream)
        parts = [e.choices[0].logprobs for e in made if e.choices[0].logprobs] if stream else [made.choices[0].logprobs]
        entries = [entry for part in parts for entry in part.content]
        assert "".join(entry.token for entry in entries) == expected(prompt_of(*HELLO))
        assert bytes(b for entry in entries for b in entry.bytes).decode() == expected(prompt_of(*HELLO))

    def test_the_bytes_of_parts_of_characters(self):
        with serve(FakeEngine(answer=lambda prompt: "é€")) as server, client_of(server) as client:
            (choice,) = client.chat.completions.create(model="small", messages=HELLO, logprobs=True).choices
            (older,) = client.completions.create(model="small", prompt="a", logprobs=0).choices
        assert older.logprobs.tokens == [rf"bytes:\x{b:02x}" for b in "é€".encode()]
        assert [bytes(entry.bytes) for entry in choice.logprobs.content] == [bytes([b]) for b in "é€".encode()]

    def test_n(self, client):
        made = client.chat.completions.create(model="small", messages=HELLO, n=3, max_tokens=4)
        assert [c.message.content for c in made.choices] == [expected(prompt_of(*HELLO))[:4]] * 3

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("messages", []), ("messages", [{"role": "wizard", "content": "a"}]), ("messages", "hello"),
            ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            ("messages", [{"role": "user", "content": "a" * 600}]), ("top_logprobs", 3), ("max_completion_tokens", -1),
            ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("response_format", {"type": "poem"}),
            ("response_format", {"type": "json_schema"}), ("structured_outputs", {"regex": "a", "choice": ["b"]}),
            ("structured_outputs", {"json": {}, "disable_any_whitespace": True}), ("n", 0), ("n", 10**9),
            ("max_tokens", -1), ("max_tokens", 2**70), ("max_completion_tokens", 1000), ("temperature", -1),
            ("top_logprobs", 100), ("seed", 2**64), ("tools", [{"type": "function", "function": {"name": "f"}}] * 129),
        ],
    )  # fmt: skip
    def test_what_is_wrong_is_named(self, client, field, value):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model="small", messages=HELLO, extra_body={field: value})
        refused(error, field)

    def test_without_a_template(self):
        refusal = pytest.raises(openai.BadRequestError, match="no chat template")
        with serve(FakeEngine(), chat_template=None) as server, client_of(server) as client, refusal:
            client.chat.completions.create(model="small", messages=HELLO)

    def test_what_a_template_refuses(self):
        template = ChatTemplate({"default": "{{ raise_exception('no system here') }}"}, {})
        refusal = pytest.raises(openai.BadRequestError, match="no system here")
        with serve(FakeEngine(), chat_template=template) as server, client_of(server) as client, refusal:
            client.chat.completions.create(model="small", messages=HELLO)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


class TestTools:
    CALL = 'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n' * 2

    def test_calls_are_parsed(self):
        engine = FakeEngine(answer=lambda prompt: self.CALL)
        with serve(engine, tool_format="hermes") as server, client_of(server) as client:
            (choice,) = client.chat.completions.create(model="small", messages=HELLO, tools=TOOLS).choices
            assert choice.finish_reason == "tool_calls"
            assert [call.function.name for call in choice.message.tool_calls] == ["weather"] * 2
            assert json.loads(choice.message.tool_calls[1].function.arguments) == {"city": "Ulm"}
            prompt = engine.engine.tokenizer.decode(engine.last["prompt"])
            assert '"name": "weather"' in prompt

            with client.chat.completions.stream(model="small", messages=HELLO, tools=TOOLS) as stream:
                for _ in stream:
                    pass
                message = stream.get_final_completion().choices[0].message
            assert [json.loads(c.function.arguments) for c in message.tool_calls] == [{"city": "Ulm"}] * 2
            assert len({call.id for call in message.tool_calls}) == 2
            assert message.content.replace("\n", "") == "Let me see." * 2

            # An answer goes back with the result of the call.
            messages = [*HELLO, choice.message, {"role": "tool", "tool_call_id": "x", "content": "rain"}]
            client.chat.completions.create(model="small", messages=messages, tools=TOOLS)
            assert "[tool]rain" in engine.engine.tokenizer.decode(engine.last["prompt"])

    def test_none_leaves_them_out(self):
        engine = FakeEngine(answer=lambda prompt: self.CALL)
        with serve(engine, tool_format="hermes") as server, client_of(server) as client:
            made = client.chat.completions.create(model="small", messages=HELLO, tools=TOOLS, tool_choice="none")
            assert made.choices[0].message.content == self.CALL
            assert "weather" not in engine.engine.tokenizer.decode(engine.last["prompt"])

    def test_a_template_that_leaves_them_out_is_an_error(self):
        template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
        asked = {"model": "small", "messages": HELLO}
        with serve(MaskedEngine(), chat_template=template) as server, client_of(server) as client:
            for choice in ({}, {"tool_choice": "auto"}):
                with pytest.raises(openai.BadRequestError, match="the chat template leaves tools out") as refused:
                    client.chat.completions.create(**asked, tools=TOOLS, **choice)
                assert refused.value.param == "tools"
            assert client.chat.completions.create(**asked, tools=TOOLS, tool_choice="none").choices
            (made,) = client.chat.completions.create(**asked, tools=TOOLS, tool_choice="required").choices
            assert made.message.tool_calls[0].function.name == "weather"


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Bonn"]}, "n": {"type": "integer"}},
    "required": ["city", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def masked():
    with serve(MaskedEngine()) as server, client_of(server) as client:
        yield client


class TestStructuredOutputs:
    """With an engine that writes what its mask allows, and ends as soon as it may."""

    def test_a_schema(self, masked):
        format = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
        made = masked.chat.completions.create(model="small", messages=HELLO, response_format=format, n=2)
        for choice in made.choices:
            found = json.loads(choice.message.content)
            assert found["city"] in ("Ulm", "Bonn")
            assert isinstance(found["n"], int)
            assert choice.finish_reason == "stop"

    def test_the_helper_that_parses(self, masked):
        class Place(pydantic.BaseModel):
            city: str
            n: int

        made = masked.chat.completions.parse(model="small", messages=HELLO, response_format=Place)
        assert isinstance(made.choices[0].message.parsed, Place)

    def test_an_object(self, masked):
        format = {"type": "json_object"}
        made = masked.chat.completions.create(model="small", messages=HELLO, response_format=format)
        assert isinstance(json.loads(made.choices[0].message.content), dict)

    def test_text_is_not_restricted(self, masked):
        made = masked.chat.completions.create(model="small", messages=HELLO, response_format={"type": "text"})
        assert made.choices[0].message.content == expected(prompt_of(*HELLO))

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_regular_expression(self, masked, stream):
        extra = {"structured_outputs": {"regex": "[ab]{3}c"}}
        made = masked.completions.create(model="small", prompt="x", extra_body=extra, stream=stream)
        text = "".join(e.choices[0].text for e in made) if stream else made.choices[0].text
        assert re.fullmatch("[ab]{3}c", text)

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
    def test_a_tool_that_must_be_called(self, masked, choice):
        made = masked.chat.completions.create(model="small", messages=HELLO, tools=TOOLS, tool_choice=choice)
        (call,) = made.choices[0].message.tool_calls
        assert (made.choices[0].finish_reason, call.function.name) == ("tool_calls", "weather")
        assert isinstance(json.loads(call.function.arguments)["city"], str)

    @pytest.mark.parametrize(
        ("choice", "tokens", "calls"),
        [
            ("required", 4, []),  # of its name
            ("required", 36, [("weather", '{"ci')]),
            ({"type": "function", "function": {"name": "weather"}}, 4, [("weather", '{"ci')]),
        ],
    )
    def test_a_tool_call_that_is_cut_is_no_text(self, masked, choice, tokens, calls):
        """As in OpenAI's API: a call with cut arguments, and the reason length."""
        asked = {"model": "small", "messages": HELLO, "tools": TOOLS, "tool_choice": choice, "max_tokens": tokens}
        (made,) = masked.chat.completions.create(**asked).choices
        deltas = [event.choices[0] for event in masked.chat.completions.create(**asked, stream=True)]
        streamed = [call for event in deltas for call in event.delta.tool_calls or ()]
        for found in (made.message.tool_calls or [], streamed):
            assert [(call.function.name, call.function.arguments) for call in found] == calls
        assert (made.finish_reason, deltas[-1].finish_reason) == ("length", "length")
        assert not made.message.content
        assert not any(event.delta.content for event in deltas)

    @pytest.mark.parametrize(
        "extra",
        [
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
            {"structured_outputs": {"regex": "("}},
            {"structured_outputs": {"grammar": "start: ("}},
            {"structured_outputs": {"grammar": "start: start start"}},
            {"structured_outputs": {"regex": r"[^\s\S]"}},
            {"structured_outputs": {"json": "{"}},
            {"structured_outputs": {"json": "[" * 20_000}},
            {"structured_outputs": {"json": {"$ref": "#"}}},
            {"structured_outputs": {"json": {"type": "integer", "minimum": 5, "maximum": 1}}},
            {"structured_outputs": {"json": {"type": "string", "pattern": "("}}},
            {"structured_outputs": {"regex": "(" * 5000}},
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        ],
    )
    def test_what_is_not_valid_is_refused(self, masked, extra):
        with pytest.raises(openai.BadRequestError) as error:
            masked.completions.create(model="small", prompt="x", extra_body=extra)
        assert next(iter(extra)) in str(error.value) or "not both" in str(error.value)

    def test_what_ends_a_grammar_does_not_tell_its_text(self):
        """Errors of requests are logged."""
        tokenizer = FakeEngine().engine.tokenizer
        grammar = guided.Grammars(tokenizer, 264, (256,)).compile(guided.of_schema({"const": "secret"}))
        with pytest.raises(RuntimeError, match=r"can't be followed further: .") as error:
            grammar.advance(tokenizer.encode("x").ids[0])
        assert "secret" not in str(error.value)

    def test_an_engine_without_a_mask(self):
        refusal = pytest.raises(openai.BadRequestError, match="no token mask")
        with serve(FakeEngine()) as server, client_of(server) as client, refusal:
            client.completions.create(
                model="small", prompt="x", extra_body={"response_format": {"type": "json_object"}}
            )

    def test_penalties_biases_and_top_logprobs_reach_an_engine_that_takes_them(self):
        engine = MaskedEngine()
        with serve(engine) as server, client_of(server) as client:
            made = client.chat.completions.create(
                model="small", messages=HELLO, max_tokens=2, presence_penalty=0.5, frequency_penalty=-1,
                logit_bias={"5": -100, "7": 2.5}, logprobs=True, top_logprobs=2,
            )  # fmt: skip
            assert engine.last["presence_penalty"] == 0.5
            assert engine.last["frequency_penalty"] == -1
            assert engine.last["logit_bias"] == {5: -100, 7: 2.5}
            assert engine.last["top_logprobs"] == 2
            (first, _) = made.choices[0].logprobs.content
            assert [len(top.token) for top in first.top_logprobs] == [1, 1]
            assert first.top_logprobs[0].token == first.token
            older = client.completions.create(model="small", prompt="a", max_tokens=2, logprobs=2)
            assert [len(top) for top in older.choices[0].logprobs.top_logprobs] == [2, 2]


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
def test_events_of_text_alone_are_the_json_of_any_event(kind):
    base = {"id": "x", "created": 1, "model": 'a "\0" model'}
    more = {"logprobs": False, "ends": frozenset(), "token_bytes": None, "metrics": None, "started": 0.0}
    answer = kind(base, [Choice(3, None)], prompt_tokens=[1], usage=True, **more)
    texts = ("a", "", '"\\\n\0', "\u2028é😀</s>", "\ud800", "data: [DONE]")
    chunks = [types.SimpleNamespace(token=5, text=text, logprob=None, finish_reason=None) for text in texts]
    made = [event_of(each) for chunk in chunks for each in answer.events(answer.choices[0], chunk)]
    assert len(made) == len(texts) - 1
    assert all(b'"usage":null' in each for each in made)
    assert answer.sent(answer.choices[0], chunks) == b"".join(made)


def test_of_tokens_that_come_together_the_last_alone_has_the_reason():
    """Where events have more than text, each is made anew."""
    more = {"logprobs": True, "ends": frozenset(), "token_bytes": lambda token: b"a", "metrics": None, "started": 0.0}
    answer = ChatAnswer({"id": "x", "created": 1, "model": "m"}, [Choice(0, None)], prompt_tokens=[1], **more)
    reasons = (None, None, "stop")
    chunks = [types.SimpleNamespace(token=5, text="a", logprob=-0.5, finish_reason=reason) for reason in reasons]
    answer.choices[0].finish_reason = "stop"  # all have come
    sent = answer.sent(answer.choices[0], chunks).decode().split("\n\n")[:-1]
    assert [json.loads(e.removeprefix("data: "))["choices"][0]["finish_reason"] for e in sent] == list(reasons)


class TestAsync:
    def test_requests_at_once(self, engine):
        async def ask(client, i):
            made = await client.chat.completions.create(
                model="small", messages=[{"role": "user", "content": f"{i}"}], stream=bool(i % 2)
            )
            if not i % 2:
                return made.choices[0].message.content
            return "".join([e.choices[0].delta.content or "" async for e in made])

        async def run(url):
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
                return await asyncio.gather(*(ask(client, i) for i in range(20)))

        with serve(FakeEngine(delay=0.001)) as server:
            answers = asyncio.run(run(server.url))
        assert answers == [expected(prompt_of({"role": "user", "content": f"{i}"})) for i in range(20)]


@pytest.fixture(scope="module")
def model():
    with rooftile.AsyncEngine.from_pretrained(
        byte_model.folder(), dtype=torch.float32, max_batch=4, max_seq_len=64, page_size=16, progress=False
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def model_client(model):
    with serve(model) as server, client_of(server) as client:
        yield client


class TestSmallModel:
    """The same through a model, in the interpreter where there is no GPU."""

    PROMPT = "    for line in "

    def test_a_stream_has_the_tokens_of_generate(self, model_client, model):
        events = list(
            model_client.completions.create(
                model="small", prompt=self.PROMPT, max_tokens=5, temperature=0, stream=True, logprobs=0
            )
        )
        direct = list(model.add(self.PROMPT, max_new_tokens=5, logprobs=True))
        assert "".join(e.choices[0].text for e in events) == "".join(chunk.text for chunk in direct)
        values = [value for e in events for value in e.choices[0].logprobs.token_logprobs]
        torch.testing.assert_close(values, [chunk.logprob for chunk in direct])

    def test_n_seeds_and_stop(self, model_client, model):
        asked = {"model": "small", "prompt": self.PROMPT, "max_tokens": 2, "temperature": 1.0}
        first = model_client.completions.create(**asked, seed=3, n=2)
        again = model_client.completions.create(**asked, seed=3, n=2)
        assert [c.text for c in first.choices] == [c.text for c in again.choices]
        assert len({c.text for c in first.choices}) > 1
        direct = model.add(self.PROMPT, n=2, max_new_tokens=2, temperature=1.0, seed=3)
        assert [c.text for c in first.choices] == [stream.result().text for stream in direct]
        drawn = model_client.completions.create(**asked | {"prompt": [self.PROMPT] * 3})
        assert len({c.text for c in drawn.choices}) > 1  # without a seed, each prompt has its own
        text = first.choices[0].text
        stopped = model_client.completions.create(**asked, seed=3, stop=text[1]).choices[0]
        assert (stopped.text, stopped.finish_reason) == (text[: text.index(text[1])], "stop")

    def test_a_chat(self, model_client):
        made = model_client.chat.completions.create(model="small", messages=HELLO, max_tokens=3, temperature=0)
        assert made.usage.completion_tokens == 3

    def test_a_grammar_and_top_logprobs(self, model_client):
        made = model_client.completions.create(
            model="small",
            prompt=self.PROMPT,
            max_tokens=8,
            logprobs=2,
            extra_body={"structured_outputs": {"regex": "[xz]{2}7"}},
        )
        (choice,) = made.choices
        assert re.fullmatch("[xz]{2}7", choice.text)
        assert choice.finish_reason == "stop"
        for token, value, top in zip(
            *(getattr(choice.logprobs, n) for n in ("tokens", "token_logprobs", "top_logprobs")), strict=True
        ):
            assert top[token] == value
            assert len(top) in (2, 3)  # the token itself is among the two, or beside them
            assert value <= max(top.values()) <= 0

    def test_biases_and_penalties(self, model_client):
        made = model_client.completions.create(
            model="small",
            prompt=self.PROMPT,
            max_tokens=3,
            temperature=0,
            logit_bias={"88": 100},
            presence_penalty=-2.0,
        )
        assert made.choices[0].text == "XXX"

    def test_usage_counts_what_the_prefix_cache_had(self, model_client):
        asked = {"model": "small", "prompt": ["x" * 33, "y" * 10], "max_tokens": 1, "n": 2}
        found = [model_client.completions.create(**asked).usage.prompt_tokens_details.cached_tokens for _ in range(2)]
        assert found == [0, 32]  # of the first prompt two pages of 16 tokens

    def test_a_client_that_leaves_frees_its_slot(self, model_client, model):
        with model_client.completions.create(model="small", prompt="a", max_tokens=50, stream=True) as stream:
            next(iter(stream))
        with pytest.raises(openai.APITimeoutError):
            model_client.with_options(timeout=0.3).completions.create(model="small", prompt="b", max_tokens=50)

        async def idle():
            for _ in range(200):
                stats = model.stats()
                if not (stats.running or stats.waiting):
                    return True
                await asyncio.sleep(0.05)
            return False

        assert asyncio.run(idle())
        assert model.stats().pages_used == 0 or model.stats().prefix_query_tokens  # cached pages may stay
