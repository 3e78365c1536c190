"""One real `motley serve` for most system tests, and one of two replicas: Ray takes its time to start.

Tests of these come first, one service after the other, and each ends with its last test: a service that nobody asks
takes a tenth of a core or more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest
from serve_process import Served, served
from service_checkpoint import TOOL_TEMPLATE, build

CONTEXT = 65_536
SHARED = ("shared_service", "shared_pair")
ENDS = pytest.StashKey[dict[str, Callable[[], None]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ENDS] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of each shared service in a row; a module's tests stay in their order but for that."""
    items.sort(key=lambda item: next((at for at, name in enumerate(SHARED) if name in _fixtures(item)), len(SHARED)))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End a service that the next test does not use, for none after it does."""
    ends = item.config.stash[ENDS]
    for name in [name for name in ends if nextitem is None or name not in _fixtures(nextitem)]:
        ends.pop(name)()


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that takes tools: every byte is a token, an answer that fills the context takes half a minute."""
    return build(tmp_path_factory.mktemp("checkpoint"), max_len=CONTEXT, chat_template=TOOL_TEMPLATE)


@pytest.fixture(scope="session")
def shared_service(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Served]:
    arguments = [str(checkpoint), "--served-model-name", "tiny", "--threads", "1", "--kv-memory", "256MiB"]
    arguments += ["--no-spare"]  # nothing of it is lost
    with ExitStack() as stack:
        pytestconfig.stash[ENDS]["shared_service"] = stack.close
        service = stack.enter_context(served(arguments, tmp_path_factory.mktemp("serve")))
        service.wait_ready()
        yield service


@pytest.fixture(scope="session")
def shared_pair(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Served]:
    """Another service, with two replicas and little time for streams of those that are taken away.

    Without a control plane, which would let them end first. A replica is full with so few that the ninth stream goes
    to the other: below that, one alone may be the soonest for each, where both share their cores.
    """
    arguments = [str(checkpoint), "--served-model-name", "tiny", "--threads", "1", "--kv-memory", "64MiB"]
    arguments += ["--replicas", "2", "--max-running", "8", "--drain-s", "1", "--no-control"]
    with ExitStack() as stack:
        pytestconfig.stash[ENDS]["shared_pair"] = stack.close
        service = stack.enter_context(served(arguments, tmp_path_factory.mktemp("pair")))
        service.wait_ready()
        yield service


@pytest.fixture(scope="session")
def service(shared_service: Served) -> Served:
    return shared_service


@pytest.fixture(scope="session")
def pair(shared_pair: Served) -> Served:
    return shared_pair


@pytest.fixture(scope="session")
def client(service: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.http}/v1", api_key="none", max_retries=0) as client:
        yield client
