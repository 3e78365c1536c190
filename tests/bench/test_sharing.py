"""Replicas in virtual time that share a store of prefixes."""

from __future__ import annotations

from motley.replicas.simulated.simulated_device import SimulatedDevice, find_model_shape, find_table_device
from motley.replicas.simulated.virtual_replica import SimulatedRequest
from motley.replicas.types import BLOCK_TOKENS, Request, SamplingParams
from motley_bench.prefix.sharing_replica import SharingReplica, SimulatedStore

DEVICE = SimulatedDevice(find_table_device("T4"), find_model_shape("qwen2.5-7b"))
FAST = 1e-6  # seconds to fetch a token


def a_job(beginning: bytes, number: int, tokens: int = 1000) -> SimulatedRequest:
    request = Request("", (0,) * tokens, SamplingParams(seed=0))
    shared = [beginning + bytes([block]) for block in range(48)]
    own = [b"own %d %d" % (number, block) for block in range(48, tokens // BLOCK_TOKENS)]
    return SimulatedRequest(request, 4, shared + own)


def serve(replica: SharingReplica, jobs: list[SimulatedRequest], now: float = 0.0) -> float:
    """One after the other; when the last has ended."""
    for job in jobs:
        job.sent_s = now
        replica.add(now, job)
        while job.done_s is None:
            ends = replica.begin(now)
            if ends is None:
                assert replica.wakes is not None
                assert replica.load().waiting == 1
                now = replica.wakes
            else:
                replica.end(now := ends)
    return now


def test_what_one_was_asked_for_twice_another_fetches() -> None:
    store = SimulatedStore(1000)
    one, two, without = (SharingReplica(name, DEVICE, store=store, fetch_s=FAST) for name in ("one", "two", "without"))
    jobs = [a_job(b"a", number) for number in range(4)]
    serve(one, jobs[:1])
    assert jobs[0].stored_tokens == 0, "it came once"
    serve(one, jobs[1:2])
    assert jobs[1].stored_tokens == 48 * BLOCK_TOKENS, "what they share, and not what they do not"
    serve(two, jobs[2:3], now=100.0)
    assert (jobs[2].cached_tokens, jobs[2].stored_tokens) == (768, 768)
    serve(without, [other := a_job(b"b", 9)], now=100.0)
    assert other.first_s is not None
    assert jobs[2].first_s is not None
    assert 100.0 + 768 * FAST < jobs[2].first_s < other.first_s
    serve(two, jobs[3:], now=200.0)
    assert jobs[3].cached_tokens == 768
    assert not two.scheduler


def test_what_is_slower_to_fetch_or_has_made_room_is_computed() -> None:
    store = SimulatedStore(48)
    one, slow = (
        SharingReplica("", DEVICE, store=store, fetch_s=FAST),
        SharingReplica("", DEVICE, store=store, fetch_s=1.0),
    )
    serve(one, [a_job(b"a", number) for number in range(2)])
    serve(slow, [job := a_job(b"a", 7)])
    assert job.cached_tokens == 0
    serve(one, [a_job(b"b", number) for number in range(2)])
    assert store.depth(job.hashes) == 0, "another one's are stored there now"
