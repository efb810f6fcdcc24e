"""Commands that are refused with an error in one line, which names the argument, its value and what is accepted."""

import re
import shlex

import pytest

from jlade import storage

SETTING = "a setting is W,N,G, tree=M, W,N,G:tree=M, jacobi=M, code, prose or creative"
NO_MODEL = "must be a directory, a GGUF file, smollm2 or an id of the Hugging Face Hub .*got '/no/where'"
NAMES = "mesh must be like data=2,lookahead=4, with the names data, lookahead, model"

BEFORE_LOADING = [
    ("chta", r"^jlade: error: did you mean `jlade chat`\? To complete the text 'chta': jlade complete chta\n"),
    ("help chta", "^jlade: error: there is no command 'chta'; there are complete, generate, chat, "),
    ("complete", "^jlade complete: error: the following arguments are required: PROMPT"),
    ("x --also 5,5", rf"^jlade complete: error: --also: {SETTING}; got '5,5'\n"),
    ("x --also 5,5,5 --no-compare", "^jlade complete: error: --also asks for a comparison"),
    ("x --lookahead 2,1,2", "ngram_size must be at least 2, got 1"),
    ("x --lookahead many", f"--lookahead: {SETTING}; got 'many'"),
    ("x --no-lookahead --lookahead 0,4,1", "--lookahead has no effect with --no-lookahead: leave one of them out"),
    ("x --temperature -1", "temperature must be a number of at least 0, got -1.0"),
    ("x --top-p 0.9", "top_p has no effect at temperature 0: set a temperature above 0, or leave it out"),
    ("x --temperature 0 --min-p 0.1", "min_p has no effect at temperature 0"),
    ("x --seed 0", "seed has no effect at temperature 0"),
    ("x --seed -1", "seed must be at least 0, got -1"),
    ("x --seed 4294967296", r"seed must be below 2\*\*32, got 4294967296"),
    ("x --schema none.json", "--schema none.json: none.json cannot be read"),
    ("x --regex (a", r"regex '\(a': missing \)"),
    ("x --regex a --ebnf b", "argument --ebnf: not allowed with argument --regex"),
    ("x --prior nowhere", "path must be a file written by jlade.save_prior, got 'nowhere'"),
    ("x --mesh 4", f"^jlade complete: error: --{NAMES}"),
    ("x --mesh columns=4", f"^jlade complete: error: --{NAMES}"),
    ("x --mesh model=2,model=2", f"^jlade complete: error: --{NAMES}"),
    ("x --mesh model=-1", f"^jlade complete: error: --{NAMES}"),
    ("x --mesh model=0", "^jlade complete: error: model must be at least 1, got 0"),
    ("x --mesh lookahead=16", "^jlade complete: error: data=1, lookahead=16, model=1 needs 16 devices, and "),
    ("x --mesh data=2", "^jlade complete: error: --mesh has data=2, but this command decodes one"),
    ("chat --mesh data=2", "^jlade chat: error: --mesh has data=2, but this command decodes one"),
    ("chat --temperature -1", "temperature must be a number of at least 0, got -1.0"),
    ("chat --template /nowhere", "/nowhere cannot be read"),
    ("chat --model /no/where", NO_MODEL),
    ("generate --batch x", r"^jlade generate: error: argument --batch-size: invalid int value: 'x' \("),
    ("generate --model no/where --temperature -1", r"temperature must be a number of at least 0, got -1\.0"),
    ("generate nowhere", "^jlade generate: error: nowhere cannot be read: No such file or directory\n"),
    ("generate x --batch-size 3 --mesh data=2", "--batch-size must be a multiple of 2, the size of data in --mesh"),
    ("generate --mesh model=2 --distributed notes.py", "--distributed must be like 10.0.0.1:1234,2,0"),
    ("generate --mesh model=2 --distributed here:x,2,0", "--distributed must be like 10.0.0.1:1234,2,0"),
    ("generate --mesh model=2 --distributed here:1,2,2", "must be below the number of processes, 2, got 2"),
    ("generate --mesh model=2 --distributed here:1,0,0", "number of processes in --distributed must be at least 1"),
    ("generate --distributed here:1,2,0", "--distributed needs --mesh"),
    ("tune --mesh data=2", "^jlade tune: error: --batch-size must be a multiple of 2"),
    ("tune --settings 15,5", f"--settings: {SETTING}; got '15,5'"),
    ("tune --settings 15,1,15", "ngram_size must be at least 2, got 1"),
    ("tune --temperature -1", "temperature must be a number of at least 0, got -1.0"),
    ("tune --plot plot.gold", "must end in one of .*png"),
    ("tune /no/where", "/no/where cannot be read"),
    ("trace", "the following arguments are required: PROMPT"),
    ("trace x --lookahead 2,1,2", "ngram_size must be at least 2, got 1"),
    ("trace x --seed 1", "seed has no effect at temperature 0"),
    ("trace x --max-new-tokens 0", "max_new_tokens must be at least 1, got 0"),
    ("trace x --mesh data=2", "--mesh has data=2, but this command decodes one prompt at a time"),
    ("trace x --output .", r"--output must be a file, got \."),
    ("prior --output new --texts nowhere", "nowhere cannot be read"),
    ("prior --output new --texts .", "--texts must name files, or directories with files"),
    ("prior --output . --texts x", "--output must be a file"),
    ("inspect /no/where", f"--model {NO_MODEL}"),
    (f"inspect {__file__}", "--model must be a directory, .*, got '.*test_refusals.py'"),
    ("inspect --length 2049", "--length must be at most 2048, the model's maximum, got 2049"),
    ("inspect --length 0", "--length must be at least 1, got 0"),
    ("inspect --batch-size 0", "--batch-size must be at least 1, got 0"),
    ("inspect --dtype int8", "--dtype: invalid choice: 'int8'"),
    ("inspect --lookahead 2,3,1", "--lookahead has no effect without --device"),
    ("inspect --attention plain", "--attention has no effect without --device"),
    ("inspect --int8", "--bits has no effect without --device"),
    ("inspect --engine", "--engine has no effect without --device"),
    ("inspect --device cpu --lookahead 2,3", f"--lookahead: {SETTING}; got '2,3'"),
    ("inspect --device cpu --length 2049", "capacity must be at most 2048, the model's positions, got 2049"),
    ("inspect --device h300", "invalid choice: 'h300'"),
    ("inspect /no/where --device cpu", f"--model {NO_MODEL}"),
    ("plan --model /no/where --device v5e", f"--model {NO_MODEL}"),
    ("plan --device cpu", "--device: invalid choice: 'cpu'"),
    ("plan --device v5e --count 0", "count must be at least 1, got 0"),
    ("plan --device v5e --lookahead 3", f"--lookahead: {SETTING}; got '3'"),
    ("plan --device v5e --compression x", "must be smollm2, paper or a number, got 'x'"),
    ("plan --device v5e --compression 2", r"compression=2\.0 is that of one setting"),
    ("compile", "are required: --output"),
    ("compile --output .", "output must not exist yet"),
    ("compile --output new --batch-size 0", "batch_size must be"),
    ("compile --output new --top-p 0.5", "top_p has no effect at temperature 0"),
    ("compile --output new --capacity 64", "--capacity has no effect without --engine serve"),
    ("compile --output new --engine serve --length 64", "--length has no effect with --engine serve"),
    ("compile --output new --engine serve --max-sequences 0", "max_sequences must be"),
    (
        "compile --output new --engine generate --max-sequences 2",
        "max-sequences has no effect with --engine generate",
    ),
    ("compile --output new --engine generate --top-k 5", "--top-k has no effect with --engine generate"),
    ("compile --output new --engine generate --length 1", "--length must be at least 2"),
    ("compile --output new --engine generate", "--batch-size must be at least 2, got 1"),
]
AFTER_LOADING = [
    ("caf\udcff", "UTF-8"),
    ("x --model /no/where", f"path {NO_MODEL}"),
    ("x --stop ''", "stop must "),
    (f"{'x ' * 2100!r}", "prompt of 2102 tokens leaves no room for a new one; the model reads at most 2048 positions"),
    ("x --max-new-tokens 4000", "the model reads at most 2048 positions"),
    ("x --mesh model=3", "^jlade complete: error: mesh has model=3, but the model has 8 heads, "),
    ("x --programs new", "programs must be a directory written by jlade compile"),
    ("tune --max-new-tokens 3", "max_new_tokens must be at least 50, got 3"),
    ("tune --max-new-tokens 4000", "with max_new_tokens=4000 they exceed the model's 2048 positions"),
    ("tune --batch-size 0", "batch_size must be at least 1, got 0"),
    ("tune --model /no/where", f"path {NO_MODEL}"),
]


def check(line, message, refused):
    error = refused(shlex.split(line))
    assert re.search(message, error)
    assert error.count("\n") == 1


@pytest.mark.parametrize(("line", "message"), BEFORE_LOADING)
def test_arguments_are_refused_before_anything_is_loaded_or_written(line, message, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(storage, "read", lambda *_, **__: pytest.fail("a model is loaded"))
    check(line, message, refused)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("line", "message"), AFTER_LOADING)
def test_arguments_that_do_not_fit_the_model_are_refused(line, message, refused):
    check(line, message, refused)
