"""Regular expressions that the tests of automata share."""

import itertools

from jlade.constraints import automaton, regex
from jlade.constraints.code_points import ALL
from jlade.constraints.tokens import Trie

# A vocabulary of all bytes, of an end token without any, and of longer tokens.
LONGER = rb"ab abc abab 12 0. ba co com aab%1 2%01a bb xx bcd".split()
TOKENS = [*(bytes([byte]) for byte in range(256)), "éx".encode(), b"", *LONGER]
EOS = TOKENS.index(b"")
TRIE = Trie(TOKENS)

TEXTS = ["".join(each) for size in range(6) for each in itertools.product("ab", repeat=size)]
PATTERNS = [
    "abc|abd*",
    "(ab|ba){2,3}c?",
    r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?",
    r"[^a-c]*",
    r"(é|ü|[à-æ])+x",
    r"\w+@\w+\.(com|org)",
    "",
    r"a{0}b",
    r".\s\S",
    r"(a*)*b",
    "(?:x|)y",
    "[😀-😎]{1,2}",
    "a*a{2,9}",
    "(a?b?){9}",
    "(a{0,9}b?)*",
    "[ab]{8}|[bc]{9}",
    "(ab){8}|(abab){8}c",
    "a{8}a{8}b",
]
COUNTED = [
    "[ab]{3,9}",
    "(a|bc){0,9}d?",
    "x[^x]{8,12}x",
    "[ab]{2,9}[0-9]{0,8}c",
    '("[ab]{1,10}",)*y',
    "(0{1,3}1){2,9}",
    "(12?){9}|com",
    "(ab{2,10}c){0,3}",
    "a?b{0,8}|c{9}",
    "(x|a{0,8}y)a{8}",
    "[ab]{8}|[bc]{8}",
    "(a[bc]{9}|[ab]c{9})x",
    "[ab]{9,}c",
    "([ab]{1,9}c){0,20}d",
]
# Texts with a number of characters: pattern, least, most.
LENGTHS = [
    ("[a-c]+", 0, 9),
    ("[a-c]*b{3}", 5, 12),
    ("[a-c]*(x|bcd)", 9, 12),
    ("([a-c]|%[0-9]{2})*", 3, 10),
    ("(é|😀)*(â|a)", 8, 9),
    ("a{12}|b+|(ab)*c", 2, 8),
    ("(abc)*", 8, 11),
    ("(a|b{12})*", 3, 11),
    ("(abc)*", 10, 11),
    (r"x?[a-c]{0,20}", 10, 15),
    ("[a-c]{2}", 0, 9),
    ("[a-c]+", 0, 5),
    ("[a-c]*x", 9, None),
    ("(x|[a-c]*xx)", 10, None),
]


def characters(pattern, minimum, maximum):
    """The texts that a pattern matches, with a number of characters."""
    meter = automaton.meter(automaton.characters(ALL))
    return automaton.counted(regex.parse(pattern), meter, minimum, maximum)
