"""A replica that is lost at any token loses no request: the answer is the one that no fault would have given."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from faulty_replica import Fault, FaultyReplica, MortalReplica, idle, start_worker, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_pool import LocalPool
from tokenizers import pre_tokenizers

from motley.cluster.routing.attempt.retry_decider import RetryDecider, RetryPolicy
from motley.cluster.routing.attempt.retryable_request import RetryableRequest
from motley.cluster.routing.router import SHORT_TOKENS, Router
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.errors import DeadlineExceeded, EngineFault, MotleyError, Overloaded, Unavailable
from motley.replicas.types import FinishReason, PromptLogprob, Request, SamplingParams, StreamMessage, TokenLogprob

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def ids(text: str) -> tuple[int, ...]:
    """Every byte is a token."""
    alphabet = sorted(BYTES.alphabet())
    return tuple(alphabet.index(char) for piece, _ in BYTES.pre_tokenize_str(text) for char in piece)


def only(letters: str) -> dict[int, float]:
    """A bias that leaves nothing but these."""
    return dict.fromkeys(ids(letters), 60.0)


PROMPT = ids("Once upon a time, and once more")
POLICY = RetryPolicy(stall_s=0.5, wait_s=2.0, backoff_s=0.001)

CASES: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0},
    "nucleus": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {
        "temperature": 0.7, "presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.7,
        "logit_bias": only("abcdefgh"),
    },
    "logprobs": {"temperature": 1.0, "logprobs": 3, "prompt_logprobs": 2},
    "several": {"temperature": 1.0, "n": 3, "logprobs": 0},
    "min_tokens": {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": list(range(0, 256, 3))},
    "stop ids of several": {"temperature": 1.0, "n": 4, "stop_token_ids": list(range(0, 256, 9))},
    "letters": {"temperature": 1.0, "n": 2, "logit_bias": only("abcé"), "stop": ["abcé", "aa", "bcb"]},
    "stop that is never whole": {"temperature": 1.0, "logit_bias": only("a"), "stop": ["a" * 20]},
    "broken characters": {"temperature": 1.0, "n": 2, "logit_bias": only("é€😀"), "stop": ["\ufffdabc"]},
}  # fmt: skip


@dataclass
class Told:
    """All that a reader learns of one choice."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ends: list[tuple[FinishReason, str | int | None]] = field(default_factory=list)


@dataclass
class Answer:
    choices: list[Told]
    headers: int = 0
    prompt_logprobs: list[tuple[PromptLogprob, ...]] = field(default_factory=list)


def request(**params: object) -> Request:
    return Request("r", PROMPT, SamplingParams(**{"max_tokens": 14, "seed": 5} | params))  # type: ignore[arg-type]


async def read(router: Router, asked: Request, *, whole: bool = False) -> Answer:
    answer = Answer([Told() for _ in range(asked.sampling.n)])
    async with aclosing(router.stream(asked, whole=whole)) as messages:
        async for message in messages:
            take(answer, message)
    return answer


def take(answer: Answer, message: StreamMessage) -> None:
    answer.headers += message.cached_tokens is not None
    if message.prompt_logprobs is not None:
        answer.prompt_logprobs.append(message.prompt_logprobs)
    for delta in message.deltas:
        told = answer.choices[delta.index]
        assert not told.ends, "nothing comes after the end"
        told.ids += delta.token_ids
        told.text += delta.text
        told.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            told.ends.append((delta.finish_reason, delta.stop_reason))


@pytest.fixture
async def workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Worker]]:
    workers = [await start_worker(folder, monkeypatch) for _ in range(3)]
    yield workers
    for worker in workers:
        await worker.close()


def faulty(workers: list[Worker], plan: list[Fault]) -> tuple[Router, LocalPool]:
    pool = LocalPool(*(FaultyReplica(worker, plan) for worker in workers))
    return Router({"cpu": pool}, POLICY), pool


