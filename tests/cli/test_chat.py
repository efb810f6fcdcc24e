import io
import re
import shutil
import signal
import sys
import types

import jax
import pytest

import jlade
from jlade import cli
from jlade.cli.arguments import DEMO
from jlade.conversion import location
from jlade.generation import text
from jlade.generation.results import NOT_FINITE
from tests import tiny
from tests.cli.own_terminal import Terminal
from tests.tiny import PAPER

LIMIT = ["--max-new-tokens", "8"]


@pytest.fixture
def chat(monkeypatch, capsys):
    """Runs a chat with the given lines, and returns its stdout and stderr."""

    monkeypatch.setattr(location, "installed", lambda name: None)  # `make chat` may have installed a model

    def run(lines, *arguments):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert cli.main(["chat", *LIMIT, *arguments]) == 0
        return capsys.readouterr()

    return run


@pytest.fixture
def streamed(monkeypatch):
    """Replaces decoding by the answers "one.", "two." and so on, in two pieces each; returns their requests."""
    requests = []

    def stream(params, prompt, **request):
        shown = text.decode(request["tokenizer"], prompt["input_ids"][0])
        requests.append(types.SimpleNamespace(prompt=shown, **request))
        answer = ("one.", "two.", "three.", "four.")[len(requests) - 1]
        generation = types.SimpleNamespace(finish_reason=("eos",), statistics=None, state=f"state after {answer}")
        yield tiny.piece(range(2), answer[:1])
        yield tiny.piece(range(3), answer[1:], generation)

    monkeypatch.setattr(jlade, "stream", stream)
    return requests


@pytest.mark.slow
def test_the_answers_are_those_to_the_whole_conversation_and_nothing_else_is_written(chat, demo):
    params, tokenizer = demo
    conversation, answers = "", []
    for question in ("import os", "def f("):
        conversation += question
        *_, last = jlade.stream(params, conversation, tokenizer=tokenizer, lookahead=PAPER, max_new_tokens=8)
        answers.append(last.generation.text[0])
        conversation += answers[-1]
    captured = chat(["import os", "", "def f(", "/stats"])
    assert captured.out == f"{answers[0]}\n{answers[1]}\n"
    assert re.search(r"last answer +│ +8 │", captured.err)
    assert re.search(r"whole chat +│ +16 │", captured.err)
    assert re.search(r"keys in the pool +│ +[1-9]", captured.err)


def test_a_turn_has_the_state_of_the_last_answer_and_its_own_key(chat, streamed):
    captured = chat(
        ["a ", "b ", "/exit", "c "], "--system", "Begin. ", "--temperature", "1", "--seed", "5", "--stop", "x"
    )
    assert captured.out == "one.\ntwo.\n"
    assert [request.prompt for request in streamed] == ["Begin. a ", "Begin. a one.b "]
    assert [request.state for request in streamed] == [None, "state after one."]
    for turn, request in enumerate(streamed):
        assert request.key == jax.random.fold_in(jax.random.key(5), turn)
        assert (request.lookahead, request.max_new_tokens, request.stop) == ("auto", 8, ["x"])
        assert "eos_ids" not in request.__dict__, "all end tokens of the checkpoint end an answer"


def test_reset_forgets_the_conversation(chat, streamed):
    chat(["a", "/reset", "b"], "--system", "Begin. ")
    assert [(request.prompt, request.state) for request in streamed] == [("Begin. a", None), ("Begin. b", None)]


def test_set_changes_later_answers_and_none_is_the_default(chat, streamed):
    changes = ["/set temperature=0.5", "/set top_k = 4", "/set seed=9", "/set max_new_tokens=7"]
    assert chat(["a", *changes, "b", "/set top_k=none", "c"]).err == ""
    assert [request.sampling for request in streamed] == [
        jlade.SamplingConfig(),
        jlade.SamplingConfig(temperature=0.5, top_k=4),
        jlade.SamplingConfig(temperature=0.5),
    ]
    assert [request.max_new_tokens for request in streamed] == [8, 7, 7]
    assert streamed[1].key == jax.random.fold_in(jax.random.key(9), 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temperature=warm", "temperature must be a number, or none for its default, got 'warm'"),
        ("/set top_k=1.5", "top_k must be an integer, or none for its default, got '1.5'"),
        ("/set top_p=2", "top_p must be a number above 0, up to 1, got 2.0"),
        ("/set top_k=5", "top_k has no effect at temperature 0: set a temperature above 0, or leave it out"),
        ("/set max_new_tokens=0", "max_new_tokens must be at least 1, got 0"),
        ("/set logit_bias=1", "with one of the names max_new_tokens, .*, seed; got 'logit_bias=1'"),
        ("/set", "a setting is name=value"),
        ("/forget it", "/forget it is not a command; /help lists the commands"),
        ("1 " * 1100, "the conversation .* has 2201 tokens; with max_new_tokens=8 they exceed .* 2048 positions"),
    ],
)
def test_an_error_takes_one_line_and_the_chat_continues(line, message, chat, streamed):
    captured = chat([line, "a"])
    assert re.search(message, captured.err)
    assert captured.err.count("\n") == 1
    assert captured.out == "one.\n"
    assert streamed[0].prompt == "a"


