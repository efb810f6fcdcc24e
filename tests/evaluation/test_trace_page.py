"""The page of a trace in a browser."""

import dataclasses
import math
import re

import numpy as np
import pytest

from jlade import LookaheadConfig
from jlade.config import PLAIN
from jlade.evaluation import trace
from jlade.lookahead import block
from tests.tiny import tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.slow  # a browser
LOOKAHEAD = LookaheadConfig.paper(5, 4, 5)
TREE = trace.WINDOW_AND_TREE
MARKS = str.maketrans({" ": "·", "\n": "↵"})


@pytest.fixture(scope="module", params=[LOOKAHEAD, TREE], ids=["paper", "tree"])
def found(demo, request):
    """A trace of the demo model."""
    params, tokenizer = demo
    prompt = "def read_config(path):\n    # </script><b>\n"
    found = trace.trace(params, prompt, tokenizer=tokenizer, max_new_tokens=48, lookahead=request.param)
    markup = "</script><script>undefined()</script><img src=x onerror=undefined()>"  # a token might be like that
    return dataclasses.replace(found, texts=[markup, *found.texts[1:]], names=found.names | {found.tokens[-1]: markup})


@pytest.fixture
def file(found, tmp_path):
    return written(found, tmp_path)


def written(found, directory):
    path = directory / "trace.html"
    path.write_text(trace.page(found), encoding="utf-8")
    return path


def names(found, *rows):
    return [found.names[token].translate(MARKS) for row in rows for token in row]


def titles(page, selector):
    return page.locator(selector).evaluate_all("cells => cells.map(cell => cell.title)")


def check_shows(page, found, number):
    """Checks that the page shows the step with the number, from 1."""
    step = found.steps[number - 1]
    end = found.prompt_length + sum(len(s.accepted) for s in found.steps[:number])
    status = page.locator("#status").inner_text()
    assert status.startswith(f"Step {number} of {len(found.steps)}: {len(step.accepted)} token")
    exact = (end - found.prompt_length) / number
    hundredths = math.floor(100 * exact + 0.5)  # as JavaScript rounds, to which Python prefers even digits
    assert f" {hundredths / 100:.2f} tokens per step so far" in status
    slider = page.get_by_role("slider", name="Step")
    assert slider.input_value() == str(number)
    assert slider.get_attribute("aria-valuetext").startswith(f"step {number} of {len(found.steps)}, ")
    assert page.locator("#text").text_content() == "".join(found.texts[:end])
    assert page.locator("#text .now").all_text_contents() == found.texts[end - len(step.accepted) : end]
    assert titles(page, "#window [data-token]") == names(found, *step.window)
    assert titles(page, "#window td.now") == names(found, step.predicted)
    assert sorted(titles(page, "#drafts [data-token]")) == sorted(names(found, [d.token for d in step.drafts]))
    kept = names(found, [draft.token for draft in step.drafts if draft.is_kept])
    assert titles(page, "#drafts [data-token].now") == kept
    assert page.locator("#drafts tr.chosen").count() == bool(kept)
    verdicts = [draft.verdict for draft in step.drafts]
    assert page.locator("#drafts .wrong").count() == verdicts.count("rejected")
    assert titles(page, "#ngrams td") == names(found, *(ngram.tokens for ngram in step.ngrams))


