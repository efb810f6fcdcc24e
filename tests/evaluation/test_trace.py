"""The trace against the algorithm in plain Python, and the data in its page."""

import copy
import dataclasses
import json
import re

import jax
import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig, NGramConfig
from jlade.cli.terminal import STEP_STYLES
from jlade.config import PLAIN
from jlade.evaluation import trace
from jlade.evaluation.trace import NGram
from jlade.lookahead import adaptive, block
from tests import reference
from tests.decoding.observed import first_window, next_token_of, sources_of
from tests.tiny import PAPER, slow, slow_but, tiny_llama, tiny_tokenizer

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SETTINGS = [
    PAPER,
    LookaheadConfig.paper(3, 5, 6, pool_from_prompt=False),
    LookaheadConfig.jacobi(5),
    LookaheadConfig.paper(0, 3, 2),
    LookaheadConfig.paper(3, 3, 0),
    PLAIN,
    LookaheadConfig.tree(12, ngrams=NGramConfig(3, 4, 3)),
    LookaheadConfig.tree(9),
]


def traced(seed=0, prompt=PROMPT, **options):
    options = {"max_new_tokens": 40, "tokenizer": tiny_tokenizer(), **options}
    return trace.trace(tiny_llama(seed), prompt, **options)


def has(pool, ngram):
    return tuple(ngram[1:]) in pool.lookup(ngram[0])


def steps_of_reference(seed, lookahead, key):
    """Returns the steps as the reference makes them, and the generated tokens."""
    next_token, watched = next_token_of(seed), []
    tokens, accepted = reference.decode(
        next_token,
        PROMPT,
        40,
        window_size=lookahead.window_size,
        ngram_size=lookahead.ngram_size,
        guess_set_size=lookahead.ngrams.guess_set_size,
        pool_from_prompt=lookahead.ngrams.pool_from_prompt,
        start=first_window(key, PROMPT, lookahead),
        sources=sources_of(seed, lookahead),
        watch=lambda *step: watched.append(copy.deepcopy(step)),
    )
    steps = []
    for (text, window, new, _, drafts), number in zip(watched, accepted, strict=True):
        own = tokens[len(text) - len(PROMPT) :][:number]
        steps.append((window, new, [verdict_on(path, own) for path in paths_of(drafts, lookahead)], own))
    return steps, watched, tokens


def paths_of(drafts, lookahead):
    """Returns the path to each draft: all prefixes of an n-gram of the pool, the paths of a tree as they are."""
    if lookahead.has_tree:
        return drafts
    return [ngram[:end] for ngram in drafts for end in range(1, len(ngram) + 1)]


def verdict_on(path, accepted):
    right = next((i for i, token in enumerate(path) if i >= len(accepted) or token != accepted[i]), len(path))
    is_wrong = right == len(path) - 1 and right < len(accepted)
    return path, "accepted" if right == len(path) else "rejected" if is_wrong else "unreached"


def paths_in(step):
    """Returns the path to each draft of a step, and its verdict."""
    paths = []
    for draft in step.drafts:
        paths.append((*(paths[draft.parent] if draft.parent >= 0 else ()), draft.token))
    return [(path, draft.verdict) for path, draft in zip(paths, step.drafts, strict=True)]


@pytest.mark.parametrize("lookahead", slow_but(SETTINGS, SETTINGS[0]), ids=str)
@pytest.mark.parametrize("seed", [0, slow(2)])
def test_equals_the_reference(seed, lookahead):
    key = jax.random.key(7)
    expected, watched, tokens = steps_of_reference(seed, lookahead, key)
    found = traced(seed, lookahead=lookahead, eos_ids=(), key=key)
    assert found.tokens == PROMPT + tokens
    assert (found.prompt_length, found.finish_reason, found.settings) == (len(PROMPT), "length", (lookahead,))
    assert [(s.window, s.predicted, paths_in(s), s.accepted) for s in found.steps] == expected
    for step in found.steps:
        kept = [draft.token for draft in step.drafts if draft.is_kept]
        assert kept == step.accepted[: len(kept)]
        assert len(step.accepted) in (len(kept), len(kept) + 1)

    pools = [pool for *_, pool, _ in watched]
    for step, (text, window, new, before, _), after in zip(found.steps, watched, pools[1:], strict=False):
        if not lookahead.ngrams.guess_set_size:
            assert step.ngrams == []
            continue
        columns = [[*column, last] for *column, last in zip(*window, new, strict=True)]
        whole = text + step.accepted
        ends = (
            range(max(len(text) + 1, lookahead.ngram_size), len(whole) + 1) if lookahead.ngrams.pool_from_prompt else ()
        )
        ngrams = [(ngram, "window") for ngram in columns]
        ngrams += [(whole[end - lookahead.ngram_size : end], "text") for end in ends]
        assert step.ngrams == [NGram(ngram, origin, has(before, ngram), has(after, ngram)) for ngram, origin in ngrams]


@pytest.mark.slow
def test_what_the_table_learned_is_the_difference_between_states():
    """Every token that a step read is followed by the most probable ones of the last text that it ended."""
    found = traced(lookahead=LookaheadConfig.tree(9), eos_ids=())
    table: dict[int, list[int]] = {}
    for step in found.steps:
        for entry in step.recycled:
            assert table.get(entry.token, entry.before) == entry.before != entry.best
            table[entry.token] = entry.best
    assert len(table) > 3
    assert all(len(best) == trace.BEST for best in table.values())