@pytest.mark.parametrize("case", CASES)
async def test_a_loss_at_any_token_changes_nothing(workers: list[Worker], case: str) -> None:
    asked = request(**CASES[case])
    whole = await read(faulty(workers, [])[0], asked)
    assert whole.headers == 1
    assert all(len(told.ends) == 1 for told in whole.choices)
    positions = max(len(told.ids) for told in whole.choices) + 2
    for after in range(positions):
        router, pool = faulty(workers, [Fault(after)])
        assert await read(router, asked) == whole, f"lost after {after} messages"
        if len(pool.sent) == 2 and after:
            [resumed] = pool.replicas[pool.sent[1]].requests
            assert max(map(len, resumed.output_ids)) >= after, "no message was without a token"
        assert len(set(pool.sent)) == len(pool.sent) in (1, 2), "never again to the one that was lost"
        await until(lambda: all(map(idle, workers)))


@pytest.mark.covering
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["died", "hang"])
async def test_a_short_answer_that_is_not_streamed_is_one_call_and_asked_for_again(
    workers: list[Worker], case: str, kind: str
) -> None:
    asked = request(**CASES[case])
    router, pool = faulty(workers, [])
    whole = await read(router, asked)
    assert await read(router, asked, whole=True) == whole
    assert len(pool.sent) == 1, "the streamed one"
    router, pool = faulty(workers, [Fault(1, kind), Fault(7, kind)])
    assert await read(router, asked, whole=True) == whole
    seen = [request for replica in pool.replicas.values() for request in replica.requests]
    assert [request.output_ids for request in seen] == [()] * 3, "from its beginning, on another replica"
    await until(lambda: all(map(idle, workers)))


async def test_a_long_answer_that_is_not_streamed_goes_on_where_it_was(workers: list[Worker]) -> None:
    asked = request(max_tokens=SHORT_TOKENS + 1, ignore_eos=True)
    router, pool = faulty(workers, [Fault(40)])
    answer = await read(router, asked, whole=True)
    assert len(answer.choices[0].ids) == SHORT_TOKENS + 1
    [resumed] = pool.replicas[pool.sent[1]].requests
    assert len(resumed.output_ids[0]) == 40


async def test_the_cases_are_what_they_claim(workers: list[Worker]) -> None:
    router, _ = faulty(workers, [])
    answers = {case: await read(router, request(**CASES[case])) for case in CASES}
    lengths = {len(told.ids) for told in answers["stop ids of several"].choices}
    assert len(lengths) > 1, "choices end at different times"
    assert any(isinstance(told.ends[0][1], str) for told in answers["letters"].choices), "a stop string ends one"
    assert answers["stop that is never whole"].choices[0].text == "a" * 14
    assert "\ufffd" in answers["broken characters"].choices[0].text
    assert answers["min_tokens"].choices[0].ends[0][0] is FinishReason.STOP
    assert answers["logprobs"].prompt_logprobs
    assert answers["seeded"].choices[0].ids != answers["greedy"].choices[0].ids


@pytest.mark.parametrize("kind", ["died", "draining", "silent end", "hang"])
@pytest.mark.parametrize("after", [0, 1, 6])
async def test_however_a_replica_is_lost(workers: list[Worker], kind: str, after: int) -> None:
    asked = request(**CASES["several"])
    whole = await read(faulty(workers, [])[0], asked)
    router, pool = faulty(workers, [Fault(after, kind)])
    assert await read(router, asked) == whole
    assert len(set(pool.sent)) == 2
    assert router.stats.counters.moved == (after > 0), "a request that has not begun is only tried again"
    await until(lambda: all(map(idle, workers)))


async def test_what_has_ended_is_not_computed_again(workers: list[Worker]) -> None:
    asked = request(**CASES["stop ids of several"])
    whole = await read(faulty(workers, [])[0], asked)
    first = min(range(4), key=lambda index: len(whole.choices[index].ids))
    router, pool = faulty(workers, [Fault(len(whole.choices[first].ids) + 1)])
    assert await read(router, asked) == whole
    [resumed] = pool.replicas[pool.sent[1]].requests
    assert resumed.output_ids[first] == tuple(whole.choices[first].ids)
    assert (resumed.sampling, resumed.prompt_ids) == (asked.sampling, asked.prompt_ids)


