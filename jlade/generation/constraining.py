"""The arguments `grammar` and `constraint`: checked, and as a constraint for a batch."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jlade.constraints.bans import Every
from jlade.constraints.constraint import Constraint
from jlade.constraints.grammar import Grammar, Tables
from jlade.constraints.tokens import Table, Trie
from jlade.decoding.stopping import Stopping
from jlade.generation import text
from jlade.generation.text import TokenBytes, Tokenizer


def check(
    grammar: Any, constraint: Any, tokenizer: Tokenizer | None, stopping: Stopping, vocab_size: int
) -> Constraint | None:
    """Returns the constraint of B sequences, None for none.

    Raises:
      TypeError, ValueError: name the argument, its value and what is accepted.
    """
    constraints = [] if constraint is None else [constraint]
    if type(constraint) in (list, tuple):  # a named tuple may be a constraint itself
        constraints = list(constraint)
    for each in constraints:
        missing = [name for name in ("start", "advance", "allowed") if not callable(getattr(each, name, None))]
        if missing:
            raise TypeError(
                f"constraint must have the methods of jlade.Constraint, got {each!r} without {', '.join(missing)}"
            )
    if (tables := _tables(grammar, tokenizer, stopping, vocab_size)) is not None:
        constraints.append(tables)
    if len(constraints) > 1:
        return Every(tuple(constraints))
    return constraints[0] if constraints else None


def _tables(grammar: Any, tokenizer: Tokenizer | None, stopping: Stopping, vocab_size: int) -> Tables | None:
    """Returns the tables of the grammars of B sequences, None for none. Arguments and errors are those of `check`."""
    batch_size = len(stopping.max_new_tokens)
    grammars = [grammar] * batch_size if isinstance(grammar, Grammar | None) else grammar
    if not isinstance(grammars, Sequence) or not all(isinstance(each, Grammar | None) for each in grammars):
        raise TypeError(f"grammar must be a jlade.Grammar, or one or None for each prompt, got {grammar!r}")
    if len(grammars) != batch_size:
        raise ValueError(f"grammar must be one for all prompts, or {batch_size}, one for each, got {len(grammars)}")
    if not any(grammars):
        return None
    if tokenizer is None:
        raise TypeError(f"grammar needs the tokenizer: {text.PASS_TOKENIZER}")
    spelled, tables = text.token_bytes(tokenizer), list[Table | None]()
    fewest = np.zeros(batch_size, np.int32) if stopping.min_new_tokens is None else stopping.min_new_tokens
    for each, eos_ids, least in zip(grammars, np.asarray(stopping.eos_ids), fewest, strict=True):
        if each is None:
            tables.append(None)
            continue
        if not (ends := tuple(sorted({*eos_ids.tolist()} - {-1}))):
            raise ValueError("grammar needs end tokens, as eos_ids, that may follow a whole text")
        table = _table(each, spelled, ends, vocab_size)
        if least and (shortest := table.shortest(ends)) < least:
            raise ValueError(
                f"min_new_tokens={least} is not possible: a text of the grammar may have to end after {shortest} tokens"
            )
        tables.append(table)
    return Tables.of(tables)


@functools.lru_cache(maxsize=4)
def _trie(spelled: TokenBytes, vocab_size: int) -> Trie:
    return Trie([spelled[token] for token in range(vocab_size)])


@functools.lru_cache(maxsize=64)
def _table(grammar: Grammar, spelled: TokenBytes, eos_ids: tuple[int, ...], vocab_size: int) -> Table:
    return Table.of(grammar.automaton, _trie(spelled, vocab_size), eos_ids, vocab_size)
