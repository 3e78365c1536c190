"""The waiting line itself, over replicas that have room when the test says so."""

from __future__ import annotations

import asyncio
from typing import Any

from motley.cluster.routing.fair_queue import FairQueue
from motley.cluster.routing.waiting import Routing, Waiting
from motley.replicas.errors import Unavailable
from motley.replicas.protocol import Request, SamplingParams


class Fleet:
    """As much of `Live` as the line asks."""

    def __init__(self) -> None:
        self.members = {"only": None}
        self.had_any = True
        self.changed = asyncio.Event()
        self.room = False

    def has_room(self, request: Request, *, late: bool) -> bool:
        return self.room

    def is_crowded_out(self, request: Request) -> bool:
        return False

    def hear(self, *, room: bool) -> None:
        self.room = room
        self.changed.set()


def request(name: str = "r", tokens: int = 3, tenant: str = "") -> Request:
    return Request(name, tuple(range(tokens)), SamplingParams(max_tokens=4, seed=0), tenant=tenant)


def a_line(fleet: Any, **routing: Any) -> Waiting:
    return Waiting(fleet, Routing(**{"max_wait_s": 60.0, **routing}), lambda: True)


def ask(line: Waiting, asked: Request, deadline_s: float = 1e6) -> asyncio.Task[None]:
    now = asyncio.get_running_loop().time()
    return asyncio.create_task(line.turn(asked, now, now + deadline_s))


async def held(line: Waiting, count: int) -> None:
    async with asyncio.timeout(10):
        while line.held != count:
            await asyncio.sleep(0.001)


async def test_one_that_leaves_as_its_turn_comes_takes_nobody_with_it() -> None:
    fleet = Fleet()
    line = a_line(fleet)
    asked = [ask(line, request(str(number))) for number in range(3)]
    await held(line, 3)
    fleet.hear(room=True)
    asked[0].cancel()  # before the line has looked
    async with asyncio.timeout(10):
        results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(each) for each in results] == [asyncio.CancelledError, type(None), type(None)]
    assert line.held == 0
    assert line._queue._ends == {"": 6.0}, "who has left has had nothing"


async def test_one_that_leaves_as_it_is_sent_away_leaves_once() -> None:
    """It makes room for another tenant, or the service ends, in the turn of the loop in which its client leaves."""
    fleet = Fleet()
    line = a_line(fleet, max_waiting=2)
    stays, goes = ask(line, request(tokens=3)), ask(line, request(tokens=5))
    await held(line, 2)
    another = ask(line, request(tenant="another"))  # for which the last of the greedier tenant is sent away
    goes.cancel()
    await asyncio.sleep(0)
    stays.cancel()
    line.end_all(Unavailable("the service is stopping"))
    async with asyncio.timeout(10):
        results = await asyncio.gather(stays, goes, another, return_exceptions=True)
    assert [type(each) for each in results] == [asyncio.CancelledError, asyncio.CancelledError, Unavailable]
    assert line.held == 0


def test_what_has_left_a_queue_leaves_it_once() -> None:
    queue: FairQueue[str] = FairQueue({}, 10, 1000)
    entry, _ = queue.push("one", "a", 5)
    assert entry is not None
    queue.push("two", "a", 7)
    for _ in range(2):
        queue.remove(entry)
        assert (len(queue), queue.tokens) == (1, 7)
    queue.pop()
    queue.remove(entry)
    assert (len(queue), queue.tokens) == (0, 0)