@pytest.mark.slow("60 drawn plans of lost replicas, each answered without losses too")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    case=st.sampled_from(sorted(CASES)),
    plan=st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["died", "draining", "silent end"])), max_size=5),
)
async def test_losses_one_after_the_other(workers: list[Worker], case: str, plan: list[tuple[int, str]]) -> None:
    asked = request(**CASES[case])
    whole = await read(faulty(workers, [])[0], asked)
    patient = RetryPolicy(wait_s=5.0, backoff_s=0.001, max_losses=9)
    faults = [Fault(after, kind) for after, kind in plan]
    pool = LocalPool(*(FaultyReplica(worker, faults) for worker in workers))
    assert await read(Router({"cpu": pool}, patient), asked) == whole
    await until(lambda: all(map(idle, workers)))


@pytest.mark.parametrize("after", [0, 3])
async def test_what_kills_every_replica_ends(workers: list[Worker], after: int) -> None:
    """A request that brings down whatever computes it must not bring down the whole fleet."""
    router, pool = faulty(workers, [Fault(after), *[Fault(0)] * 20])
    asked = request(n=2)
    seen: list[StreamMessage] = []
    with pytest.raises(Unavailable) as caught:
        await collect(router.stream(asked), seen)
    assert caught.value.code == "replica_lost"
    assert len(pool.sent) == POLICY.max_losses
    ends = [(delta.index, delta.finish_reason) for message in seen for delta in message.deltas if delta.finish_reason]
    assert ends == ([(0, FinishReason.REPLICA_LOST), (1, FinishReason.REPLICA_LOST)] if after else [])
    assert router.num_streams == 0
    await until(lambda: all(map(idle, workers)))


async def test_a_full_replica_is_passed_by_and_a_full_pool_refuses_at_once(workers: list[Worker]) -> None:
    asked = request()
    whole = await read(faulty(workers, [])[0], asked)
    router, pool = faulty(workers, [Fault(0, "full"), Fault(0, "full")])
    assert await read(router, asked) == whole
    assert len(set(pool.sent)) == 3, "each is asked once"
    router, pool = faulty(workers, [Fault(0, "full")] * 9)
    with pytest.raises(Overloaded, match="the queue is full"):
        await read(router, asked)
    assert sorted(pool.sent) == ["r0", "r1", "r2"]


async def test_a_stream_that_has_begun_waits_for_room(workers: list[Worker]) -> None:
    asked = request()
    whole = await read(faulty(workers, [])[0], asked)
    router, pool = faulty(workers, [Fault(3), *[Fault(0, "full")] * 4])
    assert await read(router, asked) == whole
    assert len(pool.sent) == 6


async def test_a_step_that_fails_is_tried_elsewhere_once(workers: list[Worker]) -> None:
    asked = request()
    whole = await read(faulty(workers, [])[0], asked)
    runners = [worker._engine.runner for worker in workers if worker._engine is not None]
    runners[0].fail_next = runners[1].fail_next = RuntimeError("out of memory")  # type: ignore[attr-defined]
    router, pool = faulty(workers[:1] + workers[2:], [])
    assert await read(router, asked) == whole
    runners[0].fail_next = RuntimeError("out of memory")  # type: ignore[attr-defined]
    router, pool = faulty(workers[:2], [])
    with pytest.raises(EngineFault, match="out of memory"):
        await read(router, asked)
    assert sorted(pool.sent) == ["r0", "r1"]
    await until(lambda: all(map(idle, workers)))


async def test_a_step_that_fails_leaves_nothing_of_the_prompt_in_the_answer(workers: list[Worker]) -> None:
    asked = request(**CASES["logprobs"])
    whole = await read(faulty(workers, [])[0], asked)
    router, pool = faulty(workers[:2], [Fault(0, "failed step")])
    assert await read(router, asked) == whole
    assert sorted(pool.sent) == ["r0", "r1"], "the first of them failed"
    assert [len(found) for found in whole.prompt_logprobs] == [len(PROMPT)]


async def test_a_slow_reader_is_no_hang(workers: list[Worker]) -> None:
    router, pool = faulty(workers, [])
    async with aclosing(router.stream(request())) as messages:
        await anext(messages)
        await asyncio.sleep(3 * POLICY.stall_s)
        rest = [delta async for message in messages for delta in message.deltas]
    assert rest[-1].finish_reason is FinishReason.LENGTH
    assert len(pool.sent) == 1


