"""A steady client beside a pressure test: neither what it gets nor its pace in the engine may change.

Its one stream begins before the pressure and outlasts it, and is compared with the same stream without. The pace is
counted in the engine's steps, which does not depend on how busy the machine is: a stream that is not held up gets a
token in every step from its first to its last. Its time beside that is reported, and of that only a gap is asserted
which no busy machine explains: where the door itself stands still, steps go on.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from serve_process import Served, wait_for

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc

MAX_TOKENS = 60_000  # tokens: longer than any test presses
NEIGHBOUR = "neighbour"
OWN = [("grpc.use_local_subchannel_pool", 1)]  # else a client that reads nothing would have a part of its connection
MINIMUM = 1500  # that it has had under pressure: many beside those that come while the steps are told
AHEAD = 400  # tokens that come while the steps are told, at most
MIN_SHARE = 0.8  # of steps; these are asked for over HTTP, and some go by meanwhile; mostly it is 1.0
MAX_GAP_S = 30.0  # between messages: mostly it is below one, and on busy cores it has been six
ARRIVE_S = 1.0  # after the pressure, in which tokens that were on their way arrive before the steps are told


@dataclass
class Run:
    """One stream. `at_s`: when each token came, in seconds from the first.

    steps  of the engine, from when it had `before` tokens until it had `after`
    """

    tokens: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    messages: int = 0
    before: int = 0
    after: int = 0
    steps: int = 0

    @property
    def gap_s(self) -> float:
        """The longest between two messages."""
        return max((later - sooner for sooner, later in itertools.pairwise(self.at_s)), default=0.0)

    @property
    def share(self) -> float:
        """Tokens for each step of the engine."""
        return (self.after - self.before) / max(self.steps, 1)


class Neighbour:
    """Its calls are of the id NEIGHBOUR, and bring `key` where there are keys."""

    def __init__(self, service: Served, key: str = "") -> None:
        self._service = service
        self._metadata = (("x-request-id", NEIGHBOUR), *((("x-api-key", key),) if key else ()))
        self._stop = threading.Event()
        self._alone = Run()
        self._pressed = Run()
        self._failure: BaseException | None = None

    @contextmanager
    def beside(self) -> Iterator[Neighbour]:
        """Streams when it is entered, and as long as that lasts. Raises what went wrong with it."""
        self._stop.clear()
        self._pressed = Run()
        thread = threading.Thread(target=self._press)
        thread.start()
        try:
            # Steps are told before the pressure: under it their answer would come long after they were counted.
            wait_for(lambda: self._pressed.before or self._failure, "the neighbour's first tokens")
            yield self
            wait_for(lambda: self.got > MINIMUM or self._failure, "the neighbour's tokens")
        finally:
            self._stop.set()
            thread.join(120)
        assert not thread.is_alive(), "its last message did not come"
        if self._failure is not None:
            raise self._failure
        self._compare()

    @property
    def got(self) -> int:
        """Tokens so far."""
        return len(self._pressed.tokens)

    def pace(self) -> str:
        """The pressed stream beside the same without pressure."""
        pressed, count = self._pressed, self.got
        seconds, alone = pressed.at_s[-1], self._alone.at_s[count - 1]
        messages = pressed.messages / count, self._alone.messages / len(self._alone.tokens)
        return (
            f"neighbour's {count} tokens as without, {pressed.share:.2f} a step (alone {self._alone.share:.2f}), "
            f"{messages[0]:.2f} messages a token (alone {messages[1]:.2f}); "
            f"{seconds:.1f} s, alone {alone:.1f} s: {seconds / alone:.1f} times; "
            f"longest gap {1e3 * pressed.gap_s:.0f} ms, alone {1e3 * self._alone.gap_s:.0f}"
        )

    def _compare(self) -> None:
        pressed = self._pressed
        assert self.got < MAX_TOKENS, "the pressure outlasted it"
        if len(self._alone.tokens) < self.got:
            self._service.wait_idle()
            self._alone = alone = Run()
            self._run(self.got + AHEAD, alone, lambda: len(alone.tokens) >= self.got)
        assert pressed.tokens == self._alone.tokens[: self.got], "a neighbour's answer changed"
        usual = min(1.0, self._alone.share)  # more than one token a step is steps that were told late
        assert pressed.share > MIN_SHARE * usual, f"held up: {pressed.share:.2f} tokens a step"
        assert pressed.gap_s < MAX_GAP_S, f"nothing came for {pressed.gap_s:.1f} s"

    def _press(self) -> None:
        try:
            self._run(MAX_TOKENS, self._pressed, self._stop.is_set, ARRIVE_S)
        except BaseException as error:  # noqa: BLE001  told by `beside`
            self._failure = error

    def _run(self, most: int, run: Run, enough: Callable[[], bool], settle_s: float = 0.0) -> None:
        sampling = pb.SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        request = pb.CompleteRequest(text="a steady neighbour", sampling=sampling, request_id=NEIGHBOUR)
        first_s = 0.0
        with grpc.insecure_channel(self._service.grpc, OWN) as channel, ThreadPoolExecutor(1) as asking:
            call = inference_pb2_grpc.InferenceStub(channel).CompleteStream(
                request, timeout=180, metadata=self._metadata
            )
            reported: list[Future[int]] = []  # it reads on while the engine's steps are asked for
            enough_s = 0.0
            for chunk in call:
                tokens = [token for choice in chunk.choices for token in choice.token_ids]
                if not tokens:
                    continue
                first_s = first_s or time.monotonic()
                run.at_s += [time.monotonic() - first_s] * len(tokens)
                run.messages += 1
                run.tokens += tokens
                if not reported:
                    reported.append(asking.submit(self._steps))
                if not run.before and reported[0].done():
                    run.before = len(run.tokens)
                if not enough_s and enough():
                    enough_s = time.monotonic()
                if len(reported) == 1 and enough_s and time.monotonic() > enough_s + settle_s:
                    reported.append(asking.submit(self._steps))
                if len(reported) == 2 and reported[1].done():
                    break
            run.after = len(run.tokens)
            run.steps = reported[1].result() - reported[0].result()
            call.cancel()

    def _steps(self) -> int:
        return self._service.load()["steps"]
