"""Launchers of the other processes of a model: forks of one that has imported, unless a test wants them started."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from forking import Zygote

STARTS = "motley.replicas.parallel.leader.launcher.subprocess"


@pytest.fixture(autouse=True, scope="package")
def _forked() -> Iterator[None]:
    zygote = Zygote()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(STARTS, zygote)
            yield
    finally:
        zygote.close()


@pytest.fixture(autouse=True)
def _started(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("started"):
            patch.setattr(STARTS, subprocess)
        yield