@pytest.mark.parametrize("width", [390, 1200])
def test_stepping(found, file, width, open_page):
    opened = open_page(file, width)
    page, last = opened.page, len(found.steps)
    check_shows(page, found, 1)
    for key, number in [("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("End", last), ("ArrowRight", last)]:
        page.keyboard.press(key)
        check_shows(page, found, number)
    page.get_by_role("slider").fill("7")
    check_shows(page, found, 7)
    for key, number in [("ArrowRight", 8), ("Home", 1), ("ArrowLeft", 1)]:  # the slider has the focus
        page.keyboard.press(key)
        check_shows(page, found, number)
    for name, number in [("Next step", 2), ("Last step", last), ("Previous step", last - 1), ("First step", 1)]:
        page.get_by_role("button", name=name).click()
        check_shows(page, found, number)
    page.locator("#chart span").nth(4).click()
    check_shows(page, found, 5)
    assert not opened.overflows()
    assert len(page.screenshot()) > 20_000, "an empty page takes 4 kB"
    assert opened.errors == []
    assert opened.requests == [file.as_uri()]


def test_playing(found, file, open_page):
    page = open_page(file, 1200).page
    page.clock.install(time=0)
    page.clock.pause_at(1000)  # otherwise real time goes on too
    page.keyboard.press(" ")
    page.clock.run_for(2000)
    check_shows(page, found, 3)
    page.get_by_role("button", name="Pause").click()
    page.clock.run_for(2000)
    check_shows(page, found, 3)
    page.keyboard.press("End")
    page.keyboard.press(" ")  # begins again
    check_shows(page, found, 1)
    page.clock.run_for(1000)
    check_shows(page, found, 2)


@pytest.mark.parametrize("width", [390, 1200])
def test_a_token_shows_what_it_attends_to(found, file, width, open_page):
    opened = open_page(file, width)
    page = opened.page
    before = next(i for i, step in enumerate(found.steps) if len(step.drafts) > 4)
    drafts = found.steps[before].drafts
    for _ in range(before):
        page.keyboard.press("ArrowRight")
    window = block.window(found.lookahead.window_size, found.lookahead.ngram_size)
    size = len(window.positions)

    def line(draft):
        return [*(line(drafts[draft].parent) if drafts[draft].parent >= 0 else []), draft]

    def check(index):
        seen = page.locator("#window .seen, #drafts .seen").evaluate_all("all => all.map(one => +one.dataset.token)")
        if index < size:
            expected, position = np.flatnonzero(window.mask[index]).tolist(), window.positions[index]
        else:
            expected = [0, *(size + i for i in line(index - size))]
            position = len(expected) - 1
        assert sorted(seen) == expected
        about = page.locator("#about").inner_text()
        assert f"position +{position})" in about
        assert f"{len(expected)} of these {size + len(drafts)} tokens" in about

    page.locator("[data-token='13']").click()
    check(13)
    page.locator("[data-token='13']").click()  # releases
    page.mouse.move(0, 0)
    assert page.locator(".seen").count() == 0
    canvas = page.locator("#mask")
    side = canvas.bounding_box()["height"] / (size + len(drafts))
    canvas.click(position={"x": 60, "y": (size + 2.5) * side})
    check(size + 2)
    page.keyboard.press("ArrowUp")
    check(size + 1)
    assert opened.errors == []


def test_colours_follow_the_system(file, open_page):
    def shades(**context):
        page = open_page(file, 1200, **context).page
        style = "(({color, backgroundColor}) => [color, backgroundColor])(getComputedStyle(document.body))"
        return [np.mean([int(part) for part in re.findall(r"\d+", rgb)]) for rgb in page.evaluate(style)]

    (light_ink, light_paper), (dark_ink, dark_paper) = shades(color_scheme="light"), shades(color_scheme="dark")
    assert light_paper - light_ink > 180
    assert dark_ink - dark_paper > 180


@pytest.mark.parametrize(
    ("lookahead", "panels"),
    [
        (PLAIN, ["text"]),
        (LookaheadConfig.paper(0, 8, 1), ["text", "verify", "learn", "attend"]),
        (LookaheadConfig.paper(6, 2, 4), ["text", "guess", "verify", "learn", "attend"]),
        (LookaheadConfig.paper(4, 4, 0), ["text", "guess", "attend"]),
        (LookaheadConfig.paper(60, 5, 60), ["text", "guess", "verify", "learn", "attend"]),
        (LookaheadConfig.tree(63), ["text", "verify", "learn", "attend"]),
        (LookaheadConfig.tree(15, relative_step_time=3.0), ["text", "verify", "learn", "attend"]),
    ],
    ids=str,
)
def test_other_settings(lookahead, panels, tmp_path, open_page):
    options = {"tokenizer": tiny_tokenizer(), "max_new_tokens": 36, "eos_ids": (), "lookahead": lookahead}
    path = written(trace.trace(tiny_llama(2), [1, 2, 3], **options), tmp_path)
    opened = open_page(path, 390)
    headings = opened.page.locator("h2:visible").evaluate_all("all => all.map(one => one.id)")
    assert headings == [f"{panel}-title" for panel in panels]
    assert trace.describe(lookahead)[1] in opened.page.locator("#description").inner_text()
    for key in ("ArrowRight", "End"):
        opened.page.keyboard.press(key)
        assert not opened.overflows()
    assert opened.errors == []
    assert opened.requests == [path.as_uri()]
