"""Chat templates as transformers renders them, tool calls in answers, and outputs that follow a grammar."""

import concurrent.futures
import json
import threading
from pathlib import Path

import pytest
from fake_engine import written
from tokenizers import Tokenizer

from rooftile import byte_model
from rooftile.serve import chat, guided
from rooftile.serve.protocol import ChatRequest, Message, ResponseFormat, StructuredOutputs

# Loops, filters, tests, namespaces and blocks as in Qwen's and Llama's templates.
TEMPLATE = """{{- bos_token }}
{%- set ns = namespace(first=true) %}
{%- if tools %}
    {{- "<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}{{ tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{% for message in messages %}
    {% if loop.index0 == 3 %}{% continue %}{% endif %}
    {%- if message.role == "assistant" and message.tool_calls is defined %}
        {%- for call in message.tool_calls %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %}
    {%- elif message.role == "assistant" %}{% generation %}{{ message.content | trim }}{% endgeneration %}
    {%- else %}
<|{{ message['role'] }}|>{{ message.content }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}{{ eos_token if not thinking }}"""
MESSAGES = [
    {"role": "system", "content": "<b>&\u00e9"},
    {"role": "user", "content": "  hello "},
    {"role": "assistant", "content": " hi "},
    {"role": "user", "content": "left out"},
    {"role": "user", "content": "bye"},
]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def transformers_renders(template, messages, tools, **more):
    from transformers.utils.chat_template_utils import render_jinja_template

    found = render_jinja_template([messages], tools, chat_template=template, add_generation_prompt=True, **more)
    return found[0][0]


CHAT = Path(__file__).parent.parent / "examples" / "chat.jinja"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


