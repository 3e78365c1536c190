"""Settings and fixtures of every test."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, by whomever

import costs
import pytest
import thorough
import torch
import unsteady
from hypothesis import HealthCheck, settings

from motley.kernels.compiler.triton_interpreter import speed_up_interpreter

speed_up_interpreter()

# Nothing here may fail for being slow: the cores are shared.
settings.register_profile("motley", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("motley")

MEASURED = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(costs.OPTION, metavar="FILE", help="what each test costs is added to this file (make durations)")
    parser.addoption(thorough.OPTION, action="store_true", help="all tests, and all combinations of their parameters")


def pytest_configure(config: pytest.Config) -> None:
    thorough.configure(config)
    costs.configure(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    thorough.select(config, items)
    costs.mark(items, costs.read())
    if not config.getoption(thorough.OPTION):
        unsteady.allow(items)


def pytest_collection_finish() -> None:
    """Collect garbage seldom: a sixth of the time of some tests went into walking what others have imported."""
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """On tensors as small as the tests' a second thread costs 50 times more than it gives on busy cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _replicas_do_not_settle() -> Iterator[None]:
    """A serving process does so once; here each replica would have all walked that the tests have imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("motley.replicas.replica.freeze_gc", lambda: None)
        yield


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Records a line of what was found; all are shown after the tests, passed or not."""
    return pytestconfig.stash.setdefault(MEASURED, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if lines := config.stash.get(MEASURED, []):
        terminalreporter.section("reported")
        for line in lines:
            terminalreporter.write_line(line)
