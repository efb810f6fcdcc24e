import json
import re
import time

import jax
import pytest

import jlade
from jlade import cli, storage
from jlade.config import PLAIN
from jlade.generation.results import NOT_FINITE
from tests.tiny import PAPER, piece, tiny_llama, tiny_tokenizer

SHORT = ["import os\n", "--max-new-tokens", "12"]

PIECE = piece([5], "x")


@pytest.mark.slow
def test_prints_the_completion_and_both_rows(demo, capsys):
    params, tokenizer = demo
    expected = jlade.generate(params, SHORT[0], tokenizer=tokenizer, max_new_tokens=12, lookahead=None)
    assert cli.main(SHORT) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{SHORT[0]}{expected.text[0]}\n")
    assert "G=3" in printed
    assert "plain" in printed
    assert "\x1b" not in printed, "no colours when the output is not a terminal"


@pytest.mark.slow
def test_json_has_the_measurements(capsys):
    assert cli.main([*SHORT, "--json", "--lookahead", "2,3,2"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert jlade.LookaheadConfig.from_dict(result["lookahead"]) == jlade.LookaheadConfig.paper(2, 3, 2)
    assert result["text"] == result["plain"]["text"]
    assert result["plain"]["steps"] == result["plain"]["tokens"] == result["tokens"] == 12
    assert result["compression"] == result["tokens"] / result["steps"]
    assert result["tokens_per_second"] == pytest.approx(result["tokens"] / result["seconds"])


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_logits_that_are_not_finite_are_an_error(more, demo, monkeypatch, capsys):
    params, tokenizer = demo
    broken = params.replace(norm=params.norm.at[3].set(float("nan")))
    monkeypatch.setattr(storage, "read", lambda *arguments, **options: (broken, tokenizer))
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*SHORT, *more])
    assert exit_info.value.code == 1
    printed = capsys.readouterr()
    assert printed.out == ("" if more else f"{SHORT[0]}\n\n")
    assert printed.err == f"jlade complete: error: {NOT_FINITE}\n"