class TestTemplate:
    @pytest.mark.parametrize("tools", [None, [TOOL]])
    @pytest.mark.parametrize("more", [{}, {"thinking": True}])
    def test_it_renders_as_transformers_does(self, tools, more):
        ours = chat.ChatTemplate({"default": TEMPLATE}, TOKENS).render(MESSAGES, tools, **more)
        assert ours == transformers_renders(TEMPLATE, MESSAGES, tools, **TOKENS, **more)

    @pytest.mark.parametrize(
        "source",
        [
            "{{ messages.__class__.__mro__ }}",
            "{{ ''.__class__.__base__.__subclasses__() }}",
            "{% set _ = messages.append(1) %}",
            "{{ raise_exception('no') }}",
            "{{ messages[9].content.x }}",
        ],
    )
    def test_a_program_that_leaves_the_sandbox_or_fails_is_an_error(self, source):
        template = chat.ChatTemplate({"default": source}, {})
        with pytest.raises(ValueError, match="the chat template refuses"):
            template.render(MESSAGES)

    @pytest.mark.parametrize("tools", [None, [TOOL]])
    def test_the_example_makes_chats_of_any_model(self, tools, tmp_path):
        template = chat.ChatTemplate.load(tmp_path, CHAT)
        shown = template.render(MESSAGES, tools)
        assert shown == transformers_renders(CHAT.read_text(), MESSAGES, tools)
        assert shown.endswith("assistant:")
        assert all(f"{message['role']}: {message['content']}" in shown for message in MESSAGES if message["content"])
        assert (json.dumps(TOOL) in shown) == bool(tools)
        assert (chat.format_of(template), template.has_tools) == ("hermes", True)

    def test_a_program_that_is_not_valid(self):
        with pytest.raises(ValueError, match="the chat template is not valid"):
            chat.ChatTemplate({"default": "{% if %}"}, {})

    def test_where_it_is_read_from(self, tmp_path):
        load = chat.ChatTemplate.load
        assert load(tmp_path) is None
        config = {"bos_token": {"content": "<s>"}, "eos_token": None, "chat_template": "{{ bos_token }}config"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert load(tmp_path).render([]) == "<s>config"
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
        assert (load(tmp_path).render([]), load(tmp_path).render([], [TOOL])) == ("plain", "tools")
        (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file")
        assert load(tmp_path).render([]) == "<s>file"
        (tmp_path / "other.jinja").write_text("other")
        assert load(tmp_path, tmp_path / "other.jinja").render([]) == "other"

    def test_messages_are_given_as_templates_expect_them(self):
        call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
        given = [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        messages = [Message.model_validate(each) for each in given]
        template = chat.ChatTemplate({"default": ""}, {})
        system, assistant = template.dicts(messages)
        assert system == {"role": "system", "content": "a\nb"}
        assert assistant["content"] == ""
        assert assistant["tool_calls"][0]["function"]["arguments"] == {"city": "Ulm"}
        call["function"]["arguments"] = "{"
        with pytest.raises(ValueError, match=r"messages\.0\.tool_calls has arguments that are no JSON"):
            template.dicts([Message.model_validate(given[1])])


def parsed(parser, text, step=None):
    """Text and calls, with the text given in pieces of so many characters."""
    step = step or len(text) or 1
    found = []
    for at in range(0, len(text), step):
        found += parser.add(text[at : at + step])
    found += parser.end()
    calls = [(each.name, json.loads(each.arguments)) for each in found if isinstance(each, chat.ToolCall)]
    return "".join(each for each in found if isinstance(each, str)), calls


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm </tool_cal"}}\n</tool_call>'
ULM = ("weather", {"city": "Ulm </tool_cal"})


@pytest.mark.parametrize("step", [None, 1, 7])
class TestToolCalls:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("no call", ("no call", [])),
            ("a <tool_cal b", ("a <tool_cal b", [])),
            ("", ("", [])),
            (f"see: {CALL}", ("see: ", [ULM])),
            (f"{CALL}\n{CALL}\n", ("", [ULM, ULM])),
            (f"{CALL} and so on", ("and so on", [ULM])),
            (CALL.removesuffix("</tool_call>"), ("", [ULM])),
            ("<tool_call>no JSON</tool_call>", ("<tool_call>no JSON</tool_call>", [])),
            ("<tool_call>[1]</tool_call>", ("<tool_call>[1]</tool_call>", [])),
            ("<tool_call>{", ("<tool_call>{", [])),
            ("<tool_call>" + "[" * 5000 + "</tool_call>", ("<tool_call>" + "[" * 5000 + "</tool_call>", [])),
        ],
    )
    def test_hermes(self, text, expected, step):
        assert parsed(chat.Hermes(), text, step) == expected

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("no call", ("no call", [])),
            ('{"name": "f", "parameters": {"a": 1}}', ("", [("f", {"a": 1})])),
            (
                '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "arguments": {}}',
                ("", [("f", {}), ("g", {})]),
            ),
            ('{"a": 1}', ('{"a": 1}', [])),
            ('{"name": "f", "parameters": {', ('{"name": "f", "parameters": {', [])),
            ("<|python", ("<|python", [])),
            *(
                (text, (text, []))
                for text in ('{"name": "f", "parameters": {}}; 5', '{"name": "f", "parameters": {}} [2]')
            ),
            ("{" * 5000, ("{" * 5000, [])),
        ],
    )
    def test_llama3(self, text, expected, step):
        assert parsed(chat.Llama3(), text, step) == expected

    def test_held_to_calls_by_a_grammar(self, step):
        assert parsed(chat.Named("f"), '{"a": 1}', step) == ("", [("f", {"a": 1})])
        text = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
        assert parsed(chat.Required(), text, step) == ("", [("f", {"a": 1}), ("g", {})])

    def test_calls_that_are_cut_have_cut_arguments(self, step):
        """At every place of an array of two calls: never text, and the name only once it is whole."""
        text = '[{"name": "a\\"b", "parameters": {"x": "{}]"}}, {"name":"g","parameters":{"y": [1]}}]'
        whole = [('a"b', '{"x": "{}]"}'), ("g", '{"y": [1]}')]
        for end in range(len(text) + 1):
            parser, found = chat.Required(), []
            for at in range(0, end, step or len(text)):
                found += parser.add(text[at : min(end, at + (step or len(text)))])
            calls = [(each.name, each.arguments) for each in found + parser.end()]
            begun = [text[:end].find(name) >= 0 for name in ('"a\\"b"', '"g"')]
            assert [name for name, _ in calls] == [name for (name, _), has in zip(whole, begun, strict=True) if has]
            for (_, arguments), (_, expected) in zip(calls, whole, strict=False):
                assert expected.startswith(arguments)
        assert calls == whole


@pytest.mark.parametrize(
    ("source", "format"),
    [("x <tool_call> y", "hermes"), ('{"name": function name, "parameters": d}', "llama3"), ("plain", None)],
)
def test_the_format_is_seen_in_the_template(source, format):
    assert chat.format_of(chat.ChatTemplate({"default": source}, {})) == format


@pytest.fixture(scope="module")
def grammars():
    return guided.Grammars(Tokenizer.from_file(str(byte_model.folder() / "tokenizer.json")), 264, [256])


def write(grammars, grammar):
    """The shortest text that follows it, or nearly."""
    return written(grammars.compile(grammar).copy(), Tokenizer.from_file(str(byte_model.folder() / "tokenizer.json")))


