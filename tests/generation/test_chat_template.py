"""Chat templates give what transformers gives, and hostile ones an error in bounded time and memory."""

import copy
import json
import shutil
import time

import pytest
from transformers import ProcessorMixin

from jlade.cli.arguments import DEMO
from jlade.generation import chat_template
from jlade.generation.chat_template import ChatTemplate
from tests.tiny import slow

MESSAGES = [{"role": "user", "content": "Hi {{ 1 }}"}, {"role": "assistant", "content": "é"}]


@pytest.fixture(scope="module")
def tokenizer():
    return chat_template.load_tokenizer(DEMO)


TO_JSON = "{% for m in messages %}{{ m.role }}: {{ m['content'] | tojson }}{{ eos_token }}{% endfor %}"
TRIMMED = "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize(("template", "continues"), [(None, False), (TO_JSON, False), (None, True), (TRIMMED, True)])
def test_equals_transformers(tokenizer, template, continues):
    """Up to the beginning of an answer, or within it."""
    ways = {"add_generation_prompt": not continues, "continue_final_message": continues}
    expected = tokenizer.apply_chat_template(MESSAGES, chat_template=template, return_dict=False, **ways)
    assert chat_template.encode(tokenizer, MESSAGES, template, continue_final_message=continues) == expected
    assert not continues or tokenizer.decode(expected).endswith("é")


def conversation(*roles):
    """Returns a conversation whose contents say who speaks when."""
    return [{"role": role, "content": f"{role}{place}"} for place, role in enumerate(roles)]


IN_PARTS = """{% for m in messages %}<{{ m.role }}>{% for c in m.content %}{% if c.type == 'text' %}|{{ c.text }}
{%- endif %}{% endfor %}{% endfor %}"""
OF_TEXTS = "{{ messages[0]['content'] | map(attribute='text') | join }}"
OF_EITHER = """{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}
{%- for c in m.content %}{{ c.text }}{% endfor %}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("content", ["ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]])
@pytest.mark.parametrize("template", [IN_PARTS, OF_TEXTS, OF_EITHER])
def test_templates_get_texts_or_parts_as_they_take_them(tokenizer, template, content):
    parts = [{"type": "text", "text": "ab"}] if isinstance(content, str) else content
    given = "ab" if template == OF_EITHER else parts
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": given}], chat_template=template, tokenize=False, add_generation_prompt=True
    )
    rendered = ChatTemplate(tokenizer, template).render([{"role": "user", "content": content}])
    assert rendered == expected
    assert rendered.replace("|", "").endswith("ab")


SEVERAL = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
ONLY_FIRST = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{- raise_exception('at the beginning') }}{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"""
LAST_WINS = """{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}
{%- set ns.system = m.content %}{% endfor %}system:{{ ns.system }};{% for m in messages if m.role != 'system' %}
{{- m.role }}:{{ m.content }};{% endfor %}"""
LEADING = """{% set ns = namespace(begun=false) %}{% for m in messages %}{% if m.role != 'system' %}
{%- set ns.begun = true %}{% elif ns.begun %}{{ raise_exception('at the beginning') }}{% endif %}
{{- m.role }}:{{ m.content }};{% endfor %}"""
TWO, BETWEEN = ("system", "system", "user"), ("system", "user", "assistant", "system", "user")
JOINED = {
    TWO: "system:system0\n\nsystem1;user:user2;",
    BETWEEN: "system:system0\n\nsystem3;user:user1;assistant:assistant2;user:user4;",
}


@pytest.mark.parametrize(
    ("template", "joined"),
    [(SEVERAL, ()), (ONLY_FIRST, (TWO, BETWEEN)), (LAST_WINS, (TWO, BETWEEN)), (LEADING, (BETWEEN,))],
)
def test_system_messages_that_would_not_be_shown_are_joined(tokenizer, template, joined):
    for roles in (TWO, BETWEEN, ("system", "user"), ("user",)):
        shown = "".join(f"{each['role']}:{each['content']};" for each in conversation(*roles))
        rendered = ChatTemplate(tokenizer, template).render(conversation(*roles))
        assert rendered.removeprefix("system:;") == (JOINED[roles] if roles in joined else shown)


def test_a_template_for_tools_is_tried_with_one(tokenizer):
    template = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}" + ONLY_FIRST
    rendered = ChatTemplate(tokenizer, template).render(conversation(*TWO), tools=TOOLS)
    assert rendered == JOINED[TWO]


def test_a_template_without_system_messages_refuses_them(tokenizer):
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + SEVERAL
    for roles in (TWO, ("system", "user")):
        with pytest.raises(ValueError, match="no system"):
            ChatTemplate(tokenizer, template).render(conversation(*roles))


TOOLS = [{"type": "function", "function": {"name": "shop", "parameters": {"type": "object", "properties": {}}}}]


