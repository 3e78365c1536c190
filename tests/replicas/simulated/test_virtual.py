"""A replica in virtual time is the engine, step for step."""

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.replicas.engine.engine import EngineCore
from motley.replicas.engine.model_limits import ModelLimits
from motley.replicas.engine.scheduler import Scheduler
from motley.replicas.errors import Overloaded
from motley.replicas.kv.blocks import BlockPool, extend_hashes
from motley.replicas.simulated.roofline_runner import RooflineRunner
from motley.replicas.simulated.simulated_device import SimulatedDevice, find_model_shape, find_table_device
from motley.replicas.simulated.virtual_replica import SimulatedRequest, VirtualReplica
from motley.replicas.types import Request, SamplingParams

MODEL = find_model_shape("qwen2.5-7b")
SIZES = {"max_batch_tokens": 256, "max_running": 6}


def a_device(name="P40"):
    return SimulatedDevice(find_table_device(name), MODEL)


def a_request(prompt_ids, output_tokens):
    sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True, temperature=0.0, seed=0)
    return Request("r", tuple(prompt_ids), sampling)


def some_work(seed, count=40, longest=500, rate=1.5):
    """Arrival in seconds, prompt, tokens of output; half of the prompts begin alike."""
    rng = random.Random(seed)
    shared = [rng.randrange(1000) for _ in range(longest * 4 // 5)]
    at, work = 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        prompt = shared[: rng.randrange(len(shared))] + [rng.randrange(1000) for _ in range(rng.randrange(1, longest))]
        work.append((at, prompt, rng.randrange(1, longest * 2 // 5)))
    return work


def by_the_engine(device, work, num_blocks, sizes=SIZES):
    """(first token, end) of each, with one call of the engine for each step."""
    now = 0.0

    def take(seconds):
        nonlocal now
        now += seconds

    pool = BlockPool(num_blocks)
    core = EngineCore(
        RooflineRunner(device, [7], take), Scheduler(pool, **sizes), ModelLimits(1000, num_blocks * 16, ()), None,
        clock=lambda: now,
    )  # fmt: skip
    left, first, done = list(enumerate(work)), {}, {}
    while left or core.busy:
        if not core.busy:
            now = max(now, left[0][1][0])
        while left and left[0][1][0] <= now:
            key, (_, prompt, outputs) = left.pop(0)
            core.add(key, a_request(prompt, outputs))
        for emission in core.step():
            first.setdefault(emission.key, now)
            if emission.done:
                done[emission.key] = now
    return [(first[key], done[key]) for key in range(len(work))], core.scheduler


def in_virtual_time(device, work, num_blocks, sizes=SIZES):
    replica = VirtualReplica("r", device, num_blocks=num_blocks, **sizes)
    jobs = []
    for at, prompt, outputs in work:
        hashes = []
        extend_hashes(hashes, b"", prompt)
        jobs.append(SimulatedRequest(a_request(prompt, outputs), outputs, hashes, at))
    arrivals = [(job.sent_s, number) for number, job in enumerate(jobs)]
    heapq.heapify(arrivals)
    steps = 0
    while arrivals or not replica.idle:
        if not replica.idle and (not arrivals or replica.ends < arrivals[0][0]):
            now = replica.ends
            replica.end(now)
            steps += 1
        else:
            now, number = heapq.heappop(arrivals)
            replica.add(now, jobs[number])
        if replica.idle:
            replica.begin(now)
    return jobs, replica, steps


@pytest.mark.parametrize("num_blocks", [4000, 80])  # room for all, and so little that sequences are preempted
@pytest.mark.parametrize("name", ["P40", "H100"])
def test_it_takes_as_long_as_the_engine(name, num_blocks):
    work = some_work(seed=num_blocks)
    device = a_device(name)
    expected, scheduler = by_the_engine(device, work, num_blocks)
    jobs, replica, steps = in_virtual_time(device, work, num_blocks)
    for job, (first, done) in zip(jobs, expected, strict=True):
        assert job.first_s == pytest.approx(first, rel=1e-9)
        assert job.done_s == pytest.approx(done, rel=1e-9)
    assert replica.scheduler.num_preemptions == scheduler.num_preemptions
    assert (scheduler.num_preemptions > 0) == (num_blocks == 80)
    assert replica.scheduler.pool.hit_tokens == scheduler.pool.hit_tokens > 0
    replica.scheduler.pool.check(idle=True)
    if num_blocks == 4000:
        assert steps < sum(outputs for _, _, outputs in work) / 3  # steps are taken together


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000), st.integers(18, 80), st.integers(1, 9), st.sampled_from([16, 48, 200]),
    st.sampled_from([2.0, 20.0]),
)  # fmt: skip
def test_whatever_is_advanced_together_ends_as_step_by_step(seed, num_blocks, running, tokens, rate):
    """Covers little room and much; small batches, and several that end, begin and need a block at once."""
    work, sizes = some_work(seed, 14, 120, rate), {"max_batch_tokens": tokens, "max_running": running}
    device = a_device("A10")
    expected, scheduler = by_the_engine(device, work, num_blocks, sizes)
    jobs, replica, _ = in_virtual_time(device, work, num_blocks, sizes)
    assert [(job.first_s, job.done_s) for job in jobs] == [pytest.approx(each, rel=1e-9) for each in expected]
    assert replica.scheduler.num_preemptions == scheduler.num_preemptions
    assert replica.scheduler.pool.hit_tokens == scheduler.pool.hit_tokens
    assert replica.scheduler.pool.cached == scheduler.pool.cached
    replica.scheduler.pool.check(idle=True)


def test_one_who_comes_ends_steps_that_are_taken_together():
    replica = VirtualReplica("r", a_device())
    replica.add(0.0, SimulatedRequest(a_request([1] * 10, 1000), 1000, []))
    replica.end(replica.begin(0.0))
    began = replica.device.step_s(0, 0, [(10, 0)])
    ends = replica.begin(began)
    assert ends > began + 900 * replica.device.step_s(1, 11)
    comes = began + 5.5 * replica.device.step_s(1, 11)
    late = SimulatedRequest(a_request([2] * 10, 5), 5, [])
    replica.add(comes, late)
    assert comes < replica.ends < comes + replica.device.step_s(1, 20)
    now = replica.ends
    while late.done_s is None:
        replica.end(now)
        now = replica.begin(now)
    assert late.first_s < comes + 3 * replica.device.step_s(1, 20)


def test_it_refuses_by_tokens():
    replica = VirtualReplica("r", a_device(), max_waiting_tokens=100)
    replica.add(0.0, SimulatedRequest(a_request([1] * 90, 5), 5, []))
    with pytest.raises(Overloaded):
        replica.add(0.0, SimulatedRequest(a_request([1] * 20, 5), 5, []))


def test_a_hidden_truth_changes_the_time_and_not_the_profile():
    device = a_device()
    other = device.hidden(random.Random(1))
    assert other.step_s(1, 1000) != device.step_s(1, 1000)
    assert other.device is device.device
    assert 0.7 < device.step_s(8, 8000) / other.step_s(8, 8000) < 1.3
    assert device.hidden(random.Random(1)) == other
