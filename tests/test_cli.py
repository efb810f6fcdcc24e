import json
import re

import pytest

from jlade import cli

SHORT = ["import os\n", "--max-new-tokens", "12"]


def test_prints_the_completion_and_both_rows(capsys):
    assert cli.main(SHORT) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("import os\nimport ")
    assert "prompt lookup W=0 N=4 G=1" in printed
    assert "plain" in printed
    assert "\x1b" not in printed, "no colours when the output is not a terminal"


def test_json_tells_what_was_measured(capsys):
    assert cli.main([*SHORT, "--json", "--window", "2", "--ngram", "3", "--guesses", "2"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [result["lookahead"][name] for name in ("window_size", "ngram_size", "guess_set_size")] == [2, 3, 2]
    assert result["text"] == result["plain"]["text"]
    assert result["plain"]["steps"] == result["plain"]["tokens"] == result["tokens"] == 12
    assert result["compression"] == result["tokens"] / result["steps"]
    assert result["tokens_per_second"] == pytest.approx(result["tokens"] / result["seconds"])


def test_no_lookahead_is_plain_decoding_alone(capsys):
    assert cli.main([*SHORT, "--json", "--no-lookahead"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["compression"] == 1
    assert "plain" not in result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: prompt"),
        (["x", "--ngram", "1"], "ngram_size must be at least 2, got 1"),
        (["x", "--window", "many"], "--window: invalid int value: 'many'"),
        (["x", "--model", "/nowhere"], "path must be a directory .* got '/nowhere'"),
        (["x", "--max-new-tokens", "4000"], "the model reads at most 2048 positions"),
    ],
)
def test_bad_arguments_exit_with_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err)
