"""Grammars that the tests of constraints share."""

from jlade import LookaheadConfig, NGramConfig
from jlade.constraints.grammar import Grammar
from tests.tiny import tiny_tokenizer

EOS = 12  # "</s>" of the tiny tokenizer
TREE = LookaheadConfig.tree(9, ngrams=NGramConfig(2, 4, 2))
GRAMMAR = Grammar.regex("(ab|ba)*c|(é|aab)+b{3,}c{2}")
COMMON = {"tokenizer": tiny_tokenizer(), "eos_ids": [EOS], "max_new_tokens": 24}