class TestGrammars:
    def test_a_schema(self, grammars):
        schema = {
            "type": "object",
            "properties": {"city": {"enum": ["Ulm", "Bonn"]}, "n": {"type": "integer"}},
            "required": ["city", "n"],
            "additionalProperties": False,
        }
        format = ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
        found = json.loads(write(grammars, guided.grammar_of(format, None)))
        assert found["city"] in ("Ulm", "Bonn")
        assert isinstance(found["n"], int)

    def test_an_object(self, grammars):
        assert isinstance(
            json.loads(write(grammars, guided.grammar_of(ResponseFormat(type="json_object"), None))), dict
        )

    @pytest.mark.parametrize(
        ("text", "spaces"), [("{", 0), ('{"a"', 0), ('{"a":', 1), ('{"a":1', 0), ('{"a":1,', 1), ('{"a":[1,', 1)]
    )
    def test_json_is_written_on_one_line(self, text, spaces, grammars):
        """At most a space after a comma or colon: a model that prefers white space must not write it for ever."""
        mask = grammars.compile(guided.grammar_of(ResponseFormat(type="json_object"), None)).copy()
        tokenizer = Tokenizer.from_file(str(byte_model.folder() / "tokenizer.json"))
        for token in tokenizer.encode(text).ids:
            mask.advance(token)
        (space,), (newline,) = (tokenizer.encode(c).ids for c in " \n")
        n = 0
        while int(mask.mask()[space // 32]) >> space % 32 & 1:
            mask.advance(space)
            n += 1
        assert n == spaces
        assert not int(mask.mask()[newline // 32]) >> newline % 32 & 1

    @pytest.mark.parametrize(
        ("structured", "expected"),
        [
            ({"regex": "[ab]{3}"}, "aaa"),
            ({"choice": ['no "end"', "yes"]}, 'no "end"'),
            ({"grammar": 'start: "x" y+\ny: "y"'}, "xy"),
            ({"json": {"const": 5}}, "5"),
            ({"json": '{"const": 5}'}, "5"),
        ],
    )
    def test_extensions(self, grammars, structured, expected):
        grammar = guided.grammar_of(None, StructuredOutputs.model_validate(structured))
        assert write(grammars, grammar) == expected

    @pytest.mark.parametrize(
        "structured",
        [
            {"json": {"type": "nonsense"}},
            {"json": "{"},
            {"regex": "("},
            {"grammar": "start: ("},
            {"json": {"minimum": "x"}},
        ],
    )
    def test_what_is_not_valid(self, grammars, structured):
        with pytest.raises(ValueError, match=r"\S"):
            grammars.compile(guided.grammar_of(None, StructuredOutputs.model_validate(structured)))

    def test_a_compiled_grammar_is_kept_unchanged(self, grammars):
        grammar = guided.grammar_of(None, StructuredOutputs(regex="[ab]c"))
        assert grammars.compile(grammar) is grammars.compile(grammar)
        assert [write(grammars, grammar) for _ in range(2)] == ["ac", "ac"]

    def test_requests_with_one_new_grammar_compile_it_once(self, grammars):
        """Those that come meanwhile wait for it. All begin together."""
        text, barrier = guided.of_schema({"const": "compiled once"}), threading.Barrier(4)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = [*pool.map(lambda _: (barrier.wait(20) and None) or grammars.compile(text), range(4))]
        assert len(set(map(id, found))) == 1

    def test_a_token_that_is_not_allowed_is_an_error(self, grammars):
        mask = grammars.compile(guided.grammar_of(None, StructuredOutputs(regex="a"))).copy()
        with pytest.raises(RuntimeError, match="the grammar can't be followed"):
            mask.advance(98)

    def test_forced_calls_are_what_the_parser_reads(self, grammars):
        tools = [{"type": "function", "function": {"name": n, "parameters": {"const": {"a": 1}}}} for n in "fg"]
        asked = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "parallel_tool_calls": False}
        request = ChatRequest.model_validate({**asked, "tool_choice": "required"})
        text = write(grammars, guided.of_schema(chat.forced_schema(request)))
        assert parsed(chat.parser_of(request, None), text) == ("", [("f", {"a": 1})])
        named = {"type": "function", "function": {"name": "g"}}
        request = ChatRequest.model_validate({**asked, "tool_choice": named})
        text = write(grammars, guided.of_schema(chat.forced_schema(request)))
        assert parsed(chat.parser_of(request, None), text) == ("", [("g", {"a": 1})])