async def test_a_long_silence_of_a_replica_that_lives_is_no_hang(workers: list[Worker]) -> None:
    class Slow(FaultyReplica):
        async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
            await asyncio.sleep(4 * POLICY.stall_s)  # a long queue, or a long prompt
            async for message in super().generate(request):
                yield message

    pool = LocalPool(*(Slow(worker, []) for worker in workers))
    answer = await read(Router({"cpu": pool}, POLICY), request())
    assert len(answer.choices[0].ids) == 14
    assert len(pool.sent) == 1


async def test_a_hung_replica_is_avoided_until_it_shows_that_it_lives(workers: list[Worker]) -> None:
    router, pool = faulty(workers[:2], [Fault(2, "hang")])
    await read(router, request())
    hung = pool.sent[0]
    for _ in range(10):
        await read(router, request())
    assert hung not in pool.sent[1:]
    pool.replicas[hung].hangs = False
    async with asyncio.timeout(20):
        while pool.sent[-1] != hung:  # it has been asked again, and now answers
            await read(router, request())


async def test_a_replica_that_hangs_is_taken_when_nobody_else_is_left(workers: list[Worker]) -> None:
    router, pool = faulty(workers[:1], [Fault(2, "hang")])
    whole = await read(faulty(workers, [])[0], request())
    assert await read(router, request()) == whole
    assert pool.sent == ["r0", "r0"]


async def test_a_deadline_holds_though_the_replica_hangs(workers: list[Worker]) -> None:
    hanging = RetryPolicy(stall_s=30.0)
    pool = LocalPool(FaultyReplica(workers[0], [Fault(2, "hang")]))
    router = Router({"cpu": pool}, hanging)
    seen: list[StreamMessage] = []
    with pytest.raises(DeadlineExceeded):
        await collect(router.stream(replace(request(), deadline_s=0.05)), seen)
    assert seen[-1].deltas[0].finish_reason is FinishReason.DEADLINE


async def test_a_replica_of_the_same_numerics_is_preferred(workers: list[Worker]) -> None:
    for _ in range(8):
        plan = [Fault(2)]
        pool = LocalPool(*(FaultyReplica(worker, plan) for worker in workers), numerics=("a", "b", "a"))
        answer = await read(Router({"cpu": pool}, POLICY), request())
        first, second = pool.sent
        if pool.numerics[first] == "a":
            assert pool.numerics[second] == "a"
        assert len(answer.choices[0].ids) == 14


