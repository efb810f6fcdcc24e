import json
import re

import pytest

import jlade
from jlade import LookaheadConfig, cli
from jlade.cli.arguments import DEMO
from jlade.conversion import save_hf
from jlade.conversion.hf_config import read_config
from tests.tiny import tiny_llama


@pytest.fixture
def directory(tmp_path):
    """A directory with nothing but a config.json."""
    save_hf(tiny_llama(vocab_size=101, hidden_size=32), tmp_path / "whole")
    (tmp_path / "bare").mkdir()
    (tmp_path / "whole" / "config.json").rename(tmp_path / "bare" / "config.json")
    return tmp_path / "bare"


def plan(capsys, *arguments):
    assert cli.main(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_json_is_that_of_the_function(directory, capsys):
    arguments = ("--device", "v5e", "--count", 4, "--batch-size", 2, "--length", 64, "--int8", "--dtype", "float16")
    setting = ("--lookahead", "3,4,3", "--compression", "1.5")
    facts = json.loads(plan(capsys, "--model", directory, *arguments, *setting, "--json"))
    expected = jlade.plan(
        read_config(directory),
        "v5e",
        4,
        dtype="float16",
        bits=8,
        lookahead=LookaheadConfig.paper(3, 4, 3),
        batch_size=2,
        capacity=64,
        compression=1.5,
    )
    assert facts == expected.facts()
    assert len(facts["options"]) == 3 + 2 * 3  # data is 1 or 2
    assert {option["compression"] for option in facts["options"]} == {1.5}


def test_the_table_and_the_recommendation(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    printed = plan(capsys, "--model", DEMO, "--device", "H100", "--count", 4)
    best = jlade.plan(DEMO, "h100", 4).recommended
    data, lookahead, model = best.layout
    assert f"Recommended: jlade.make_mesh(data={data}, lookahead={lookahead}, model={model}), " in printed
    rows = re.findall(r"│ (\d+, \d+, \d+) +│ ([\w, ]+?) +│ +([\d.]+) │.*?([\d,]+) │\n", printed)
    speeds = [int(row[3].replace(",", "")) for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert len(rows) == 6
    assert best.layout in {tuple(map(int, row[0].split(", "))) for row in rows}


def test_without_options_it_plans_for_the_demo_model(small_demo, capsys):
    assert plan(capsys) == plan(capsys, "--model", small_demo, "--device", "h100")


def test_more_meshes_than_rows(capsys):
    """Of powers of two: data x lookahead x model divides 16, and 8 heads divide among 1, 2, 4 or 8 devices."""
    printed = plan(capsys, "--model", DEMO, "--device", "v6e", "--count", 16, "--batch-size", 16)
    assert f"--json has {15 + 10 + 6 + 3 - 12} more meshes" in printed


def test_nothing_fits(directory, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    printed = plan(capsys, "--model", directory, "--device", "l4", "--length", 64, "--batch-size", 2_000_000)
    assert "does not fit" in printed
    assert re.search(r"No mesh fits: a device needs at least .* and has 24\.1 GB\. Take more\s+devices", printed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "/no/where", "--device", "v5e"],
            "--model must be a directory, a GGUF file, smollm2 or an id of the Hugging Face Hub like 'owner/name', got "
            "'/no/where'",
        ),
        (["--model", DEMO, "--device", "cpu"], "--device: invalid choice: 'cpu'"),
        (["--model", DEMO, "--device", "v5e", "--count", 0], "count must be at least 1, got 0"),
        (
            ["--model", DEMO, "--device", "v5e", "--lookahead", "3"],
            "--lookahead: a setting is W,N,G, tree=M, W,N,G:tree=M, jacobi=M, code, prose or creative; got '3'",
        ),
        (
            ["--model", DEMO, "--device", "v5e", "--compression", "x"],
            "must be smollm2, paper or a number, got 'x'",
        ),
        (["--model", DEMO, "--device", "v5e", "--compression", "2"], "compression=2.0 is that of one setting"),
    ],
)
def test_refusals(arguments, message, refused):
    assert message in refused(["plan", *map(str, arguments)])
