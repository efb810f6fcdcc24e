"""Tokens per step of JSON tasks, with drafts of the grammar and without them, as other constraints have none.

    python benchmarks/grammar_drafts.py --model smollm2 --lookahead tree=63

The tasks are calls of functions and records, with a schema each (`benchmarks/prompts/json_tasks.jsonl`). Both ways have
the same text: the grammar masks the same tokens.
"""

import functools
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import flax.struct
import jax
import numpy as np

import jlade
from benchmarks import report
from jlade.cli import arguments
from jlade.constraints.grammar import Tables
from jlade.generation.chat_template import encode, load_tokenizer

TASKS = Path(__file__).parent / "prompts" / "json_tasks.jsonl"


@flax.struct.dataclass
class Masks:
    """The constraint of a grammar without its drafts."""

    tables: Tables

    def start(self, tokens: jax.Array, length: jax.Array) -> jax.Array:
        return self.tables.start(tokens, length)

    def advance(self, state: jax.Array, token: jax.Array) -> jax.Array:
        return self.tables.advance(state, token)

    def allowed(self, state: jax.Array) -> jax.Array:
        return self.tables.allowed(state)


def main() -> None:
    parser = report.make_parser(__doc__)
    arguments.add_model(parser)
    arguments.add_lookahead(parser)
    parser.add_argument("--max-new-tokens", type=int, default=160, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every N-th task")
    options = parser.parse_args()
    params, tokenizer = arguments.load(options)
    of_chat = load_tokenizer(arguments.find(options))
    lookahead = arguments.lookahead(options)
    common = {"tokenizer": tokenizer, "max_new_tokens": options.max_new_tokens, "lookahead": lookahead}
    rows = []
    for task in report.read_lines(TASKS)[:: options.every]:
        prompt = encode(of_chat, [{"role": "user", "content": task["prompt"]}])
        grammar = jlade.Grammar.json_schema(task["schema"])
        inputs, _ = jlade.prepare(params, prompt, grammar=grammar, **common)
        assert isinstance(inputs.constraint, Tables)
        generate = functools.partial(jlade.generate, params, prompt, **common)
        with_drafts = generate(grammar=grammar)
        without = generate(constraint=Masks(inputs.constraint))
        np.testing.assert_array_equal(with_drafts.tokens, without.tokens)
        row = {"name": task["name"], "tokens": int(with_drafts.lengths[0])}
        row |= {"finish_reason": with_drafts.finish_reason[0]}
        rows.append(row | {"steps": int(with_drafts.steps[0]), "steps_without": int(without.steps[0])})
        print(rows[-1], file=sys.stderr, flush=True)
    total = {name: sum(row[name] for row in rows) for name in rows[0] if name not in ("name", "finish_reason")}
    facts: dict[str, Any] = {
        "tasks": len(rows),
        "whole": sum(row["finish_reason"] == "eos" for row in rows),
        "tokens_per_step": total["tokens"] / total["steps"],
        "tokens_per_step_without": total["tokens"] / total["steps_without"],
        "gain": total["steps_without"] / total["steps"],
        "least_gain": min(row["steps_without"] / row["steps"] for row in rows),
    }
    cells = ([str(row[name]) for name in ("name", "tokens", "steps", "steps_without")] for row in rows)
    report.print_table(["task", "tokens", "steps", "without drafts of the grammar"], cells)
    print(facts)
    report.write(options.json, facts | {"rows": rows})


if __name__ == "__main__":
    main()
