"""One real `motley serve` for all system tests: Ray takes its time to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from served import Served, served
from service_checkpoint import TOOL_TEMPLATE, build

CONTEXT = 65_536


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that takes tools: every byte is a token, an answer that fills the context takes half a minute."""
    return build(tmp_path_factory.mktemp("checkpoint"), max_len=CONTEXT, chat_template=TOOL_TEMPLATE)


@pytest.fixture(scope="session")
def service(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    arguments = [str(checkpoint), "--served-model-name", "tiny", "--threads", "1", "--kv-memory", "256MiB"]
    with served(arguments, tmp_path_factory.mktemp("serve")) as service:
        service.wait_ready()
        yield service


@pytest.fixture(scope="session")
def pair(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Another service, with two replicas and little time for streams of those that are taken away.

    Without a control plane, which would let them end first. A replica is full with so few that the ninth stream goes
    to the other: below that, one alone may be the soonest for each, where both share their cores.
    """
    arguments = [str(checkpoint), "--served-model-name", "tiny", "--threads", "1", "--kv-memory", "64MiB"]
    arguments += ["--replicas", "2", "--max-running", "8", "--drain-s", "1", "--no-control"]
    with served(arguments, tmp_path_factory.mktemp("pair")) as service:
        service.wait_ready()
        yield service


@pytest.fixture(scope="session")
def client(service: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.http}/v1", api_key="none", max_retries=0) as client:
        yield client
