"""The page at `/` in a browser."""

import json
import re

import pytest

from tests.server.conftest import running, wait_until
from tests.server.tiny_chat import alone

pytestmark = pytest.mark.slow  # a browser
CHAT = "/v1/chat/completions"
QUESTION = "cab"
PROMPT = f"{QUESTION}c"  # of the template


@pytest.fixture
def opened(served, open_page):
    """The page at 1200 pixels, with the settings of a short text."""
    opened = open_page(f"{served.url}/", 1200)
    set_limit(opened.page, 20)
    return opened


def set_limit(page, number):
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill(str(number))


def send(page, text=QUESTION):
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def wait_for_end(page):
    page.get_by_role("button", name="Send").wait_for()


def ask(page, text=QUESTION):
    send(page, text)
    wait_for_end(page)


def answers(page):
    """Returns the texts of the answers."""
    return page.locator(".answer pre").all_text_contents()


def greedy(prompt=PROMPT):
    """Returns the text after a prompt."""
    return alone(prompt, max_new_tokens=20).text[0]


@pytest.mark.parametrize(("width", "question"), [(390, QUESTION), (1200, "bab")])
def test_an_answer_in_the_colours_of_its_steps(width, question, served, open_page):
    opened = open_page(f"{served.url}/", width)
    page = opened.page
    title = page.get_by_role("heading", level=1)
    title.get_by_text("tiny", exact=True).wait_for()  # the page asks for it
    assert title.inner_text() == "tiny"
    set_limit(page, 20)
    ask(page, question)
    expected = alone(f"{question}c", max_new_tokens=20)
    spans = page.locator(".answer pre span")
    assert "".join(spans.all_text_contents()) == expected.text[0]
    shown = spans.evaluate_all("spans => spans.map(span => [parseInt(span.title), span.className])")
    assert all(name == f"step-{min(number, 4)}" for number, name in shown)
    colours = spans.evaluate_all("spans => spans.map(span => getComputedStyle(span).backgroundColor)")
    assert len(set(colours)) == len({name for _, name in shown}) > 1
    rate, tokens, steps = re.match(
        r"([\d.]+) tokens per step · (\d+) tokens in (\d+) steps", page.locator(".figures").inner_text()
    ).groups()
    assert int(tokens) == expected.lengths[0]
    assert float(rate) == pytest.approx(int(tokens) / int(steps), abs=0.005)
    assert int(steps) < int(tokens)
    assert not opened.overflows()
    assert len(page.screenshot()) > 10_000, "an empty page takes 4 kB"
    assert opened.errors == []
    assert all(address.startswith(f"{served.url}/") for address in opened.requests)


def test_a_conversation_and_a_new_one(served, opened):
    page = opened.page
    page.get_by_label("System prompt").fill("b")
    ask(page)
    first = greedy(f"b{PROMPT}")
    ask(page, "a")
    second = greedy(f"b{QUESTION}{first}ac")
    assert answers(page) == [first, second]
    page.get_by_role("button", name="New chat").click()
    assert page.locator("article").count() == 0
    ask(page, "a")
    assert answers(page) == [greedy("bac")]
    assert opened.errors == []


def test_a_text_is_no_markup(opened):
    page = opened.page
    answer_with(page, "<img src=x onerror=fail()>")
    ask(page, "<b>a</b>")
    assert page.locator(".user pre").text_content() == "<b>a</b>"
    assert page.locator(".answer pre").text_content() == "<img src=x onerror=fail()>"
    assert page.locator("main img, main b:not(.figures b)").count() == 0
    assert opened.errors == []


