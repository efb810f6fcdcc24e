"""The arguments `grammar` and `constraint`: checked, and as a constraint for a batch."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jlade.constraints.bans import Every
from jlade.constraints.blocks import NEVER
from jlade.constraints.constraint import Constraint
from jlade.constraints.grammar import Grammar, Tables
from jlade.constraints.tokens import Table, Trie
from jlade.decoding import sharding
from jlade.decoding.stopping import Stopping
from jlade.errors import ArgumentTypeError, ArgumentValueError
from jlade.generation import saved_tables, text
from jlade.generation.text import TokenBytes, Tokenizer

SHORTEST = 8  # tokens of a text


def check(
    constraint: Any, tables: Sequence[Table | None] | None, batch_size: int, vocab_size: int
) -> Constraint | None:
    """Returns the constraint of B sequences, None for none.

    Args:
      constraint: the argument, to be checked.
      tables: of the sequences' grammars; None if no sequence has one.
      batch_size, vocab_size: B and V.

    Raises:
      TypeError, ValueError: name the argument, its value and what is accepted.
    """
    constraints = [] if constraint is None else [constraint]
    if type(constraint) in (list, tuple):  # a named tuple may be a constraint itself
        constraints = list(constraint)
    for rule in constraints:
        missing = [name for name in ("start", "advance", "allowed") if not callable(getattr(rule, name, None))]
        if missing:
            raise TypeError(
                f"constraint must have the methods of jlade.Constraint, got {rule!r} without {', '.join(missing)}"
            )
        if (allowed := _allowed(rule, batch_size)) != (expected := jax.ShapeDtypeStruct((vocab_size,), bool)):
            raise ValueError(f"constraint must allow {_shown(expected)}, the model's vocabulary, got {_shown(allowed)}")
    if tables is not None:
        constraints.append(Tables.of(tables))
    if len(constraints) > 1:
        return Every(tuple(constraints))
    return constraints[0] if constraints else None


def _allowed(constraint: Constraint, batch_size: int) -> Any:
    """Returns the shape of the tokens that a constraint allows, for one of B sequences."""

    def of_sequence(constraint: Constraint, tokens: jax.Array, length: jax.Array) -> jax.Array:
        return constraint.allowed(constraint.start(tokens, length))

    def of_batch(constraint: Constraint, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        axes = sharding.batch_axes(sharding.constraint_specs(constraint))
        return jax.vmap(of_sequence, in_axes=(axes, 0, 0), out_axes=0)(constraint, tokens, lengths)

    shapes = (jax.ShapeDtypeStruct(shape, np.int32) for shape in ((batch_size, SHORTEST), (batch_size,)))
    mask = jax.eval_shape(of_batch, constraint, *shapes)
    return jax.ShapeDtypeStruct(mask.shape[1:], mask.dtype)


def _shown(shape: Any) -> str:
    return f"{list(shape.shape)} {shape.dtype}"


def tables(grammar: Any, tokenizer: Tokenizer | None, stopping: Stopping, vocab_size: int) -> list[Table | None] | None:
    """Returns the tables of the grammars of B sequences; None if no sequence has one.

    Raises:
      TypeError, ValueError: name the argument, its value and what is accepted.
    """
    batch_size = len(stopping.max_new_tokens)
    grammars = [grammar] * batch_size if isinstance(grammar, Grammar | None) else grammar
    if not isinstance(grammars, Sequence) or not all(isinstance(one, Grammar | None) for one in grammars):
        raise ArgumentTypeError("grammar", f"must be a jlade.Grammar, or one or None for each prompt, got {grammar!r}")
    if len(grammars) != batch_size:
        raise ArgumentValueError(
            "grammar", f"must be one for all prompts, or {batch_size}, one for each, got {len(grammars)}"
        )
    if not any(grammars):
        return None
    if tokenizer is None:
        raise ArgumentTypeError("grammar", f"needs the tokenizer: {text.PASS_TOKENIZER}")
    spelled, result = text.token_bytes(tokenizer), list[Table | None]()
    minimums = np.zeros(batch_size, np.int32) if stopping.min_new_tokens is None else stopping.min_new_tokens
    for one, eos_ids, minimum in zip(grammars, np.asarray(stopping.eos_ids), minimums, strict=True):
        if one is None:
            result.append(None)
            continue
        table = table_of(one, spelled, eos_ids.tolist(), vocab_size)
        if minimum and (shortest := table.shortest()) < minimum:
            raise ArgumentValueError(
                "min_new_tokens",
                f"must be at most {shortest}, after which a text of the grammar may have to end, got {minimum}",
            )
        result.append(table)
    return result


def is_dead_end(table: Table, tokens: Sequence[int], is_banned: np.ndarray) -> bool:
    """Whether a grammar allows only tokens that are banned [V] bool after those of a text."""
    state = functools.reduce(table.advance, tokens, 0)
    return not (table.allowed(state) & ~is_banned).any()


def table_of(grammar: Grammar, spelled: TokenBytes, eos_ids: Sequence[int], vocab_size: int) -> Table:
    """Returns the table of a grammar, made once, for end tokens of which those below 0 do not count.

    Raises:
      ValueError: there is no end token, or no tokens spell a text of the grammar; as an error of `eos_ids` if only
        end tokens do.
    """
    if not (ends := tuple(sorted({*eos_ids} - {-1}))):
        raise ArgumentValueError("grammar", "needs end tokens, as eos_ids, that may follow a whole text")
    try:
        return _table(grammar, spelled, ends, vocab_size)
    except ValueError as error:
        # Without ends the error is another one, or the table tells which of them are needed.
        is_spelled = _table(grammar, spelled, (), vocab_size).class_of_token[list(ends)] != NEVER
        spelled_ends = np.array(ends)[is_spelled].tolist()
        raise ArgumentValueError(
            "eos_ids",
            f"must leave tokens that spell a text of the grammar, got {spelled_ends}: an end token may follow a whole "
            "text alone",
        ) from error


@functools.lru_cache(maxsize=4)
def _trie(spelled: TokenBytes, vocab_size: int) -> Trie:
    return Trie([spelled.in_grammar(token) for token in range(vocab_size)])


@functools.lru_cache(maxsize=4)
def _fingerprint(spelled: TokenBytes, vocab_size: int) -> str:
    """Returns a fingerprint of the tokens' bytes in grammars."""
    of_tokens = map(spelled.in_grammar, range(vocab_size))
    return hashlib.sha256(b"".join(len(each).to_bytes(4, "little") + each for each in of_tokens)).hexdigest()


@functools.lru_cache(maxsize=64)
def _table(grammar: Grammar, spelled: TokenBytes, eos_ids: tuple[int, ...], vocab_size: int) -> Table:
    def make() -> Table:
        trie, automaton = _trie(spelled, vocab_size), grammar.automaton
        if automaton.bounds is not None and not trie.may_count(automaton, eos_ids):
            automaton = grammar.unrolled
        return Table.of(automaton, trie, eos_ids, vocab_size, spelled.first_tokens)

    source = [grammar.kind, grammar.source, _fingerprint(spelled, vocab_size), eos_ids, vocab_size]
    return dataclasses.replace(saved_tables.saved(json.dumps(source), make), is_tagged=grammar.is_tagged)
