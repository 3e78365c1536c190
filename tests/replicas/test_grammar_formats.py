"""Patterns of formats, against what Python's own readers take: every value that is small enough to try."""

from __future__ import annotations

import datetime
import ipaddress
import re

import pytest

from motley.replicas.grammar.regex.string_formats import FORMAT_PATTERNS


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
