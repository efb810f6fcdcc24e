"""tunix's models, converted and as they are, the texts of its sampler, and the rollout engine in its cluster."""

import collections
import dataclasses
import functools
import importlib
import itertools
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jlade
from jlade.models.llama import Llama
from jlade.testing import check_decoder
from tests.compilations import recorded
from tests.decoding.copies import copies_in_loops

pytest.importorskip("tunix", reason="google-tunix is not installed: pip install 'jlade[tunix]'")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # tunix imports deprecated names
    import optax
    import qwix
    from tunix.generate.sampler import CacheConfig, Sampler
    from tunix.models.gemma import model as gemma
    from tunix.models.gemma3 import model as gemma3
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
    from tunix.rl.rollout.base_rollout import RolloutConfig

    from jlade.integrations.tunix import LookaheadRollout, LookaheadSampler, decoder, models, parameters, rollout

VOCAB, CACHE, PAD, BOS, EOS = 13, 64, 0, 1, 2
TREE = jlade.LookaheadConfig.tree(7)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of tunix


@pytest.fixture(autouse=True)
def lenient_promotion():
    """tunix's models multiply integers by floats, and add vectors to matrices."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Letters:
    """A tokenizer of one token for each letter; a space ends a text."""

    names = "_^ abcdefghij"

    def encode(self, text):
        return [self.names.index(letter) for letter in text]

    def decode(self, ids):
        return "".join(self.names[i] for i in ids)

    def bos_id(self):
        return BOS

    def eos_id(self):
        return EOS

    def pad_id(self):
        return PAD


SHAPE = {"embed_dim": 16, "hidden_dim": 24, "num_heads": 4, "head_dim": 6, "num_kv_heads": 2}
LLAMA = SHAPE | {"num_layers": 2, "vocab_size": VOCAB, "rope_theta": 10_000, "norm_eps": 1e-5}
GEMMA = SHAPE | {"num_layers": 2, "num_embed": VOCAB, "final_logit_softcap": None}
GEMMA |= {"attention_types": [gemma.AttentionType.GLOBAL] * 2, "use_post_attn_norm": False, "use_post_ffw_norm": False}
GEMMA_2 = GEMMA | {"final_logit_softcap": 3.0, "attn_logits_soft_cap": 5.0, "sliding_window_size": 5}
GEMMA_2 |= {"use_post_attn_norm": True, "use_post_ffw_norm": True}
GEMMA_2 |= {"attention_types": [gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL]}
GEMMA_3 = SHAPE | {"num_layers": 7, "num_embed": VOCAB, "sliding_window_size": 5, "param_dtype": jnp.float32}
GEMMA_3 |= {"global_base_frequency": 1_000_000, "global_scale_factor": 8.0}
EVERY_KIND = {  # a module, its model and the fields of its configuration
    "llama3": (llama3, "Llama3", LLAMA),
    "llama3 with tied embeddings": (llama3, "Llama3", LLAMA | {"weight_tying": True}),
    "qwen2": (qwen2, "Qwen2", LLAMA),
    "qwen3": (qwen3, "Qwen3", LLAMA),
    "qwen3 with experts": (qwen3, "Qwen3", LLAMA | {"num_experts": 4, "num_experts_per_tok": 2}),
    "gemma": (gemma, "Gemma", GEMMA),
    "gemma with as many KV heads": (gemma, "Gemma", GEMMA | {"num_kv_heads": 4}),
    "gemma2": (gemma, "Gemma", GEMMA_2),
    "gemma3": (gemma3, "Gemma3", GEMMA_3),
}


def make(kind, seed=0, **changes):
    """Returns a model with the weights of a seed."""
    module, name, fields = EVERY_KIND[kind]
    return getattr(module, name)(module.ModelConfig(**fields | changes), rngs=nnx.Rngs(seed))


@functools.cache
def model(kind="llama3"):
    """Returns a model with random weights everywhere, also in norms and biases."""
    made = make(kind)
    keys = map(jax.random.key, itertools.count())
    nnx.update(made, jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), nnx.state(made)))
    return made


def copy_of_model():
    """Returns another Llama with the weights of `model()`."""
    made = make("llama3", seed=1)
    nnx.update(made, nnx.state(model()))
    return made


def run(made, tokens):
    """Returns the logits [L, V] of a text [L], by the model itself without a cache."""
    size = len(tokens)
    return made(tokens[None], np.arange(size)[None], None, np.tri(size, dtype=bool)[None])[0][0]


def cache_config(made):
    c = made.config
    return CacheConfig(CACHE, c.num_layers, c.num_kv_heads, c.head_dim)


@functools.cache
def samplers(kind="llama3", eos_tokens=None):
    """Returns tunix's sampler and ours of a model, whose programs several tests use.

    tunix's sampler decodes all calls with the end tokens of the first.
    """
    made = model(kind)
    ours = LookaheadSampler(made, Letters(), cache_config(made), lookahead=TREE)
    return Sampler(made, Letters(), cache_config(made)), ours


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_converted_model_has_the_logits_of_its_own(kind):
    made, tokens = model(kind), np.random.default_rng(0).integers(0, VOCAB, 20, np.int32)
    params = jlade.adopt(nnx.state(made), parameters.describe(made, CACHE), dtype=models.cache_dtype(made))
    llama = params.decoder
    hidden, _ = llama.forward(
        params, tokens[None], np.arange(20)[None], llama.init_cache(params, 1, CACHE), np.tri(20, dtype=bool)
    )
    np.testing.assert_allclose(llama.logits(params, hidden)[0], run(made, tokens), atol=3e-5)


@pytest.mark.parametrize("kind", ["llama3", "qwen2", "gemma"])
def test_a_model_as_it_is_passes_the_check(kind):
    made = model(kind)
    check_decoder(*decoder(made, max_positions=CACHE), reference=lambda tokens: run(made, tokens))


@pytest.mark.parametrize("room", [models.ROOM, 5])
def test_a_model_as_it_is_generates_its_greedy_text(room):
    """Also with blocks that are larger than the room, of the prompt and of steps."""
    made = model("qwen2")
    expected, read = np.full(43, 3), nnx.jit(run)
    for i in range(3, 43):
        expected[i] = np.argmax(read(made, expected)[i - 1])
    found, params = decoder(made, max_positions=CACHE, room=room)
    out = jlade.generate(params, expected[:3], decoder=found, max_new_tokens=40, lookahead=TREE)
    assert out.tokens[0].tolist() == expected[3:].tolist()
    assert out.compression[0] > 1


def test_steps_of_a_model_as_it_is_copy_what_its_attention_copies():
    """The operands of its products with the cache, on a CPU: no more than in a loop of the model alone."""
    capacity, found, params = 1024, *decoder(model("qwen2"), max_positions=1024)
    inputs, config = jlade.prepare(params, [[3]] * 2, decoder=found, max_new_tokens=1000, lookahead=TREE)
    cache, size = found.init_cache(params, 2, capacity), TREE.block_size
    state = jax.eval_shape(lambda: jlade.start(jlade.Prefix(cache), inputs, config))
    rest = dataclasses.replace(state, memory=None)

    def run_steps(params, rest, memory, max_steps):
        return jlade.run_steps(params, dataclasses.replace(rest, memory=memory), config, max_steps)

    steps = jax.jit(run_steps, donate_argnames="memory").lower(params, rest, state.memory, jnp.int32(9))

    def alone(params, cache, tokens, mask):
        def run(carry):
            tokens, cache = carry
            hidden, layers = found.forward(params, tokens, tokens, cache, mask)
            return tokens + jnp.argmax(hidden, -1).astype(jnp.int32), cache.replace(layers=layers)

        return jax.lax.while_loop(lambda carry: carry[0][0, 0] < 99, run, (tokens, cache))

    model_alone = jax.jit(alone).lower(params, cache, np.zeros((2, size), np.int32), np.tri(size, dtype=bool))
    layers = frozenset({2 * (models.ROOM + capacity) * SHAPE["num_kv_heads"] * SHAPE["head_dim"]})
    own, of_model = (len(copies_in_loops(each.compile().as_text(), layers)) for each in (steps, model_alone))
    assert own <= of_model <= 2 * LLAMA["num_layers"]


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (lambda: model("gemma2"), ValueError, "sliding_window_size=5"),
        (lambda: model("gemma3"), ValueError, "sliding_window_size=5"),
        (lambda: make("qwen2", use_flash_attention=True), ValueError, "use_flash_attention=True"),
        (lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)), TypeError, "Linear takes"),
    ],
)
def test_a_model_that_would_give_another_text_is_refused(made, error, message):
    with pytest.raises(error, match=message):
        decoder(made())


PROMPTS = ["abcabcab", "hij", "g", "abcabcab"]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_greedy_tokens_are_those_of_the_vanilla_sampler(kind):
    """Without padding for Gemma 2, as the vanilla sampler shifts its windows by it."""
    prompts = ["abcd", "hijb"] if kind == "gemma2" else PROMPTS
    vanilla, ours = samplers(kind)
    # The length is below that of the longest prompt. The vanilla sampler hides padding tokens that it generates.
    settings = {"max_prompt_length": 5, "return_logprobs": True, "forbidden_tokens": [PAD]}
    expected, got = (each(prompts, 30, **settings) for each in (vanilla, ours))
    assert got.text == expected.text
    np.testing.assert_array_equal(got.padded_prompt_tokens, expected.padded_prompt_tokens)
    for i in range(len(prompts)):
        np.testing.assert_array_equal(got.tokens[i], expected.tokens[i])
        np.testing.assert_allclose(got.logprobs[i], expected.logprobs[i], atol=1e-4)
    assert got.logits == expected.logits == []


def test_a_cache_in_8_bits():
    prompts = ["abcabcab", "hij"]
    settings = {"max_prompt_length": 8, "forbidden_tokens": [PAD], "return_logprobs": True}
    made = model()
    rounding = LookaheadSampler(made, Letters(), cache_config(made), lookahead=TREE, kv_dtype="int8")
    own = Llama(parameters.describe(made, CACHE), kv_dtype="int8")
    params = jlade.adopt(nnx.state(made), own.config, dtype=jnp.float32)
    ids = [rounding.tokenize(prompt) for prompt in prompts]
    bias = jlade.SamplingConfig(logit_bias={PAD: -np.inf})
    options = {"max_new_tokens": 30, "lookahead": None, "sampling": bias, "eos_ids": [EOS], "logprobs": True}
    expected = jlade.generate(params, ids, decoder=own, **options)
    got = rounding(prompts, 30, **settings)
    ends = [int(n) - (reason == "eos") for n, reason in zip(expected.lengths, expected.finish_reason, strict=True)]
    for i, end in enumerate(ends):
        np.testing.assert_array_equal(got.tokens[i], expected.tokens[i, :end])
        np.testing.assert_allclose(got.logprobs[i], expected.processed_logprobs[i, :end], atol=1e-5)
    assert np.abs(np.subtract(got.logprobs[0], samplers()[1](prompts, 30, **settings).logprobs[0])).max() > 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {"echo": True, "return_logprobs": True},
        {"pad_output": True, "return_logprobs": True},
        {"pad_output": True, "echo": True},
        {"temperature": 0.7},  # greedy without top_p
        {"forbidden_tokens": [PAD, 5, 7], "return_logprobs": True},
        {"eos_tokens": (4, 9)},
        {},
    ],
    ids=str,
)
def test_results_have_the_form_of_the_vanilla_sampler(settings):
    settings = {"max_prompt_length": 16, "forbidden_tokens": [PAD]} | settings
    expected, got = (
        each(["abcab", "ab", "ii"], 20, **settings) for each in samplers(eos_tokens=settings.get("eos_tokens"))
    )
    assert got.text == expected.text
    assert type(got.tokens) is type(expected.tokens)
    for i in range(3):
        np.testing.assert_array_equal(got.tokens[i], expected.tokens[i])
        if expected.logprobs is not None:
            np.testing.assert_allclose(got.logprobs[i], expected.logprobs[i], atol=1e-4)
    assert (got.logprobs is None) == (expected.logprobs is None)


def texts_with_probabilities(made, prompt, size, temperature, top_p, top_k):
    """Returns the probability of every text of up to `size` tokens, cut at its end token, by tunix's definition."""
    read, found = nnx.jit(run), collections.Counter({(): 1.0})
    for _ in range(size):
        longer = collections.Counter()
        for text, probability in found.items():
            if text[-1:] == (EOS,):
                longer[text] = probability
                continue
            logits = np.asarray(read(made, np.array([*prompt, *text])))[-1] / temperature
            order = np.argsort(-logits)[:top_k]
            p = np.exp(logits[order] - logits.max())
            p /= p.sum()
            p = np.where(np.cumsum(p) - p > top_p, 0, p)
            for token, share in zip(order, p / p.sum(), strict=True):
                longer[*text, int(token)] += probability * share
        found = +longer
    return {text[: text.index(EOS)] if EOS in text else text: p for text, p in found.items()}


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "size"), [(0.8, 1.0, None, 2), (1.3, 0.8, None, 3), (1.0, 1.0, 3, 3)]
)
def test_sampled_texts_have_the_distribution(temperature, top_p, top_k, size):
    """Also from the second call on, whose drafts are the texts of the calls before."""
    made, (_, ours) = model(), samplers()
    counts = collections.Counter()
    for seed in range(8):
        out = ours(
            ["ab"] * 256, size, max_prompt_length=8, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
        )
        counts.update(tuple(tokens.tolist()) for tokens in out.tokens)
    probabilities = texts_with_probabilities(made, [BOS, *Letters().encode("ab")], size, temperature, top_p, top_k)
    assert counts.keys() <= probabilities.keys()
    total = sum(counts.values())
    frequent = [text for text, p in probabilities.items() if p * total >= 5]
    assert len(frequent) > 10
    observed = np.array([counts[text] for text in frequent])
    expected = np.array([probabilities[text] for text in frequent]) * total
    observed, expected = (np.append(x, total - x.sum()) for x in (observed, expected))
    assert scipy.stats.chisquare(observed, expected + 1e-9, sum_check=False).pvalue > 1e-4


