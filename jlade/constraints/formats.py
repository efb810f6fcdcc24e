"""Formats of strings in JSON Schema, as regular expressions."""

_YEAR = r"(000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"
_LEAP = r"(\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = r"(0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8])"
_DATE = rf"({_YEAR}-({_DAY})|{_LEAP}-02-29)"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"({_BYTE}\.){{3}}{_BYTE}"
_GROUP = r"[0-9A-Fa-f]{1,4}"
_IPV6 = (
    rf"(({_GROUP}:){{7}}{_GROUP}|({_GROUP}:){{1,7}}:|({_GROUP}:){{1,6}}:{_GROUP}|({_GROUP}:){{1,5}}(:{_GROUP}){{1,2}}"
    rf"|({_GROUP}:){{1,4}}(:{_GROUP}){{1,3}}|({_GROUP}:){{1,3}}(:{_GROUP}){{1,4}}|({_GROUP}:){{1,2}}(:{_GROUP}){{1,5}}"
    rf"|{_GROUP}:(:{_GROUP}){{1,6}}|:((:{_GROUP}){{1,7}}|:))"
)
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_IN_URI = r"([A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:{_IN_URI}*(\?({_IN_URI}|\?)*)?(#({_IN_URI}|\?)*)?"
_REFERENCE = rf"({_URI}|([A-Za-z0-9._~!$&'()*+,;=@/-]|%[0-9A-Fa-f]{{2}})*(\?({_IN_URI}|\?)*)?(#({_IN_URI}|\?)*)?)"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[Tt]{_TIME}",
    "duration": r"P(\d+W|(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)(T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S))?"
    r"|T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S))",
    "email": rf"{_ATOM}(\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    "uri": _URI,
    "uri-reference": _REFERENCE,
    "json-pointer": r"(/([^~/]|~[01])*)*",
}

# Formats that a draft of JSON Schema defines, and that are not supported. Other names are annotations, as are keywords
# that no draft defines.
UNSUPPORTED = {
    "color", "host-name", "idn-email", "idn-hostname", "ip-address", "iri", "iri-reference", "phone", "regex",
    "relative-json-pointer", "style", "uri-template", "utc-millisec",
}  # fmt: skip
