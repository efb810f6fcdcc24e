"""Prompts of models that fill gaps, with tokenizers of their kinds."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from jlade.evaluation import infilling
from jlade.evaluation.infilling import MARKERS
from tests.tiny import tiny_tokenizer

LETTERS = {letter: i for i, letter in enumerate("abcdefgh")}


def tokenizer_with(names, begins=False):
    """Returns a tokenizer of letters with special tokens, and maybe one that begins every text."""
    result = Tokenizer(models.BPE(vocab=dict(LETTERS), merges=[]))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([*names, "<s>"])
    if begins:
        result.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", len(LETTERS) + 4)])
    return result


@pytest.mark.parametrize("names", MARKERS, ids=lambda names: names[0])
@pytest.mark.parametrize("begins", [False, True])
def test_the_beginning_and_the_rest_come_before_the_gap(names, begins):
    tokenizer = tokenizer_with(names, begins)
    first, second, third, end = range(8, 12)
    assert infilling.prompt(tokenizer, "ab", "gh") == [*[12] * begins, first, 0, 1, second, 6, 7, third]
    assert infilling.filled(tokenizer, [2, 3, end, 4]) == "cd"
    assert infilling.filled(tokenizer, [2, 3]) == "cd"


def test_other_tokenizers_are_refused():
    with pytest.raises(ValueError, match=r"a question with a suffix is for models that fill gaps, .*<fim_prefix>"):
        infilling.prompt(tiny_tokenizer(), "a", "b")
