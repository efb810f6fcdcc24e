"""A wrong argument in an example is found by mypy and by pyright, as a reader has them."""

import re

import pytest

from tools import user_types

pytest.importorskip("mypy", reason="the extra lint installs it")
pytest.importorskip("pyright", reason="the extra lint installs it")

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
    "an attribute of a state": 'print(jlade.start(*jlade.prepare(params, "def f(")).tokens)\n',
}


@pytest.mark.slow
def test_mistakes_are_found_by_both_checkers(tmp_path):
    found = user_types.check({"example.py": RIGHT + "".join(WRONG.values())}, tmp_path / "examples")
    first = RIGHT.count("\n") + 1
    for name, output in found.items():
        lines = {int(line) for line in re.findall(r"example\.py:(\d+):(?:\d+)?.*error", output.stdout)}
        assert lines == set(range(first, first + len(WRONG))), (name, output.stdout, output.stderr)