def test_named_templates_are_chosen_as_in_transformers(tokenizer):
    several = copy.copy(tokenizer)
    several.chat_template = {"default": "plain", "tool_use": "{{ tools[0].function.name }}", "other": "another"}
    for name, tools, expected in ((None, None, "plain"), (None, TOOLS, "shop"), ("other", TOOLS, "another")):
        options = {"chat_template": name, "tools": tools, "tokenize": False}
        assert several.apply_chat_template(MESSAGES, **options) == expected
        assert ChatTemplate(several, name).render(MESSAGES, tools=tools) == expected


OF_CALLS = "{{% for m in messages %}}{{{{ m.content }}}}{{% for call in m.tool_calls %}}{}{{% endfor %}};{{% endfor %}}"
IN_OBJECT = "{{ call.function.name + (call.function.arguments | tojson) }}"
AS_TEXT = "{{ call.function.name + call.function.arguments }}"
IF_NONE = "{{% if m.content is none %}}{}{{% endif %}}"


@pytest.mark.parametrize(
    ("written", "style", "empty"),
    [
        (IN_OBJECT, (False, False), ""),
        (AS_TEXT, (True, False), ""),
        (IF_NONE.format(IN_OBJECT), (False, True), "None"),
        (IF_NONE.format(AS_TEXT), (True, True), "None"),
        ("", None, ""),
    ],
)
def test_calls_are_given_as_the_template_takes_them(tokenizer, written, style, empty):
    template = ChatTemplate(tokenizer, OF_CALLS.format(written))
    assert template.call_style() == style
    call = {"id": "0", "type": "function", "function": {"name": "shop", "arguments": {"size": "é"}}}
    rendered = template.render(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    )
    expected = empty + 'shop{"size": "é"}' if style else ""
    assert rendered == f"a;{expected};"
    if style == (True, False):  # where transformers has the arguments as OpenAI's interface
        call["function"]["arguments"] = '{"size": "é"}'
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        assert tokenizer.apply_chat_template(messages, chat_template=template.template, tokenize=False) == rendered


def test_results_of_calls_that_are_shown(tokenizer):
    after_a_call = "{% for m in messages if m.role == 'tool' and messages[1].tool_calls %}{{ m.content }}{% endfor %}"
    assert ChatTemplate(tokenizer, "{% for m in messages %}{{ m.content }}{% endfor %}").shows_results()
    assert not ChatTemplate(
        tokenizer, "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    ).shows_results()
    assert not ChatTemplate(tokenizer, "{{ messages[2].name }}").shows_results()
    assert ChatTemplate(tokenizer, after_a_call).shows_results()


@pytest.fixture
def bare(tmp_path):
    """The directory of a tokenizer without a chat template."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path / name)
    return tmp_path


def test_a_processor_has_the_template_where_the_tokenizer_has_none(bare):
    (bare / "chat_template.json").write_text(json.dumps({"chat_template": "of chat_template.json"}))
    assert chat_template.load_tokenizer(bare).chat_template == "of chat_template.json"
    assert ProcessorMixin.get_processor_dict(bare)[0]["chat_template"] == "of chat_template.json"
    (bare / "processor_config.json").write_text(json.dumps({"chat_template": "of processor_config.json"}))
    assert chat_template.load_tokenizer(bare).chat_template == "of processor_config.json"
    assert ProcessorMixin.get_processor_dict(bare)[0]["chat_template"] == "of processor_config.json"
    (bare / "chat_template.jinja").write_text("of the tokenizer")
    assert chat_template.load_tokenizer(bare).chat_template == "of the tokenizer"


def test_a_broken_template_of_a_processor_is_named(bare):
    (bare / "chat_template.json").write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(ValueError, match=r"chat_template\.json: chat_template must be a string, got 3"):
        chat_template.load_tokenizer(bare)


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "__init__"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% for i in range(10**9) %}{% endfor %}", "range"),
        ("{{ 'a' * 10**10 }}", "512 MiB"),
        ("{{ 'a' | center(10**10) }}", "512 MiB"),
        ("{{ '%9999999999d' | format(1) }}", "512 MiB"),
        ("{{ 'a' * 2**19 }}", "its text has 524288 characters; accepted are 26"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{" * 5000, "recursion"),
        ("{{ '\\ud800' }}", "UTF-8"),
        ("{{ raise_exception('roles must alternate') }}", "refuses the conversation: roles must alternate"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_hostile_templates_are_refused(tokenizer, template, error):
    with pytest.raises(ValueError, match="the chat template.*" + error):
        chat_template.encode(tokenizer, MESSAGES, template)


@pytest.mark.parametrize(
    "template",
    [
        slow("{% for i in range(10**5) %}{% for i in range(10**5) %}{% endfor %}{% endfor %}"),
        "{{ 10 ** (10 ** 10) }}",  # one operation, which takes hours and no signal interrupts
    ],
)
def test_endless_templates_are_stopped_and_others_go_on(template):
    renderer = chat_template.Renderer(seconds=1)
    begin = time.monotonic()
    with pytest.raises(ValueError, match="takes more than 1 seconds"):
        renderer.render(conversations=[MESSAGES], chat_template=template)
    assert time.monotonic() - begin < 20  # most of it to start, on a busy machine
    assert renderer.render(conversations=[MESSAGES], chat_template="a") == "a"
    renderer.end()
