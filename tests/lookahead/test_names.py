import pytest
from hypothesis import given
from hypothesis import strategies as st

from jlade import LookaheadConfig, NGramConfig
from jlade.config import PLAIN
from jlade.lookahead import names

SIZES = (st.integers(0, 30), st.integers(2, 9), st.integers(0, 30))
SETTINGS = (
    st.builds(LookaheadConfig.paper, *SIZES)
    | st.builds(LookaheadConfig.tree, st.integers(1, 99))
    | st.builds(LookaheadConfig.jacobi, st.integers(1, 99))
    | st.builds(
        lambda tree, window, ngram, guesses: LookaheadConfig.tree(tree, ngrams=NGramConfig(window, ngram, guesses)),
        *(st.integers(1, 99), st.integers(1, 30), st.integers(2, 9), st.integers(0, 30)),
    )
)


@given(SETTINGS)
def test_a_name_is_read_as_its_setting(setting):
    assert names.parse(names.name(setting)) == setting
    assert names.parse(f" {names.name(setting).replace(',', ', ')}") == setting


@pytest.mark.parametrize(
    ("setting", "name", "label"),
    [
        (LookaheadConfig.paper(15, 5, 15), "15,5,15", "15, 5, 15"),
        (LookaheadConfig.tree(63), "tree=63", "tree of 63"),
        (LookaheadConfig(), "tree=119", "tree of 119"),
        (LookaheadConfig.tree(80, ngrams=NGramConfig(10, 5, 10)), "10,5,10:tree=80", "10, 5, 10, tree of 80"),
        (LookaheadConfig.jacobi(16), "jacobi=16", "Jacobi, 16 guesses"),
        (PLAIN, "0,2,0", "plain"),
    ],
)
def test_names_and_labels(setting, name, label):
    assert (names.name(setting), names.label(setting)) == (name, label)


@pytest.mark.parametrize(("kind", "sizes"), [("code", (8, 6, 15)), ("prose", (7, 5, 10)), ("creative", (5, 4, 8))])
def test_presets_have_the_sizes_of_the_guide(kind, sizes):
    setting = LookaheadConfig.preset(kind)
    assert (setting.window_size, setting.ngram_size, setting.ngrams.guess_set_size) == sizes
    assert setting == LookaheadConfig.paper(*sizes) == names.parse(kind)


def test_another_preset_is_refused():
    with pytest.raises(ValueError, match="kind must be one of 'code', 'prose', 'creative', got 'poem'"):
        LookaheadConfig.preset("poem")


@pytest.mark.parametrize(
    "name", ["", "15", "15,5", "tree", "tree=", "tree=x", "1,2,3:tree", "1,2,3tree=4", ":tree=4", "jacobi"]
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match=f"a setting is {names.SYNTAX}; got '{name}'"):
        names.parse(name)