@functools.cache
def cluster():
    """Returns a cluster whose rollout engine is ours, and an optimizer that moves every weight."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    config = ClusterConfig(
        role_to_mesh=dict.fromkeys((Role.ACTOR, Role.ROLLOUT, Role.REFERENCE), mesh),
        rollout_engine=functools.partial(LookaheadRollout, lookahead=TREE, draft_from_rollouts=4),
        training_config=RLTrainingConfig(actor_optimizer=optax.sgd(1.0), eval_every_n_steps=1, max_steps=1),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=12,
            max_prompt_length=8,
            kv_cache_size=CACHE,
            temperature=0.9,
            return_logprobs=True,
        ),
    )
    return RLCluster(actor=copy_of_model(), reference=None, tokenizer=Letters(), cluster_config=config)


def test_the_logprobs_of_a_cluster_are_its_own():
    own = cluster()
    for settings in ({}, {"top_p": 0.7, "top_k": 5}):  # the second are scored by the model
        rollout_config = dataclasses.replace(own.cluster_config.rollout_config, temperature=1.0, **settings)
        out = own.rollout.generate(["abc"] * 4, rollout_config)
        tokens = np.full((4, 12), PAD)
        for row, ids in zip(tokens, out.tokens, strict=True):
            row[: len(ids)] = ids
        expected = own.rollout.get_per_token_logps(jnp.asarray(out.left_padded_prompt_tokens), jnp.asarray(tokens))
        for row, ids, logprobs in zip(expected, out.tokens, out.logprobs, strict=True):
            assert len(logprobs) == len(ids)
            end = [*ids.tolist(), PAD].index(PAD)  # the cluster hides padding tokens, also generated ones
            assert end > 0
            np.testing.assert_allclose(logprobs[:end], row[:end], atol=1e-4)


def test_a_filter_that_keeps_all_tokens_changes_no_logprobs():
    """The pad token is in the prompt, ends texts, and may be in them: steps see it, or do not, in both cases."""
    made = model()
    ours = LookaheadSampler(made, Letters(), cache_config(made), lookahead=TREE)
    prompts = ["ab_cd_", *["abc"] * 7]
    for eos in (PAD, 9):
        settings = {"max_prompt_length": 8, "temperature": 0.7, "seed": 5, "eos_tokens": [eos], "return_logprobs": True}
        plain = ours(prompts, 30, top_p=1.0, **settings)
        scored = ours(prompts, 30, top_p=1 - 1e-6, **settings)
        assert (PAD in np.concatenate(plain.tokens)) == (eos != PAD)
        for i, tokens in enumerate(plain.tokens):
            np.testing.assert_array_equal(tokens, scored.tokens[i])
            np.testing.assert_allclose(plain.logprobs[i], scored.logprobs[i], atol=1e-4)


def test_new_weights_compile_nothing_and_give_their_own_texts():
    own = cluster()
    prompts = ["abc"] * 4 + ["hij"] * 4
    made = own.rollout.model()
    changed = jax.tree.map(lambda x: x + 0.1, nnx.state(made))
    own.rollout.update_params(changed)
    before = own.generate(prompts)
    changed = jax.tree.map(lambda x: x - 0.2 * jnp.abs(x), nnx.state(made))
    with recorded("jaxpr_to_mlir") as programs:
        own.rollout.update_params(changed)
        after = own.generate(prompts)
    assert programs == []
    assert before.text != after.text
    nnx.update(made, changed)
    fresh = LookaheadSampler(made, Letters(), cache_config(made), lookahead=TREE)
    expected = fresh(prompts, 12, max_prompt_length=8, temperature=0.9, top_p=1.0)
    assert after.text == expected.text


def test_a_model_with_lora_is_decoded_as_it_is():
    provider = qwix.LoraProvider(module_path=".*gate_proj|.*down_proj", rank=2, alpha=2.0)
    made = copy_of_model()
    made = qwix.apply_lora_to_model(made, provider, **made.get_model_input())
    nnx.update(made, jax.tree.map(lambda x: x + 0.5, nnx.state(made, nnx.LoRAParam)))
    ours = LookaheadSampler(made, Letters(), cache_config(made), lookahead=TREE)
    vanilla = Sampler(made, Letters(), cache_config(made))
    settings = {"max_prompt_length": 8, "forbidden_tokens": [PAD]}
    expected = vanilla(["abc", "h"], 20, **settings).text
    assert ours(["abc", "h"], 20, **settings).text == expected != samplers()[1](["abc", "h"], 20, **settings).text
    with pytest.raises(ValueError, match="kv_dtype='int8' is for jlade's own models, and ModelDecoder makes its own"):
        LookaheadSampler(made, Letters(), cache_config(made), kv_dtype="int8")


def test_a_group_gets_different_texts_and_earlier_ones_save_steps():
    made, prompts = model(), ["abc"] * 8
    drafting, alone = (
        LookaheadSampler(made, Letters(), cache_config(made), lookahead=TREE, draft_from_rollouts=number)
        for number in (8, 0)
    )
    steps = {}
    for name, each in (("drafting", drafting), ("alone", alone)):
        texts = [each(prompts, 40, temperature=1.0, top_p=1.0, seed=3).text for _ in range(2)]
        assert texts[0] == texts[1], "the same seed"
        steps[name] = each.last.steps.sum()
    assert len(set(texts[0])) == 8
    assert steps["drafting"] < 0.6 * steps["alone"]


def test_the_texts_of_the_latest_prompts_are_kept(monkeypatch):
    monkeypatch.setattr(rollout, "PROMPTS", 2)
    made = model()
    ours, steps = LookaheadSampler(made, Letters(), cache_config(made), lookahead=TREE), {}
    for prompt in ("abc", "abc", "h", "dd", "h", "abc"):
        ours([prompt], 30, temperature=1.0, top_p=1.0, seed=3)
        steps.setdefault(prompt, []).append(int(ours.last.steps[0]))
    first, again, forgotten = steps["abc"]
    assert again < first == forgotten
    assert steps["h"][1] < steps["h"][0]


def test_the_parts_of_divided_weights_stay_where_they_are():
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("fsdp", "tp"))
    made = make("llama3", seed=1)
    place = lambda x: P(None, "tp") if x.ndim > 1 and x.shape[1] % 2 == 0 else P()  # noqa: E731
    nnx.update(made, jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, place(x))), nnx.state(model())))
    params = jlade.adopt(nnx.state(made), parameters.describe(made, CACHE), dtype=np.dtype(np.float32))
    assert params.layers[0].attention.query.sharding.shard_shape((24, 16)) == (12, 16)
    assert params.embedding.sharding.shard_shape((VOCAB, 16)) == (VOCAB, 8)
    ours = LookaheadSampler(made, Letters(), cache_config(made), lookahead=TREE)
    assert ours(PROMPTS, 30).text == samplers()[1](PROMPTS, 30).text


def test_without_tunix_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tunix.generate.sampler", None)
    monkeypatch.delitem(sys.modules, "jlade.integrations.tunix")
    with pytest.raises(ImportError, match=r"pip install 'jlade\[tunix\]'"):
        importlib.import_module("jlade.integrations.tunix")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"return_logits": True}, "return_logits is not supported"),
        ({"beam_size": 2}, "beam_size is not supported"),
        ({"max_prompt_length": 60}, "exceed the cache of 64"),
        ({"temperature": -1.0, "top_p": 1.0}, "temperature must be"),
        ({"forbidden_tokens": [3], "top_p": 0.5, "temperature": 1.0, "return_logprobs": True}, "needs top_p=1.0"),
    ],
)
def test_what_is_not_supported_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        samplers()[1](["ab"], 8, **settings)
