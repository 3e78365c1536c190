"""Processes of a whole service, killed and stopped under streams that outlast what a reload of HAProxy once cut."""

from __future__ import annotations

import signal

import pytest
from process_faults import CLIENTS, Case, of, run_all

from motley.cluster.service.supervision.watchdog import EXIT_SERVICE_LOST

STREAM_S = 40.0  # HAProxy cut them 30 s after a reload
EVERYBODY = frozenset(CLIENTS)
OURS = frozenset({"motley.client"})
# Whose streams come whole, at least.
GO_ON = {
    "controller:kill": EVERYBODY,
    "controller:stop": EVERYBODY,
    "manager:kill": EVERYBODY,
    "manager:stop": EVERYBODY,
    "replica:kill": EVERYBODY,
    "ingress:kill": OURS,
    "ingress:stop": OURS,
    "haproxy:kill": OURS,
    "haproxy:stop": OURS,
}
END = ("raylet:kill", "raylet:stop", "gcs:kill", "gcs:stop", "agent:kill", "runtime-env:kill")


def cases(*which: str) -> dict[str, Case]:
    return {f"{case.role}:{case.how}": case for case in run_all([*which], STREAM_S, None, print)}


@pytest.mark.thorough
def test_streams_outlive_what_is_started_again() -> None:
    found = cases(*GO_ON)
    for name, whole in GO_ON.items():
        case = found[name]
        assert case.exit_code is None, name
        assert case.whole_again, name
        assert all(stream.ended for client in whole for stream in of(case, client)), (name, case.streams)
        assert not any(response.startswith("404") for response in case.answers), name


@pytest.mark.thorough
def test_the_service_ends_with_a_reason_without_what_nobody_starts_again() -> None:
    for name, case in cases(*END).items():
        assert case.exit_code == EXIT_SERVICE_LOST, name
        assert case.said.startswith("motley serve: Ray's "), name
        assert case.left == [], name


@pytest.mark.thorough
def test_nothing_is_left_of_one_that_was_killed() -> None:
    [case] = cases("serve:kill").values()
    assert case.exit_code == -signal.SIGKILL
    assert case.left == []
