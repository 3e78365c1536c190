"""A worker whose device is simulated: the real engine around it, in real time, and it says what it is."""

import asyncio
import random
import time

import pytest

from motley.replicas.demo import demo_path
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import InvalidRequest
from motley.replicas.protocol import BATCHES, Request, SamplingParams
from motley.replicas.simulated.device import SimulatedDevice, device_named, model_named
from motley.replicas.simulated.worker import SIMULATED, SimulatedWorker


def a_request(tokens, output):
    return Request("r", tuple(range(1, tokens + 1)), SamplingParams(max_tokens=output, ignore_eos=True, seed=0))


async def answered(worker, request):
    began, first, tokens = time.monotonic(), None, 0
    async for message in worker.generate(request):
        tokens += sum(len(delta.token_ids) for delta in message.deltas)
        first = first or time.monotonic() - began
    return first, time.monotonic() - began, tokens


def test_it_takes_the_time_of_the_gpu_and_says_so():
    async def scenario():
        worker = SimulatedWorker(demo_path(), EngineConfig(max_running=8), "P40", "qwen2.5-7b")
        await worker.start()
        profile = worker.profile()
        first, whole, tokens = await answered(worker, a_request(100, 20))
        await worker.close()
        return profile, first, whole, tokens

    profile, first, whole, tokens = asyncio.run(scenario())
    device = SimulatedDevice(device_named("P40"), model_named("qwen2.5-7b"))
    assert tokens == 20
    # It cannot be faster than what is hidden allows; a busy machine may make it slower.
    assert first > device.step_s(0, 0, [(100, 0)]) / 1.31
    assert whole - first > 18 * device.step_s(1, 100) / 1.31
    assert profile.device == profile.model.family == profile.numerics == SIMULATED
    assert "Tesla P40, simulated" in profile.device_name
    assert profile.compute_capability == "6.1"
    assert profile.prefill_tokens_per_s == 512 / device.step_s(0, 0, [(512, 512)]), "what everybody knows of a P40"
    assert profile.decode_s == tuple(device.step_s(batch, batch) for batch in BATCHES)
    assert profile.max_running == 8
    assert "computes nothing" in profile.choices["engine"]


def test_by_itself_it_takes_the_checkpoints_own_shape():
    async def scenario():
        worker = SimulatedWorker(demo_path(), EngineConfig(), "H100", name="demo")
        await worker.start()
        first, _, tokens = await answered(worker, a_request(50, 4))
        await worker.close()
        return worker.profile(), first, tokens

    profile, first, tokens = asyncio.run(scenario())
    assert tokens == 4
    assert "demo" in profile.device_name
    assert first < 5


def test_a_card_that_is_not_known_or_too_small_is_refused():
    with pytest.raises(InvalidRequest, match="Tesla P40"):
        device_named("Voodoo 2")
    with pytest.raises(InvalidRequest, match=r"qwen2\.5-7b"):
        model_named("gpt-2")
    worker = SimulatedWorker(demo_path(), EngineConfig(), "T4", "qwen3-32b")
    with pytest.raises(InvalidRequest, match="does not hold qwen3-32b"):
        asyncio.run(worker.start())


def test_every_replica_is_off_its_profile_in_its_own_way():
    device = SimulatedDevice(device_named("T4"), model_named("qwen2.5-7b"))
    steps = {device.hidden(random.Random(seed)).step_s(4, 4000) for seed in range(5)}
    assert len(steps) == 5
    assert all(0.7 < each / device.step_s(4, 4000) < 1.5 for each in steps)
