"""Patterns of formats, against what Python's own readers take: every value that is small enough to try."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import json
import random
import re
import uuid
from collections.abc import Callable
from urllib.parse import urlsplit

import jsonschema_rs
import pytest
from byte_grammars import ByteGrammar

from motley.replicas.grammar.grammar_spec import GrammarSpec
from motley.replicas.grammar.regex.string_formats import FORMAT_PATTERNS, FORMATS


def takes(name: str, text: str) -> bool:
    return re.fullmatch(FORMAT_PATTERNS[name], text) is not None


@pytest.mark.parametrize("place", range(4))
def test_each_part_of_an_address_is_one_of_256(place: int) -> None:
    for number in [*range(1000), "00", "01", "007", "", "-1"]:
        parts: list[object] = [1, 1, 1, 1]
        parts[place] = number
        text = ".".join(map(str, parts))
        assert takes("ipv4", text) == _reads(text), text


def _reads(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def test_a_date_has_a_day_of_every_year() -> None:
    """29 February is never written: a pattern does not count leap years."""
    for month in range(14):
        for day in range(33):
            text = f"2023-{month:02}-{day:02}"
            assert takes("date", text) == _is_day(2023, month, day), text


def _is_day(year: int, month: int, day: int) -> bool:
    try:
        datetime.date(year, month, day)
    except ValueError:
        return False
    return True


def test_a_time_has_24_hours_of_60_minutes_of_60_seconds() -> None:
    for number in range(100):
        assert takes("time", f"{number:02}:00:00Z") == (number < 24)
        assert takes("time", f"00:{number:02}:00Z") == takes("time", f"00:00:{number:02}Z") == (number < 60)
        assert takes("time", f"00:00:00+{number:02}:00") == (number < 24)
        assert takes("time", f"00:00:00-00:{number:02}") == (number < 60)


PARTS = ("Y", "M", "D", "T", "H", "m", "S", "W")  # m: minutes


def _is_duration(parts: tuple[str, ...]) -> bool:
    """Whether RFC 3339, appendix A, allows these parts, read as its grammar says."""

    def chain(units: str, left: list[str]) -> bool:
        """The first of the parts is one of the units, and each other one the next unit."""
        begin = units.find(left[0]) if left else -1
        return begin >= 0 and list(units[begin : begin + len(left)]) == left

    if parts == ("W",):
        return True
    days, found, clock = " ".join(parts).partition("T")
    left, behind = days.split(), clock.split()
    return (not left or chain("YMD", left)) and (chain("HmS", behind) if found else bool(left))


@pytest.mark.parametrize(
    "parts",
    [
        parts
        for count in range(7)
        for parts in itertools.combinations(PARTS, count)
        if "m" not in parts or "T" in parts  # else they are months
    ],
    ids="".join,
)
def test_a_duration_leaves_out_no_part_between_two(parts: tuple[str, ...]) -> None:
    text = "P" + "".join(part if part == "T" else f"12{part.upper()}" for part in parts)
    assert takes("duration", text) == _is_duration(parts)
    assert not takes("duration", text.replace("12S", "1.5S") if "S" in parts else f"{text}.5")
    assert not takes("duration", text.lower())


def test_labels_of_a_hostname_have_at_most_63_characters() -> None:
    for count in range(1, 70):
        assert takes("hostname", "a" * count) == (count <= 32), count
        hyphened = "-".join("a" * count)
        assert takes("hostname", hyphened) == (len(hyphened) <= 63), count
    longest = "-".join("a" * 32)
    short = "-".join("a" * 10)
    assert takes("hostname", ".".join([longest] * 3 + [short] * 3))
    for text in ("", "-a", "a-", "a--b", "a.", ".a", "a..b", "a_b", "A", ".".join([longest] * 4)):
        assert not takes("hostname", text), text


OCTETS = ["0", "9", "10", "99", "199", "249", "255", "05", "00", "256"]


@pytest.mark.parametrize("octet", OCTETS)
def test_an_ipv4_address_within_another_is_one(octet: str) -> None:
    for around, place in itertools.product(("::{}", "::ffff:{}", "::ffff:0:{}", "1::{}", "a:b:c:d::{}"), range(4)):
        parts = ["1"] * 4
        parts[place] = octet
        text = around.format(".".join(parts))
        assert takes("ipv6", text) == _is_ipv6(text), text


@pytest.mark.parametrize("before", range(10))
def test_an_ipv6_address_has_eight_groups_or_fewer_and_a_gap(before: int) -> None:
    groups = ["f00"] * before
    assert takes("ipv6", ":".join(groups)) == _is_ipv6(":".join(groups))
    for behind in range(10):
        text = f"{':'.join(groups)}::{':'.join(['0'] * behind)}"
        assert takes("ipv6", text) == (_is_ipv6(text) and before + behind < 8), text


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _is_local_and_host(text: str) -> bool:
    local, _, host = text.partition("@")
    return 0 < len(local) <= 64 and len(host) <= 253 and all(0 < len(label) <= 63 for label in host.split("."))


STRICT_READERS: dict[str, Callable[[str], object]] = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "email": _is_local_and_host,
    "hostname": lambda text: _is_local_and_host(f"a@{text}"),
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uri": lambda text: urlsplit(text).scheme,
    "uri-reference": lambda text: urlsplit(text) is not None,
    **{name: uuid.UUID for name in FORMATS if name.startswith("uuid")},
}


@pytest.mark.parametrize("lengths", [{}, {"minLength": 3, "maxLength": 60}], ids=str)
@pytest.mark.parametrize("name", sorted(FORMATS - {"uri-reference"}))
def test_texts_of_a_format_are_what_readers_take(name: str, lengths: dict[str, int]) -> None:
    """Each by a validator of JSON Schema, and by a reader of its own; drawn byte by byte, so short and long ones."""
    schema = {"type": "string", "format": name, **lengths}
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    grammar = ByteGrammar(GrammarSpec.json_schema(schema))
    drawn = (grammar.text(random.Random(seed), 12 * (1 + seed % 9)) for seed in range(25))
    found = [json.loads(text) for text in drawn if text is not None]
    assert len(found) > 20
    for text in found:
        assert validator.is_valid(text), text
        assert STRICT_READERS.get(name, bool)(text), text
