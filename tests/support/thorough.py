"""Which tests run each time, and which only under `--thorough`, for which `make thorough` asks.

Two marks leave tests for then. `thorough`: the test, or that case of it. `covering`: of all combinations of a test's
parameters those that are not needed for each value to have its turn, and from three parameters on each pair of values.
Whoever names a test by its id gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

OPTION = "--thorough"
MARKS = (
    "thorough: only with --thorough",
    "covering: without --thorough only combinations that show each value of two parameters, each pair of more",
)


def thorough(*cases: Any) -> list[Any]:
    """Cases of `parametrize` for then; those with several values as tuples."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*each, marks=pytest.mark.thorough) for each in values]


def halves(cases: Sequence[T], name: Callable[[T], str], each_time: Collection[str]) -> pytest.MarkDecorator:
    """Gives a test `cases` as a list, of those that are named; and then of all others."""
    if unknown := set(each_time) - set(map(name, cases)):
        raise ValueError(f"there is no {unknown}")
    named = [case for case in cases if name(case) in each_time]
    others = [case for case in cases if name(case) not in each_time]
    return pytest.mark.parametrize("cases", [named, *thorough(others)], ids=["some", "others"])


def configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", mark)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes out of `items` what is left for then."""
    if config.getoption(OPTION) or any("::" in argument for argument in config.args):
        return
    retained = [item for item in items if item.get_closest_marker("thorough") is None]
    retained_ids = {id(item) for item in retained} - _not_needed(retained)
    if left := [item for item in items if id(item) not in retained_ids]:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if id(item) in retained_ids]


def _not_needed(items: Iterable[pytest.Item]) -> set[int]:
    by_test: dict[tuple[Any, ...], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering") is not None:
            by_test.setdefault((item.path, item.cls, item.originalname), []).append(item)
    return {id(item) for cases in by_test.values() for item in cases} - {
        id(cases[index])
        for cases in by_test.values()
        for index in covering([_to_show(_values(case)) for case in cases])
    }


def _values(item: pytest.Function) -> list[Hashable]:
    """Return the value of each `parametrize`; names that are given together have one."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    found: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        values = [params[name.strip()] for name in names]
        one = tuple((type(value), value if isinstance(value, Hashable) else id(value)) for value in values)
        found.append((*names, one))
    return found


def _to_show(values: Sequence[Hashable]) -> frozenset[Hashable]:
    """Return what one combination of values shows: its pairs, or where there are fewer than three its values."""
    return frozenset(values if len(values) < 3 else combinations(values, 2))


def covering(cases: Sequence[frozenset[Hashable]]) -> list[int]:
    """Return the indices of some cases that show all that any shows: each time the first with most that is new."""
    missing = frozenset[Hashable]().union(*cases)
    chosen: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda index: (len(cases[index] & missing), -index))
        chosen.append(best)
        missing -= cases[best]
    return sorted(chosen) or list(range(len(cases)))
