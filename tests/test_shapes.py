"""Public docstrings give dtype and shape of every array, in the notation of docs/api.rst, and arrays have them."""

import dataclasses
import functools
import inspect
import pathlib
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig, NGramConfig, SamplingConfig, testing
from jlade.drafts import recycled, suffix
from jlade.engine.scoring import PromptLogProbs
from tests.tiny import PAPER, tiny_llama, tiny_tokenizer

REFERENCE = (pathlib.Path(__file__).parents[1] / "docs" / "api.rst").read_text(encoding="utf-8")
PUBLIC = [each for name in jlade.__all__ if not inspect.ismodule(each := getattr(jlade, name))]
PUBLIC += [testing.check_constraint, testing.check_decoder, PromptLogProbs]
SHAPE = re.compile(r"\b(bool|u?int\d*|float\d*|array|key)\[([^\]]*)\]")
ELSEWHERE = re.compile(r"`(jlade\.)?(generate|prefill|decode)`")  # which has the argument
DTYPES = {"int": np.integer, "float": np.floating, "array": np.generic, "key": jax.dtypes.prng_key}

each_public = pytest.mark.parametrize("thing", PUBLIC, ids=lambda thing: thing.__name__)


def has_array(annotation):
    """Whether values of this type are or hold arrays, other than in the fields of a class."""
    parts = annotation if isinstance(annotation, list) else typing.get_args(annotation)
    is_array = annotation is jax.Array or (typing.get_origin(annotation) or annotation) is np.ndarray
    return is_array or any(map(has_array, parts))


def entries(doc, title):
    """Returns the entries of a section of a docstring by their names."""
    found, names = {}, []
    for line in doc.partition(f"{title}:\n")[2].splitlines():
        if line and not line.startswith("  "):
            break
        if entry := re.match(r"  (\w[\w, ]*): (.*)", line):
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        elif line:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def members(cls):
    """Yields the functions and properties of a public class that have docstrings, by their names."""
    for name, member in vars(cls).items():
        member = getattr(member, "__func__", member)
        is_public = not name.startswith("_") or name == "__init__"
        if is_public and (inspect.isfunction(member) or isinstance(member, property)) and member.__doc__:
            yield name, member


def without_a_shape(function, doc):
    """Returns the names of the arguments of a function that are arrays without a shape, "return" for its result."""
    parameters = inspect.signature(function).parameters.values()
    given, missing, number = entries(doc, "Args"), [], 0
    for each in parameters:
        if has_array(each.annotation):
            text = given.get(each.name, doc)
            number += each.name not in given and not ELSEWHERE.search(doc)
            if not (SHAPE.search(text) or ELSEWHERE.search(text)):
                missing.append(each.name)
    # Without entries a sentence has the shapes of all of them, and of the result.
    rest = doc.partition("Args:\n")[0] + doc.partition("Returns:\n")[2]
    number += has_array(inspect.signature(function).return_annotation)
    if not ELSEWHERE.search(rest) and len(SHAPE.findall(rest)) < number:
        missing.append("return")
    return missing


@each_public
def test_every_array_has_a_shape(thing):
    doc = inspect.getdoc(thing)
    if inspect.isfunction(thing):
        assert without_a_shape(thing, doc) == []
        return
    attributes, arguments = entries(doc, "Attributes"), entries(doc, "Args")
    hints = typing.get_type_hints(thing, include_extras=True) if thing is not jlade.Engine else {}
    fields = [name for name, hint in hints.items() if has_array(hint)]
    assert [name for name in fields if not SHAPE.search(attributes.get(name, ""))] == []
    for name, member in members(thing):
        if isinstance(member, property):
            is_array = has_array(inspect.signature(member.fget).return_annotation)
            assert not is_array or SHAPE.search(member.__doc__), name
        elif not (name == "__init__" and arguments):
            assert without_a_shape(member, inspect.getdoc(member)) == [], name
    if arguments:
        assert without_a_shape(thing.__init__, doc) == []


@each_public
def test_the_letters_of_a_shape_are_explained(thing):
    docs = [inspect.getdoc(thing), *(member.__doc__ for _, member in members(thing))] if inspect.isclass(thing) else []
    text = "\n".join(docs or [inspect.getdoc(thing)])
    known = re.findall(r"^`(\w+)` ", REFERENCE, re.MULTILINE) + re.findall(r"\b[A-Z]+\b", SHAPE.sub("", text))
    letters = {letter for _, axes in SHAPE.findall(text) for letter in re.findall(r"\b[A-Z]+\b", axes)}
    assert letters <= set(known)


def check(value, text, sizes, name):
    """Asserts that the arrays in a value have one of the shapes in a text, with axes of these sizes.

    An axis whose size is not known has the same one in all arrays of a call.
    """
    shapes = SHAPE.findall(text)
    for array in jax.tree.leaves(value):
        if hasattr(array, "shape") and shapes:
            assert any(fits(array, dtype, axes, sizes) for dtype, axes in shapes), (
                name,
                array.dtype,
                array.shape,
                shapes,
            )


