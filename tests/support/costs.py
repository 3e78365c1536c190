"""Costs of each test, as the marks `unit`, `process`, `ray` and `triton`, from tests/durations.json.

`make durations` runs the tests with `--costs FILE` and makes that file of what they noted: for each test that takes
0.05 s of processor time or more, or is more than a unit test, the seconds of its slowest case, what it was seen to do,
and the seconds of all its cases together. A session's or a module's fixtures count for each test that uses them, and
their seconds for the first of these. Processes that others start for a test (Ray's workers) are not in its seconds.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FILE = Path(__file__).parents[1] / "durations.json"
OPTION = "--costs"
MARKS = {
    "unit": "starts no process, no Ray cluster and no Triton kernel",
    "process": "starts a process",
    "ray": "needs a Ray cluster",
    "triton": "runs Triton kernels in the interpreter",
}
MIN_S = 0.05  # seconds that are worth a line
SLOW_S = 1.0  # a unit test that takes longer has the mark `slow`, which says why
SLOW = "slow(why): a unit test that takes more than a second of processor time in tests/durations.json"
_STARTED = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec")


class Cost(NamedTuple):
    """Processor time of a test: of its slowest case and of all cases, in seconds; `kind` is one of MARKS."""

    slowest: float
    kind: str
    total: float


Costs = dict[str, Cost]


def configure(config: pytest.Config) -> None:
    for mark, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{mark}: {meaning} (tests/durations.json)")
    config.addinivalue_line("markers", SLOW)
    if path := config.getoption(OPTION):
        config.pluginmanager.register(Recorder(Path(path)), "costs")


NOTHING = Cost(0.0, "unit", 0.0)
# Most of them need a Ray cluster, and what runs only when asked has been seen by nobody who notes it.
SYSTEM = "tests/system/"


def mark(items: list[pytest.Item], costs: Mapping[str, Cost]) -> None:
    """Gives each test that has none of the marks the one of its line, or `unit`; a test of the system `ray`."""
    for item in items:
        if not any(item.get_closest_marker(name) for name in MARKS):
            line = costs.get(test_id(item.nodeid))
            item.add_marker(line.kind if line else "ray" if item.nodeid.startswith(SYSTEM) else "unit")


def test_id(node_id: str) -> str:
    """The test's id without that of a case."""
    return node_id.partition("[")[0]


test_id.__test__ = False  # type: ignore[attr-defined]


def read(path: Path = FILE) -> Costs:
    """Return what a file holds; nothing where there is none."""
    return {name: Cost(*line) for name, line in json.loads(path.read_text()).items()} if path.exists() else {}


def is_there(name: str) -> bool:
    """Whether there is such a test (still)."""
    file, _, test = name.partition("::")
    path = FILE.parents[1] / file
    return path.exists() and re.search(rf"\bdef {re.escape(test.rpartition('::')[2])}\(", path.read_text()) is not None


def is_worth_a_line(name: str, cost: Cost) -> bool:
    return cost.slowest >= MIN_S or cost.kind != "unit" or name.startswith(SYSTEM)


def write(costs: Mapping[str, Cost], path: Path) -> None:
    lines = (f"{json.dumps(name)}: {json.dumps(costs[name])}" for name in sorted(costs))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


class Recorder:
    """Watches what each test does, and adds it to a file at the end of the session."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._now: set[str] = set()
        self._of_fixtures: dict[Any, set[str]] = {}
        self._found: Costs = {}
        self._garbage_s = self._began_s = 0.0
        gc.callbacks.append(self._collect)
        sys.addaudithook(self._hear)
        _watch_triton(self._now)

    def _hear(self, event: str, details: tuple[Any, ...]) -> None:
        if event in _STARTED:
            serves = event == "subprocess.Popen" and "serve" in map(str, details[1])
            self._now.add("ray" if serves else "process")

    def _collect(self, phase: str, details: Mapping[str, int]) -> None:
        """Leave out what collecting garbage takes, for that is mostly other tests'."""
        now = time.process_time()
        self._garbage_s += 0.0 if phase == "start" else now - self._began_s
        self._began_s = now

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        before, had_ray = set(self._now), _has_ray()
        self._now.clear()
        result = yield
        done = self._now | ({"ray"} if _has_ray() and not had_ray else set())
        self._of_fixtures[fixturedef] = set(done)
        self._now |= before | done
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._now.clear()
        self._garbage_s = 0.0
        before, had_ray = os.times(), _has_ray()
        result = yield
        after = os.times()
        done = self._now | ({"ray"} if _has_ray() and not had_ray else set())
        for fixtures in item._fixtureinfo.name2fixturedefs.values():  # type: ignore[attr-defined]
            done |= self._of_fixtures.get(fixtures[-1], set())
        own, of_children = (sum(after[each]) - sum(before[each]) for each in (slice(0, 2), slice(2, 4)))
        self._note(test_id(item.nodeid), own - self._garbage_s, of_children, done)
        return result

    def _note(self, name: str, own: float, of_children: float, done: set[str]) -> None:
        """A child may end under a later test, which is charged for it only if it starts some of its own."""
        found = self._found.get(name, NOTHING)
        dearest = max([found.kind, *done], key=("unit", "triton", "process", "ray").index)
        seconds = own if dearest in ("unit", "triton") else own + of_children
        self._found[name] = Cost(round(max(found.slowest, seconds), 2), dearest, round(found.total + seconds, 2))

    def pytest_sessionfinish(self) -> None:
        write({**read(self._path), **self._found}, self._path)


def _has_ray() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(getattr(ray, "is_initialized", bool)())


def _watch_triton(now: set[str]) -> None:
    from triton.runtime import interpreter

    run = interpreter.GridExecutor.__call__

    def watched(executor: Any, *args: Any, **kwargs: Any) -> Any:
        now.add("triton")
        return run(executor, *args, **kwargs)

    interpreter.GridExecutor.__call__ = watched


def main(paths: list[str]) -> None:
    """Adds what several sessions wrote to tests/durations.json, and takes out tests that are no more."""
    found = read()
    for path in paths:
        found |= read(Path(path))
    write({name: cost for name, cost in found.items() if is_worth_a_line(name, cost) and is_there(name)}, FILE)


if __name__ == "__main__":
    main(sys.argv[1:])
