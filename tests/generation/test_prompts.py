"""Padded batches, and special tokens in prompts; `test_generate.py` has the other forms of a prompt."""

import functools
from collections import UserDict

import numpy as np
import pytest

import jlade
from jlade.generation import prompts
from tests.texts import assert_same_texts
from tests.tiny import PAPER, tiny_llama, tiny_tokenizer

generate = functools.partial(jlade.generate, tiny_llama(3), max_new_tokens=12, lookahead=PAPER)
TEXTS = [[1, 2, 3, 4], [4], [5, 6]]
LEFT = [[1, 2, 3, 4], [0, 0, 0, 4], [0, 0, 5, 6]]
RIGHT = [[1, 2, 3, 4], [4, 0, 0, 0], [5, 6, 0, 0]]
LEFT_MASK = [[1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 1, 1]]
RIGHT_MASK = [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]


def read(prompt, **options):
    return [ids.tolist() for ids in prompts.read(prompt, options.pop("tokenizer", None), 13, **options)]


@pytest.mark.parametrize(("ids", "mask"), [(LEFT, LEFT_MASK), (RIGHT, RIGHT_MASK)], ids=["left", "right"])
def test_a_padded_batch_gets_the_texts_of_its_prompts(ids, mask):
    expected = generate(TEXTS)
    for out in (
        generate(np.array(ids), attention_mask=np.array(mask)),
        generate({"input_ids": ids, "attention_mask": mask, "token_type_ids": None}),
    ):
        assert_same_texts(out, expected)
        np.testing.assert_array_equal(out.steps, expected.steps)


def test_forms_of_a_padded_batch():
    torch = pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
    assert read(LEFT, attention_mask=LEFT_MASK) == TEXTS
    assert read(np.array(LEFT), attention_mask=np.array(LEFT_MASK, bool)) == TEXTS
    assert read(UserDict(input_ids=torch.tensor(LEFT), attention_mask=torch.tensor(LEFT_MASK))) == TEXTS
    assert read({"input_ids": TEXTS, "attention_mask": [[1] * len(text) for text in TEXTS]}) == TEXTS
    assert read({"input_ids": TEXTS[0]}) == TEXTS[:1]
    assert read({"input_ids": [0, 1, 2, 0, 0], "attention_mask": [0, 1, 1, 0, 0]}) == [[1, 2]]
    assert read({"input_ids": LEFT}, attention_mask=LEFT_MASK) == TEXTS


