"""Chat templates give what transformers gives, and hostile ones an error in bounded time and memory."""

import time

import pytest

from jlade.cli.options import DEMO
from jlade.generation import chat_template
from tests.tiny import slow

MESSAGES = [{"role": "user", "content": "Hi {{ 1 }}"}, {"role": "assistant", "content": "é"}]


@pytest.fixture(scope="module")
def tokenizer():
    return chat_template.load_tokenizer(DEMO)


@pytest.mark.parametrize(
    "template", [None, "{% for m in messages %}{{ m.role }}: {{ m['content'] | tojson }}{{ eos_token }}{% endfor %}"]
)
def test_equals_transformers(tokenizer, template):
    expected = tokenizer.apply_chat_template(
        MESSAGES, chat_template=template, add_generation_prompt=True, return_dict=False
    )
    assert chat_template.encode(tokenizer, MESSAGES, template) == expected


@pytest.mark.parametrize(
    "template", [None, "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"]
)
def test_the_beginning_of_an_answer_is_continued_as_in_transformers(tokenizer, template):
    expected = tokenizer.apply_chat_template(
        MESSAGES, chat_template=template, continue_final_message=True, return_dict=False
    )
    assert chat_template.encode(tokenizer, MESSAGES, template, continue_final_message=True) == expected
    assert tokenizer.decode(expected).endswith("é")


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "__init__"),
        ("{{ messages.append(1) }}", "append"),
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
