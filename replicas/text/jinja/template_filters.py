"""Jinja's filters and tests for chat templates, each within the limits; those without a use there are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jinja2
import jinja2.filters
import jinja2.runtime

from .template_meter import TemplateLimit, bounded_list, check_compared, check_items, text_size
from .template_strings import bounded_join, bounded_json, bounded_percent, bounded_replace, check_indent

__all__ = ["BOUNDED_FILTERS", "COMPARING_FUNCTIONS", "NUMERIC_TESTS", "ROW_FILTERS"]

# Filters whose result is no larger than their input, or comes one by one.
_CHEAP = (
    "abs", "attr", "count", "d", "default", "filesizeformat", "float", "int", "length", "map", "reject",
    "rejectattr", "select", "selectattr",
)  # fmt: skip
# Filters that see all of a list, and some of which compare its members; a text may be as long as a list at most.
_LISTING = ("dictsort", "first", "groupby", "last", "max", "min", "slice", "sort", "unique")
# Filters that write out their input, grown by a small factor at most.
_WRITING = ("capitalize", "e", "escape", "lower", "safe", "string", "title", "truncate", "upper", "wordcount")
_BY_WORD = ("title", "wordcount")  # filters that split a text into a list of words
ROW_FILTERS = ("batch", "slice")  # filters that yield lists one by one


def _listing(name: str) -> Callable[..., Any]:
    function = jinja2.filters.FILTERS[name]
    with_context = hasattr(function, "jinja_pass_arg")
    compares = name not in ("first", "last", "slice")

    def bounded(*args: Any, **kwargs: Any) -> Any:
        value = args[with_context]
        if not isinstance(value, str | list | tuple | dict):
            value = bounded_list(value)
        check_items(len(value))
        if compares:
            text_size(value)
            args = (*map(_SizeCheckingEnvironment, args[:with_context]), *args[with_context:])
        return function(*args[:with_context], value, *args[with_context + 1 :], **kwargs)

    return _marked(bounded, function)


class _SizeCheckingEnvironment:
    """The environment, for filters that compare attributes: it checks the size of each, as an attribute may be larger
    than the object that has it.
    """

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def getitem(self, obj: Any, argument: Any) -> Any:
        value = self._environment.getitem(obj, argument)
        text_size(value)
        return value


def _writing(name: str) -> Callable[..., Any]:
    function = jinja2.filters.FILTERS[name]

    def bounded(*args: Any, **kwargs: Any) -> Any:
        for value in args:
            text_size(value)
            if name in _BY_WORD and isinstance(value, str):
                check_items(len(value))
        result = function(*args, **kwargs)
        return str(result) if isinstance(result, str) else result  # Markup has methods of its own

    return _marked(bounded, function)


def _marked(bounded: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy the attributes by which Jinja marks filters that take its context or environment."""
    bounded.__dict__.update(getattr(function, "__dict__", {}))
    return bounded


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    values = bounded_list(value)
    if attribute is not None:
        values = [*map(jinja2.filters.make_attrgetter(environment, attribute), values)]
    return bounded_join(str(d), values)


def _batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> Iterable[Any]:
    if fill_with is not None:
        check_items(linecount)
    return jinja2.filters.do_batch(bounded_list(value), linecount, fill_with)


def _items(value: Any) -> Iterable[Any]:
    """Return a mapping's pairs as a list, so that they are counted."""
    return bounded_list(jinja2.filters.do_items(value))


def _trim(value: Any, chars: str | None = None) -> str:
    text_size(value)
    check_compared(str(value), chars or "")
    return str(value).strip(chars)


def _list(value: Iterable[Any]) -> list[Any]:
    return bounded_list(value)


def _reverse(value: Any) -> Any:
    return value[::-1] if isinstance(value, str) else bounded_list(value)[::-1]


def _replace(s: Any, old: str, new: str, count: int | None = None) -> str:
    text_size(s)
    return bounded_replace(str(s), str(old), str(new), -1 if count is None else count)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    check_indent(s, width)
    return str(jinja2.filters.do_indent(s, width, first, blank))


def _center(value: str, width: int = 80) -> str:
    text_size(value)
    return str(value).center(width)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("format: either positional or keyword arguments")
    text_size(value)
    return bounded_percent(str(value), kwargs or args)


@jinja2.pass_environment
def _sum(
    environment: jinja2.Environment, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0
) -> Any:
    values = bounded_list(iterable)
    if attribute is not None:
        values = [*map(jinja2.filters.make_attrgetter(environment, attribute), values)]
    if not all(isinstance(value, int | float) for value in (start, *values)):
        raise TemplateLimit("only numbers are summed")
    return sum(values, start)


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    if abs(precision) > 300:
        raise TemplateLimit(f"the filter round takes at most 300 digits, not {precision}")
    rounded: float = jinja2.filters.do_round(value, precision, method)  # type: ignore[arg-type]
    return rounded


BOUNDED_FILTERS: dict[str, Callable[..., Any]] = {
    **{name: jinja2.filters.FILTERS[name] for name in _CHEAP},
    **{name: _listing(name) for name in _LISTING},
    **{name: _writing(name) for name in _WRITING},
    "batch": _batch,
    "center": _center,
    "format": _format,
    "indent": _indent,
    "items": _items,
    "join": _join,
    "list": _list,
    "replace": _replace,
    "reverse": _reverse,
    "round": _round,
    "sum": _sum,
    "tojson": bounded_json,
    "trim": _trim,
}
# Tests that compare what they are given, write it out or look it up.
COMPARING_FUNCTIONS = frozenset(
    (
        "lower",
        "upper",
        "filter",
        "test",
        "eq",
        "==",
        "equalto",
        "ne",
        "!=",
        "lt",
        "<",
        "lessthan",
        "le",
        "<=",
        "gt",
        ">",
        "greaterthan",
        "ge",
        ">=",
        "in",
    )
)
NUMERIC_TESTS = ("divisibleby", "even", "odd")