def test_a_batch_of_transformers_is_taken_whole(demo):
    pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=demo[1], pad_token="<pad>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    texts = ["import os\nimport sys\n", "def f("]
    expected = [tokenizer.encode(text) for text in texts]
    conversations = [[{"role": "user", "content": text}] for text in texts]
    for side in ("left", "right"):
        tokenizer.padding_side = side
        for batch in (
            tokenizer(texts, padding=True, return_tensors="np"),
            tokenizer(texts, padding="max_length", max_length=20, return_tensors="pt"),
            tokenizer(texts),
        ):
            assert [ids.tolist() for ids in prompts.read(batch, tokenizer, 4096)] == expected
        batch = tokenizer.apply_chat_template(conversations, padding=True, return_dict=True)
        assert [tokenizer.decode(ids) for ids in prompts.read(batch, tokenizer, 4096)] == texts
        with pytest.raises(ValueError, match="seems to be padded"):
            prompts.read(tokenizer(texts, padding=True, return_attention_mask=False), tokenizer, 4096)


@pytest.mark.parametrize(
    ("prompt", "mask", "error", "message"),
    [
        ([1, 2, 3, 4], [1, 0, 1, 1], ValueError, "attention_mask must be 0 at the ends of prompt alone, got 0 at 1,"),
        ([[1, 2, 3]], [[1, 0, 1]], ValueError, r"attention_mask\[0\] must be 0 at the ends of prompt\[0\] alone"),
        ([1, 2], [1, 2], ValueError, "attention_mask must hold 0 and 1, got 2"),
        ([[1, 2], [3, 4]], [[1, 1], [0, 0.5]], ValueError, r"attention_mask\[1\] must hold 0 and 1, got 0.5"),
        ([[1, 2]], [[0, 0]], ValueError, r"attention_mask\[0\] has no 1"),
        (
            [[1, 2]],
            [[1, 1, 1]],
            ValueError,
            r"attention_mask\[0\] must have the shape of prompt\[0\], \[2\], got \[3\]",
        ),
        ([1, 2], [[1, 1]], ValueError, r"attention_mask must have the shape of prompt, \[2\], got \[1, 2\]"),
        ([[1, 2], [3, 4]], [[1, 1]], ValueError, "attention_mask must have a row for each of 2 prompts, got 1"),
        ([[1, 2]], 1, TypeError, "attention_mask must hold 0 and 1 in the shape of prompt, got 1"),
        ("ab", [1], TypeError, "attention_mask goes with token ids; prompts in text are not padded"),
        ({"ids": [1]}, None, TypeError, "prompt is a mapping without \"input_ids\"; it has 'ids'"),
        (
            {"input_ids": [1], "attention_mask": [1]},
            [1],
            TypeError,
            "attention_mask cannot be given twice: prompt has one too",
        ),
    ],
    ids=str,
)
def test_bad_masks_and_mappings_are_refused(prompt, mask, error, message):
    with pytest.raises(error, match=message):
        generate(prompt, attention_mask=mask, tokenizer=tiny_tokenizer())


PAD = 7


@pytest.mark.parametrize(
    ("prompt", "padded"),
    [
        ([[1, 2, 3], [PAD, PAD, 3]], "1"),
        ([[1, PAD, PAD], [1, 2, 3]], "0"),
        ([[1, 2, 3], [1, 2, PAD]], "1"),
        ([1, PAD, PAD], ""),
        ([[1, 2, PAD], [3, 4, PAD]], None),  # the pad token also ends texts in many checkpoints
        ([[1, PAD, PAD], [3, 4]], None),
        ([[1, PAD, 2], [3, 4, 5]], None),
    ],
)
def test_a_batch_that_looks_padded_needs_a_mask(prompt, padded):
    tokenizer = tiny_tokenizer.__wrapped__()
    tokenizer.enable_padding(pad_id=PAD)
    if padded is None:
        assert read(prompt, tokenizer=tokenizer) == prompt
        return
    name = f"prompt\\[{padded}\\]" if padded else "prompt"
    with pytest.raises(ValueError, match=f"{name} seems to be padded, .* token 7: pass attention_mask= with the batch"):
        read(prompt, tokenizer=tokenizer)
    mask = np.ones_like(prompt)
    assert read(prompt, tokenizer=tokenizer, attention_mask=mask) == np.atleast_2d(prompt).tolist()
    assert read(prompt) == np.atleast_2d(prompt).tolist(), "without a tokenizer the pad token is not known"


def test_special_tokens_in_a_text_can_be_plain_characters(demo):
    params, tokenizer = demo
    special = prompts.read("a</s>b", tokenizer, 4096)[0].tolist()
    plain = prompts.read("a</s>b", tokenizer, 4096, parse_special=False)[0].tolist()
    assert special == [1, *tokenizer.encode("a", add_special_tokens=False).ids, 2, special[-1]]
    assert plain[0] == 1
    assert 2 not in plain
    assert tokenizer.decode(plain) == "a</s>b"
    assert tokenizer.encode("a</s>b").ids == special, "the tokenizer is left as it was"
    inputs, _ = jlade.prepare(params, "a</s>b", tokenizer=tokenizer, parse_special=False)
    assert inputs.prompts[0, : inputs.lengths[0]].tolist() == plain


def test_special_tokens_in_a_text_for_a_tokenizer_of_transformers(demo):
    transformers = pytest.importorskip("transformers", reason="the test extra installs it on Python 3.11 only")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=demo[1])
    tokenizer("a text that is cut", truncation=True, max_length=2)
    ids = prompts.read("a</s>b", tokenizer, 4096, parse_special=False)[0].tolist()
    assert ids == tokenizer.encode("a</s>b", split_special_tokens=True)


@pytest.mark.parametrize(
    ("prompt", "value", "message"),
    [
        ([1], False, "parse_special=False needs text, but prompt is token ids"),
        ("a", "no", "parse_special must be True or False, got 'no'"),
    ],
)
def test_parse_special_is_for_text(prompt, value, message):
    with pytest.raises(TypeError, match=message):
        generate(prompt, tokenizer=tiny_tokenizer(), parse_special=value)


def test_a_tokenizer_that_pads_adds_nothing_to_a_text():
    tokenizer = tiny_tokenizer.__wrapped__()
    tokenizer.enable_padding(pad_id=PAD, length=6)
    assert read("ab", tokenizer=tokenizer) == [[2]]
