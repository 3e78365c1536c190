"""A model divided among GPUs: real processes, of which each has the stand-in for one and gloo in NCCL's place."""

from __future__ import annotations

import json
import os
import re
import signal
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_driver import drive
from late_device import LateDevice, LateOps
from late_exchange import LateExchange
from late_shards import KV_BYTES, MIXED, RANKS, STAGES, built, followers
from tiny_checkpoints import build_checkpoint

from motley.replicas.capacity.device_fit import find_table_devices, local_cpu
from motley.replicas.checkpoint.reading.weight_loader import WeightLoader
from motley.replicas.engine.startup.engine_builder import BuiltEngine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import EngineLost, InvalidRequest
from motley.replicas.execution.runner import prepare_batch
from motley.replicas.execution.step_plan import PlanItem, StepPlan
from motley.replicas.gpu.gpu_runner import GpuRunner
from motley.replicas.loading.operator_choice import choose_operators
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.model.decoder import Decoder
from motley.replicas.model.sharding.stages import pipeline_stages
from motley.replicas.parallel.calls import decoder_calls
from motley.replicas.parallel.calls.stage_executor import StageExecutor
from motley.replicas.parallel.leader import follower_group
from motley.replicas.parallel.leader.gpu_leader import GuardedAccelerator, SynchronizedAccelerator
from motley.replicas.parallel.leader.launcher import SubprocessLauncher
from motley.replicas.parallel.leader.process_config import process_config, process_devices
from motley.replicas.parallel.planning.device_report import DeviceReport, device_report
from motley.replicas.parallel.planning.layer_assignment import best_layers
from motley.replicas.types import Pooling, Request, SamplingParams


@pytest.fixture(autouse=True)
def _processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(follower_group, "CollectiveExchange", LateExchange)
    yield
    assert followers() == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", num_hidden_layers=4, tie_word_embeddings=True)


def request(prompt: list[int], pooling: Pooling | None = None, **params: Any) -> Request:
    params = {"temperature": 0.0, "max_tokens": 12, "seed": 5} | params
    return Request("r", tuple(prompt), SamplingParams(**params), pooling=pooling)


REQUESTS = [
    request([7, 3, 200, 41]),
    request(list(range(60)), max_tokens=8),
    request(list(range(100)), prompt_logprobs=2, max_tokens=4),
    request([17, 33, 101], temperature=0.8, top_k=20, n=2),
    request(list(range(30)), repetition_penalty=1.3, logprobs=2),
    request(list(range(80)), Pooling.MEAN, max_tokens=1),
]


def said(made: BuiltEngine, requests: list[Request] = REQUESTS) -> tuple[list[Any], list[float]]:
    """Tokens, and every number that is told beside them."""
    tokens: list[Any] = []
    numbers: list[float] = []
    for messages in drive(made.core, requests, apart=2):
        tokens.append([(delta.index, delta.token_ids) for each in messages for delta in each.deltas])
        for message in messages:
            numbers += message.embedding or ()
            told = [entry for delta in message.deltas for entry in delta.logprobs or ()]
            numbers += [value for entry in told for value in (entry.logprob, *(value for _, value in entry.top))]
            numbers += [entry.logprob for entry in message.prompt_logprobs or () if entry is not None]
    return tokens, numbers


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[list[Any], list[float]]:
    return said(built(folder))


@pytest.mark.slow("Processes with stand-ins answer six kinds of requests")
@pytest.mark.parametrize(
    "way",
    [RANKS, STAGES, pytest.param(RANKS | STAGES, marks=[pytest.mark.started, pytest.mark.thorough])],
    ids=["ranks", "stages", "stages of ranks"],
)
def test_it_says_what_one_process_says(folder: Path, whole: tuple[list[Any], list[float]], way: dict[str, Any]) -> None:
    """Greedy, seeded, penalised, log-probabilities, embeddings; prompts in pieces, beside others that decode."""
    made = built(folder, **way)
    try:
        found = said(made)
        assert found[0] == whole[0]
        assert found[1] == pytest.approx(whole[1], abs=1e-4)
    finally:
        made.close()


