import pytest
from hypothesis import given
from hypothesis import strategies as st

from jlade.config import PLAIN, LookaheadConfig, NGramConfig
from jlade.evaluation.methods import DTYPES, SETTINGS, TRANSFORMERS, WAYS, Method, parse


@st.composite
def names(draw):
    """Names with flags in any order and with spaces, such as "15,5,15 :t=0.7: warm"."""
    base = draw(st.sampled_from([*SETTINGS, *TRANSFORMERS, "W,N,G"]))
    flags = draw(st.lists(st.sampled_from(DTYPES), max_size=1))
    if base == "W,N,G":
        base = f"{draw(st.integers(0, 40))},{draw(st.integers(2, 12))},{draw(st.integers(1, 40))}"
        flags += draw(
            st.lists(
                st.sampled_from(["no-prompt", "warm", "growth", *WAYS]),
                unique=True,
            )
        )
        flags += draw(
            st.sampled_from([[], ["tree=9"], ["tree=1"], ["tree=9", "no-suffix"], ["no-recycled", "tree=20"]])
        )
    if base not in TRANSFORMERS:
        temperatures = st.floats(0, 10) | st.just(1.0)
        flags += [f"t={draw(temperatures)}" for _ in range(draw(st.integers(0, 1)))]
    return draw(st.sampled_from([":", " : "])).join([base, *draw(st.permutations(flags))])


@given(names())
def test_a_name_that_a_method_gives_is_read_as_that_method(name):
    method = parse(name)
    assert parse(str(method)) == method
    assert str(parse(str(method))) == str(method)


@given(names(), names())
def test_methods_that_differ_have_other_labels(one, other):
    """In a figure the second of two series with the same label would replace the first."""
    assert (parse(one) == parse(other)) == (parse(one).label == parse(other).label)


def test_what_names_mean():
    assert parse("plain") == Method(PLAIN)
    assert parse("0,9,0") == parse("1,2,0") == parse("plain"), "a step of one token"
    assert parse("prompt-lookup") == parse("0,4,1") == Method(LookaheadConfig.paper(0, 4, 1))
    assert str(parse("0,4,1")) == "prompt-lookup"
    assert parse("15,5,15") == Method(LookaheadConfig.paper())
    assert parse("jacobi=16").setting == LookaheadConfig.jacobi(16)
    assert parse("auto").setting == "auto"
    assert parse("transformers") == Method(None)
    assert parse("transformers-lookup:bfloat16") == Method(None, lookup_tokens=10, dtype="bfloat16")
    tree = LookaheadConfig.tree(63, sources=("suffix",))
    assert parse("0,2,0:tree=63:no-pool:no-recycled") == Method(tree)
    assert str(Method(tree)) == "tree=63:no-recycled"
    without_pool = LookaheadConfig.tree(80, ngrams=NGramConfig(10, 5, 0, window_advance="token"))
    assert parse("10,5,10:tree=80:no-pool:token-window") == Method(without_pool)
    assert str(Method(without_pool)) == "10,5,0:tree=80:token-window"
    adaptive = LookaheadConfig.tree(7, relative_step_time=1.5)
    assert parse("tree=7:cost=1.5") == Method(adaptive)
    by_rejection = LookaheadConfig.paper(window_draw="greedy", verification="rejection")
    assert parse("15,5,15:greedy-window:rejection") == Method(by_rejection)
    everything = Method(LookaheadConfig.paper(7, 5, 3, pool_from_prompt=False), 0, "float16", 0.7, True, True)
    assert parse("7,5,3:t=0.7:warm:float16:growth:no-prompt") == everything


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("plain", "plain"),
        ("plain:bfloat16:t=1", "plain, bfloat16, temperature 1"),
        ("auto", "jlade's choice"),
        ("15,5,15", "15, 5, 15"),
        ("15,5,15:warm:t=0.25", "15, 5, 15, warm pool, temperature 0.25"),
        ("15,5,15:no-prompt:growth", "15, 5, 15, without the prompt, counting the pool"),
        ("0,4,1", "prompt lookup 0, 4, 1"),
        ("4,5,3:tree=20", "4, 5, 3, tree of 20"),
        ("0,2,0:tree=63:no-suffix", "tree of 63, without suffix"),
        ("tree=7:cost=1.5", "tree of 7, adaptive"),
        ("15,5,15:rejection:greedy-window:t=1", "15, 5, 15, by rejection, greedy window, temperature 1"),
        ("jacobi=16:t=1", "Jacobi, 16 guesses, temperature 1"),
        ("transformers", "transformers"),
        ("transformers-lookup:float16", "transformers, prompt lookup, float16"),
    ],
)
def test_labels(name, label):
    assert parse(name).label == label


def test_a_method_in_the_dtype_of_the_run_has_none_of_its_own():
    assert parse("15,5,15:bfloat16", "bfloat16") == parse("15,5,15")
    assert str(parse("plain:float32", "float32")) == "plain"
    assert str(parse("plain:float32", "bfloat16")) == "plain:float32"


def test_the_baseline_is_plain_decoding_with_the_same_dtype_and_temperature():
    assert str(parse("15,5,15:no-prompt:warm:float16:t=0.7").baseline) == "plain:float16:t=0.7"
    assert str(parse("transformers-lookup").baseline) == "plain"
    assert parse("plain:t=1").baseline == parse("plain:t=1")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("medusa", "a setting is .*; got 'medusa'"),
        ("15,5", "a setting is"),
        ("plain:tree=3", "a setting is"),
        ("15,5,15:no-suffix", ":no-suffix needs a tree"),
        ("auto:cost=2", ":cost needs sizes"),
        ("auto:rejection", ":rejection needs sizes"),
        ("tree=7:cost=0", "relative_step_time must be a number above 0, or None, got 0.0"),
        ("2,3,4:cost=2", "relative_step_time must be None without a tree or with a window"),
        ("15,1,15", "ngram_size must be at least 2, got 1"),
        ("plain:warm", ":warm needs W, N and G with a pool"),
        ("tree=9:warm", ":warm needs W, N and G with a pool"),
        ("auto:growth", ":growth needs W, N and G with a pool"),
        ("15,5,0:no-prompt", ":no-prompt needs W, N and G with a pool"),
        ("15,5,15:hot", "'hot' is not known"),
        ("15,5,15:float64", "'float64' is not known"),
        ("plain:t=hot", "could not convert string to float"),
        ("plain:t=-1", "temperature must be a number of at least 0, got -1.0"),
        ("plain:t=inf", "temperature must be at most 10000 in size, got inf"),
        ("plain:t=nan", "temperature must be a number of at least 0, got nan"),
        ("transformers:t=1", "transformers decodes greedily here"),
    ],
)
def test_names_that_are_refused(name, reason):
    with pytest.raises(ValueError, match=f"a method is plain, .* got '{name}': {reason}"):
        parse(name)
