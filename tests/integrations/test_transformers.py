"""`model.generate(..., custom_generate=lookahead(model))` against transformers' own `generate`."""

import importlib
import sys

import pytest

torch = pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
transformers = pytest.importorskip("transformers")

import scipy.stats  # noqa: E402
from tokenizers import Tokenizer, decoders, models  # noqa: E402
from transformers.convert_slow_tokenizer import bytes_to_unicode  # noqa: E402
from transformers.generation import logits_process, stopping_criteria  # noqa: E402

import jlade  # noqa: E402
from jlade import LookaheadConfig, SamplingConfig  # noqa: E402
from jlade.integrations.transformers import lookahead  # noqa: E402
from jlade.models import llama  # noqa: E402
from tests.families import SIZES  # noqa: E402
from tests.tiny import PAPER, slow, slow_but  # noqa: E402

PAD, EOS = 0, 7
TOKENS = [b"<pad>", *(bytes([i]) for i in b"abcdefghijklmnopqrstuvwxyz \n"), b"ab", b"\xc3", b"\xa9", b"\n\n", b"ba"]


def make(family, **changes):
    """Returns a random model of transformers, whose texts have some variety."""
    torch.manual_seed(0)
    shape = SIZES | {"max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": None}
    config = getattr(transformers, f"{family}Config")(**(shape | {"eos_token_id": None, "pad_token_id": PAD} | changes))
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def model():
    return make("Llama")


@pytest.fixture(scope="module")
def decode(model):
    return lookahead(model, lookahead=PAPER)


@pytest.fixture(scope="module")
def batch():
    """Prompts of 12, 7 and 1 tokens, padded on the left."""
    torch.manual_seed(1)
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, :5] = mask[2, :11] = 0
    return {"input_ids": torch.randint(1, 50, (3, 12)) * mask, "attention_mask": mask}


@pytest.fixture(scope="module")
def tokenizer():
    character = bytes_to_unicode()
    names = {"".join(character[byte] for byte in token): i for i, token in enumerate(TOKENS)}
    backend = Tokenizer(models.WordLevel(names | {f"x{i}": i for i in range(len(TOKENS), 50)}, unk_token="a"))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")


def both(model, decode, inputs, **options):
    """Returns the sequences of transformers' own `generate`, and of the same call with jlade."""
    options = {"max_new_tokens": 40, "do_sample": False} | options
    return model.generate(**inputs, **options), model.generate(**inputs, **options, custom_generate=decode)


def assert_equal(expected, found):
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        slow("Llama", {"tie_word_embeddings": True}),
        slow("Qwen2", {}),
        slow("Mixtral", {"num_local_experts": 4}),
        slow(
            "Gemma3Text", {"head_dim": 12, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
        ),
    ],
)
def test_greedy_texts_of_a_padded_batch(family, changes, batch):
    other = make(family, **changes)
    assert_equal(*both(other, lookahead(other, lookahead=PAPER), batch))


@pytest.mark.slow
def test_one_prompt_without_a_mask_and_the_automatic_setting(model, batch):
    prompt = {"input_ids": batch["input_ids"][:1]}
    assert_equal(*both(model, lookahead(model), prompt))


@pytest.mark.slow
def test_a_model_in_bfloat16_is_copied_bit_by_bit(batch):
    other = make("Llama", tie_word_embeddings=True).to(torch.bfloat16)
    params = lookahead(other, dtype="auto").params()
    assert params.norm.dtype == "bfloat16"
    in_float32 = lookahead(other, dtype="float32").params()
    assert in_float32.embedding.tolist() == other.get_input_embeddings().weight.float().tolist()
    assert_equal(*both(other.float(), lookahead(other, lookahead=PAPER), batch))


OPTIONS = [
    {"max_length": 30, "max_new_tokens": None},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 1.4, "suppress_tokens": [3, 9], "bad_words_ids": [[11]], "sequence_bias": [[[5], 2.5]]},
    {"no_repeat_ngram_size": 2, "bad_words_ids": [[11], [3, 9], [21, 30, 40]]},
    {"eos_token_id": [EOS, 21]},
    {"eos_token_id": list(range(20, 40)), "min_new_tokens": 9},
    {"eos_token_id": list(range(20, 40)), "min_length": 15},
    {"eos_token_id": -1},
    {"do_sample": True, "top_k": 1, "num_return_sequences": 2},
    {"do_sample": True, "top_k": None, "top_p": 1e-6, "min_p": 0.5, "temperature": 0.3, "renormalize_logits": True},
    {"use_cache": False},
]