@pytest.mark.slow("Two to four processes, some with stand-ins, answer six kinds of requests")
@pytest.mark.parametrize("name", MIXED)
def test_stages_may_be_on_gpus_and_on_cpus(
    name: str, folder: Path, whole: tuple[list[Any], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its own operators. KV of such a replica is lent to nobody."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    made = built(folder, MIXED[name][0], **MIXED[name][1])
    try:
        found = said(made)
        assert found[0] == whole[0]
        assert found[1] == pytest.approx(whole[1], abs=1e-4)
        assert made.group is not None
        assert made.group.host_kv_refusal == "the processes of the model have it in float32 on CPUs and float32 on GPUs"
        kinds = made.profile.numerics.split("+")
        assert len(kinds) == len(made.group.stages)
        assert len(set(kinds)) > 1
    finally:
        made.close()


def test_each_stage_computes_in_the_dtype_of_its_own_device(folder: Path) -> None:
    """To the bit as its own operators do here: of the stand-in in fp32, of the CPU in bf16."""
    made = built(folder, "on_cpu", pipeline_parallel=2, pipeline_layers=(2, 2), dtype="bfloat16")
    try:
        found = made.logits((1, 2, 3, 4, 5))
    finally:
        made.close()
    checkpoint = inspect_checkpoint(folder)
    both = [LateOps(), choose_operators(EngineConfig(dtype="bfloat16"), checkpoint.config.dtype)[0]]
    stream: Any = None
    plan = StepPlan((PlanItem(0, 0, (1, 2, 3, 4, 5), (0,)),))
    batch = prepare_batch(plan, lambda values: values, all_rows=True)
    for stage, ops in zip(pipeline_stages(4, (2, 2)), both, strict=True):
        weights = WeightLoader(checkpoint.tensors, ops.device)
        decoder = Decoder(checkpoint.config, checkpoint.format, weights, ops, stage=stage)
        method, tensors = decoder_calls.call_message("forward", batch)
        stream = decoder_calls.execute_call(decoder, ops.allocate_kv(2, 2, 2, 16), method, tensors, stream)
    assert torch.equal(found, stream)


@pytest.mark.slow("Two processes capture graphs on stand-ins, and replay them in Python")
def test_graphs_are_all_ranks_and_steps_are_planned_ahead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time nothing is captured, and what is told of a step is the number of its graph."""
    monkeypatch.setattr("motley.replicas.gpu.decode_graphs.MAX_GRAPHS", 3)
    made = built(folder, **RANKS)
    assert made.group is not None
    sent: list[dict[str, Any]] = []
    broadcast = made.group.broadcast
    monkeypatch.setattr(made.group, "broadcast", lambda fields: sent.append(fields) or broadcast(fields))
    try:
        said(made)  # captures, and lets go of some
        captures = [fields for fields in sent if "capture" in fields]
        assert [fields["capture"] for fields in captures] == list(range(len(captures)))
        assert len(captures) > 3
        assert {number for fields in captures for number in fields["drop"]} <= set(range(len(captures)))
        assert any(fields["drop"] for fields in captures)
        one = [request([1, 2, 3], max_tokens=30)]
        drive(made.core, one)
        sent.clear()
        made.core.add(0, one[0])
        ahead = 0
        while made.core.busy:
            made.core.step()
            ahead += made.core.launched
        assert ahead >= 28
        assert [set(fields) for fields in sent[1:]] == [{"replay"}] * 29
    finally:
        made.close()


def test_graphs_go_before_the_exchange_that_they_have(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for them, and for ever if that is the other way round."""
    left: list[int] = []
    abort = LateExchange.abort
    made = built(folder, **RANKS)
    try:
        drive(made.core, [request([1, 2, 3])])
        assert isinstance(made.runner, GpuRunner)
        assert made.runner.graphs is not None
        graphs = [weakref.ref(launch) for launch in made.runner.graphs._replays.values()]
        assert graphs

        def given_up(exchange: LateExchange) -> None:
            left.append(sum(graph() is not None for graph in graphs))
            abort(exchange)

        monkeypatch.setattr(LateExchange, "abort", given_up)
    finally:
        made.close()
    assert left
    assert not any(left)


def to_its_end(made: BuiltEngine) -> None:
    while made.core.busy:
        made.core.step()


@pytest.mark.parametrize("way", [RANKS, STAGES], ids=["rank", "stage"])
def test_a_process_that_is_killed_ends_the_engine(folder: Path, way: dict[str, Any]) -> None:
    made = built(folder, **way)
    try:
        made.core.add(0, request([1, 2, 3], max_tokens=200))
        for _ in range(10):
            made.core.step()
        [other] = followers()
        os.kill(other, signal.SIGKILL)
        for key in (1, 2):
            made.core.add(key, request([4, 5]))
            with pytest.raises(EngineLost, match=r"1 ended with status -9"):
                to_its_end(made)
    finally:
        made.close()


def test_graphs_go_when_a_rank_is_lost(folder: Path) -> None:
    """Though nobody has closed the engine yet, and the error is kept, in whose frames a graph was to be launched."""
    device = LateDevice()
    made = built(folder, stand_in=device, **RANKS)
    try:
        made.core.add(0, request([1, 2, 3], max_tokens=200))
        for _ in range(10):
            made.core.step()
        assert device.graphs
        os.kill(followers()[0], signal.SIGKILL)
        with pytest.raises(EngineLost) as lost:
            to_its_end(made)
        assert not device.graphs, lost
    finally:
        made.close()


def test_a_rank_that_hangs_in_a_step_is_lost_sooner_than_at_other_times(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_group, "REPLY_TIMEOUT_S", 2.0)
    made = built(folder, **RANKS)
    try:
        made.core.add(0, request([1, 2, 3], max_tokens=200))
        for _ in range(10):
            made.core.step()
        os.kill(followers()[0], signal.SIGSTOP)
        with pytest.raises(EngineLost, match="rank 1 has sent no heartbeat for 2 s"):
            to_its_end(made)
    finally:
        made.close()


def test_a_rank_that_cannot_capture_ends_the_engine_and_says_so(folder: Path) -> None:
    made = built(folder, "cannot_capture", **RANKS)
    try:
        with pytest.raises(
            EngineLost, match=r"rank 1 ended .* a rank could not capture a CUDA graph .*MemoryError: no room"
        ):
            said(made)
    finally:
        made.close()


def test_where_the_first_rank_cannot_capture_the_engine_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = built(folder, **RANKS)
    try:
        accelerator = made.runner._accelerator  # type: ignore[union-attr]
        assert isinstance(accelerator, SynchronizedAccelerator)

        def fails(_: object) -> None:
            raise MemoryError("no room here")

        monkeypatch.setattr(accelerator._accelerator, "capture", fails)
        with pytest.raises(EngineLost, match=r"a rank could not capture a CUDA graph.* no room here"):
            said(made)
    finally:
        made.close()


def test_what_an_exchange_leaves_that_was_given_up_is_not_believed() -> None:
    """NCCL's end like any other work, when they are let go of."""
    lost: list[EngineLost] = []

    def check() -> None:
        if lost:
            raise lost[0]

    others = SimpleNamespace(check=check, waiting_for_followers=nullcontext)
    accelerator = GuardedAccelerator(LateDevice(), others)  # type: ignore[arg-type]
    accelerator.mark().wait()
    accelerator.submit(lambda: lost.append(EngineLost("rank 1 ended")))
    with pytest.raises(EngineLost, match="rank 1 ended"):
        accelerator.mark().wait()


def test_there_are_as_many_blocks_as_the_process_with_the_least_room_has(folder: Path) -> None:
    made = built(folder, **STAGES)
    try:
        of_layer = sum(cache.nbytes for cache in LateOps().allocate_kv(1, 1, 2, 16))
        assert made.profile.kv_blocks_total == KV_BYTES // (3 * of_layer)
        assert "stage 1 has room for no more" in made.choices["kv_blocks"]
    finally:
        made.close()


def test_what_comes_from_another_card_is_computed_in_the_dtype_of_this_one(folder: Path) -> None:
    """And goes on in it."""
    checkpoint, ops, device = inspect_checkpoint(folder), LateOps(), LateDevice()
    last = pipeline_stages(4, (1, 3))[1]
    decoder = Decoder(
        checkpoint.config, checkpoint.format, WeightLoader(checkpoint.tensors, ops.device), ops, stage=last
    )
    plan = StepPlan((PlanItem(0, 0, (1, 2, 3), (0,), pooling=Pooling.MEAN),))
    batch = prepare_batch(plan, lambda values: values)
    half = tuple(torch.randn(2, 3, 64).half())
    found = [
        StageExecutor(device).make(
            decoder, ops.allocate_kv(3, 2, 2, 16), *decoder_calls.call_message("hidden", batch), stream
        )
        for stream in (half, tuple(part.float() for part in half))
    ]
    assert found[0].dtype == torch.float32
    assert torch.equal(*found)


class Booked(SubprocessLauncher):
    """Whose processes see one GPU each, as Ray's do."""

    def device(self, number: int) -> str | None:
        return "cuda"


def test_gpus_are_one_after_the_other_unless_each_process_sees_its_own() -> None:
    assert process_devices(EngineConfig(device="cuda:1", pipeline_parallel=3)) == ["cuda:1", "cuda:2", "cuda:3"]
    assert process_devices(EngineConfig(device="cuda", pipeline_parallel=2), Booked()) == ["cuda", "cuda"]
    of_each = EngineConfig(device="cuda,cpu,cuda:3,cuda", tensor_parallel=2, pipeline_parallel=4)
    assert process_devices(of_each) == ["cuda:0", "cuda:1", "cpu", "cpu", "cuda:3", "cuda:4", "cuda:5", "cuda:6"]


def test_layers_go_by_what_gpus_there_are(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, num_hidden_layers=12, vocab_size=64, hidden_size=256, intermediate_size=512)
    checkpoint = inspect_checkpoint(folder)
    p40, t4, a100 = (
        device_report(checkpoint, find_table_devices(name)[0])
        for name in ("Tesla P40", "Tesla T4", "NVIDIA A100-SXM4-40GB")
    )
    slow, fast, other = best_layers(checkpoint.config, [t4, a100, a100], 1, 16)[0]
    assert slow < fast
    assert abs(fast - other) <= 1
    first, second = best_layers(checkpoint.config, [a100, t4, a100, a100], 2, 16)[0]
    assert first < second, "of two ranks each does as much as the weaker"
    first, second = best_layers(checkpoint.config, [p40, t4], 1, 16)[0]
    assert first < second, "a P40 reads a dense layer in fp32"
    assert DeviceReport(**json.loads(json.dumps(asdict(t4)))) == t4
    assert str(t4) == "Tesla T4 (7.5), 320 GB/s (table), 14.1 of 14.7 GiB free, in float16"


def test_layers_go_by_what_each_process_says_of_the_card_that_it_alone_sees(tmp_path: Path) -> None:
    """The second has three times the first's bandwidth; the third as much, and room for two layers."""
    folder = build_checkpoint(tmp_path, "qwen2", num_hidden_layers=12, vocab_size=64)
    own = device_report(inspect_checkpoint(folder), local_cpu(LateOps), threads=1)
    fast: dict[str, Any] = {"name": "a card", "bandwidth": 3 * own.bandwidth, "compute": 3 * own.compute}
    room = 2 * (own.layers[0] + own.kv_block) + own.head + 2**28  # which is kept in reserve
    says = [fast, fast | {"name": "a small one", "total": room, "free": room}]
    made = built(folder, says=says, pipeline_parallel=3, max_model_len=16)
    try:
        assert made.group is not None
        assert [stage.layers for stage in made.group.stages] == [(0, 2), (2, 10), (10, 12)]
        assert re.search(
            "stage 1: layers 2 to 9 on a card, .*; stage 2: layers 10 to 11 on a small one", made.choices["stages"]
        )
        tokens, _ = said(made, [request([7, 3, 5], max_tokens=4)])
    finally:
        made.close()
    one = built(folder, max_model_len=16)
    assert tokens == said(one, [request([7, 3, 5], max_tokens=4)])[0]
    one.close()


def test_ranks_that_compute_in_other_dtypes_are_refused(folder: Path) -> None:
    with pytest.raises(
        InvalidRequest, match=r"ranks of stage 0 are .* in float32; and .* in float16: what they add up"
    ):
        built(folder, says=[{"dtype": "float16"}], **RANKS)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(InvalidRequest, match=r"4 processes want a GPU each, cuda:0 to cuda:3, and torch can use 3"):
        process_config(EngineConfig(device="cuda", tensor_parallel=2, pipeline_parallel=2))
    assert process_config(EngineConfig(device="cuda", tensor_parallel=2, pipeline_parallel=2), Booked())
    with pytest.raises(InvalidRequest, match="cuda:2 to cuda:3"):
        process_config(EngineConfig(device="cuda:2", tensor_parallel=2))
    with pytest.raises(InvalidRequest, match="a GPU of its own for each process"):
        process_config(EngineConfig(device="cuda:1,cpu,cuda:1", pipeline_parallel=3))
    with pytest.raises(InvalidRequest, match=r"'cpu,cuda' is not accepted; expected a device, or one for each of 3"):
        EngineConfig(device="cpu,cuda", pipeline_parallel=3)


def test_where_some_are_on_gpus_cpus_share_the_threads() -> None:
    config = EngineConfig(device="cpu,cuda,cpu", pipeline_parallel=3, threads=6)
    assert process_config(config, given=True).threads == 3
    assert process_config(replace(config, device="cpu"), given=True).threads == 2
