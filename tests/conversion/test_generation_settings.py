"""generation_config.json: what is honoured, as transformers does, what is named, and what is refused."""

import contextlib
import json
import math
import warnings

import jax
import pytest

import jlade
from jlade import SamplingConfig
from jlade.conversion import generation_settings, save_hf
from jlade.conversion.hf_config import read_config
from jlade.conversion.json_files import Values
from jlade.generation import stop_strings
from tests.tiny import slow, tiny_llama, tiny_tokenizer


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint without generation_config.json."""
    directory = tmp_path_factory.mktemp("written")
    save_hf(tiny_llama(3), directory / "hf")
    tiny_tokenizer().save(str(directory / "hf" / "tokenizer.json"))
    (directory / "hf" / "generation_config.json").unlink()
    return directory / "hf"


@pytest.fixture
def checkpoint(written, tmp_path):
    """A function that makes a checkpoint with settings of generation, or keys of config.json: its directory."""

    def make(settings=None, **keys):
        for file in written.iterdir():
            (tmp_path / file.name).symlink_to(file)
        if settings is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(settings))
        if keys:
            (tmp_path / "config.json").unlink()
            (tmp_path / "config.json").write_text(json.dumps(json.loads((written / "config.json").read_text()) | keys))
        return tmp_path

    return make


def test_the_table_has_every_setting_of_transformers():
    transformers = pytest.importorskip("transformers", reason="the test extra installs it on Python 3.11 only")
    config = transformers.GenerationConfig()
    assert {key for key in vars(config) if not key.startswith("_")} <= generation_settings.KEYS
    defaults = Values("", vars(config) | config._get_default_generation_params())
    assert generation_settings.changing(defaults, generation_settings.NOT_SUPPORTED) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"suppress_tokens": [4, 11]},
        {"no_repeat_ngram_size": 2, "bad_words_ids": [[9], [12], [1, 2]], "eos_token_id": 12},
        slow({"stop_strings": ["ca", "bb"]}),
        slow({"stop_strings": "a"}),
    ],
    ids=str,
)
def test_the_text_is_that_of_transformers(settings, checkpoint):
    torch = pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
    transformers = pytest.importorskip("transformers")
    prompt = [1, 2, 3]
    directory = checkpoint(settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    other = transformers.PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer())
    with torch.no_grad():
        found = model.generate(torch.tensor([prompt]), tokenizer=other, max_new_tokens=20, do_sample=False)
    expected = found[0, len(prompt) :].tolist()
    named = ", ".join(key for key in generation_settings.OF_GREEDY if key in settings)
    said = pytest.warns(UserWarning, match=rf"generation_config\.json: {named} change greedy texts too")
    with said if named else contextlib.nullcontext():
        params, tokenizer = jlade.load(directory, "float32")
    options = {"tokenizer": tokenizer, "max_new_tokens": 20, "lookahead": None}
    recommended = {"sampling": jlade.load_sampling(directory), "constraint": jlade.load_constraints(directory)}
    out = jlade.generate(params, prompt, **recommended, **options)
    assert out.tokens[0, : out.lengths[0]].tolist() == expected
    unsettled = jlade.generate(params, prompt, stop=(), **options)
    assert unsettled.tokens[0, : unsettled.lengths[0]].tolist() != expected


@pytest.mark.slow
def test_an_engine_stops_at_the_strings_of_a_checkpoint(checkpoint):
    params, tokenizer = jlade.load(checkpoint({"stop_strings": ["ca", "bb"]}), "float32")
    expected = jlade.generate(params, [1, 2, 3], tokenizer=tokenizer, max_new_tokens=20, lookahead=None)
    assert expected.finish_reason == ("stop",)
    with jlade.Engine(params, tokenizer, max_sequences=1, lookahead=None) as engine:
        (answer,) = engine.generate([[1, 2, 3]], max_new_tokens=20)
    assert answer.text == expected.text


def test_a_stop_string_of_a_checkpoint_that_is_a_special_token_is_an_end_token(checkpoint):
    params, _ = jlade.load(checkpoint({"stop_strings": ["ca", "</s>"], "eos_token_id": 9}), "float32")
    assert (params.config.eos_ids, params.config.stop_strings) == ((9, 12), ("ca",))


def test_a_stop_string_with_a_special_token_is_warned_of():
    with pytest.warns(UserWarning, match="'</s>!' never matches the special token '</s>', .* in eos_ids"):
        stop_strings.check("</s>!", 1, tiny_tokenizer(), tiny_llama().decoder)


def test_stop_strings_of_a_checkpoint_need_the_tokenizer(checkpoint):
    params, _ = jlade.load(checkpoint({"stop_strings": ["ca"]}), "float32")
    changed = jax.tree.map(lambda array: array, params)  # without the tokenizer
    with pytest.raises(TypeError, match=r"the checkpoint's stop strings \('ca',\) need the tokenizer: .* stop=\(\)"):
        jlade.generate(changed, [1, 2, 3], max_new_tokens=4)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"encoder_no_repeat_ngram_size": 3}, "encoder_no_repeat_ngram_size"),
        ({"num_beams": 4, "early_stopping": True, "length_penalty": 2.0}, "num_beams"),
        ({"top_h": 0.4, "typical_p": 0.9, "colour": "red"}, "top_h, typical_p, colour"),
        (
            {"begin_suppress_tokens": [3], "forced_eos_token_id": 2, "min_length": 4},
            "begin_suppress_tokens, forced_eos_token_id, min_length",
        ),
    ],
    ids=str,
)
def test_settings_that_change_texts_are_named_once_and_strict_refuses_them(settings, named, checkpoint):
    directory = checkpoint(settings)
    message = rf"generation_config\.json: ignored settings of generation, which strict=True refuses: {named}$"
    with pytest.warns(UserWarning, match=message) as caught:
        read_config(directory)
    assert len(caught) == 1
    with pytest.raises(ValueError, match=rf"strict=True refuses settings of generation: {named}$"):
        read_config(directory, strict=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "bad_words_ids": None, "guidance_scale": 1},
        {"max_new_tokens": 2048, "max_length": 4096, "cache_implementation": "hybrid", "_from_model_config": True},
        {"bos_token_id": 1, "pad_token_id": 0, "prompt_lookup_num_tokens": 10, "transformers_version": "5.24.0"},
    ],
    ids=str,
)
def test_settings_without_effect_are_silent(settings, checkpoint):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_config(checkpoint(settings), strict=True)


@pytest.mark.parametrize("settings", [None, {"top_k": 7}], ids=["alone", "beside generation_config.json"])
def test_settings_in_config_json_count_where_there_are_no_others(settings, checkpoint):
    pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
    transformers = pytest.importorskip("transformers")
    keys = {"do_sample": True, "temperature": 0.5, "suppress_tokens": [3], "stop_strings": ["b"]}
    directory = checkpoint(settings, **keys)
    expected = transformers.AutoModelForCausalLM.from_pretrained(directory).generation_config
    sampling = jlade.load_sampling(directory)
    assert read_config(directory).stop_strings == tuple(expected.stop_strings or ())
    assert bool(sampling.temperature) == bool(expected.do_sample)
    assert sampling.temperature == (expected.temperature or 0.0)
    assert sampling.logit_bias == (None if settings else ((3, -math.inf),))


def test_named_settings_of_config_json(checkpoint):
    with pytest.warns(UserWarning, match=r"config\.json: ignored settings of generation, .*: typical_p$"):
        read_config(checkpoint(typical_p=2))


@pytest.mark.parametrize(
    ("read", "settings", "message"),
    [
        *(
            (jlade.load_sampling, {key: value}, f"{key} is .*; beam search is not supported")
            for key, value in (("num_beams", 4), ("num_beam_groups", 2), ("force_words_ids", [[3]]))
        ),
        (jlade.load_sampling, {"suppress_tokens": 5}, "suppress_tokens must be a list of token ids, got 5"),
        (jlade.load_sampling, {"suppress_tokens": [-1]}, r"suppress_tokens must be a list of token ids, got \[-1\]"),
        (read_config, {"stop_strings": [""]}, r"stop_strings must be a string or a list of them, got \[''\]"),
        (read_config, {"stop_strings": 5}, "stop_strings must be a string or a list of them, got 5"),
        (
            jlade.load_constraints,
            {"no_repeat_ngram_size": -1},
            "no_repeat_ngram_size must be an integer of at least 0, got -1",
        ),
        (jlade.load_constraints, {"bad_words_ids": [[]]}, "bad_words_ids must be a list of lists of token ids"),
        (
            jlade.load_constraints,
            {"bad_words_ids": [[3, 13]]},
            "bad_words_ids: sequences must be one or more lists of token ids from 0 to 12",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_broken_settings_are_refused(read, settings, message, checkpoint):
    with pytest.raises(ValueError, match=rf"generation_config\.json: {message}"):
        read(checkpoint(settings))


@pytest.mark.slow
def test_sampled_texts_hold_no_suppressed_token(checkpoint):
    directory = checkpoint({"do_sample": True, "temperature": 2.0, "top_k": 0, "suppress_tokens": [4, 11]})
    with pytest.warns(UserWarning, match="suppress_tokens change greedy texts too"):
        params, tokenizer = jlade.load(directory, "float32")
    options = {"max_new_tokens": 40, "sampling": jlade.load_sampling(directory), "tokenizer": tokenizer}
    text = jlade.generate(params, [1, 2, 3], eos_ids=(), lookahead=None, **options).tokens[0].tolist()
    assert len(text) == 40
    assert not {4, 11} & set(text)
    assert SamplingConfig(temperature=2.0, logit_bias={4: -math.inf, 11: -math.inf}) == options["sampling"]
