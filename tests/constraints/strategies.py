"""Random expressions and schemas."""

from hypothesis import strategies as st


def patterns():
    """Yields regular expressions over the letters of the tiny tokenizer."""
    return st.recursive(
        st.sampled_from(["a", "b", "c", "é", "ab", "[ac]", "[^b]", ".", "[ab]{2,9}", "(?:é|ca){0,8}", "c{8}"]),
        lambda inner: st.one_of(
            st.lists(inner, min_size=2, max_size=3).map("".join),
            st.lists(inner, min_size=2, max_size=3).map(lambda options: f"(?:{'|'.join(options)})"),
            st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}", "{2,}"])).map(
                lambda pair: f"(?:{pair[0]}){pair[1]}"
            ),
        ),
        max_leaves=8,
    )


def schemas():
    """Yields schemas of values that the tokens of `json_tokenizer` spell."""
    names = st.sampled_from(["a", "aa", "1"])
    leaves = st.one_of(
        st.just({"type": ["null", "integer"], "maximum": 1}),
        st.sampled_from([(0, 1), (1, 11), (0, 110)]).map(
            lambda pair: {"type": "integer", "minimum": pair[0], "exclusiveMaximum": pair[1] + 1}
        ),
        st.integers(0, 3).map(lambda maximum: {"type": "string", "maxLength": maximum, "pattern": "^[a1]*$"}),
        st.lists(st.sampled_from([None, 0, 10, "a", "a1", [0], {"a": None}]), min_size=1, max_size=3).map(
            lambda values: {"enum": values}
        ),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(inner, st.integers(0, 2)).map(
                lambda pair: {"type": "array", "items": pair[0], "minItems": pair[1], "maxItems": 3}
            ),
            st.lists(inner, min_size=1, max_size=2).map(
                lambda items: {"type": "array", "prefixItems": items, "items": False}
            ),
            st.tuples(st.dictionaries(names, inner, min_size=1, max_size=3), st.sets(names)).map(
                lambda pair: {
                    "type": "object",
                    "properties": pair[0],
                    "required": sorted(pair[1] & pair[0].keys()),
                    "additionalProperties": False,
                }
            ),
            st.lists(inner, min_size=2, max_size=2).map(lambda options: {"anyOf": options}),
        ),
        max_leaves=4,
    )
