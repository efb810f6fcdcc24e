"""Calls of tools in the forms of several templates: read off them, held by grammars, read back, and rendered again."""

import dataclasses
import functools
import json
import random
import re

import pytest

from jlade.constraints.grammar import Grammar
from jlade.constraints.special import MARK, special
from jlade.server import calls, examples, tools
from jlade.server.call_formats import Fields, Form
from jlade.server.calls import AnswerReader, CallReader
from jlade.server.examples import Examples
from jlade.server.fields import RequestError
from jlade.server.thoughts import Marks
from jlade.server.tools import Tool, Tools
from tests.server import json_chat
from tests.server.conftest import running
from tests.server.json_chat import BIAS, QUESTION, tool

HEAD = """{% for tool in tools or [] %}{{ tool.function | tojson }}
{% endfor %}{% for message in messages %}{{ message.role }}:{{ message.content }}"""
TAIL = "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
CHECKED = "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
TEMPLATES = {
    "hermes": json_chat.HERMES,
    "mistral 3": HEAD
    + "{{ '[TOOL_CALLS] [' if message.tool_calls }}{% for call in message.tool_calls %}"
    + CHECKED
    + """{{ (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last else ']' }}"""
    + "{% endfor %}"
    + TAIL,
    "mistral 11": HEAD
    + "{% for call in message.tool_calls %}"
    + CHECKED
    + "{{ '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + call.function.arguments | tojson }}"
    + "{% endfor %}"
    + TAIL,
    "qwen": HEAD
    + """{% for call in message.tool_calls %}
{{- ('' if loop.first else '\n') + '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
{%- endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}"""
    + TAIL,
    "glm": HEAD
    + """{% for call in message.tool_calls %}
{{- ('' if loop.first else '\n') + '<tool_call>' + call.function.name + '\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<arg_key>' + name + '</arg_key>\n<arg_value>' }}
{{- (value if value is string else value | tojson) + '</arg_value>\n' }}
{%- endfor %}{{ '</tool_call>' }}{% endfor %}"""
    + TAIL,
}
QWEN = Form(
    "<tool_call>\n<function=",
    ">\n<",
    "/function>\n</tool_call>",
    "/function>\n</tool_call>\n<tool_call>\n<function=",
    Fields("parameter=", ">\n", "\n</parameter>\n<"),
)
HERMES = Form(
    '\n<tool_call>\n{"name": "',
    '", "arguments": ',
    "}\n</tool_call>",
    '}\n</tool_call>\n<tool_call>\n{"name": "',
)
FORMS = {
    "hermes": HERMES,
    "mistral 3": Form(special("[TOOL_CALLS]") + ' [{"name": "', '", "arguments": ', "}]", '}, {"name": "'),
    "mistral 11": Form(special("[TOOL_CALLS]"), special("[ARGS]"), "", special("[TOOL_CALLS]")),
    "qwen": QWEN,
    "glm": Form(
        "<tool_call>",
        "\n<",
        "/tool_call>",
        "/tool_call>\n<tool_call>",
        Fields("arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n<"),
    ),
}
PROPERTIES = {
    "text": {"type": "string"},
    "number": {"type": "integer"},
    "either": {"anyOf": [{"enum": ["red", "7"]}, {"type": "boolean"}, {"type": "null"}]},
    "list": {"type": "array", "items": {"$ref": "#/$defs/size"}},
}
DEFINITIONS = {"size": {"enum": ["small", "large"]}}
SHOP = tool(
    "shop",
    {
        "type": "object",
        "properties": PROPERTIES,
        "required": ["text"],
        "additionalProperties": False,
        "$defs": DEFINITIONS,
    },
    strict=True,
)
SHOPS = tool("shops", {"additionalProperties": False})
CALLS = [
    [("shop", {"text": 'a "quoted"\n  <b>text</b>\n</param> of {é}, \\ and \'\n', "number": -3})],
    [("shop", {"text": "7", "either": "7", "list": ["small", "large"]}), ("shops", {}), ("shop", {"text": ""})],
    [("shops", {})],
    [("shop", {"text": "null", "either": None}), ("shop", {"text": "\n", "either": True})],
]