async def test_across_numerics_no_token_is_lost_or_repeated(
    workers: list[Worker], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other class would have said something else: it goes on from what has been said."""
    other = await start_worker(folder, monkeypatch, turn=7)
    asked = request(logprobs=1)
    whole = await read(faulty(workers, [])[0], asked)
    for after in range(1, 14):
        pool = LocalPool(FaultyReplica(workers[0], [Fault(after)]), numerics=("a",))
        pool.numerics["other"] = "b"
        answer = Answer([Told()])
        async with aclosing(Router({"cpu": pool}, POLICY).stream(asked)) as messages:
            while len(answer.choices[0].ids) < after:
                take(answer, await anext(messages))
            pool.replicas = {"other": FaultyReplica(other, [])}
            await drain(messages, answer)
        begun = whole.choices[0].ids[:after]
        [rest] = (await read(faulty([other], [])[0], replace(asked, output_ids=(tuple(begun),)))).choices
        [told] = answer.choices
        assert told.ids == begun + rest.ids
        assert [entry.token_id for entry in told.logprobs] == told.ids
        assert told.text.endswith(rest.text)
        assert told.ends == rest.ends
        assert told.ids != whole.choices[0].ids
    await other.close()


async def test_a_request_waits_for_the_replica_that_takes_the_place_of_its_own(workers: list[Worker]) -> None:
    asked = request()
    whole = await read(faulty(workers, [])[0], asked)
    router, pool = faulty(workers[:1], [Fault(4)])
    async with aclosing(router.stream(asked)) as messages:
        answer = Answer([Told()])
        for _ in range(4):
            take(answer, await anext(messages))
        pool.replicas.clear()
        rest = asyncio.create_task(drain(messages, answer))
        await asyncio.sleep(0.05)
        assert not rest.done()
        pool.replicas["new"] = FaultyReplica(workers[1], [])
        await rest
    assert answer == whole


async def collect(messages: AsyncIterator[StreamMessage], into: list[StreamMessage]) -> None:
    async for message in messages:
        into.append(message)


async def drain(messages: AsyncIterator[StreamMessage], answer: Answer) -> None:
    async for message in messages:
        take(answer, message)


async def test_leaving_while_it_looks_for_another_ends_it(workers: list[Worker]) -> None:
    router, pool = faulty(workers[:1], [])
    pool.replicas.clear()
    task = asyncio.create_task(read(router, request()))
    await until(lambda: router.num_streams == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert router.num_streams == 0


async def test_wrong_requests_are_not_tried_again(workers: list[Worker]) -> None:
    router, pool = faulty(workers, [])
    with pytest.raises(MotleyError, match="vocabulary"):
        await read(router, replace(request(), prompt_ids=(10_000,)))
    assert len(pool.sent) == 1


@pytest.mark.parametrize("after", [5, 25, 60])
async def test_all_streams_of_a_replica_that_dies_go_on(workers: list[Worker], after: int) -> None:
    """Many at a time, whose messages come together; some have ended, some not begun."""
    asked = [request(**CASES[case]) for case in CASES]
    whole = [await read(faulty(workers, [])[0], one) for one in asked]
    replicas = [MortalReplica(worker) for worker in workers]
    for replica in replicas:
        await replica.start()
    router = Router({"cpu": LocalPool(*replicas, calls=True)}, POLICY)
    count = 0

    async def counted(one: Request) -> Answer:
        nonlocal count
        answer = Answer([Told() for _ in range(one.sampling.n)])
        async with aclosing(router.stream(one)) as messages:
            async for message in messages:
                take(answer, message)
                count += 1
                if count == after:
                    busiest = max(replicas, key=lambda replica: replica.worker.num_streams)
                    busiest.dead.set()
        return answer

    assert await asyncio.gather(*map(counted, asked)) == whole
    assert any(replica.dead.is_set() for replica in replicas)
    await until(lambda: all(map(idle, workers)))


async def test_when_the_ingress_itself_stood_still_no_replica_is_to_blame(workers: list[Worker]) -> None:
    class Late(FaultyReplica):
        async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
            await asyncio.sleep(0)
            time.sleep(4 * POLICY.stall_s)  # the process was stopped, or its machine slept
            await asyncio.sleep(POLICY.stall_s / 2)
            async for message in super().generate(request):
                yield message

    pool = LocalPool(*(Late(worker, []) for worker in workers))
    await read(Router({"cpu": pool}, POLICY), request())
    assert len(pool.sent) == 1


@pytest.mark.parametrize("code", ["replica_lost", "replica_stalled"])
def test_a_request_that_takes_replicas_with_it_is_given_up(code: str) -> None:
    """Whether they die of it or hang: the clock stands still, so that no other limit ends it."""
    policy = RetryPolicy(max_losses=3)
    retry = RetryDecider(policy, clock=lambda: 0.0)
    for number in range(policy.max_losses - 1):
        retry.after(Unavailable("gone", code=code), f"replica {number}")
    with pytest.raises(Unavailable, match="no other could take over"):
        retry.after(Unavailable("gone", code=code), "the last")


def test_what_is_left_of_a_deadline_goes_with_what_is_left_of_an_answer() -> None:
    now = 5.0
    request = Request("r", (1, 2), SamplingParams(seed=0), deadline_s=10.0)
    journey, endless = (
        RetryableRequest(each, POLICY, lambda: now) for each in (request, replace(request, deadline_s=None))
    )
    now = 12.0
    assert journey.rest().deadline_s == 3.0
    assert endless.rest().deadline_s is None
    now = 15.0
    with pytest.raises(DeadlineExceeded):
        journey.rest()
