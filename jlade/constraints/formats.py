"""Formats of strings in JSON Schema, as regular expressions.

A format has fewer texts than its specification where all of them would take many states. Names of hosts and mailboxes
are bounded by their numbers of letters and digits, which can be counted, so that their lengths are within the limits.
"""

import functools

from jlade.constraints import regex
from jlade.constraints.automaton import Expression, build, minimal
from jlade.constraints.patterns import Spelling

_YEAR = r"(000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"
_LEAP = r"(\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = r"(0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8])"
_DATE = rf"({_YEAR}-({_DAY})|{_LEAP}-02-29)"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"({_BYTE}\.){{3}}{_BYTE}"
_GROUP = r"[0-9A-Fa-f]{1,4}"
_LAST = rf"({_GROUP}:{_GROUP}|{_IPV4})"
_IPV6 = (
    rf"(({_GROUP}:){{6}}{_LAST}|::({_GROUP}:){{0,5}}{_LAST}|{_GROUP}::({_GROUP}:){{0,4}}{_LAST}"
    rf"|({_GROUP}:){{1,2}}:({_GROUP}:){{0,3}}{_LAST}|({_GROUP}:){{1,3}}:({_GROUP}:){{0,2}}{_LAST}"
    rf"|({_GROUP}:){{1,4}}:({_GROUP}:)?{_LAST}|({_GROUP}:){{1,5}}:{_LAST}|({_GROUP}:){{1,6}}:{_GROUP}"
    rf"|({_GROUP}:){{1,7}}:|::({_GROUP})?)"
)
_UUID = r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-%s-[0-9A-Fa-f]{12}"
_BASE64 = "([A-Za-z0-9{0}]{{4}})*([A-Za-z0-9{0}]{{2}}([A-Za-z0-9{0}]|=)=)?"
_LETTER = "[A-Za-z0-9]"
_LABEL = rf"{_LETTER}(-?{_LETTER}){{0,31}}"  # up to 63 characters
_LABELS = rf"{_LABEL}(\.{_LABEL})*"
_LONG, _SHORT = rf"{_LETTER}(-?{_LETTER}){{0,27}}", rf"{_LETTER}(-?{_LETTER}){{0,13}}"
_HOST = rf"{_LONG}(\.{_LONG}(\.{_LONG}(\.{_SHORT}(\.{_SHORT}(\.{_SHORT})?)?)?)?)?"  # up to 253 characters
_ESCAPE = r"%[0-9A-Fa-f]{2}"
_NAME = rf"([A-Za-z0-9._~!$&'()*+,;=-]|{_ESCAPE})*"
_CHARACTER = rf"([A-Za-z0-9._~!$&'()*+,;=:@-]|{_ESCAPE})"  # of a segment of a path
_PATH = rf"(/{_CHARACTER}*)*"
_AUTHORITY = rf"(([A-Za-z0-9._~!$&'()*+,;=:-]|{_ESCAPE})*@)?({_NAME}|\[::({_GROUP})?\])(:\d*)?"
_END = rf"(\?({_CHARACTER}|[/?])*)?(#({_CHARACTER}|[/?])*)?"
_ROOTED = rf"//{_AUTHORITY}{_PATH}|/({_CHARACTER}+{_PATH})?"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:({_ROOTED}|({_CHARACTER}+{_PATH})?){_END}"
_RELATIVE = rf"({_ROOTED}|(([A-Za-z0-9._~!$&'()*+,;=@-]|{_ESCAPE})+{_PATH})?){_END}"
_POINTER = r"(/([^~/]|~[01])*)*"
_VARIABLE = r"\w+(\.\w+)*(:[1-9]\d{0,3}|\*)?"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"


def _network4(length: int) -> str:
    """Returns the networks of IPv4 with a prefix of some bits: those after it are 0."""
    whole, bits = divmod(length, 8)
    multiples = "|".join(map(str, range(0, 256, 256 >> bits)))
    return r"\.".join([*[_BYTE] * whole, f"({multiples})", "0", "0", "0"][:4]) + f"/{length}"


def _network6(groups: int) -> str:
    """Returns the networks of IPv6 whose prefixes have some groups, or more bits, which are 0."""
    lengths = "|".join(map(str, range(16 * groups, 129)))
    address = rf"({_GROUP}:){{{groups}}}:" if groups else "::"
    return f"{address}/({lengths})"


FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[Tt]{_TIME}",
    "duration": r"P(\d+W|(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)(T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S))?"
    r"|T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S))",
    "email": rf"{_ATOM}(\.?{_ATOM}){{0,31}}@{_LABELS}",  # RFC 5321: up to 64 characters, and labels up to 63
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": _UUID % r"[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}",
    "uri": _URI,
    "uri-reference": rf"{_URI}|{_RELATIVE}",
    "uri-template": rf"([A-Za-z0-9._~!$&()*+,;=:@/?#\[\]-]|{_ESCAPE}|\{{[+#./;?&]?{_VARIABLE}(,{_VARIABLE})*\}})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(0|[1-9]\d*)(#|{_POINTER})",
    # Those of pydantic.
    **{f"uuid{version}": _UUID % rf"{version}[0-9A-Fa-f]{{3}}-[89ABab][0-9A-Fa-f]{{3}}" for version in range(1, 9)},
    "ipv4interface": rf"{_IPV4}(/([12]?\d|3[0-2]))?",
    "ipv6interface": rf"{_IPV6}(/([1-9]?\d|1[01]\d|12[0-8]))?",
    "ipv4network": "|".join([_IPV4, *map(_network4, range(33))]),
    "ipv6network": "|".join([_IPV6, *map(_network6, range(8))]),
    "base64": _BASE64.format("+/"),
    "base64url": _BASE64.format("_-"),
}
FORMATS |= {f"ipvany{kind}": f"{FORMATS[f'ipv4{kind}']}|{FORMATS[f'ipv6{kind}']}" for kind in ("interface", "network")}
FORMATS["ipvanyaddress"] = rf"{_IPV4}|{_IPV6}"

# Those whose texts in ASCII are of another format, and those of draft 3 with another name.
FORMATS |= {name: FORMATS[name.removeprefix("idn-")] for name in ("idn-email", "idn-hostname")}
FORMATS |= {"iri": _URI, "iri-reference": FORMATS["uri-reference"], "host-name": _HOST, "ip-address": _IPV4}

# Formats that a draft of JSON Schema defines, and that are not supported. Other names are annotations, as are keywords
# that no draft defines, and so is "regex".
UNSUPPORTED = {"color", "phone", "style", "utc-millisec"}


@functools.cache
def expression(name: str, spell: Spelling) -> Expression:
    """Returns the texts of one of `FORMATS`."""
    found = regex.parse(FORMATS[name], spell)
    is_counted = build(found, counts=True).bounds is not None
    return found if is_counted else minimal(build(found))
