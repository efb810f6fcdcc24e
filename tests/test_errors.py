"""Errors of arguments carry the argument's name, apart from the message that begins with it."""

import pickle

import numpy as np
import pytest

from jlade import LookaheadConfig, SamplingConfig
from jlade.errors import ArgumentError, ArgumentTypeError, ArgumentValueError, check_int
from jlade.generation import prompts


@pytest.mark.parametrize("kind", [ArgumentTypeError, ArgumentValueError])
def test_an_error_keeps_its_argument_on_the_way_to_another_process(kind):
    error = kind("top_k", "must be at least 1, got 0")
    again = pickle.loads(pickle.dumps(error))
    for one in (error, again):
        assert isinstance(one, TypeError if kind is ArgumentTypeError else ValueError)
        assert f"{one.argument} {one.problem}" == str(one) == "top_k must be at least 1, got 0"
        assert one.argument == "top_k"
    assert type(again) is kind


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: SamplingConfig(top_k=0), "top_k"),
        (lambda: SamplingConfig(top_k=1.5), "top_k"),
        (lambda: SamplingConfig(top_p=2), "top_p"),
        (lambda: SamplingConfig(logit_bias={1: 1e9}), "logit_bias"),
        (lambda: LookaheadConfig.tree(-1), "size"),
        (lambda: check_int("capacity", 2, 3), "capacity"),
        (lambda: prompts.read([[1], [13]], None, 13), "prompt[1]"),
        (lambda: prompts.read([1], None, 13, [2]), "attention_mask"),
        (lambda: prompts.limits([prompts.NO_PROMPT], 3, -1, prompts.Room(8, "")), "min_new_tokens"),
        (lambda: prompts.check_room(8, 1, 0, prompts.Room(8, "")), "prompt"),
        (lambda: prompts.check_room(1, 2, 3, prompts.Room(8, "")), "min_new_tokens"),
        (lambda: prompts.limits([prompts.NO_PROMPT], 2**31, 0, prompts.Room(8, "")), "max_new_tokens"),
        (lambda: prompts.check_room(1, np.int32(2**31 - 1), 0, prompts.Room(8, "")), "prompt"),
    ],
)
def test_wrong_arguments_are_named(call, argument):
    with pytest.raises(ArgumentError) as error:
        call()
    assert error.value.argument == argument
    assert str(error.value).startswith(f"{argument} ")