def test_a_pipe_without_any_answer_is_an_error(chat, streamed, capsys):
    with pytest.raises(SystemExit) as exit_info:
        chat(["/reset", "1 " * 1100, "2 " * 1100])
    assert exit_info.value.code == 2
    *errors, last = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert last == "jlade chat: error: none of 2 questions was answered"
    assert streamed == []


def test_an_answer_whose_logits_are_not_finite_is_none(chat, monkeypatch, capsys):
    failed = types.SimpleNamespace(finish_reason=("error",), statistics=None, state=None)
    monkeypatch.setattr(jlade, "stream", lambda *arguments, **request: iter([tiny.piece([], "", failed)]))
    with pytest.raises(SystemExit):
        chat(["a"])
    assert capsys.readouterr().err.splitlines() == [
        f"the answer ended early: {NOT_FINITE}",
        "jlade chat: error: none of 1 questions was answered",
    ]


def test_help_and_stats_before_any_answer(chat):
    captured = chat(["/help", "/stats"])
    assert captured.out == ""
    assert all(command in captured.err for command in ("/help", "/reset", "/stats", "/set", "/exit", "4 or more"))
    assert re.search(r"last answer +│ +0 │ +0 │ +- │ +- │", captured.err)


def interrupt(monkeypatch, streamed, turn, before_piece, times):
    """Types Ctrl-C `times` times while a piece of an answer is generated."""
    whole = jlade.stream

    def stream(*arguments, **request):
        for number, piece in enumerate(whole(*arguments, **request)):
            if (len(streamed), number) == (turn, before_piece):
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            yield piece

    monkeypatch.setattr(jlade, "stream", stream)


@pytest.mark.parametrize(
    ("turn", "before_piece", "times", "out", "prompts", "states"),
    [
        (2, 0, 1, "one.\nt\nthree.\n", ["a", "aone.b", "aone.btc"], [None, *["state after one."] * 2]),
        (1, 1, 2, "o\ntwo.\n", ["a", "aob"], [None, None]),
        (1, 0, 2, "\ntwo.\n", ["a", "b"], [None, None]),
    ],
    ids=["after its first piece", "at once, by a second Ctrl-C", "before it begins, and its question is forgotten"],
)
def test_an_interrupted_answer_is_kept(turn, before_piece, times, out, prompts, states, chat, streamed, monkeypatch):
    interrupt(monkeypatch, streamed, turn, before_piece, times)
    assert chat("abc"[: len(prompts)]).out == out
    assert [request.prompt for request in streamed] == prompts
    assert [request.state for request in streamed] == states


def test_a_template_can_be_given_and_may_refuse(chat, streamed, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{% if 'secret' in m.content %}{{ raise_exception('no secrets') }}{% endif %}"
        "[{{ m.role }}: {{ m.content }}]{% endfor %}{% if add_generation_prompt %}[assistant: {% endif %}"
    )
    captured = chat(["a", "a secret", "b"], "--template", str(template))
    assert [request.prompt for request in streamed] == [
        "[user: a][assistant: ",
        "[user: a][assistant: one.][user: b][assistant: ",
    ]
    assert captured.err == "the chat template refuses the conversation: no secrets\n"


def test_ctrl_c_at_the_prompt_leaves(monkeypatch, run):
    monkeypatch.setattr("builtins.input", lambda prompt: signal.raise_signal(signal.SIGINT))
    assert run("chat").out == ""


def test_a_model_without_a_template_chats_with_one_given(tmp_path, chat, streamed, refused):
    directory = tmp_path / "model"
    shutil.copytree(DEMO, directory, ignore=shutil.ignore_patterns("chat_template.jinja"))
    message = f"{directory} has no chat template: pass a Jinja file with --template"
    assert message in refused(["chat", "--model", directory])
    chat(["a"], "--model", str(directory), "--template", str(DEMO / "chat_template.jinja"))
    assert streamed[0].prompt == "a"


@pytest.mark.parametrize("module", ["transformers", "jinja2"])
def test_a_missing_package_is_reported_with_the_command_that_installs_it(module, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, module, None)
    assert 'pip install "jlade[chat]"' in refused(["chat"])


@pytest.mark.slow
def test_on_a_terminal_answers_are_coloured_and_can_be_stopped(small_demo):
    terminal = Terminal("chat", "--model", str(small_demo), "--max-new-tokens", "1000")
    try:
        assert f"Chat with {small_demo}" in terminal.wait_for("> $")
        terminal.type("import os\n")
        terminal.wait_for(r"\x1b\[9\dm")
        terminal.type("\x03")
        stopped = terminal.wait_for("interrupted: [^\r]*tokens/s")
        terminal.wait_for("> $")
        assert int(re.search(r"interrupted: (\d+) tokens", stopped)[1]) < 1000

        terminal.type("/set max_new_tokens=9\n")
        terminal.wait_for("> $")
        terminal.type("def f(\n")
        answer = terminal.wait_for(r"\x1b\[2mlength: 9 tokens, \d steps, \d\.\d\d tokens/step, [\d-]+ tokens/s")
        assert re.search(r"\x1b\[9\dm", answer)
        terminal.wait_for("> $")

        terminal.type("\x04")
        assert terminal.process.wait(timeout=120) == 0
    finally:
        terminal.close()
