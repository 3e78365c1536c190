"""Patterns and bounds for JSON Schema's `format`, and the formats that say nothing a grammar could enforce."""

from __future__ import annotations

# The library's own patterns for these formats accept wrong values: the 31st of April, 066 in an address.
_MONTHS = r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = rf"[12][0-9]{{3}}-{_MONTHS}"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_HEX = "[0-9a-f]"
_GROUP = "[0-9A-Fa-f]{1,4}"
_LABEL = r"[a-z0-9]{1,30}(-[a-z0-9]{1,30})?"
# A label of a hostname has at most 63 characters: here up to 32 letters and digits, and a hyphen between any two.
_HOST_LABEL = r"[a-z0-9](-?[a-z0-9]){0,31}"
_SHORT_HOST_LABEL = r"[a-z0-9](-?[a-z0-9]){0,9}"
# RFC 3339, appendix A: a part may be followed by the next smaller one only, and no part has decimals.
_SECONDS = "[0-9]{1,6}S"
_CLOCK = f"T([0-9]{{1,6}}H([0-9]{{1,6}}M({_SECONDS})?)?|[0-9]{{1,6}}M({_SECONDS})?|{_SECONDS})"
_DAYS = "[0-9]{1,4}D"
_MONTHS_AND_DAYS = f"[0-9]{{1,4}}M({_DAYS})?"
_CALENDAR = f"([0-9]{{1,4}}Y({_MONTHS_AND_DAYS})?|{_MONTHS_AND_DAYS}|{_DAYS})"


def _uuid(version: str) -> str:
    return rf"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}"


def _ipv6() -> str:
    """Return the pattern of eight groups, of fewer around `::`, and of an IPv4 address behind some of them."""
    address = rf"{_OCTET}\.{_OCTET}\.{_OCTET}\.{_OCTET}"
    around = [f"({_GROUP}:){{1,{count}}}(:{_GROUP}){{1,{7 - count}}}" for count in range(1, 7)]
    whole = [f"({_GROUP}:){{7}}{_GROUP}", f"({_GROUP}:){{1,7}}:", f":((:{_GROUP}){{1,7}}|:)", *around]
    mapped = [f"::([Ff]{{4}}(:0{{1,4}})?:)?{address}", f"({_GROUP}:){{1,4}}:{address}"]
    return "|".join((*whole, *mapped))


FORMAT_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "ipv4": rf"{_OCTET}\.{_OCTET}\.{_OCTET}\.{_OCTET}",
    "email": r"[A-Za-z0-9_+-]{1,30}(\.[A-Za-z0-9_+-]{1,16}){0,2}@[A-Za-z0-9]{1,32}(-[A-Za-z0-9]{1,16})?"
    r"(\.[A-Za-z]{2,16}){1,3}",
    "duration": f"P({_CALENDAR}({_CLOCK})?|{_CLOCK}|[0-9]{{1,4}}W)",
    # The lookahead makes states of the pattern: the library takes six times as long for counted groups.
    "hostname": rf"^(?=[a-z0-9]){_HOST_LABEL}(\.{_HOST_LABEL}){{0,2}}(\.{_SHORT_HOST_LABEL}){{0,3}}$",
    "ipv6": _ipv6(),
    "int32": r"0|-?[1-9][0-9]{0,8}",  # a number of 32 bits that a schema wants as text
    "int64": r"0|-?[1-9][0-9]{0,17}",
    **{f"uuid{version}": _uuid(str(version)) for version in (1, 3, 4, 5, 6, 7, 8)},
}
# Patterns for the library's own formats where it has no rule: in names, and beside lengths. URIs are those of the web.
NARROWED_PATTERNS = {
    "uuid": _uuid("[1-8]"),
    "uri": rf"https?://{_LABEL}(\.{_LABEL}){{1,3}}(:[1-9][0-9]{{0,3}})?(/[A-Za-z0-9._~-]{{0,64}}){{0,12}}"
    r"(\?[A-Za-z0-9._~=&-]{0,256})?",
}
LIBRARY_FORMATS = frozenset(("uri", "uri-reference", "uuid"))
MIN_FORMAT_LENGTHS = {
    "uri": 2,
    "uri-reference": 0,
    "uuid": 36,
}  # shortest text of each format
FORMATS = frozenset((*FORMAT_PATTERNS, *LIBRARY_FORMATS))

_OPEN_LABEL = "[a-z0-9]+(-[a-z0-9]+)*"
# Formats beside lengths that counting cannot express: patterns of few states, and the most characters for which no
# part of a text can be longer than the format allows. Longer texts follow the patterns above, whose parts are counted.
LENGTH_PATTERNS: dict[str, tuple[str, int]] = {
    "email": (
        r"^(?=[^@]{1,64}@)[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9]+(-[A-Za-z0-9]+)*(\.[A-Za-z]{2,})+$",
        65,
    ),
    "hostname": (rf"{_OPEN_LABEL}(\.{_OPEN_LABEL})*", 63),
    "uri": (
        rf"^(?=https?://[^:/?]{{4,48}}([:/?]|$))https?://({_OPEN_LABEL}\.)+[a-z]{{2,}}(:[1-9][0-9]{{0,3}})?"
        r"(/[A-Za-z0-9._~/-]*)?(\?[A-Za-z0-9._~=&-]*)?$",
        255,
    ),
}

# Formats that describe a value's meaning, and restrict it in no way that a grammar knows.
ANNOTATION_FORMATS = frozenset((
    "base64url", "binary", "byte", "decimal", "directory-path", "double", "file-path", "float", "html", "markdown",
    "multi-line", "password", "path", "phone", "json-string", "textarea",
))  # fmt: skip
# format -> least and largest integer. For 64 bits: those with 18 digits, which take few rules.
INTEGER_FORMATS: dict[str, tuple[int, int]] = {
    "int8": (-(2**7), 2**7 - 1), "int16": (-(2**15), 2**15 - 1), "int32": (-(2**31), 2**31 - 1),
    "int64": (1 - 10**18, 10**18 - 1), "uint8": (0, 2**8 - 1), "uint16": (0, 2**16 - 1), "uint32": (0, 2**32 - 1),
    "uint64": (0, 10**18 - 1),
}  # fmt: skip
