"""Special tokens in the texts of grammars: their names between marks, a byte that UTF-8 never has.

So no other text spells them. A string has the mark as the surrogate by which Python stands for the byte.
"""

import codecs

from jlade.constraints.automaton import byte_range

BYTE = 0xFF
MARK = "\udcff"
ID = "\udcfe"  # in a string of `tags`: any id, or number of a call
OTHERS = byte_range(0, BYTE - 1)  # any byte but the mark


def special(name: str) -> str:
    """Returns a special token as part of a string."""
    return f"{MARK}{name}{MARK}"


def encode(text: str) -> bytes:
    """Returns the bytes of a string with special tokens."""
    return text.encode(errors="surrogateescape")


def _marked(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return (MARK, error.start + 1) if error.object[error.start] == BYTE else ("\ufffd", error.end)


DECODE_ERRORS = "jlade.marked"  # for decoders: the mark stays, and other bytes that are not UTF-8 are U+FFFD
codecs.register_error(DECODE_ERRORS, _marked)
