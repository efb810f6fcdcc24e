"""Which changes of a call compile which programs, as docs/usage.md's table says."""

import dataclasses

import jax
import pytest

import jlade
from tests.compilations import recorded
from tests.tiny import PAPER, slow, tiny_llama, tiny_tokenizer

# A model that no other test has, so that no program is there.
SHAPE = {"num_layers": 1, "head_dim": 4, "max_positions": 2048}
PROGRAMS = {"jit(_read)": "prefill", "jit(_run)": "decode"}
NOTHING, DECODE, BOTH = set(), {"decode"}, {"prefill", "decode"}
TREE = jlade.LookaheadConfig.tree(7)
SUFFIX = jlade.LookaheadConfig.tree(7, sources=("suffix",))


def compiled(prompt=(1, 2, 3), seed=0, **options):
    """Returns the programs that a call compiles; `seed` is that of the weights."""
    given = {"tokenizer": tiny_tokenizer(), "max_new_tokens": 4, "lookahead": PAPER, "eos_ids": ()} | options
    with recorded("jaxpr_to_mlir") as events:
        jlade.generate(tiny_llama(seed, **SHAPE), list(prompt), **given)
    return {PROGRAMS[facts["fun_name"]] for _, facts in events if facts["fun_name"] in PROGRAMS}


def sampling(**controls):
    return {"sampling": jlade.SamplingConfig(**controls)}


def paced(relative_step_time):
    return {"lookahead": dataclasses.replace(SUFFIX, relative_step_time=relative_step_time)}


ALL = {"temperature": 0.9, "top_k": 9, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2}
ALL |= {"presence_penalty": 0.1, "frequency_penalty": 0.1}
OTHER = {"temperature": 0.3, "top_k": 4, "top_p": 0.5}
CHANGES = {
    "temperature": (sampling(temperature=0.7), sampling(temperature=0.3), DECODE),
    "stop string": ({"stop": ["ab"]}, {"stop": ["cab", "b", "éa" * 15], "eos_ids": [1, 2] * 10}, DECODE),
    "relative_step_time": (paced(1.4), paced(1.7), DECODE),
    "all controls": (sampling(**ALL, logit_bias={3: 1.0}), sampling(**(ALL | OTHER), logit_bias={5: 2.0}), DECODE),
    "min_new_tokens": ({"min_new_tokens": 2}, {"min_new_tokens": 3}, DECODE),
    "logprobs": ({"logprobs": True}, {"logprobs": True, "max_new_tokens": 3}, DECODE),
    "more than 32 end tokens": ({"eos_ids": [5] * 33}, {"eos_ids": [6] * 64}, DECODE),
    "more than 1024 tokens": ({"max_new_tokens": 1100}, {"max_new_tokens": 1200}, BOTH),
    "batch size": ({"prompt": [[1, 2], [2]]}, {"prompt": [[1, 3], [2, 4]]}, BOTH),
    "setting": ({"lookahead": SUFFIX}, {"lookahead": SUFFIX, "max_new_tokens": 3}, DECODE),
    "setting with recycled logits": ({"lookahead": TREE}, {"lookahead": TREE, "max_new_tokens": 3}, BOTH),
}
QUICK = ("temperature", "stop string", "relative_step_time", "more than 1024 tokens")


@pytest.mark.parametrize("change", [change if change in QUICK else slow(change) for change in CHANGES])
def test_the_first_use_compiles_and_other_values_do_not(change):
    first, second, programs = CHANGES[change]
    compiled()
    assert compiled((3, 4, 5, 6), max_new_tokens=5, eos_ids=(7,), key=jax.random.key(3)) == NOTHING
    assert compiled(seed=1) == NOTHING, "other weights"
    assert compiled(**first) == programs
    assert compiled(**second) == NOTHING
    assert compiled() == NOTHING, "the program without it is still there"


@pytest.mark.slow
def test_a_stream_compiles_its_steps_once():
    """Those of an adaptive setting too, whose pace is part of the state."""
    setting = jlade.LookaheadConfig.tree(6, sources=("suffix",), relative_step_time=1.2)
    options = {"max_new_tokens": 8, "eos_ids": (), "lookahead": setting}
    with recorded("jaxpr_to_mlir") as events:
        pieces = list(jlade.stream(tiny_llama(**SHAPE), [1, 2, 3], **options))
    assert len(pieces) > 1
    assert [facts["fun_name"] for _, facts in events].count("jit(_run)") == 1


@pytest.mark.slow
def test_an_engine_with_other_weights_compiles_nothing():
    def decoded(seed):
        with jlade.Engine(tiny_llama(seed, **SHAPE), max_sequences=1, capacity=32, lookahead=PAPER) as engine:
            engine.warm_up()
            return [result.tokens.tolist() for result in engine.generate([[1, 2], [3, 4]], max_new_tokens=8)]

    first = decoded(0)
    with recorded("jaxpr_to_mlir") as events:
        second = decoded(1)
    assert events == []
    assert second != first


@pytest.mark.slow
def test_the_first_state_corpus_and_prediction():
    for lookahead in (TREE, SUFFIX):
        compiled(lookahead=lookahead)
    state = jlade.generate(
        tiny_llama(**SHAPE), [1, 2, 3], max_new_tokens=4, lookahead=PAPER, eos_ids=(), keep_state=True
    ).state
    longer = [1, 2, 3, *[4] * 5]
    assert compiled(longer, state=state) == NOTHING, "the rest of the prompt is read by the program of other prompts"
    assert compiled([*longer, 5], state=state) == NOTHING
    assert compiled(lookahead=SUFFIX, corpus=[[1, 2, 3, 4]]) == DECODE
    assert compiled(lookahead=SUFFIX, corpus=[[4, 3, 2, 1]]) == NOTHING
    assert compiled(lookahead=TREE, corpus=[[1, 2, 3, 4]]) == DECODE
    assert compiled(lookahead=TREE, prediction=[1, 2, 3]) == DECODE
    for text, events in (([1, 2, 3, 4], DECODE), ([4, 3, 2], NOTHING)):
        assert compiled(lookahead=TREE, prior=jlade.prior(tiny_llama(**SHAPE), [text])) == events
