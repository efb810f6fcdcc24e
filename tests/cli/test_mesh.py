"""`--mesh`: the commands on several devices give the texts of one device, and refuse meshes that cannot work."""

import io
import json
import sys

import numpy as np
import pytest

import jlade
from jlade import cli
from jlade.costs import choice
from jlade.generation import difference
from jlade.models import sharding
from tests.tiny import tiny_llama

SETTING = ["--lookahead", "3,3,2"]


@pytest.fixture
def model(tiny_model):
    """The directory of a small model, and of prompts."""
    (tiny_model / "prompts").write_text("a\nab\nc\n")
    return tiny_model


@pytest.mark.slow
def test_generate_gives_the_texts_of_one_device(model, capsys):
    arguments = ["generate", str(model / "prompts"), "--lines", "--model", str(model), "--max-new-tokens", "6"]
    arguments += [*SETTING, "--temperature", "1", "--json", "--batch-size", "8"]
    printed = []
    for mesh in ([], ["--mesh", "data=2,lookahead=2,model=2"]):
        assert cli.main([*arguments, *mesh]) == 0
        printed.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    assert printed[0] == printed[1]


@pytest.mark.slow
def test_complete_compares_on_the_mesh(model, capsys):
    arguments = ["ab", "--model", str(model), "--max-new-tokens", "6", *SETTING, "--mesh", "lookahead=4", "--json"]
    assert cli.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plain"]["identical"]
    assert found["plain"]["text"] == found["text"]


@pytest.mark.slow
def test_the_chat_keeps_its_state_on_the_mesh(model, monkeypatch, capsys):
    (model / "template").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    arguments = ["chat", "--model", str(model), "--template", str(model / "template"), "--max-new-tokens", "6"]
    states, stream, printed = [], jlade.stream, []

    def recorded(params, prompt, **request):
        states.append(request["state"])
        return stream(params, prompt, **request)

    monkeypatch.setattr(jlade, "stream", recorded)
    for mesh in ([], ["--mesh", "lookahead=2,model=2"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
        assert cli.main([*arguments, *SETTING, *mesh]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert len(states) == 4
    assert len(states[3].cache.keys[0].devices()) == 4


@pytest.mark.slow
def test_tune_stores_for_the_mesh_and_inspect_lists_it(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    arguments = ["tune", "--model", str(model), str(model / "prompts"), "--lines", "--max-new-tokens", "16", "--json"]
    assert cli.main([*arguments, "--settings", "0,3,1", "--mesh", "lookahead=2"]) == 0
    capsys.readouterr()
    assert cli.main(["inspect", str(model), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [found["devices"] for found in facts["tuned"]] == ["data 1, lookahead 2, model 1"]
    assert facts["source"] == "estimated", "the result is for two devices"
    assert cli.main(["inspect", str(model)]) == 0
    assert "tuned for batch size 1 on data 1, lookahead 2, model 1" in capsys.readouterr().out
    params, mesh = tiny_llama(num_layers=1), jlade.make_mesh(lookahead=2)
    assert choice.find(params, params.decoder, 1, mesh) is not None
    assert choice.find(params, params.decoder, 1) is None


@pytest.mark.slow
def test_the_gap_of_logits_is_that_of_one_device():
    params = tiny_llama(vocab_size=16, num_layers=1)
    divided = sharding.put(params, sharding.mesh_for(params.config, jlade.make_mesh(model=4)))
    one, several = (difference.find(p, [3, 1, 4], [1, 5, 9], [1, 5, 8]) for p in (params, divided))
    assert several.position == one.position
    np.testing.assert_allclose(several.logit_gap, one.logit_gap, atol=1e-5)
