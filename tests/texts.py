"""Comparisons of texts that say in words where these part: the token, the step, and what came before."""

import numpy as np


def text_of(out, row=0) -> list[int]:
    """Returns the tokens of a row of a generation."""
    return out.tokens[row, : out.lengths[row]].tolist()


def assert_text(out, tokens, accepted=None, row=0, name=None) -> None:
    """Asserts that a row of a generation has the tokens, and as many of them in each step as `accepted` says."""
    name = name or f"row {row}"
    found, steps = text_of(out, row), out.accepted[row, : out.steps[row]].tolist()
    assert found == list(tokens), difference(found, tokens, steps, name)
    if accepted is not None:
        assert steps == list(accepted), f"{name}: its steps accept {steps} tokens, not {list(accepted)}"


def assert_same_texts(found, expected) -> None:
    """Asserts that all rows of two generations have the same tokens, padding included."""
    assert found.tokens.shape == expected.tokens.shape
    for row, (one, other) in enumerate(zip(found.tokens.tolist(), expected.tokens.tolist(), strict=True)):
        assert one == other, difference(one, other, found.accepted[row].tolist(), f"row {row}")


def difference(found, expected, accepted, name) -> str:
    """Returns where a text, made in steps that `accepted` tokens, leaves the expected one."""
    pairs = zip([*found, "no token"], [*expected, "no token"], strict=False)
    place, (one, other) = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    step = int(np.searchsorted(np.cumsum(accepted), place, side="right"))
    return f"{name}: token {place}, of step {step}, is {one}, not {other}, after {found[max(0, place - 8) : place]}"
