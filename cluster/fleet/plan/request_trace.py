"""Reader of published request traces, line by line; an error names the line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ....replicas.errors import InvalidRequest
from ...simulation.traffic import HIGH_REUSE, LOW_REUSE, Arrival, poisson_arrivals

SYNTHETIC_TRACES = {"synthetic": LOW_REUSE, "synthetic-reuse": HIGH_REUSE}
_MAX_TOKENS = 1 << 20
_MAX_LINES = 10_000_000
_MIN_SPAN_S = 1e-6
_MAX_TIME = 1e15  # in seconds or milliseconds, which is thousands of years either way

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Requests in the order of their arrival, the first at 0 s.

    empty  number of requests that were left out since they had no answer
    """

    format: str
    arrivals: tuple[Arrival, ...]
    empty: int = 0

    @property
    def seconds(self) -> float:
        """Length of the trace, with one mean interval after the last request."""
        count = len(self.arrivals)
        return self.arrivals[-1].at_s * count / (count - 1)

    @property
    def rate(self) -> float:
        return len(self.arrivals) / self.seconds


def read_trace(path: Path) -> RequestTrace:
    """Read a trace: Mooncake's JSON lines, or the CSV of Azure or BurstGPT, which is detected.

    Raises InvalidRequest.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = _numbered_lines(file, str(path))
            number, first = next(lines, (1, ""))
            if first.lstrip().startswith("{"):
                return _collect_trace("Mooncake", _read_mooncake(_chain(number, first, lines)))
            header = _header(first)
            for name, columns, row in _TABLES:
                if set(columns) <= {column.strip() for column in header}:
                    return _collect_trace(name, _read_table(header, lines, row))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"trace: {path} is no text: byte {error.start}", param="trace") from error
    except OSError as error:
        raise InvalidRequest(f"trace: {path}: {error.strerror}", param="trace") from error
    expected = "JSON objects (Mooncake), or a header with " + " or ".join(", ".join(c) for _, c, _ in _TABLES)
    raise InvalidRequest(f"trace: line 1 of {path} is {first.strip()[:60]!r}; expected {expected}", param="trace")


def synthetic_trace(name: str, rate: float, requests: int, seed: int) -> RequestTrace:
    """Return random requests: a mix of chats, documents and writing; with `synthetic-reuse` most share prefixes."""
    some = list(poisson_arrivals(rate, 2 * requests / rate + 60 / rate, seed, reuse=SYNTHETIC_TRACES[name]))[:requests]
    return rescale_trace(_collect_trace(name, iter(some)), rate)


def busiest_window(trace: RequestTrace, requests: int) -> RequestTrace:
    """Return the `requests` consecutive requests of a trace that arrive within the shortest time."""
    every = trace.arrivals
    if requests >= len(every):
        return trace
    first = min(range(len(every) - requests + 1), key=lambda at: every[at + requests - 1].at_s - every[at].at_s)
    chosen = every[first : first + requests]
    return replace(trace, arrivals=tuple(replace(each, at_s=each.at_s - chosen[0].at_s) for each in chosen))


def rescale_trace(trace: RequestTrace, rate: float) -> RequestTrace:
    """Return the same requests with their intervals scaled so that `rate` arrive per second."""
    by = trace.rate / rate
    return replace(trace, arrivals=tuple(replace(each, at_s=each.at_s * by) for each in trace.arrivals))


def _collect_trace(name: str, found: Iterator[Arrival | None]) -> RequestTrace:
    some, empty = [], 0
    for arrival in found:
        if arrival is None:
            empty += 1
        else:
            some.append(arrival)
    some.sort(key=lambda arrival: arrival.at_s)
    if len(some) < 2 or some[-1].at_s - some[0].at_s < _MIN_SPAN_S:
        raise InvalidRequest(f"trace: {len(some)} requests; expected two or more, at different times", param="trace")
    ordered = (replace(each, number=at, at_s=each.at_s - some[0].at_s) for at, each in enumerate(some))
    return RequestTrace(name, tuple(ordered), empty)


def _numbered_lines(file: Iterator[str], path: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(file, 1):
        if number > _MAX_LINES:
            raise InvalidRequest(f"trace: {path} has more than {_MAX_LINES} lines", param="trace")
        if line.strip():
            yield number, line


def _header(first: str) -> list[str]:
    try:
        return next(csv.reader([first]), [])
    except csv.Error:  # not a table
        return []


def _chain(number: int, first: str, rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield number, first
    yield from rest


def _read_mooncake(lines: Iterator[tuple[int, str]]) -> Iterator[Arrival | None]:
    """Yield the requests of a Mooncake trace.

    Times are in milliseconds. Each of `hash_ids` stands for a piece of 512 tokens, and is equal where all tokens up to
    its end are equal.
    """
    for number, line in lines:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _line_error(number, "line", line, "a JSON object") from error
        if not isinstance(fields, dict):
            raise _line_error(number, "line", line, "a JSON object")
        ids = fields.get("hash_ids", [])
        if not isinstance(ids, list) or not all(type(each) is int and abs(each) < 1 << 62 for each in ids):
            raise _line_error(number, "hash_ids", ids, "a list of whole numbers")
        at_s = _time(fields, "timestamp", number) / 1000
        yield _arrival(
            at_s, _tokens(fields, "input_length", number), _output_tokens(fields, "output_length", number), ids
        )


def _read_table(header: Sequence[str], lines: Iterator[tuple[int, str]], row: _Row) -> Iterator[Arrival | None]:
    names = [column.strip() for column in header]
    for number, line in lines:
        try:
            cells = next(csv.reader([line]))
        except csv.Error as error:
            raise _line_error(number, "line", line, f"fields separated by commas ({error})") from error
        if len(cells) != len(names):
            raise _line_error(number, "line", line, f"{len(names)} fields, as in the header")
        yield row(dict(zip(names, cells, strict=True)), number)


def _azure_arrival(fields: Fields, number: int) -> Arrival | None:
    text = str(fields["TIMESTAMP"]).strip()
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise _line_error(number, "TIMESTAMP", text, "a time such as 2023-11-16 18:17:03.979") from error
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    prompt, output = _tokens(fields, "ContextTokens", number), _output_tokens(fields, "GeneratedTokens", number)
    return _arrival(at.timestamp(), prompt, output)


def _burstgpt_arrival(fields: Fields, number: int) -> Arrival | None:
    at_s = _time(fields, "Timestamp", number)
    return _arrival(at_s, _tokens(fields, "Request tokens", number), _output_tokens(fields, "Response tokens", number))


_Row = Callable[[Fields, int], Arrival | None]
_TABLES: tuple[tuple[str, tuple[str, ...], _Row], ...] = (
    ("Azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure_arrival),
    ("BurstGPT", ("Timestamp", "Request tokens", "Response tokens"), _burstgpt_arrival),
)


def _arrival(at_s: float, prompt: int, output: int, chain: Sequence[int] = ()) -> Arrival | None:
    return Arrival(0, at_s, prompt, output, chain=tuple(chain)) if output else None


def _time(fields: Fields, name: str, number: int) -> float:
    time = _number(fields, name, number, float)
    if not -_MAX_TIME <= time <= _MAX_TIME:
        raise _line_error(number, name, time, f"a time between -{_MAX_TIME:g} and {_MAX_TIME:g}")
    return float(time)


def _tokens(fields: Fields, name: str, number: int) -> int:
    return max(1, _output_tokens(fields, name, number))


def _output_tokens(fields: Fields, name: str, number: int) -> int:
    tokens = _number(fields, name, number, int)
    if not 0 <= tokens <= _MAX_TOKENS:
        raise _line_error(number, name, tokens, f"0 to {_MAX_TOKENS} tokens")
    return int(tokens)


def _number(fields: Fields, name: str, number: int, kind: type[int] | type[float]) -> float:
    value = fields.get(name)
    what = "a whole number" if kind is int else "a number"
    if name not in fields:
        raise InvalidRequest(f"trace: line {number}: {name} is missing", param="trace")
    try:
        found = kind(value) if isinstance(value, str) else value
    except ValueError as error:
        raise _line_error(number, name, value, what) from error
    accepted = int if kind is int else (int, float)
    if not isinstance(found, accepted) or isinstance(found, bool) or found != found:
        raise _line_error(number, name, value, what)
    return found


def _line_error(number: int, name: str, value: object, expected: str) -> InvalidRequest:
    said = str(value).strip()[:60]
    return InvalidRequest(f"trace: line {number}: {name} is {said!r}; expected {expected}", param="trace")
