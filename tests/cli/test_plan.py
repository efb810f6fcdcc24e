import json
import re

import pytest

import jlade
from jlade import LookaheadConfig
from jlade.cli.arguments import DEMO
from jlade.conversion.hf_config import read_config


@pytest.fixture
def plan(run):
    return lambda *arguments: run("plan", *arguments).out


def test_json_is_that_of_the_function(bare, plan):
    arguments = ("--device", "v5e", "--count", 4, "--batch-size", 2, "--length", 64, "--int8", "--dtype", "float16")
    setting = ("--lookahead", "3,4,3", "--compression", "1.5")
    facts = json.loads(plan("--model", bare, *arguments, *setting, "--json"))
    expected = jlade.plan(
        read_config(bare),
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


def test_the_table_and_the_recommendation(plan, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    printed = plan("--model", DEMO, "--device", "H100", "--count", 4)
    best = jlade.plan(DEMO, "h100", 4).recommended
    data, lookahead, model = best.layout
    assert f"Recommended: jlade.make_mesh(data={data}, lookahead={lookahead}, model={model}), " in printed
    rows = re.findall(r"│ (\d+, \d+, \d+) +│ ([\w, ]+?) +│ +([\d.]+) │.*?([\d,]+) │\n", printed)
    speeds = [int(row[3].replace(",", "")) for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert len(rows) == 6
    assert best.layout in {tuple(map(int, row[0].split(", "))) for row in rows}


def test_without_options_it_plans_for_the_demo_model(small_demo, plan):
    assert plan() == plan("--model", small_demo, "--device", "h100")


def test_more_meshes_than_rows(plan):
    """Of powers of two: data x lookahead x model divides 16, and 8 heads divide among 1, 2, 4 or 8 devices."""
    printed = plan("--model", DEMO, "--device", "v6e", "--count", 16, "--batch-size", 16)
    assert f"--json has {15 + 10 + 6 + 3 - 12} more meshes" in printed


def test_nothing_fits(bare, plan, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    printed = plan("--model", bare, "--device", "l4", "--length", 64, "--batch-size", 2_000_000)
    assert "does not fit" in printed
    assert re.search(r"No mesh fits: a device needs at least .* and has 24\.1 GB\. Take more\s+devices", printed)
