"""A worker whose device is simulated: the real engine around it, in real time, and it says what it is."""

import asyncio
import random
import time

import pytest
from awq_files import build_awq
from fp8_files import build_fp8
from gptq_files import build_gptq
from tiny_checkpoints import build_checkpoint

from motley.replicas.demo import demo_path
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import InvalidRequest
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.simulated.simulated_device import (
    INT4_WEIGHTS,
    SimulatedDevice,
    SimulatedWeights,
    find_model_shape,
    find_table_device,
)
from motley.replicas.simulated.simulated_worker import SIMULATED, SimulatedWorker, checkpoint_weights
from motley.replicas.types import PROFILED_BATCH_SIZES, Request, SamplingParams


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
    device = SimulatedDevice(find_table_device("P40"), find_model_shape("qwen2.5-7b"))
    assert tokens == 20
    # It cannot be faster than what is hidden allows; a busy machine may make it slower.
    assert first > device.step_s(0, 0, [(100, 0)]) / 1.31
    assert whole - first > 18 * device.step_s(1, 100) / 1.31
    assert profile.device == profile.model.family == profile.numerics == SIMULATED
    assert "Tesla P40, simulated" in profile.device_name
    assert profile.compute_capability == "6.1"
    assert profile.prefill_tokens_per_s == 512 / device.step_s(0, 0, [(512, 512)]), "what everybody knows of a P40"
    assert profile.decode_s == tuple(device.step_s(batch, batch) for batch in PROFILED_BATCH_SIZES)
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
        find_table_device("Voodoo 2")
    with pytest.raises(InvalidRequest, match=r"qwen2\.5-7b"):
        find_model_shape("gpt-2")
    worker = SimulatedWorker(demo_path(), EngineConfig(), "T4", "qwen3-32b")
    with pytest.raises(InvalidRequest, match="does not hold qwen3-32b"):
        asyncio.run(worker.start())


def test_every_replica_is_off_its_profile_in_its_own_way():
    device = SimulatedDevice(find_table_device("T4"), find_model_shape("qwen2.5-7b"))
    steps = {device.hidden(random.Random(seed)).step_s(4, 4000) for seed in range(5)}
    assert len(steps) == 5
    assert all(0.7 < each / device.step_s(4, 4000) < 1.5 for each in steps)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One small model in several formats; K in 128s, as kernels want it."""
    folder, sizes = tmp_path_factory.mktemp("formats"), {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    return {
        "dense": build_checkpoint(folder / "dense", "llama", num_hidden_layers=2, **sizes),
        "gptq-int4": build_gptq(folder / "four", bits=4, group_size=128, **sizes),
        "gptq-int8": build_gptq(folder / "eight", bits=8, group_size=128, **sizes),
        "awq": build_awq(folder / "awq", group_size=64, **sizes)[0],
        "fp8": build_fp8(folder / "fp8", **sizes)[0],
    }


@pytest.mark.parametrize(
    ("format_", "gpu", "expected"),
    [
        ("dense", "T4", (16, "half")),
        ("dense", "P40", (32, "half")),  # computes in fp32, and holds what it computes with
        ("gptq-int4", "P40", (4, "half")),
        ("gptq-int8", "P40", (8, "int8")),
        ("gptq-int8", "P100", (16, "half")),  # has no dp4a
        ("awq", "H100", (4, "half")),
        ("fp8", "H100", (8, "fp8")),
        ("fp8", "A100", (16, "half")),  # written out
    ],
)
def test_a_checkpoint_is_read_as_that_gpu_holds_it(checkpoints, format_, gpu, expected):
    checkpoint, device = inspect_checkpoint(checkpoints[format_]), find_table_device(gpu)
    weights = checkpoint_weights(checkpoint, device)
    assert (weights.bits, weights.activations) == expected


def test_a_dense_model_takes_the_time_of_its_own_bytes(checkpoints):
    """In a step of one sequence weights are all that is read: near four times those of int4, twice those of fp8."""
    four, eight, dense = (
        SimulatedDevice(find_table_device("H100"), find_model_shape("qwen2.5-7b"), weights)
        for weights in (INT4_WEIGHTS, SimulatedWeights(8, 1 << 14, "fp8"), SimulatedWeights(16))
    )
    ratio = dense._linears_s(1, 1) / four._linears_s(1, 1)
    assert 2.5 < ratio < 4
    assert 1.5 < dense._linears_s(1, 1) / eight._linears_s(1, 1) < 2
    assert dense.weight_bytes > eight.weight_bytes > four.weight_bytes
    assert dense.num_blocks < four.num_blocks

    async def profile_of(name):
        worker = SimulatedWorker(checkpoints[name], EngineConfig(max_running=8), "P40")
        await worker.start()
        profile = worker.profile()
        await worker.close()
        return profile

    profiles = [asyncio.run(profile_of(name)) for name in ("gptq-int4", "dense")]
    assert profiles[0].decode_s[0] < profiles[1].decode_s[0]
    assert [profile.device_name.rpartition(" in ")[2] for profile in profiles] == ["4 bits", "32 bits"]