@pytest.mark.parametrize("options", slow_but(OPTIONS, OPTIONS[0], OPTIONS[3]), ids=str)
def test_options_mean_the_same(model, decode, batch, options):
    assert_equal(*both(model, decode, batch, **options))


@pytest.mark.slow
def test_the_text_of_the_batch_ends_and_is_filled_up(model, decode, batch):
    """Otherwise the test above shows nothing of end tokens."""
    expected, found = both(model, decode, batch, eos_token_id=[EOS, 21, 30, 40])
    assert_equal(expected, found)
    assert found.shape[1] > 14
    assert (found[:, -1] == PAD).any()


@pytest.mark.slow
def test_processors_and_criteria_of_ones_own(model, decode, batch):
    own = {
        "logits_processor": [logits_process.SuppressTokensLogitsProcessor([3, 9, 11])],
        "stopping_criteria": [stopping_criteria.EosTokenCriteria([21]), stopping_criteria.MaxLengthCriteria(31)],
    }
    assert_equal(*both(model, decode, batch, **own))


@pytest.mark.slow
@pytest.mark.parametrize(("begin", "end"), [(11, 13), (10, 14), (14, 15), (20, 23)])
def test_stop_strings_end_texts_and_may_begin_in_the_prompt(model, batch, tokenizer, begin, end):
    """The prompt has 12 tokens; the stop string is the text of tokens of the first sequence."""
    decode = lookahead(model, lookahead=PAPER, tokenizer=tokenizer)
    plain = model.generate(**batch, max_new_tokens=40, do_sample=False)
    stop = tokenizer.decode(plain[0, begin:end].tolist())
    criteria = [stopping_criteria.StopStringCriteria(tokenizer, [stop, "never"])]
    expected, found = both(model, decode, batch, stopping_criteria=criteria, eos_token_id=EOS)
    assert_equal(expected, found)
    prompt = {"input_ids": batch["input_ids"][:1]}
    expected, found = both(model, decode, prompt, stopping_criteria=criteria)
    assert_equal(expected, found)
    assert found.shape[1] <= end


