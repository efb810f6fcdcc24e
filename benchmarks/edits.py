"""Tokens per step of edits with the old text as prediction: `jlade.generate(..., prediction=old)`.

    python benchmarks/edits.py HumanEval.jsonl.gz --model smollm2

The tasks are made of the programs of a file like HumanEval's: rename the function, add a comment, change a line, by
turns. The model is asked for the whole new program, and decodes it three times: plainly, and with the same tree with
and without the prediction. The texts have to be the same. Only steps are counted, so the time does not matter. A model
copies in fact where most of its tokens stand in the old program too, in the same order.
"""

import difflib
import sys
from pathlib import Path
from typing import NamedTuple

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import numpy as np

import jlade
from benchmarks import report
from jlade.conversion import location
from jlade.evaluation import records
from jlade.generation import chat_template
from jlade.lookahead import names

COPIED = 0.9  # share of the tokens from which on an answer counts as a copy


class Task(NamedTuple):
    """An edit that the model is asked for."""

    kind: str
    order: str
    old: str


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("data", help="programs: records with prompt, canonical_solution and entry_point")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lookahead", default="tree=63", metavar="SETTING")
    parser.add_argument("--tasks", type=int, default=20, metavar="Q")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="M")
    options = parser.parse_args()

    params, tokenizer = report.load(options.model, "float32")
    chat = chat_template.load_tokenizer(location.find(options.model))
    setting = names.parse(options.lookahead)
    rows: list[tuple[str, float, int, int, int]] = []
    for task in tasks(options.data, options.tasks):
        old = f"```python\n{task.old}\n```"
        messages = [{"role": "user", "content": f"{task.order} Answer with the whole program.\n\n{old}"}]
        prompt = chat_template.encode(chat, messages)
        request = {"tokenizer": tokenizer, "max_new_tokens": options.max_new_tokens}
        plain = jlade.generate(params, prompt, lookahead=None, **request)
        without = jlade.generate(params, prompt, lookahead=setting, **request)
        predicted = jlade.generate(params, prompt, lookahead=setting, prediction=old, **request)
        for out in (without, predicted):
            np.testing.assert_array_equal(out.tokens, plain.tokens)
        new = plain.tokens[0, : plain.lengths[0]].tolist()
        blocks = difflib.SequenceMatcher(None, tokenizer.encode(old).ids, new, autojunk=False).get_matching_blocks()
        copied = sum(block.size for block in blocks) / len(new)
        rows.append((task.kind, copied, len(new), int(without.steps[0]), int(predicted.steps[0])))

    kinds = dict.fromkeys(row[0] for row in rows)
    groups = {kind: [row for row in rows if row[0] == kind] for kind in kinds}
    groups |= {"all": rows, "copies": [row for row in rows if row[1] >= COPIED]}
    figures = {}
    for name, group in groups.items():
        if group:
            tokens, steps, predicted_steps = np.sum([row[2:] for row in group], axis=0).tolist()
            copied = sum(row[1] * row[2] for row in group) / tokens
            figures[name] = {"tasks": len(group), "tokens": tokens, "copied": copied}
            figures[name] |= {"without": tokens / steps, "with": tokens / predicted_steps}
    forms = {"tasks": "", "tokens": "", "copied": ".0%", "without": ".2f", "with": ".2f"}
    cells = ([name, *(f"{of[key]:{form}}" for key, form in forms.items())] for name, of in figures.items())
    report.print_table(["edits", *forms], cells, "Tokens per step with a prediction")
    report.write(options.json, {"lookahead": options.lookahead, "tokens_per_step": figures})


def tasks(file: str, number: int) -> list[Task]:
    """Returns edits of programs spread over a file."""
    programs = records.read(file)
    made = []
    for i in range(number):
        program = programs[i * len(programs) // number]
        old, name = program.text("prompt") + program.text("canonical_solution"), program.text("entry_point")
        orders = (
            ("rename", f"Rename the function {name} to compute_{name}."),
            ("add a comment", "Add the comment `# Checked.` as the first line of this program."),
            ("change a line", f"Write the name of the parameter of {name} in capital letters."),
        )
        made.append(Task(*orders[i % len(orders)], old.strip()))
    return made


if __name__ == "__main__":
    main()