def test_no_lookahead_is_plain_decoding_alone(capsys):
    """Of a text that is the name of a command."""
    assert cli.main(["--json", "--max-new-tokens", "12", "--no-lookahead", "--", "chat"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompt"] == "chat"
    assert result["compression"] == 1
    assert "plain" not in result


def test_sampling_options_and_stop_strings_reach_both_decodings(monkeypatch, capsys):
    requests = []

    def stream(params, prompt, **request):
        requests.append(request)
        yield piece([5], "x")

    monkeypatch.setattr(jlade, "stream", stream)
    controls = ["--temperature", "0.8", "--top-k", "50", "--top-p", "0.9", "--repetition-penalty", "1.1", "--seed", "3"]
    assert cli.main([*SHORT, "--json", "--stop", "a", "--stop", "b", "--min-new-tokens", "2", *controls]) == 0
    assert {request["lookahead"] for request in requests} == {PLAIN, PAPER}
    for request in requests:
        assert request["sampling"] == jlade.SamplingConfig(temperature=0.8, top_k=50, top_p=0.9, repetition_penalty=1.1)
        assert (request["stop"], request["min_new_tokens"], request["max_new_tokens"]) == (["a", "b"], 2, 12)
        assert request["key"] == jax.random.key(3)


@pytest.mark.parametrize(("option", "grammar"), [("regex", "(ab|c){2}"), ("ebnf", 'root ::= "c" | "ab" root')])
def test_the_text_is_one_of_the_grammar(option, grammar, monkeypatch, tmp_path, capsys):
    params = tiny_llama(2, eos_ids=(12,))
    monkeypatch.setattr(storage, "read", lambda *arguments, **options: (params, tiny_tokenizer()))
    if option == "ebnf":
        (tmp_path / "grammar").write_text(grammar, encoding="utf-8")
        grammar = str(tmp_path / "grammar")
    command = ["a", "--json", "--lookahead", "4,4,3", "--temperature", "0", "--max-new-tokens", "24"]
    assert cli.main([*command, f"--{option}", grammar]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == result["plain"]["text"]
    is_whole = re.fullmatch("(ab|c){2}" if option == "regex" else "(ab)*c", result["text"]) is not None
    assert result["finish_reason"] == ("eos" if is_whole else "length")


def test_a_schema_is_read_from_its_file(monkeypatch, tmp_path, capsys):
    requests = []
    monkeypatch.setattr(jlade, "stream", lambda params, prompt, **request: iter([requests.append(request) or PIECE]))
    monkeypatch.setattr(jlade, "prepare", lambda *arguments, **request: (None, None))
    monkeypatch.setattr(jlade, "prefill", lambda *arguments: None)
    (tmp_path / "schema.json").write_text('{"type": "boolean"}', encoding="utf-8")
    assert cli.main([*SHORT, "--json", "--no-compare", "--schema", str(tmp_path / "schema.json")]) == 0
    assert requests[-1]["grammar"] == jlade.Grammar.json_schema('{"type": "boolean"}')


@pytest.mark.slow
def test_other_settings_can_be_compared_too(capsys):
    assert cli.main([*SHORT, "--json", "--also", "2,3,2"]) == 0
    result = json.loads(capsys.readouterr().out)
    (also,) = result["also"]
    assert jlade.LookaheadConfig.from_dict(also["lookahead"]) == jlade.LookaheadConfig.paper(2, 3, 2)
    for run in (also, result["plain"]):
        assert run["text"] == result["text"]
        assert run["identical"]
        assert run["first_difference"] is None


def test_without_comparison_the_prompt_is_decoded_once(monkeypatch, capsys):
    settings = []
    stream = jlade.stream

    def counted(params, prompt, **request):
        settings.append(request["lookahead"])
        return stream(params, prompt, **request)

    monkeypatch.setattr(jlade, "stream", counted)
    assert cli.main([*SHORT, "--no-compare"]) == 0
    assert set(settings) == {PAPER}
    printed = capsys.readouterr().out
    assert "plain" not in printed
    assert "identical" not in printed


def test_a_difference_of_the_texts_is_reported(monkeypatch, capsys):
    def stream(params, prompt, lookahead, **request):
        tokens = [5, 6, 7] if lookahead == PLAIN else [5, 6, 8]
        yield piece(tokens, "x")

    monkeypatch.setattr(jlade, "stream", stream)
    assert cli.main([*SHORT, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)["plain"]
    assert not plain["identical"]
    assert plain["first_difference"]["position"] == 2
    assert plain["first_difference"]["logit_gap"] > 0
    assert cli.main(SHORT) == 0
    gap = f"{plain['first_difference']['logit_gap']:.2g}"
    expected = f"not identical, in float32: plain differs from token 3 on, where the two largest logits are {gap} apart"
    assert expected in capsys.readouterr().out


def test_a_slow_wide_block_is_explained(monkeypatch, capsys):
    def stream(params, prompt, lookahead, **request):
        for _ in range(4 if lookahead == PLAIN else 2):
            time.sleep(0 if lookahead == PLAIN else 0.02)
            yield piece([5] * (1 if lookahead == PLAIN else 2), "x")

    monkeypatch.setattr(jlade, "stream", stream)
    assert cli.main(SHORT) == 0
    printed = capsys.readouterr().out
    figures = re.search(
        rf"a step accepts 2\.00 tokens and feeds {PAPER.block_size} to the model\. "
        r"This CPU takes ([\d.]+) plain steps for it",
        printed,
    )
    speed = float(re.search(r"G=3 .* ([\d.]+)x", printed)[1])  # in the table: tokens of a step over its time, rounded
    assert 2 / (speed + 0.005) - 0.05 <= float(figures[1]) <= 2 / (speed - 0.005) + 0.05
    assert "identical: both texts have the same 4 tokens" in printed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_is_chosen(dtype, monkeypatch, capsys):
    monkeypatch.setattr(jlade, "stream", lambda params, prompt, **request: iter([PIECE]))
    arguments = ["--dtype", dtype] if dtype != "float32" else []  # float32 is the default on CPUs
    assert cli.main([*SHORT, "--json", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == dtype


def test_ctrl_c_ends_with_the_figures_so_far(monkeypatch, capsys):
    def stream(params, prompt, **request):
        yield PIECE
        raise KeyboardInterrupt

    monkeypatch.setattr(jlade, "stream", stream)
    assert cli.main(SHORT) == 130
    assert "G=3 │      1 │     1" in capsys.readouterr().out
