"""A pool handle as Serve gives one, with its replicas in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from typing import Any

from motley.cluster.routing.attempt.call_attempt import OPEN_CALLS, CallAttempt
from motley.cluster.routing.attempt.placement import ReplicaCandidate
from motley.replicas.engine.streams.replica_envelope import ReplicaEnvelope
from motley.replicas.types import CallId, StreamMessage


class LocalPool:
    """`replicas`: one, or several with names of their own. Asks the attempt as Serve's router does.

    calls     what is asked of a replica comes with the call's identity, as through Serve; else it has no trunk
    sent      the names of the replicas that streams went to
    name      what theirs begin with
    weights   digests of the weights they have, by name, as Serve's router has heard
    """

    def __init__(self, *replicas: Any, numerics: Sequence[str] = (), calls: bool = False, name: str = "r") -> None:
        self.calls = calls
        self.replicas = {f"{name}{number}": replica for number, replica in enumerate(replicas)}
        self.numerics = dict(zip(self.replicas, numerics, strict=False))
        self.weights: dict[str, str] = {}
        self.cancelled = 0
        self.by_value = False
        self.sent: list[str] = []

    def options(self, *, method_name: str = "", stream: bool = False, _by_reference: bool | None = None) -> Any:
        self.by_value = self.by_value if _by_reference is None else not _by_reference
        assert self.by_value, "messages travel by value"
        return _Method(self, method_name, stream) if method_name else self

    async def find(self, attempt: CallAttempt) -> Any:
        """The replica to be asked, as soon as there is one."""
        while True:
            candidates = [
                ReplicaCandidate(name, self.numerics.get(name, ""), weights=self.weights.get(name, ""))
                for name in self.replicas
            ]
            chosen, wait = attempt.choose(candidates)
            if chosen is not None:
                return self.replicas[chosen.id]
            assert wait, "Serve would ask again at once, and for ever"
            await asyncio.sleep(0.001)


class _Method:
    def __init__(self, pool: LocalPool, name: str, stream: bool) -> None:
        self._pool, self._name, self._stream = pool, name, stream

    def remote(self, *args: Any) -> Any:
        *values, call = args
        if self._stream:
            return _Stream(self._pool, self._name, values, call)
        return _Answer(self._answer(values, OPEN_CALLS[call]))

    async def _answer(self, values: list[Any], attempt: CallAttempt) -> Any:
        return _enveloped(await getattr(await self._pool.find(attempt), self._name)(*values))


def _enveloped(response: Any) -> Any:
    """A worker in a replica's place gives messages as they are."""
    return ReplicaEnvelope((response,)) if isinstance(response, StreamMessage) else response


class _Answer:
    """Whoever waits for it and is cancelled cancels it."""

    def __init__(self, response: Coroutine[Any, Any, Any]) -> None:
        self._answer = response

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer.__await__()

    def cancel(self) -> None:
        self._answer.close()


class _Stream:
    def __init__(self, pool: LocalPool, name: str, values: list[Any], call: CallId) -> None:
        self._pool, self._name, self._values, self._attempt = pool, name, values, OPEN_CALLS[call]
        self._messages = self._generate()

    async def _generate(self) -> AsyncGenerator[Any, None]:
        replica = await self._pool.find(self._attempt)
        assert self._attempt.replica is not None
        if self._name == "trunk" and not self._pool.calls:
            return
        self._pool.sent.append(self._attempt.replica)
        call = (self._attempt.call,) if self._pool.calls or self._name == "answers" else ()
        messages = getattr(replica, self._name)(*self._values, *call)
        try:
            async for message in messages:
                yield _enveloped(message)
        finally:
            await messages.aclose()

    def __aiter__(self) -> Any:
        return self._messages

    def cancel(self) -> None:
        self._pool.cancelled += self._name == "generate"
        self._closing = asyncio.get_running_loop().create_task(self._messages.aclose())
