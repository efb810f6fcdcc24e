"""The examples that mypy and pyright check are those of the documentation, and both find wrong arguments in them."""

import re

import pytest

from tests.pages import PAGES, ROOT, read_blocks
from tools import user_types

RIGHT = """\
import jlade

params, tokenizer = jlade.demo()
out = jlade.generate(params, "def f(", max_new_tokens=8, sampling=jlade.SamplingConfig(temperature=0.5))
print(out.text[0], out.lengths.sum(), [option.layout for option in jlade.plan("model", "h100").options])
"""
WRONG = {
    "a name": 'jlade.generate(params, "def f(", max_tokens=8)\n',
    "a type": 'jlade.generate(params, "def f(", max_new_tokens="8")\n',
    "a choice": 'jlade.generate(params, "def f(", lookahead="tree")\n',
    "a setting": "jlade.LookaheadConfig.tree(63, sources=7)\n",
    "an option of a request": 'jlade.Engine(params).submit("def f(", max_new_tokens=8, temperature=0.5)\n',
    "an attribute": 'print(jlade.generate(params, "def f(").token)\n',
    "an argument that is missing": 'print(jlade.start(*jlade.prepare(params, "def f(")).tokens)\n',
}


def test_all_examples_are_checked_at_their_lines():
    examples = user_types.examples()
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {
        name.removeprefix("examples/") for name in examples if name.startswith("examples/")
    }
    for page in PAGES:
        lines = examples.pop(str(page.relative_to(ROOT).with_suffix(".py"))).splitlines()
        for block in read_blocks(page)[0]:
            if block.kind == "python":
                code = block.text.splitlines()
                assert lines[block.line : block.line + len(code)] == code
                lines[block.line : block.line + len(code)] = [""] * len(code)
        assert not any(lines), page.name
    assert all(name.startswith("examples/") for name in examples)


@pytest.mark.slow
def test_mistakes_are_found_by_both_checkers(tmp_path):
    for checker in ("mypy", "pyright"):
        pytest.importorskip(checker, reason="the extra lint installs it")
    found = user_types.check({"example.py": RIGHT + "".join(WRONG.values())}, tmp_path / "examples")
    first = RIGHT.count("\n") + 1
    for name, output in found.items():
        lines = {int(line) for line in re.findall(r"example\.py:(\d+):(?:\d+)?.*error", output.stdout)}
        assert lines == set(range(first, first + len(WRONG))), (name, output.stdout, output.stderr)