def form_of(template):
    examples = Examples(json_chat.chat_template(template), [json_chat.END])
    return Form.of(examples, Marks.of(examples))


def form(name):
    return form_of(TEMPLATES[name])


def rendered(name, asked):
    """Returns an answer with calls as a template writes it, with marks around special tokens."""
    return rendered_by(TEMPLATES[name], asked)


def rendered_by(written, asked):
    """Returns the same of any template."""
    made = [
        {"id": f"{i:09}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(asked)
    ]
    template = json_chat.chat_template(written)
    text = template.render([*QUESTION, {"role": "assistant", "content": "", "tool_calls": made}], False)
    text = text.removeprefix(template.render(QUESTION)).removesuffix(json_chat.END)
    return marked(re.sub(r', "id": "\d{9}"|\[CALL_ID\]\d{9}', "", text))


def marked(text):
    return re.sub("|".join(map(re.escape, json_chat.MARKS)), lambda found: special(found[0]), text)


def accepts(grammar, text):
    return grammar.automaton.accepts(text.encode(errors="surrogateescape"))


LLAMA = """{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{% if message.tool_calls %}
{% if message.tool_calls | length != 1 %}{{ raise_exception("one call") }}{% endif %}
{% set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}<|end|>
{%- else %}{{ message.content }}<|end|>{% endif %}{% endfor %}"""
LIST = """{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message.content }}
{%- for call in message.tool_calls %}{{ "<tool_call>[" if loop.first else ", " }}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}' }}
{{- "]</tool_call>" if loop.last else "" }}{% endfor %}<|end|>{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "form"),
    [
        *((template, FORMS[name]) for name, template in TEMPLATES.items()),
        (
            json_chat.HERMES.replace("{{ message.role }}:", "{{ message.role }}:<think>\n\n</think>\n\n"),
            dataclasses.replace(HERMES, opening=HERMES.opening.lstrip()),
        ),
        (LLAMA, Form('{"name": "', '", "parameters": ', "}")),
        (LIST, Form('<tool_call>[{"name": "', '", "arguments": ', "}]</tool_call>", '}, {"name": "')),
    ],
)
def test_the_form_of_a_template(template, form):
    assert form_of(template) == form


def read(asked, form, text, seed=None, thoughts=(), **options):
    """Returns the thoughts, the content and the calls of an answer, whole or in random pieces."""
    reader, parts, chance = AnswerReader(thoughts, CallReader(form, asked, **options)), [], random.Random(seed)
    while text and seed is not None:
        length = chance.randint(1, 1 + seed)
        parts += reader.feed(text[:length])
        text = text[length:]
    thought, content, found = calls.gather([*parts, *reader.feed(text, last=True)])
    return thought, content, [(call["name"], call["arguments"]) for call in found]


def fields(field):
    return f"{{% for name, value in call.arguments | items %}}{field}{{% endfor %}}"


OTHER_FORMS = {
    "numbers": "<call>{{ call.name }}:{{ loop.index0 }} {{ call.arguments | tojson }}</call>",
    "the name again": "{{ ' to=' + call.name }}[ARGS]<f {{ call.name }}>"
    + fields("{{ '<p>' + name + '=' + (value if value is string else value | tojson) + '</p>\n' }}")
    + "</f>",
    "types": "<call {{ call.name }}>"
    + fields("""<p {{ name }} {{ 'text' if value is string else 'other' }}>
{{- value if value is string else value | tojson }}</p>""")
    + "</call>",
    "no arguments": "<call>{{ call.name + '\n' }}"
    + fields("{{ '<p>' + name + '=' + (value if value is string else value | tojson) + '</p>\n' }}")
    + "{{ '\n' if not call.arguments }}</call>",
    "of Python": "<call>{{ call.name }}("
    + fields("<p>{{ name }}: {{ '<![CDATA[' + value + ']]>' if value is string and '<' in value else value }}</p>")
    + ")</call>",
    "joined": "<call>{{ call.name }}("
    + fields("{{ ', ' if not loop.first }}{{ name }}={{ '$' + value + '$' if value is string else value }}")
    + ")</call>",
    "in quotes": """{% macro written(value) %}{% if value is string %}${{ value }}${% elif value is mapping %}{{ '{' }}
{%- for name, each in value | items %}{{ ',' if not loop.first }}{{ name }}:{{ written(each) }}{% endfor %}{{ '}' }}
{%- elif value is sequence %}[{% for each in value %}{{ ',' if not loop.first }}{{ written(each) }}{% endfor %}]
{%- else %}{{ value | tojson }}{% endif %}{% endmacro %}{{ '<call>' + call.name + '{' }}"""
    + fields("{{ ',' if not loop.first }}{{ name }}:{{ written(value) }}")
    + "{{ '}</call>' }}",
}
ANY = tool("any", {"properties": {"value": {}}, "additionalProperties": False})
NESTED = [("any", {"value": [{"a b": None, "c": "d'e\\\n", "f": "\"'"}, True, -1.5]}), ("any", {"value": False})]


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_other_forms_are_accepted_and_read(name):
    template = (
        HEAD
        + "{% for item in message.tool_calls %}{% set call = item.function %}"
        + OTHER_FORMS[name]
        + "{% endfor %}"
        + TAIL
    )
    form, asked = form_of(template), tools.read({"tools": [SHOP, SHOPS, ANY]})
    assert form.between is not None
    for made in (*CALLS, NESTED):
        text = rendered_by(template, made)
        assert accepts(asked.grammar(form), text), text
        for seed in (None, 0, 3, 30):
            thought, content, found = read(asked, form, text, seed)
            assert (thought, content) == ("", "")
            assert [(name, json.loads(arguments)) for name, arguments in found] == made


def test_tools_that_a_template_does_not_show_are_in_a_system_message():
    template = json_chat.chat_template(TEMPLATES["qwen"].partition("{% endfor %}")[2])
    reader = dataclasses.replace(json_chat.READER, chat_template=template, capacity=4096)
    prompt = json_chat.TOKENIZER.decode(reader.chat({"messages": QUESTION, "tools": [SHOP]}).prompts[0])
    assert prompt.startswith("system:")
    assert '"name": "shop"' in prompt
    assert "<tool_call>\n<function=NAME>\n<parameter=ARGUMENT>\nVALUE\n</parameter>\n</function>" in prompt


def test_the_form_that_a_template_names():
    named, text = (
        "respond only with <|tool_call|> followed by a JSON list",
        '<|tool_call|>[{"name": "shops", "arguments": {}}]',
    )
    template = f"{named} {{{{ tools | tojson }}}}{{% for each in messages %}}{{{{ each.content }}}}{{% endfor %}}"
    assert read(tools.read({"tools": [SHOPS]}), form_of(template), text) == ("", "", [("shops", "{}")])


ANSWERS = {
    "Yes.": ("", "Yes.", []),
    'a\n<tool_call>\n{"name": "f", "arguments": {"x": "}\\"{\\n</tool_call>"} }\n</tool_call>b\n<tool_call': (
        "",
        "ab\n<tool_call",
        [("f", '{"x": "}\\"{\\n</tool_call>"}')],
    ),
    '\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {"y": {}}}\n'
    "</tool_call>": ("", "", [("f", "{}"), ("g", '{"y": {}}')]),
    '\n<tool_call>\n{"name": "g", "arguments": {"y": [1, {': ("", "", [("g", '{"y": [1, {')]),
}


@pytest.mark.parametrize("text", ANSWERS)
def test_calls_are_read_in_any_pieces(text):
    of_body = Tools([], [Tool(name, {}, False, "tools") for name in "fg"], False, True)
    for seed in range(50):
        assert read(of_body, HERMES, text, seed) == ANSWERS[text]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("made", CALLS)
def test_calls_that_a_template_writes_are_accepted_and_read(name, made):
    text = rendered(name, made)
    for choice in ("auto", "required"):
        asked = tools.read({"tools": [SHOP, SHOPS], "tool_choice": choice, "parallel_tool_calls": True})
        assert accepts(asked.grammar(form(name)), text)
        for seed in (None, 0, 1, 3, 10, 30):
            _, content, found = read(asked, form(name), text, seed)
            assert content == ""
            assert [(name, json.loads(arguments)) for name, arguments in found] == made

    for one in ({"parallel_tool_calls": False}, {"tool_choice": "required"}):
        alone = tools.read({"tools": [SHOP, SHOPS]} | one)
        assert accepts(alone.grammar(form(name)), text) is (len(made) == 1)
        assert not accepts(alone.grammar(form(name)), text + text)
    for named in ({"tool_choice": SHOPS}, {"tool_choice": SHOPS, "parallel_tool_calls": True}):
        only = tools.read({"tools": [SHOP, SHOPS]} | named)
        assert accepts(only.grammar(form(name)), text) is (made == [("shops", {})])
        assert not accepts(only.grammar(form(name)), text + text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_beside_calls(name):
    asked = tools.read({"tools": [SHOPS]})
    grammar, call = asked.grammar(form(name)), rendered(name, [("shops", {})])
    for before in ("Let me see. ", "[TOOL_CALLS] is no token here <tool", ""):
        assert accepts(grammar, before + call)
        for seed in (None, 0, 2, 20):
            assert read(asked, form(name), before + call, seed) == ("", before, [("shops", "{}")])
    assert accepts(grammar, "no call [TOOL_CALLS]shops[ARGS]{}")
    assert not accepts(grammar, call[: len(call) // 2]), "a call is whole"
    assert not accepts(grammar, f"a{special('[ARGS]')}b"), "special tokens are in calls alone"
    assert not accepts(grammar, f"a{MARK}b")


def test_the_blanks_before_calls_may_be_missing():
    asked = tools.read({"tools": [SHOP]})
    grammar, call = asked.grammar(HERMES), '<tool_call>\n{"name": "shop", "arguments": {"text": %s}}\n</tool_call>'
    assert HERMES.opening.startswith("\n")
    for before in ("", "\n", "a", "a\n"):
        assert accepts(grammar, before + call % '"b"')
        assert not accepts(grammar, before + call % "7")
        assert read(asked, HERMES, before + call % '"b"')[1:] == (before.strip(), [("shop", '{"text": "b"}')])


LIKE_CALLS = {"type": "object", "properties": {"name": {"enum": ["shops", "x"]}, "arguments": {}}}
FORMATS = [
    (Grammar.json(), '{"a": 1}', "<tool_call>"),
    (Grammar.json_schema(LIKE_CALLS), '{"name": "x", "arguments": {}}', '{"name": "y"}'),
    (Grammar.regex("[ab]{2}\n*"), "ab\n", "a"),
]


@pytest.mark.parametrize("form", [*FORMS.values(), Form('{"name": "', '", "arguments": ', "}")])
@pytest.mark.parametrize(("other", "text", "wrong"), FORMATS)
def test_a_format_beside_calls(form, other, text, wrong):
    asked = tools.read({"tools": [SHOPS]})
    arguments = "{}" if form.fields is None else ""
    call = f"{form.opening}shops{form.middle}{arguments}{form.closing}"
    thought = f"<think>so {call}</think>\n\n".replace(MARK, "")
    for marks, before, cut_off in (
        ((), "", "</think>"),
        ([("<think>", "</think>")], "", "<think>"),
        ([("<think>", "</think>")], thought, thought[:-10]),
        ([("", "</think>")], thought.removeprefix("<think>"), "so"),
    ):
        grammar = asked.grammar(form, marks, other=other)
        assert accepts(grammar, before + text)
        assert accepts(grammar, before + call)
        for refused in (wrong, text + call, call + text):
            assert not accepts(grammar, before + refused)
        for answer in (text, call):
            assert not accepts(grammar, cut_off + answer)
        for seed in (None, 0, 1, 3, 20):
            for answer, expected in ((text, (text, [])), (call, ("", [("shops", "{}")]))):
                assert read(asked, form, before + answer, seed, marks, is_either=True)[1:] == expected
    within = f"[{call}]".replace(MARK, "")
    assert read(asked, form, within, 1, is_either=True) == ("", within, []), "a call begins the answer"


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_that_are_cut_off(name):
    made = CALLS[1]
    asked, text = tools.read({"tools": [SHOP, SHOPS]}), "so: " + rendered(name, made)
    for end in range(len(text)):
        _, content, found = read(asked, form(name), text[:end])
        assert MARK not in content
        assert content.startswith("so: "[:end])
        for (_, arguments), (_, whole) in zip(found, read(asked, form(name), text)[2], strict=False):
            assert whole.startswith(arguments)


def test_values_are_those_of_the_schema():
    asked = tools.read({"tools": [SHOP], "tool_choice": "required"})
    grammar = asked.grammar(QWEN)
    for fields, is_accepted in (
        ("<parameter=text>\nred\n</parameter>\n", True),
        ("", False),  # what is required
        ("<parameter=number>\n3\n</parameter>\n<parameter=text>\nred\n</parameter>\n", False),  # the order
        ("<parameter=text>\nred\n</parameter>\n<parameter=number>\nthree\n</parameter>\n", False),
        ("<parameter=text>\nred\n</parameter>\n<parameter=either>\nblue\n</parameter>\n", False),
        ('<parameter=text>\nred\n</parameter>\n<parameter=either>\n"red"\n</parameter>\n', False),
        ('<parameter=text>\nred\n</parameter>\n<parameter=list>\n["tiny"]\n</parameter>\n', False),
        ("<parameter=text>\nred\n</parameter>\n<parameter=size>\nred\n</parameter>\n", False),
    ):
        text = f"<tool_call>\n<function=shop>\n{fields}</function>\n</tool_call>"
        assert accepts(grammar, text) is is_accepted, fields


def test_a_value_ends_with_its_tag():
    """Without the line break before it too, which models leave out."""
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}}
    asked = tools.read({"tools": [{"type": "function", "function": function}]})
    grammar, begin = asked.grammar(QWEN), "<tool_call>\n<function=f>\n<parameter=a>\n"
    for text, value in (
        ("value</parameter>\n", "value"),
        ("value\n</parameter>\n", "value"),
        ("value\n\n</parameter>\n", "value\n"),
        ("</parameter>\n", ""),
        ("a</param\n</parameter>\n<parameter=b>\n7\n</parameter>\n", "a</param"),
    ):
        call = f"{begin}{text}</function>\n</tool_call>"
        assert accepts(grammar, call), call
        for seed in (None, 0, 1, 3, 10, 30):
            _, content, found = read(asked, QWEN, f"{call}\n{call}", seed)
            assert content == ""
            assert [json.loads(arguments)["a"] for _, arguments in found] == [value, value]
    assert not accepts(grammar, f"{begin}a</parameter>b\n</parameter>\n</function>\n</tool_call>")
    number = "<parameter=b>\n7</parameter>\n"
    assert not accepts(grammar, f"{begin}a\n</parameter>\n{number}</function>\n</tool_call>"), "it goes on otherwise"


@pytest.mark.parametrize("name", ["hermes", "qwen"])
def test_the_largest_tool_may_have_any_arguments_where_all_are_too_large(name, caplog):
    objects = {"properties": {name: {"type": "object"} for name in "abc"}, "required": list("abc")}
    small = tool("small", {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False})
    reader = dataclasses.replace(
        json_chat.READER, max_grammar=250_000, chat_template=json_chat.chat_template(TEMPLATES[name])
    )

    def grammar(is_strict):
        body = {"messages": QUESTION, "tools": [tool("large", objects, strict=is_strict), small]}
        return reader.with_grammar(reader.chat(body | {"tool_choice": "required"})).options["grammar"]

    found = grammar(False)
    assert accepts(found, rendered(name, [("large", {"a": "7", "b": "", "c": ""})]))
    assert accepts(found, rendered(name, [("small", {"a": 7})]))
    assert not accepts(found, rendered(name, [("small", {"a": "x"})]))
    assert "the tool large, which is not strict" in caplog.text
    assert "the tool small" not in caplog.text
    with pytest.raises(RequestError, match=r"tools\[0\].* has no grammar: large: .* at most max_grammar=250000"):
        grammar(True)


def test_another_reader_finds_the_same_calls():
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    made = [("shop", {"text": 'a "b"\n<c>', "number": 3, "list": ["large"]}), ("shops", {}), ("shop", {"text": "7"})]
    text = rendered("qwen", made)
    function = {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
        "close_pattern": r"</tool_call>\s*",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</parameter>"},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    template = {"defaults": {}, "start_anchor": "assistant:", "fields": {"calls": function}}
    message = chat_parsing.parse_response(text, template, prefix="", tools=[SHOP, SHOPS])
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in message["calls"]]
    asked = tools.read({"tools": [SHOP, SHOPS]})
    own = [(name, json.loads(arguments)) for name, arguments in read(asked, QWEN, text)[2]]
    assert own == found == made


def test_thoughts_that_the_prompt_begins():
    template = TEMPLATES["qwen"].replace("{{ message.role }}:", "{{ message.role }}:<think>\n\n</think>\n\n")
    template = template.replace("'assistant:'", "'assistant:<think>\n'")
    found = form_of(template)
    assert found == QWEN
    call, begun = rendered("qwen", CALLS[2]), [("", "</think>")]
    must, may = (tools.read({"tools": [SHOPS], "tool_choice": choice}) for choice in ("required", "auto"))
    for thought in ("\n</think>\n\n", f"so {call}, or <tool_call>?\n</think>\n\n", "</think>"):
        shown = thought.partition("</think>")[0].strip()
        for asked in (must, may):
            assert accepts(asked.grammar(QWEN, begun), thought + call)
            for seed in (None, 0, 1, 3, 10, 30):
                assert read(asked, QWEN, thought + call, seed, begun) == (shown, "", [("shops", "{}")])
    assert not accepts(must.grammar(QWEN, begun), call)
    assert not accepts(must.grammar(QWEN, begun), "</think>")
    assert accepts(may.grammar(QWEN, begun), call), "a thought that is cut off"
    assert read(may, QWEN, call, None, begun) == (call, "", [])


THINK = [special("[THINK]"), special("[/THINK]")]


@pytest.mark.parametrize(("begin", "end"), [("<think>", "</think>"), (" \n<think>", "</think>"), THINK])
def test_thoughts_that_an_answer_begins(begin, end):
    marks = [("<think>", "</think>"), tuple(THINK)]
    may, call = tools.read({"tools": [SHOPS]}), rendered("qwen", CALLS[2])
    thought, shown = f"{begin}maybe {call} <tool_call>{end}", f"maybe {call} <tool_call>"
    for text, *parts in (
        (thought + "\n\nHi", shown, "Hi", []),
        (thought + "\n\n" + call, shown, "", [("shops", "{}")]),
        (thought[: -len(end)], shown, "", []),  # its end is cut off
        (f"So <think> {call}", "", "So <think> ", [("shops", "{}")]),  # only the beginning of an answer begins thoughts
    ):
        assert accepts(may.grammar(QWEN, marks), text), text
        for seed in (None, 0, 1, 3, 10, 30):
            assert read(may, QWEN, text, seed, marks) == tuple(parts)
    assert not accepts(may.grammar(QWEN, marks), thought + "<tool_call>")
    assert not accepts(may.grammar(QWEN, marks), f"{begin}{call}{end}<tool_call>{call}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (TEMPLATES["qwen"].replace("'assistant:'", "'assistant:\n\n>'"), "otherwise than its prompt ends"),
        (TEMPLATES["mistral 11"].replace("| tojson", "| items | list | string"), "in a form that is not supported"),
        ("{{ tools | tojson }}{% for each in messages %}{{ each.content }}{% endfor %}", "in a form that is not"),
        (json_chat.HERMES.replace("<tool_call>", "<|end|>"), "in a form that is not"),
    ],
)
def test_templates_without_a_form(template, message):
    with pytest.raises(ValueError, match=message):
        form_of(template)


def test_a_template_that_knows_no_tools_has_the_oldest_form():
    assert form_of("{{ messages[0].content }}") == dataclasses.replace(HERMES, is_shown=False)


OTHER_ROLES = "{% if <condition> %}{{ raise_exception('not this role here') }}{% endif %}"
PLAIN = f"""{{% for m in messages %}}{OTHER_ROLES}{{{{ m.role }}}}:{{{{ m.content }}}}
{{% endfor %}}{{% if add_generation_prompt %}}assistant:{{% endif %}}"""
HISTORY = [
    *({"role": "user", "content": "Two shirts"}, {"role": "assistant", "content": None, "tool_calls": [0, 1]}),
    *({"role": "tool", "content": "yes"}, {"role": "tool", "content": [{"type": "text", "text": "no"}]}),
    *({"role": "user", "content": "And?"}, {"role": "assistant", "content": "One.", "tool_calls": [1]}),
    {"role": "tool", "content": "yes"},
]


@pytest.mark.parametrize("has_system", [False, True])
def test_tools_calls_and_results_are_shown_where_the_template_shows_none(has_system):
    is_refused = "m.role == 'tool'" if has_system else "m.role != ('user', 'assistant')[loop.index0 % 2]"
    template = json_chat.chat_template(PLAIN.replace("<condition>", is_refused))
    reader = dataclasses.replace(json_chat.READER, chat_template=template)
    made = [{"id": "0", "function": {"name": "shop", "arguments": json.dumps({"size": each})}} for each in ("S", "L")]
    messages = [each | {"tool_calls": [made[i] for i in each.get("tool_calls", [])]} for each in HISTORY]
    asked = reader.chat({"messages": messages, "tools": [tool("shop")]})
    call = '\n<tool_call>\n{"name": "shop", "arguments": %s}\n</tool_call>'
    small, large = (call % json.dumps({"size": each}) for each in ("S", "L"))
    example = call % '{"ARGUMENT": VALUE}'
    introduction = (
        "You can call these functions:\n"
        f"{json.dumps(tool('shop')['function'])}\n\nA call is written so:\n{example.replace('shop', 'NAME')}"
    )
    begin = f"system:{introduction}\nuser:Two" if has_system else f"user:{introduction}\n\nTwo"
    assert json_chat.TOKENIZER.decode(asked.prompts[0]) == (
        f"{begin} shirts\nassistant:{small}{large}\n"
        "user:<tool_response>\nyes\n</tool_response>\n<tool_response>\nno\n</tool_response>\nAnd?\n"
        f"assistant:One.{large}\nuser:<tool_response>\nyes\n</tool_response>\nassistant:"
    )
    assert asked.grammar.make().automaton.accepts(f"Yes.{call % json.dumps({'size': 'small'})}".encode())


HARMONY = (
    HEAD.replace("{{ message.role }}:", "<|start|>{{ message.role }}").replace(
        "{{ message.content }}", "{% if message.content %}<|channel|>final<|message|>{{ message.content }}{% endif %}"
    )
    + """{% for call in message.tool_calls %}{{ ' to=functions.' + call.function.name }}
{{- '<|channel|>commentary json<|message|>' + call.function.arguments | tojson }}{% endfor %}"""
    + TAIL.replace("assistant:", "<|start|>assistant")
)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_recipient_of_a_call_may_be_before_and_after_the_channel(choice):
    """As gpt-oss writes it."""
    template = json_chat.chat_template(HARMONY)
    template.tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|channel|>", "<|message|>"]})
    written = Examples(template, [json_chat.END])
    marks = Marks.of(written)
    form, special_in = Form.of(written, marks), functools.partial(examples.marked, template.tokenizer)
    content = special_in(marks.content[0]), ""
    asked = tools.read({"tools": [SHOP, SHOPS], "tool_choice": choice})
    grammar = asked.grammar(form, (), content)
    for header in (
        " to=functions.shop<|channel|>commentary json<|message|>",
        " to=functions.shop<|channel|>commentary <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.shop <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.shop<|message|>",
    ):
        call = special_in(header + '{"text": "a"}')
        assert accepts(grammar, call), header
        assert not accepts(grammar, call.replace("shop", "sho"))
        assert not accepts(grammar, call.replace("text", "test"))
        for seed in (None, 0, 1, 3):
            assert read(asked, form, call, seed, content=content)[1:] == ("", [("shop", '{"text": "a"}')])
    text = special_in("<|channel|>final<|message|>hello")
    assert accepts(grammar, text) is (choice == "auto")
    assert read(asked, form, text, content=content)[1:] == ("hello", [])


VALUE_OF_A = "<tool_call>\n<function=shop>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
JSON = Form('{"name": "', '", "arguments": ', "}")


@pytest.mark.parametrize(
    ("form", "parameters", "message", "text"),
    [
        (
            QWEN,
            {"properties": {"a": {"type": "array", "minContains": 1}}},
            "shop: a: #/minContains",
            VALUE_OF_A.format("[[1]]"),
        ),
        (
            QWEN,
            {"properties": {"a": {"type": "string", "pattern": "(?<=a)b"}}},
            "shop: a: #/pattern",
            VALUE_OF_A.format("7"),
        ),
        (
            QWEN,
            {"properties": {"a": {}}, "minProperties": 1},
            "shop: #/minProperties: not supported where arguments",
            VALUE_OF_A.format("7"),
        ),
        (
            JSON,
            {"properties": {"a": {"contains": 3}}},
            "shop: #/properties/a/contains",
            '{"name": "shop", "arguments": {"b": 1}}',
        ),
    ],
)
def test_a_tool_that_is_not_strict_may_have_other_values(form, parameters, message, text, caplog):
    def grammar(is_strict):
        body = {"tools": [tool("shop", parameters, strict=is_strict)], "tool_choice": "required"}
        return tools.read(body).grammar(form)

    with pytest.raises(RequestError, match=message):
        grammar(True)
    assert accepts(grammar(False), text)
    assert "the tool shop, which is not strict, is not held in full" in caplog.text


PROPERTIES_OF_BUY = {"size": {"enum": ["small", "large"]}, "number": {"enum": [1, 22]}}
BUY = tool("buy", {"type": "object", "properties": PROPERTIES_OF_BUY, "required": ["size"]})


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_client_gets_calls(json_engine, name):
    template = json_chat.chat_template(TEMPLATES[name])
    reader = dataclasses.replace(json_chat.READER, chat_template=template)
    options = {"model": "tiny", "messages": QUESTION, "logit_bias": BIAS, "max_tokens": 200, "temperature": 1.0}
    with running(json_engine, reader) as served, served.openai() as client:
        create = client.chat.completions.create
        choices = [(1, "required"), (2, BUY), (3, "auto")]
        # Calls of Hermes begin with a line break, which would be likely as whitespace too.
        for seed, choice in choices[: 2 if name == "hermes" else 3]:
            options |= {"tools": [BUY, SHOPS], "tool_choice": choice, "seed": seed}
            if choice == "auto":
                options["logit_bias"] = BIAS | {str(begin_of_calls(name)): 100, str(json_chat.EOS): 50}
            answer = create(**options, parallel_tool_calls=False, logprobs=True).choices[0]
            (call,) = answer.message.tool_calls
            assert answer.finish_reason == "tool_calls"
            assert answer.message.content is None
            assert call.function.name == "buy" or choice != BUY
            arguments = json.loads(call.function.arguments)
            if call.function.name == "buy":
                assert arguments["size"] in ("small", "large")
                assert arguments.get("number", 1) in (1, 22)

            # The tokens are those that the template writes of the call.
            tokens = "".join(token.token for token in answer.logprobs.content)
            written = rendered(name, [(call.function.name, arguments)]).replace(MARK, "")
            assert tokens.replace(" ", "").lstrip("\n") == written.replace(" ", "").lstrip("\n")

            content = found = streamed = ""
            for chunk in create(**options, parallel_tool_calls=False, stream=True):
                content += chunk.choices[0].delta.content or ""
                for delta in chunk.choices[0].delta.tool_calls or []:
                    found += delta.function.name or ""
                    streamed += delta.function.arguments or ""
            assert (content, found, streamed) == ("", call.function.name, call.function.arguments)
            assert chunk.choices[0].finish_reason == "tool_calls"

            earlier = [{"role": "assistant", "tool_calls": [call.to_dict()]}]
            earlier += [{"role": "tool", "tool_call_id": call.id, "content": "done"}]
            prompt = reader.chat({"messages": QUESTION + earlier}).prompts[0]
            after = create(model="tiny", messages=QUESTION + earlier, max_tokens=4)
            assert after.usage.prompt_tokens == len(prompt)

        options |= {"max_tokens": 3, "tool_choice": "required"}
        assert create(**options).choices[0].finish_reason == "length"
        *_, last = create(**options, stream=True)
        assert last.choices[0].finish_reason == "length"


def begin_of_calls(name):
    """Returns the token with which a block of calls begins."""
    return json_chat.TOKENIZER.encode(FORMS[name].opening.replace(MARK, "")).ids[0]
