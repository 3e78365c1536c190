"""How much of what many clients send is read in one turn of the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from motley.cluster.security.edge.early_response import EarlyResponseMiddleware
from motley.cluster.security.edge.read_turns import AT_ONCE, ReadTurns

CLIENTS = 200
PARTS = 5
MANY_PARTS = 300  # of 1,000 bytes, of which a look at what is there already takes 263


class Counted:
    """Clients that always have something to read, and how many parts were read in each turn of the loop."""

    def __init__(self) -> None:
        self.read: list[int] = [0]
        self.order: list[int] = []
        self.going = True

    def tick(self) -> None:
        self.read.append(0)
        if self.going:
            asyncio.get_running_loop().call_soon(self.tick)

    def of(self, client: int, parts: int = PARTS) -> Any:
        left = parts

        async def receive() -> dict[str, Any]:
            nonlocal left
            left -= 1
            self.read[-1] += 1
            self.order.append(client)
            return {"type": "http.request", "body": b"x" * 1000, "more_body": left > 0}

        return receive


async def nothing(message: Any) -> None:
    pass


async def read_all(scope: Any, receive: Any, send: Any) -> None:
    while (await receive())["more_body"]:
        pass
    await answer(scope, receive, send)


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


async def ask_all(app: Any, counted: Counted, parts: int = PARTS) -> None:
    counted.tick()
    scope = {"type": "http", "headers": [(b"transfer-encoding", b"chunked")]}
    async with asyncio.TaskGroup() as tasks:
        for client in range(CLIENTS):
            tasks.create_task(app(scope, counted.of(client, parts), nothing))
    counted.going = False


async def test_few_bodies_are_read_in_a_turn_and_all_of_them_in_the_end() -> None:
    counted = Counted()
    await ask_all(EarlyResponseMiddleware(read_all), counted)
    assert sum(counted.read) == CLIENTS * PARTS
    assert max(counted.read) <= 2 * AT_ONCE, "those of a turn, and of the next before it is seen"
    assert set(counted.order[: CLIENTS + AT_ONCE]) == set(range(CLIENTS)), (
        "but for the first, all have one before a second"
    )


async def test_what_is_thrown_away_after_an_early_answer_waits_for_its_turn_too() -> None:
    counted = Counted()
    await ask_all(EarlyResponseMiddleware(answer, linger_bytes=10**9), counted, parts=MANY_PARTS)
    behind = counted.read[next(i for i, read in enumerate(counted.read) if read) + 1 :]  # one look at each before
    assert max(behind) <= 2 * AT_ONCE
    assert sum(counted.read) == CLIENTS * MANY_PARTS


async def test_where_there_is_room_nobody_waits() -> None:
    turns = ReadTurns(at_once=2)
    for _ in range(2):
        with pytest.raises(StopIteration):
            turns.wait().send(None)


async def test_who_gives_up_takes_no_place() -> None:
    turns = ReadTurns(at_once=1)
    first, left, stays = (asyncio.ensure_future(turns.wait()) for _ in range(3))
    await first
    left.cancel()
    await stays
    assert left.cancelled()