def fits(array, dtype, axes, sizes):
    kind = DTYPES.get(dtype) or np.dtype(dtype)
    axes = [axis.strip() for axis in axes.split(",") if axis.strip()]
    shape = list(array.shape)
    if "..." in axes:
        place = axes.index("...")
        after = len(axes) - place - 1
        axes[place : place + 1] = map(str, shape[place : len(shape) - after])
    if not jnp.issubdtype(array.dtype, kind) or len(axes) != len(shape):
        return False
    found = dict(sizes)
    for axis, size in zip(axes, shape, strict=True):
        if re.fullmatch(r"[\w()]+", axis) and not axis.isdigit():
            if found.setdefault(axis, size) != size:
                return False
        elif eval(axis, found) != size:
            return False
    sizes.update({axis: size for axis, size in found.items() if axis != "__builtins__"})
    return True


def check_fields(value, sizes, known=()):
    """Checks the fields and the properties of a public object; the letters of its own are new ones."""
    sizes, checked = dict(sizes) | dict(known), 0
    attributes = entries(inspect.getdoc(type(value)), "Attributes")
    for name, text in attributes.items():
        if type(getattr(value, name)) not in PUBLIC:  # whose own docstring has the shapes
            check(getattr(value, name), text, sizes, f"{type(value).__name__}.{name}")
            checked += bool(SHAPE.search(text))
    for name, member in members(type(value)):
        if isinstance(member, property) and has_array(inspect.signature(member.fget).return_annotation):
            check(getattr(value, name), member.__doc__, sizes, f"{type(value).__name__}.{name}")
    assert checked


SIZES = {"V": 13, "K": 2, "max_new_tokens": 12}


def test_results_have_their_shapes():
    stream = jlade.stream(
        tiny_llama(3), [1, 2, 3], max_new_tokens=12, lookahead=PAPER, logprobs=True, top_logprobs=2,
        with_statistics=True, keep_state=True,
    )  # fmt: skip
    pieces = list(stream)
    out = pieces[-1].generation
    for piece in pieces:
        check_fields(piece, SIZES)
    check_fields(out, SIZES, {"B": 1})
    check_fields(out.statistics, SIZES, {"B": 1, "A": PAPER.max_accepted, "max(steps)": out.steps.max()})
    check_fields(out.state, SIZES, {"B": 1, "C": 64, "N": 4, "W": 4})
    check_fields(out.state.inputs.stopping, SIZES, {"B": 1, "K": 32})
    check_fields(jax.tree.map(lambda array: array[0], out.state.sources["pool"]), SIZES, {"R": 13, "S": 3, "N": 4})


def test_arguments_and_states_have_their_shapes():
    lookahead = LookaheadConfig.tree(8, ngrams=NGramConfig(4, 3, 5))
    controls = {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1}
    controls |= {"presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {1: 2.0}}
    prompts, keys = [[1, 2, 3], [4]], jax.random.split(jax.random.key(0), 2)
    corpus = jlade.Corpus([[1, 2, 3]])
    inputs, config = jlade.prepare(
        tiny_llama(3), prompts, max_new_tokens=12, min_new_tokens=2, lookahead=lookahead, key=keys,
        sampling=SamplingConfig(temperature=1.0, **controls), tokenizer=tiny_tokenizer(), stop=["ab", "c"],
        corpus=corpus, constraint=jlade.BannedSequences.of([[1, 2, 3], [4]], 13),
    )  # fmt: skip
    prefix = jax.eval_shape(functools.partial(jlade.prefill, config=config), tiny_llama(3), inputs)
    state = jax.eval_shape(functools.partial(jlade.start, config=config), prefix, inputs)
    sizes = SIZES | {"B": 2, "C": 64}
    inputs = dataclasses.replace(inputs, has_drafts=np.ones(2, bool), costs=np.ones(3, np.float32))
    check_fields(inputs, sizes, {"levels": 3})
    check_fields(inputs.sampling, sizes)
    check_fields(inputs.stopping, sizes, {"K": 32})
    check_fields(inputs.stopping.strings, sizes)
    check_fields(inputs.constraint, sizes, {"K": 2, "longest": 3})
    check_fields(inputs.shared["corpus"], sizes, {"S": 1024, "K": suffix.LONGEST, "R": suffix.LATEST})
    check_fields(corpus, sizes)
    check_fields(prefix, sizes)
    check_fields(prefix.cache, sizes, {"S": 64, "KH": 2, "D": 6})
    check_fields(state, sizes, {"N": 3, "W": 4})
    states = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype), state.sources)
    check_fields(states["recycled"], sizes, {"P": recycled.num_places(13)})
    check_fields(tiny_llama(3), sizes, {"E": 16})


@pytest.mark.parametrize(
    ("array", "text"),
    [(np.zeros(2, np.int64), "int32[B]"), (np.zeros((2, 3), np.int32), "int32[B]"), (np.zeros(3, bool), "bool[B]")],
    ids=["dtype", "rank", "size"],
)
def test_a_wrong_shape_is_found(array, text):
    with pytest.raises(AssertionError):
        check(array, text, {"B": 2}, "array")
