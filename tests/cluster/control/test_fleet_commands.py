"""`motley fleet` against a control plane: what it sends, and what is kept of who has decided, how and why."""

from __future__ import annotations

import asyncio
import json

import pytest
from admin_server import ADMIN, Plane
from click.testing import Result
from typer.testing import CliRunner

from motley.cli.fleet import KEY, app
from motley.cluster.routing.explanation.route_record import pack_predictions
from motley.cluster.routing.prediction.routing_query import LatencyPrediction
from motley.replicas.errors import Overloaded
from motley.replicas.types import Request, SamplingParams


@pytest.fixture(autouse=True)
def ann(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, ADMIN)
    monkeypatch.setenv("LOGNAME", "ann")


async def run(plane: Plane, *arguments: str) -> Result:
    """Beside the loop that answers it."""
    return await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--address", plane.target])


@pytest.mark.parametrize(
    "command",
    [["scale", "cpu", "3"], ["policy", "queue"], ["drain", "r1"], ["roll", "cpu"]],
    ids=lambda command: command[0],
)
async def test_without_a_reason_it_is_kept_who_gave_which_command(plane: Plane, command: list[str]) -> None:
    done = await run(plane, *command)
    assert done.exit_code == 0, done.output
    state = plane.bench.plane.state
    assert (state.generation, state.events[-1].by) == (1, "key of ops")
    assert state.events[-1].reason.endswith(f"motley fleet {command[0]} by ann")


async def test_an_update_says_its_file_too(plane: Plane) -> None:
    done = await run(plane, "update", "/w/one")
    assert done.exit_code == 0, done.output
    assert plane.bench.plane.state.events[-1].reason == "/w/one: motley fleet update by ann"


async def test_a_reason_that_is_said_is_the_reason(plane: Plane) -> None:
    await run(plane, "scale", "cpu", "3", "--reason", "the afternoon")
    assert plane.bench.plane.state.events[-1].reason == "the afternoon"
    refused = await run(plane, "scale", "cpu", "4", "--reason", " ")
    assert "reason: it is missing" in str(refused.exception)
    assert plane.bench.plane.state.generation == 1


async def test_a_route_is_shown_in_words(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    decision = (
        ("r1",),
        pack_predictions([LatencyPrediction(0, 0.1, 0.01, 0.2)]),
        3,
        "random",
        (("draining", 9, ("r3",)),),
    )
    for _ in range(2):
        with plane.bench.fleet.routes.begin(
            Request("ab", (1,), SamplingParams(), client_id="mine"), "", "", 3
        ) as record:
            record.placed(decision, None, "cpu", 0)
            record.failed(Overloaded("full", code="queue_full"))
            record.placed(decision, None, "cpu", 4)
            record.answered(7, done=True)
    done = await run(plane, "explain", "mine")
    assert done.exit_code == 0, done.output
    for words in (
        "ab: answered after",
        "moves: 1",
        "ended by queue_full",
        "to go on after 4 tokens",
        "9 draining: r3, ...",
    ):
        assert done.output.count(words) in (2, 4), (words, done.output)
    told = json.loads((await run(plane, "explain", "mine", "--json")).output)
    assert (told["matches"], [one["outcome"] for one in told["routes"]]) == (2, ["answered"] * 2)
    missing = await run(plane, "explain", "another")
    assert "no ingress knows 'another'" in str(missing.exception)
