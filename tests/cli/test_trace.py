import json
import re

import jax
import pytest

import jlade
from jlade import cli
from jlade.cli import trace
from jlade.evaluation import trace as trace_lib
from jlade.lookahead import names

SHORT = ["trace", "import os\n", "--max-new-tokens", "12", "--lookahead", "2,3,2"]


def test_the_page_is_that_of_the_trace(demo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*SHORT, "--temperature", "0.5", "--seed", "3"]) == 0
    params, tokenizer = demo
    expected = trace_lib.trace(
        params,
        "import os\n",
        tokenizer=tokenizer,
        max_new_tokens=12,
        lookahead=jlade.LookaheadConfig.paper(2, 3, 2),
        sampling=jlade.SamplingConfig(temperature=0.5),
        key=jax.random.key(3),
    )
    assert (tmp_path / "trace.html").read_text(encoding="utf-8") == trace_lib.page(expected)
    steps = len(expected.steps)
    assert capsys.readouterr().out == f"trace.html: 12 tokens in {steps} steps, {12 / steps:.2f} per step\n"


def test_the_default_setting_is_the_one_in_the_help(small_demo, tmp_path):
    path = tmp_path / "page.html"
    assert cli.main(["trace", "x", "--model", str(small_demo), "--max-new-tokens", "1", "--output", str(path)]) == 0
    lookahead = json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"))[1])["lookahead"]
    default = re.search(r"\(default: (\S+), a window and", " ".join(trace.parser().format_help().split()))[1]
    assert jlade.LookaheadConfig.from_dict(lookahead) == names.parse(default)


def test_a_page_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch, capsys):
    path = tmp_path / "new" / "page.html"
    arguments = ["trace", "x", "--no-lookahead", "--max-new-tokens", "2", "--output", str(path)]
    assert cli.main(arguments) == 0
    first = path.read_text(encoding="utf-8")
    assert cli.main([*arguments[:1], "y", *arguments[2:]]) == 0
    second = path.read_text(encoding="utf-8")
    data = re.search(r'id="data">(.*?)</script>', second)[1]
    assert json.loads(data)["texts"][:2] == ["", "y"]
    assert second != first

    def page(trace):
        raise RuntimeError("no page")

    monkeypatch.setattr(trace_lib, "page", page)
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert "no page" in capsys.readouterr().err
    assert [file.read_text(encoding="utf-8") for file in path.parent.iterdir()] == [second]