@pytest.mark.parametrize("how", ["button", "key"])
def test_stopping_frees_the_row(how, served, opened, rounds):
    page, ended = opened.page, served.metric("vllm:request_success_total")
    send(page)
    wait_until(lambda: served.engine.num_running == 1)
    for _ in range(2):
        rounds.release()
    page.locator(".answer pre span").first.wait_for()
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    wait_for_end(page)
    assert page.locator(".figures").inner_text().endswith("stopped")
    wait_until(lambda: served.metric("vllm:request_success_total") == ended + 1)  # the server has seen it
    rounds.release(2)
    wait_until(lambda: served.engine.num_running == 0)
    text = page.locator(".answer pre").text_content()
    assert text
    assert greedy().startswith(text)
    assert text != greedy()


def answer_with(page, *steps):
    """Makes the server answer the page by steps of those texts."""
    steps = [{"tokens": 2, "text": text} for text in steps]
    event = json.dumps({"choices": [{}], "jlade": {"steps": steps}})
    page.route(f"**{CHAT}", lambda route: route.fulfill(body=f"data: {event}\n\ndata: [DONE]\n\n"))


def test_code_between_fences_is_shown_as_code(opened):
    page = opened.page
    text = "Look:\n```python\nif a < b:\n    <b>\n```\nThen ``` is no fence:\n~~~~\n```\n~~~~\n```sh\nls"
    answer_with(page, *(text[i : i + 4] for i in range(0, len(text), 4)))
    ask(page)
    code = page.locator(".answer pre code")
    assert code.all_text_contents() == ["```python\nif a < b:\n    <b>\n```\n", "~~~~\n```\n~~~~\n", "```sh\nls"]
    assert page.locator(".answer pre").text_content() == text
    fences = page.locator(".answer .fence").all_text_contents()
    assert "".join(fences) == "```python\n```\n~~~~\n~~~~\n```sh\n"
    assert set(page.locator(".answer pre span").evaluate_all("spans => spans.map(span => span.title)")) == {
        "2 tokens in one step"
    }
    assert opened.errors == []


def test_a_refused_question_is_put_back(opened):
    page = opened.page
    page.get_by_label("Max tokens").fill("64")
    send(page)
    alert = page.get_by_role("alert")
    assert "maximum context length is 64 tokens" in alert.inner_text()
    wait_for_end(page)
    assert page.get_by_label("Message").input_value() == QUESTION
    assert page.locator("article").count() == alert.get_by_role("button").count() == 0
    page.get_by_label("Max tokens").fill("20")
    page.keyboard.press("Enter")
    page.get_by_label("Message").press("Enter")
    wait_for_end(page)
    assert answers(page) == [greedy()]
    assert alert.count() == 0


def test_a_full_conversation_offers_a_new_one(opened):
    page = opened.page
    ask(page)
    send(page, "ab" * 30)
    page.get_by_role("alert").get_by_role("button", name="New chat").click()
    assert page.get_by_role("alert").count() == page.locator("article").count() == 0
    assert page.get_by_label("Message").input_value() == "ab" * 30
    ask(page)
    assert answers(page) == [greedy()]


def test_a_server_that_goes_away(opened):
    page = opened.page
    page.route(f"**{CHAT}", lambda route: route.abort())
    send(page)
    assert page.get_by_role("alert").inner_text() == "The server cannot be reached."


def test_a_key_is_asked_for(engine, open_page):
    with running(engine, keys=["secret"]) as guarded:
        page = open_page(f"{guarded.url}/", 390).page
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        assert page.get_by_role("alert").inner_text() == "the API key is missing or wrong"
        page.get_by_label("API key").fill("secret")
        page.get_by_role("button", name="Connect").click()
        page.get_by_label("API key").wait_for(state="hidden")
        assert page.get_by_role("alert").count() == 0
        set_limit(page, 20)
        ask(page)
        assert page.locator(".answer pre").text_content() == greedy()


def test_the_page_runs_and_loads_nothing_but_itself(served, opened):
    policy = served.client.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    script = "const made = document.createElement('script'); made.textContent = 'window.ran = 1'"
    assert opened.page.evaluate(f"() => {{ {script}; document.body.append(made); return window.ran }}") is None
    assert any("Content Security Policy" in error for error in opened.errors)
