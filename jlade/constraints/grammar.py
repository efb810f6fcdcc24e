"""Grammars: what a whole text may be, compiled on the host into tables that a step reads."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Annotated, Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.constraints import automaton, ebnf, json_schema, regex
from jlade.constraints.automaton import DEAD, Automaton
from jlade.constraints.tokens import Table
from jlade.mesh import SHARED


@dataclasses.dataclass(frozen=True)
class Grammar:
    """The texts that a generation may have, made by `json_schema`, `json`, `regex`, `choice` or `ebnf`.

    It is compiled for a tokenizer when it is first used, and kept by its content.
    """

    kind: str
    source: str

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | bool | str) -> Self:
        """Returns JSON that a schema accepts; see `jlade.constraints.json_schema`.

        Properties come in the order of their declaration. Objects have no others unless `additionalProperties` says so.

        Raises:
          ValueError: the schema is wrong, or asks for what is not supported; names the path and the keyword.
        """
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return cls("json_schema", text)._checked()

    @classmethod
    def json(cls) -> Self:
        """Returns any JSON object, up to 3 levels deep."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Returns the texts that match a regular expression as a whole, in the syntax of Python's `re`.

        Raises:
          ValueError: the pattern is wrong, or has what is not supported: references, and assertions within it.
        """
        return cls("regex", pattern)._checked()

    @classmethod
    def choice(cls, options: Sequence[str]) -> Self:
        """Returns the texts of a list."""
        if isinstance(options, str) or not options or not all(isinstance(each, str) for each in options):
            raise ValueError(f"options must be one or more strings, got {options!r}")
        return cls("choice", json.dumps(list(options)))._checked()

    @classmethod
    def ebnf(cls, rules: str) -> Self:
        """Returns the texts of the rule "root" of a grammar in EBNF; see `jlade.constraints.ebnf`.

        Raises:
          ValueError: names the line and what is wrong.
        """
        return cls("ebnf", rules)._checked()

    @property
    def automaton(self) -> Automaton:
        """The automaton over bytes."""
        return _automaton(self)

    def _checked(self) -> Self:
        _ = self.automaton
        return self


@functools.lru_cache(maxsize=256)
def _automaton(grammar: Grammar) -> Automaton:
    match grammar.kind:
        case "json_schema":
            return automaton.build(json_schema.parse(grammar.source))
        case "regex":
            return automaton.build(regex.parse(grammar.source))
        case "choice":
            return automaton.build(automaton.choice(*map(automaton.literal, json.loads(grammar.source))))
        case "ebnf":
            return automaton.build(ebnf.parse(grammar.source))
    raise ValueError(f"kind must be json_schema, regex, choice or ebnf, got {grammar.kind!r}")


@flax.struct.dataclass
class Tables:
    """The tables of the grammars of a batch: a `Constraint`. State 0 allows all tokens, for sequences without one."""

    next_state: Annotated[jax.Array, SHARED]  # [S, C] int32, states of all tables, `DEAD` for tokens not allowed
    class_of_token: Annotated[jax.Array, SHARED]  # [K, V] int32
    first: jax.Array  # [B] int32, the first state of each sequence
    which: jax.Array  # [B] int32, its row of `class_of_token`

    @classmethod
    def of(cls, tables: Sequence[Table | None]) -> Self:
        """Returns the tables of B sequences, None for one without a grammar, padded so that few sizes occur."""
        different = list(dict.fromkeys(table for table in tables if table is not None))
        num_states = 1 + sum(len(table.next_state) for table in different)
        num_classes = max(table.next_state.shape[1] for table in different)
        next_state = np.full((_padded(num_states, 128), _padded(num_classes, 128)), DEAD, np.int32)
        next_state[0] = 0
        class_of_token = np.zeros((_padded(len(different), 1), len(different[0].class_of_token)), np.int32)
        begins, begin = {}, 1
        for row, table in enumerate(different):
            states, classes = table.next_state.shape
            of_table = np.where(table.next_state == DEAD, DEAD, table.next_state + begin)
            next_state[begin : begin + states, :classes] = of_table
            class_of_token[row] = table.class_of_token
            begins[table] = begin, row
            begin += states
        places = [(0, 0) if table is None else begins[table] for table in tables]
        first, which = (np.array(each, np.int32) for each in zip(*places, strict=True))
        arrays: Any = cls
        return arrays(next_state, class_of_token, first, which)

    def start(self, tokens: jax.Array, length: jax.Array) -> jax.Array:
        return self.first

    def advance(self, state: jax.Array, token: jax.Array) -> jax.Array:
        return jnp.maximum(self.next_state[state, self.class_of_token[self.which, token]], 0)

    def allowed(self, state: jax.Array) -> jax.Array:
        arguments = self.next_state[state] != DEAD, self.class_of_token[self.which]
        return jax.lax.platform_dependent(*arguments, tpu=by_product, default=by_index)


def by_index(is_allowed: jax.Array, class_of_token: jax.Array) -> jax.Array:
    """Returns which tokens are allowed [V], given which classes are [C], and the class of each token [V]."""
    return is_allowed[class_of_token]


def by_product(is_allowed: jax.Array, class_of_token: jax.Array) -> jax.Array:
    """The same by a product of matrices: TPUs read single elements one by one."""
    classes = jnp.arange(len(is_allowed), dtype=jnp.int32)
    one_hot = (class_of_token[None, :] == classes[:, None]).astype(jnp.bfloat16)
    return is_allowed.astype(jnp.bfloat16) @ one_hot > 0


def _padded(number: int, least: int) -> int:
    """Returns the least power of two, times `least`, that is at least `number`."""
    return least * (1 << max(0, -(-number // least) - 1).bit_length())