@pytest.mark.slow
def test_auto_shows_a_window_and_a_tree():
    assert traced(lookahead="auto", max_new_tokens=2).lookahead == trace.WINDOW_AND_TREE


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_sampled_tokens_are_those_of_generate(verification):
    options = {
        "lookahead": LookaheadConfig.paper(4, 4, 3, verification=verification),
        "sampling": jlade.SamplingConfig(temperature=0.3, repetition_penalty=0.9),
        "key": jax.random.key(3),
    }
    found = traced(**options)
    out = jlade.generate(tiny_llama(), PROMPT, max_new_tokens=40, **options)
    assert sum((s.accepted for s in found.steps), PROMPT) == found.tokens == [*PROMPT, *out.tokens[0]]
    assert [len(s.accepted) for s in found.steps] == out.accepted[0].tolist()
    assert any(draft.is_kept for s in found.steps for draft in s.drafts)
    for step in found.steps:
        from_drafts = sum(draft.is_kept for draft in step.drafts)
        assert len(step.accepted) in (from_drafts, from_drafts + 1)


@pytest.mark.slow
def test_a_mesh_changes_nothing():
    options = {"lookahead": PAPER, "max_new_tokens": 12}
    assert traced(mesh=jlade.make_mesh(lookahead=2, model=2), **options) == traced(**options)


@pytest.mark.slow
def test_adaptive_steps_have_the_levels_of_their_pace():
    lookahead = LookaheadConfig.tree(7, relative_step_time=3.0)
    params = tiny_llama(2, max_positions=300)
    found = trace.trace(params, [1, 2, 3], tokenizer=tiny_tokenizer(), max_new_tokens=150, lookahead=lookahead)
    assert found.settings == adaptive.settings(lookahead)
    assert {s.level for s in found.steps} == {0, 1, 2}
    for step in found.steps:
        assert len(step.drafts) <= found.settings[step.level].num_drafted


@pytest.mark.slow
def test_texts_and_names(demo):
    """Characters of several tokens come with the last of them; the texts add up to that of `generate`."""
    params, tokenizer = demo
    prompt = 'name = "漢字é </s>"  # '
    options = {"tokenizer": tokenizer, "max_new_tokens": 12, "lookahead": PLAIN}
    found = trace.trace(params, prompt, **options)
    out = jlade.generate(params, prompt, **options)
    assert "".join(found.texts[found.prompt_length :]) == out.text[0]
    assert "".join(found.texts[: found.prompt_length]) == prompt.replace("</s>", "")
    names = [found.names[token] for token in found.tokens[: found.prompt_length]]
    assert {"<s>", "</s>"} <= set(names)
    assert "\\xe6" in "".join(names)


@pytest.mark.slow
def test_a_stop_string_ends_the_trace():
    options = {"lookahead": PAPER}
    out = jlade.generate(tiny_llama(), PROMPT, tokenizer=tiny_tokenizer(), max_new_tokens=40, **options)
    stop = re.search("[abc]{3}", out.text[0][4:])[0]
    found = traced(stop=stop, **options)
    assert found.finish_reason == "stop"
    assert stop in "".join(found.texts[found.prompt_length :])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokenizer": None}, TypeError, "the text of tokens: pass tokenizer="),
        ({"prompt": [[1, 2], [3]]}, ValueError, "prompt must be a single prompt, got a batch of 2"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, got 0"),
    ],
)
def test_refusals(options, error, message):
    with pytest.raises(error, match=message):
        traced(**options)


def data_of(page):
    (embedded,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(embedded)


@pytest.mark.slow
def test_the_page_has_the_trace_and_the_masks():
    found = traced(lookahead=PAPER)
    data = data_of(trace.page(found))
    expected = json.loads(json.dumps(dataclasses.asdict(found)))
    assert data.items() >= expected.items()
    for setting, built in zip([PAPER], data["blocks"], strict=True):
        mask = block.window(setting.window_size, setting.ngram_size).mask
        assert built["sizes"] == [setting.window_size, setting.ngram_size, setting.num_drafted]
        for row, runs in zip(mask, built["seen"], strict=True):
            seen = [k for begin, end in zip(runs[::2], runs[1::2], strict=True) for k in range(begin, end)]
            assert seen == np.flatnonzero(row).tolist()


@pytest.mark.slow
def test_text_cannot_leave_the_data():
    token = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)> TRACE_DATA \u2028"
    found = traced(max_new_tokens=1)
    page = trace.page(dataclasses.replace(found, texts=[token] * len(found.tokens)))
    assert set(data_of(page)["texts"]) == {token}
    assert page.count("<script") == page.count("</script>") == 2


def test_settings_have_names():
    names = [trace.describe(lookahead)[0] for lookahead in SETTINGS]
    assert names[:2] == ["Lookahead decoding"] * 2
    assert names[2:6] == ["Jacobi decoding", "Prompt lookup", "Decoding with a window alone", "Plain decoding"]
    assert names[6:] == ["Lookahead decoding with a tree", "Decoding with a tree"]


def test_the_page_has_as_many_colours_as_the_command():
    colours = re.findall(r"--step-(\d):", trace.TEMPLATE.read_text(encoding="utf-8"))
    assert [int(colour) for colour in colours] == 2 * list(range(len(STEP_STYLES)))