class Recorder:
    """A streamer that keeps its calls."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append((value.dtype, value.tolist()))

    def end(self):
        self.calls.append("end")


@pytest.mark.slow
def test_a_streamer_receives_what_transformers_gives_it(model, batch):
    theirs, ours = Recorder(), Recorder()
    inputs = {name: array[1:2] for name, array in batch.items()}
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": EOS}
    expected = model.generate(**inputs, **options, streamer=theirs)
    found = model.generate(**inputs, **options, custom_generate=lookahead(model, lookahead=PAPER, streamer=ours))
    assert ours.calls == theirs.calls
    assert_equal(expected, found)


@pytest.mark.slow
def test_a_streamer_of_text(model, batch, tokenizer, capsys):
    inputs = {"input_ids": batch["input_ids"][:1]}
    model.generate(**inputs, max_new_tokens=40, do_sample=False, streamer=transformers.TextStreamer(tokenizer))
    theirs = capsys.readouterr().out
    decode = lookahead(model, lookahead=PAPER, streamer=transformers.TextStreamer(tokenizer))
    model.generate(**inputs, max_new_tokens=40, do_sample=False, custom_generate=decode)
    assert capsys.readouterr().out == theirs
    assert len(theirs) > 40


@pytest.mark.slow
def test_a_dictionary_is_returned(model, decode, batch):
    expected, found = both(model, decode, batch, return_dict_in_generate=True)
    assert type(found) is type(expected)
    assert_equal(expected.sequences, found.sequences)


@pytest.mark.slow
def test_sampled_tokens_follow_the_distribution_of_the_model(model, decode):
    """The first two tokens of many texts of one prompt, in one call, against their probabilities."""
    prompt, number = torch.tensor([[5, 6, 7]]), 1500
    options = {"do_sample": True, "temperature": 0.6, "top_k": 3, "num_return_sequences": number, "max_new_tokens": 2}
    torch.manual_seed(0)
    found = model.generate(prompt, **options, custom_generate=decode)[:, 3:].tolist()
    with torch.no_grad():
        first = _probabilities(model, [5, 6, 7])
        pairs = {(a, b): p * q for a, p in first.items() for b, q in _probabilities(model, [5, 6, 7, a]).items()}
    counts = [sum(tuple(each) == pair for each in found) for pair in pairs]
    assert sum(counts) == number
    expected = [number * p for p in pairs.values()]
    assert scipy.stats.chisquare(counts, expected, sum_check=False).pvalue > 1e-3


def _probabilities(model, tokens):
    """Returns the probabilities of the three most probable next tokens at a temperature of 0.6."""
    top = model(torch.tensor([tokens])).logits[0, -1].double().topk(3)
    return dict(zip(top.indices.tolist(), (top.values / 0.6).softmax(-1).tolist(), strict=True))


@pytest.mark.slow
def test_the_seed_of_torch_decides_the_text(model, decode, batch):
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 20, "custom_generate": decode}
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts += [model.generate(**batch, **options).tolist(), model.generate(**batch, **options).tolist()]
    assert texts[0:2] == texts[2:4]
    assert texts[0] != texts[1] != texts[4] != texts[0]


@pytest.mark.slow
def test_controls_that_transformers_lacks(model, batch):
    """A penalty of 100 for tokens that were generated before: each is generated once."""
    decode = lookahead(model, lookahead=PAPER, sampling=SamplingConfig(presence_penalty=100.0))
    found = model.generate(**batch, max_new_tokens=30, custom_generate=decode)[:, 12:]
    assert all(len(set(row)) == 30 for row in found.tolist())


@pytest.mark.slow
def test_corpus_and_prediction_change_no_text(model, batch):
    decode = lookahead(model, lookahead=LookaheadConfig.tree(7))
    prompt = {"input_ids": batch["input_ids"][:1]}
    expected, _ = both(model, decode, prompt)
    guess = expected[0, 12:].tolist()
    found = model.generate(
        **prompt, max_new_tokens=40, do_sample=False, custom_generate=decode, prediction=guess, corpus=[guess]
    )
    assert_equal(expected, found)


def add_in_place(model):
    model.lm_head.weight.data.add_(0.3 * torch.randn(50, 32))


def write_through_numpy(model):
    model.lm_head.weight.data.numpy()[:] *= -1


def merge_an_adapter(model):
    for layer in model.model.layers:
        weight = layer.self_attn.v_proj.weight
        weight.data += torch.randn(len(weight), 2) @ torch.randn(2, 32)


def swap_two_rows(model):
    """Without another sum of the weights."""
    weight = model.lm_head.weight.data
    weight[[7, 8]] = weight[[8, 7]]
    weight[[11, 39]] = weight[[39, 11]]


def load(model):
    torch.manual_seed(5)
    model.load_state_dict({name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()})


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=10)
    model(torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    optimizer.step()


def replace_the_head(model):
    model.lm_head = torch.nn.Linear(32, 50, bias=False)


def untie(model):
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())


CHANGES = [
    add_in_place,
    *map(slow, (write_through_numpy, merge_an_adapter, swap_two_rows, load, train)),
    replace_the_head,
    slow(untie),
]


@pytest.fixture(scope="module")
def changing():
    """A model that tests change."""
    return make("Llama")


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_the_text_is_that_of_the_weights_at_the_call(change, changing, batch):
    other = make("Llama", tie_word_embeddings=True) if change is untie else changing
    decode = lookahead(other, lookahead=PAPER)
    before, found = both(other, decode, batch)
    assert_equal(before, found)
    params = decode.params()
    assert lookahead(other).params() is params
    change(other)
    expected, found = both(other, decode, batch)
    assert expected.tolist() != before.tolist()
    assert_equal(expected, found)
    assert decode.params() is not params


@pytest.mark.parametrize(
    "settings", [{"kv_dtype": "int8"}, {"bits": 8}, slow({"bits": 4, "kv_dtype": "float8_e4m3fn"})]
)
def test_few_bits(settings, batch):
    """The text is that of `jlade.generate` with the weights in so many bits, which are copied anew for others."""
    made, bits = make("Llama"), settings.get("bits")
    weights = lookahead(made).params()
    params = weights if bits is None else llama.quantize(weights, bits)
    options = {"kv_dtype": settings.get("kv_dtype"), "eos_ids": (), "lookahead": None, "max_new_tokens": 40}
    inputs = batch["input_ids"].numpy(), batch["attention_mask"].numpy()
    expected = jlade.generate(params, inputs[0], attention_mask=inputs[1], **options).tokens
    expected = torch.cat([batch["input_ids"], torch.from_numpy(expected).to(torch.long)], dim=1)
    plain, found = both(made, lookahead(made, lookahead=PAPER, **settings), batch)
    assert_equal(expected, found)
    assert found.tolist() != plain.tolist()


def test_few_bits_are_checked(model):
    with pytest.raises(ValueError, match=r"bits must be .* or None, got 3"):
        lookahead(model, bits=3)
    with pytest.raises(ValueError, match=r"kv_dtype must be 'int8', .*; got 'int4'"):
        lookahead(model, kv_dtype="int4")


def test_another_dtype_of_the_model_is_followed():
    other = make("Llama")
    decode = lookahead(other)
    assert decode.params().norm.dtype == "float32"
    other.to(torch.bfloat16)
    assert decode.params().norm.dtype == "bfloat16"


class Own(stopping_criteria.StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


class OwnProcessor(logits_process.LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


REFUSED = [
    ({"num_beams": 2}, "num_beams must be 1 .* got 2"),
    ({"prompt_lookup_num_tokens": 10}, "prompt_lookup_num_tokens must be None"),
    ({"cache_implementation": "static"}, "cache_implementation must be 'dynamic'"),
    ({"return_dict_in_generate": True, "output_scores": True}, "output_scores must be False"),
    ({"return_dict_in_generate": True, "output_logits": True}, "output_logits must be False"),
    ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions must be False"),
    ({"encoder_no_repeat_ngram_size": 3}, "EncoderNoRepeatNGramLogitsProcessor, which jlade lacks; accepted are"),
    ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
    ({"do_sample": True, "typical_p": 0.9}, "TypicalLogitsWarper"),
    ({"prefix_allowed_tokens_fn": lambda batch, ids: [1, 2]}, "PrefixConstrainedLogitsProcessor"),
    ({"logits_processor": [OwnProcessor()]}, "OwnProcessor"),
    ({"sequence_bias": [[[1, 2], 1.0]]}, r"single tokens, got \[1, 2\]"),
    (
        {"do_sample": True, "temperature": 0.5, "logits_processor": [logits_process.TopPLogitsWarper(0.9)]},
        "TemperatureLogitsWarper twice or out of order",
    ),
    (
        {"do_sample": True, "logits_processor": [logits_process.TopPLogitsWarper(0.9, min_tokens_to_keep=2)]},
        "min_tokens_to_keep of TopPLogitsWarper must be 1, got 2",
    ),
    (
        {"logits_processor": [logits_process.RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=4)]},
        "prompt_ignore_length",
    ),
    ({"stopping_criteria": [Own()]}, "stopping_criteria holds Own, which jlade lacks; accepted are MaxLengthCriteria"),
    ({"max_time": 1.0}, "MaxTimeCriteria"),
    ({"past_key_values": transformers.DynamicCache()}, "(past_key_values|cache) must be None .* got DynamicCache"),
    ({"streamer": Recorder()}, r"lookahead\(model, streamer=...\)"),
    ({"synced_gpus": True}, "synced_gpus must be None"),
    ({"inputs_embeds": torch.zeros(3, 12, 32)}, "inputs_embeds"),
    ({"position_ids": torch.arange(12)[None] + 3}, "position_ids must count"),
    ({"max_new_tokens": 300}, "max_new_tokens=300"),
]


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # of transformers 5.24
@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: str(value)[:50])
def test_everything_else_is_refused_by_name(model, decode, batch, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        model.generate(**batch, **({"max_new_tokens": 8} | options), custom_generate=decode)


def test_an_assistant_is_refused(model, decode, batch):
    prompt = {"input_ids": batch["input_ids"][:1]}
    with pytest.raises(ValueError, match="assistant_model must be None"):
        model.generate(**prompt, max_new_tokens=8, assistant_model=model, custom_generate=decode)


def test_padding_on_the_right_is_refused(model, decode, batch):
    mask = batch["attention_mask"].flip(1)
    with pytest.raises(ValueError, match=r"attention_mask must have .* 0 on the left"):
        model.generate(batch["input_ids"], attention_mask=mask, max_new_tokens=8, custom_generate=decode)


def test_stop_strings_are_refused_where_they_would_differ(model, decode, batch, tokenizer):
    def generate(by, stop, **options):
        criteria = [stopping_criteria.StopStringCriteria(tokenizer, stop)]
        model.generate(**batch, max_new_tokens=8, stopping_criteria=criteria, custom_generate=by, **options)

    with_tokenizer = lookahead(model, lookahead=PAPER, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"lookahead\(model, tokenizer=tokenizer\)"):
        generate(decode, "ab")
    with pytest.raises(ValueError, match="special tokens, got '<pad>'"):
        generate(with_tokenizer, "a<pad>")
    with pytest.raises(ValueError, match="min_new_tokens=4"):
        generate(with_tokenizer, "ab", min_new_tokens=4, eos_token_id=EOS)


def test_sampling_is_given_in_one_place(model, batch):
    decode = lookahead(model, sampling=SamplingConfig(temperature=0.5))
    with pytest.raises(ValueError, match="takes the place of do_sample, top_k in generate"):
        model.generate(**batch, max_new_tokens=8, do_sample=True, custom_generate=decode)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "jlade.integrations.transformers")
    with pytest.raises(ImportError, match=r"pip install 'jlade\[transformers\]'"):
        importlib.import_module("jlade.integrations.transformers")


class Packed(torch.nn.Parameter):
    """A parameter of a type of its own, as those of quantized modules are."""

    def detach(self):
        return self


def test_the_model_is_checked(model, decode, batch):
    with pytest.raises(ValueError, match="lookahead\\(model\\) of another model"):
        make("Llama").generate(**batch, max_new_tokens=8, custom_generate=decode)
    with pytest.raises(TypeError, match="model must be a model of transformers, got str"):
        lookahead("gpt2")
    other = transformers.BloomConfig(n_layer=1, hidden_size=8, n_head=2, vocab_size=9)
    with pytest.raises(ValueError, match=r"model.config: model_type is 'bloom'; supported are llama"):
        lookahead(transformers.BloomForCausalLM(other))
    with torch.device("meta"):
        absent = transformers.AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(ValueError, match="on the device 'meta'"):
        lookahead(absent)
    other = make("Llama")
    projection = other.model.layers[0].self_attn
    projection.v_proj = torch.nn.ModuleDict({"base_layer": projection.v_proj})  # as peft wraps it
    with pytest.raises(ValueError, match=r"adapter of peft at .*v_proj.base_layer.weight: .*merge_and_unload"):
        lookahead(other)
    other = make("Llama")
    other.lm_head = torch.nn.Linear(32, 50)
    with pytest.raises(ValueError, match=r"model.state_dict\(\): 1 tensors are not of this model: lm_head.bias"):
        lookahead(other)
    other.lm_head.weight = Packed(torch.ones(50, 32))
    with pytest.raises(ValueError, match=r"lm_head.weight of LlamaForCausalLM must be a plain tensor .* got .*Packed"):
        lookahead(other)
    other = make("Llama")
    other.model.layers[0].self_attn.q_proj = torch.nn.Linear(32, 16, bias=False)
    with pytest.raises(ValueError, match=r"model.state_dict\(\): model.layers.0.self_attn.q_proj.weight has shape"):
        lookahead(other)
    with pytest.raises(TypeError, match=r"sampling must be a SamplingConfig or None, got 0\.5"):
        lookahead(model, sampling=0.5)
