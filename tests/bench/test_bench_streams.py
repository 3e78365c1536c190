"""The engine's benchmark on a GPU, as far as it goes without one: streams, idle time, rows and goals."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch
from late_device import LateOps
from late_engine_child import late_streams

from motley.kernels.layer_memory import total_nbytes
from motley.replicas.checkpoint.files.json_fields import JsonFields
from motley.replicas.gpu.decode_graphs import GraphKey
from motley.replicas.gpu.gpu_runner import GpuRunner
from motley.replicas.model.families.registry import read_config
from motley.replicas.model.tensor_layout import decoder_layout
from motley.replicas.quantization.gptq import GPTQ
from motley.replicas.types import Delta, Request, StreamMessage
from motley_bench.checkpoints.random_model import config_of, random_model
from motley_bench.engine import engine_gpu_streams, stream_measurement
from motley_bench.engine.engine_gpu_rows import goal_line, judge_goals, rows_of
from motley_bench.engine.stream_measurement import EngineMeasurement, StreamWorkload, WorkloadGroup
from motley_bench.sides import gpu_idle_time
from motley_bench.sides.concurrent_streams import StreamTimes, drive, requests_of, summary

SUPPORT = Path(__file__).parents[1] / "support"


def heard(*streams: tuple[float, list[float]]) -> list[StreamTimes]:
    """A token at each time."""
    return [StreamTimes(began, [(when, 1) for when in times], ended=True) for began, times in streams]


def test_rates_are_those_of_the_time_in_which_all_decode() -> None:
    """The first stream waits for nobody; until the second's first token it decodes alone, and that does not count."""
    first, second = [1.0, 2.0, 3.0, 3.5, 4.0], [3.0, 3.5, 4.0, 4.5, 5.0]
    found = summary(heard((0.0, first), (0.5, second)))
    assert found["complete"]
    assert found["tokens"] == 10
    assert found["output_tokens_per_s"] == 10 / 5
    assert found["ttft_s"] == (1.0 + 2.5) / 2
    assert found["decode_tokens_per_s"] == 4 / 1.0, "two each in (3, 4]"
    assert found["step_s"]["p50"] == 0.5


def test_streams_that_never_decode_together_have_no_step() -> None:
    found = summary(heard((0.0, [1.0, 2.0]), (0.0, [3.0, 4.0])))
    assert (found["step_s"], found["decode_tokens_per_s"]) == (None, None)
    assert found["output_tokens_per_s"] == 1.0
    nothing = summary([StreamTimes(0.0)])
    assert (nothing["complete"], nothing["tokens"], nothing["output_tokens_per_s"]) == (False, 0, None)


class Endless:
    """A side whose first two streams end after a token, while the others never do. closed: streams that ended."""

    def __init__(self) -> None:
        self.closed = 0

    async def generate(self, request: Request) -> AsyncIterator[StreamMessage]:
        try:
            yield StreamMessage((Delta(0, (1,)),))
            if request.request_id not in ("bench-0", "bench-1"):
                await asyncio.Event().wait()
        finally:
            self.closed += 1


async def test_what_is_not_over_in_time_is_cut_off_and_leaves_no_stream_open() -> None:
    worker = Endless()
    found = await drive(worker, requests_of(3, 4, 2, 100, 0), limit_s=0.05)
    assert sorted(stream.ended for stream in found) == [False, True, True]
    assert worker.closed == 3
    assert not summary(found)["complete"]
    driven = asyncio.ensure_future(drive(worker, requests_of(2, 4, 2, 100, 1), limit_s=60.0))
    while worker.closed < 4:
        await asyncio.sleep(0.001)
    driven.cancel()
    with pytest.raises(asyncio.CancelledError):
        await driven
    assert worker.closed == 5


async def test_what_a_stream_raises_ends_all() -> None:
    class Broken(Endless):
        async def generate(self, request: Request) -> AsyncIterator[StreamMessage]:
            if request.request_id == "bench-2":
                raise ZeroDivisionError
            async for message in super().generate(request):
                yield message

    worker = Broken()
    with pytest.raises(ZeroDivisionError):
        await drive(worker, requests_of(4, 4, 2, 100, 2), limit_s=60.0)
    assert worker.closed == 3


@pytest.mark.slow("Captures a graph of every size, and reads eight long prompts twice")
def test_the_worker_is_driven_on_a_device_that_computes_by_itself() -> None:
    streams = late_streams()
    about = streams.describe()
    assert about["kv_tokens"] >= 1024
    assert isinstance(streams._built.runner, GpuRunner), "graphs, staging and overlap"
    assert streams.max_streams(20, 12) == 256
    assert streams.max_streams(2040, 16) == 0, "longer than the model was made for"
    streams.warm(8, 250, 12)
    graphs = streams._built.runner.graphs
    assert graphs is not None
    captured = set(graphs.captured)
    assert captured >= {GraphKey(8, 256, False), *(GraphKey(batch, 512, False) for batch in (1, 2, 4, 8))}, (
        "up to 262 tokens"
    )
    found = streams.run(8, 250, 12, 60.0)
    assert (found["tokens"], found["complete"]) == (96, True)
    assert found["roofline_step_s"] > 0
    assert set(graphs.captured) == captured, "none is captured while it is measured"


@pytest.mark.slow("Draws forty tokens of two streams four times on the stand-in")
def test_streams_run_once_more_with_drafts() -> None:
    """And all else without."""
    streams = late_streams(4)
    core = streams._built.core
    warming = core.load().drafted_tokens
    plain = streams.run(2, 20, 40, 60.0)
    assert core.load().drafted_tokens == warming
    found = streams.drafted(2, 20, 40, 60.0)
    assert (found["tokens"], found["complete"], found["drafts"]) == (80, True, 4)
    assert 0 < found["accepted"] <= found["drafted"]
    assert found["tokens_per_turn"] == 80 / (80 - found["accepted"])
    tried = core.load().drafted_tokens
    assert streams.run(2, 20, 40, 60.0)["tokens"] == plain["tokens"] == 80
    assert core.load().drafted_tokens == tried
    rows = rows_of([{"shape": "rehearsal", "side": "motley", "what": "drafted", "batch": 2, "prompt_tokens": 20,
                     "output_tokens": 40, **found}], {}, real=False)  # fmt: skip
    assert [each["metric"] for each in rows] == ["decode with drafts", "drafts accepted", "tokens per step"]
    assert rows[1]["value"] == found["accepted"] / found["drafted"]
    assert {each["source"] for each in rows} == {"rehearsal"}


@pytest.mark.parametrize(("name", "billions"), [("qwen2.5-7b", 7.62), ("llama-3-8b", 8.03), ("qwen3-0.6b", 0.596)])
def test_random_models_have_as_many_weights_as_their_models(name: str, billions: float) -> None:
    layout = decoder_layout(read_config(JsonFields(config_of(name), "config.json")), GPTQ(bits=4, group_size=128))
    counts = {
        tensor: math.prod(spec.shape) * (8 if tensor.endswith(".qweight") else 1)
        for tensor, spec in layout.items()
        if not spec.optional and not tensor.endswith((".scales", ".qzeros"))
    }
    assert sum(counts.values()) / 1e9 == pytest.approx(billions, rel=0.002)


def test_a_random_model_computes_numbers() -> None:
    """Always the same, and finite: a faster path for NaN would be no measurement."""
    one, other = (random_model("rehearsal", LateOps()) for _ in range(2))
    assert one.fingerprint == other.fingerprint
    assert total_nbytes(one.decoder.embedding) == 512 * 128 * 4
    assert torch.equal(one.decoder.embedding, other.decoder.embedding)
    assert 0.018 < one.decoder.embedding.std() < 0.022
    x = torch.ones(1, 128)
    y = one.decoder.layers[0].mlp.down(x)
    assert torch.isfinite(y).all()
    assert y.std() > 0.05, "codes and zero points are not all alike"
    with pytest.raises(ValueError, match=r"shape: 'huge' is not known; expected qwen2\.5-7b"):
        random_model("huge", LateOps())


def kernel(ts: float, dur: float, launch: int, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": f"k<{launch}>", "ts": ts, "dur": dur, "args": {"correlation": launch}}


def steps(count: int) -> list[dict[str, Any]]:
    """[copy 0..1) idle [kernel 2..6) idle [kernel 7..9) of one graph, idle; and the next at 10."""
    events = []
    for step in range(count):
        at, launch = 10.0 * step, 100 + 3 * step
        events += [kernel(at, 1, launch, "gpu_memcpy"), kernel(at + 2, 4, launch + 1), kernel(at + 7, 2, launch + 1)]
    return events


def test_idle_time_is_told_apart_by_whose_it_is() -> None:
    inner = [kernel(0, 1, 7), kernel(2, 1, 7, "gpu_memcpy"), kernel(4, 1, 7)]
    assert gpu_idle_time.idle_of(inner)["between_steps"] == 0, "a graph may copy as well"
    noise = [{"ph": "M", "name": "process_name"}, kernel(0, 1000, 5, "cuda_runtime")]
    events = gpu_idle_time.on_device({"traceEvents": [*noise, *reversed(steps(4))]})
    found = gpu_idle_time.idle_of(events)
    assert found["steps"] == 4
    assert found["span_us"] == 39
    assert found["within_graphs"] == pytest.approx(4 * 1 / 39)
    assert found["between_steps"] == pytest.approx((4 * 1 + 3 * 1) / 39)
    assert found["busy"] == pytest.approx(28 / 39)
    eager = [kernel(0, 4, 1), kernel(5, 5, 2), kernel(6, 2, 3)]  # the last one beside another, on a second stream
    assert gpu_idle_time.idle_of(eager)["between_steps"] == pytest.approx(0.1)
    with pytest.raises(ValueError, match="no kernel"):
        gpu_idle_time.idle_of([])


def test_a_trace_is_kept_small_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_idle_time, "_MAX_EVENTS", 9)
    events = gpu_idle_time.on_device({"traceEvents": steps(20)})
    gpu_idle_time.write_trimmed(events, tmp_path / "trace.json.gz")
    retained = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert len(retained) == 9
    assert retained[0] in events[20:40]
    bars = ET.fromstring(gpu_idle_time.figure(events, "batch < 1")).findall("{*}rect")
    assert len(bars) == 1 + 4 * 3, "the ground, and four steps"
    assert ET.fromstring(gpu_idle_time.figure(steps(2), "")).findall("{*}rect")


def streamed(**changed: Any) -> dict[str, Any]:
    cell = {"shape": "qwen2.5-7b", "batch": 1, "prompt_tokens": 128, "output_tokens": 128}
    figures = {"complete": True, "decode_tokens_per_s": 500.0, "output_tokens_per_s": 450.0, "ttft_s": 0.01}
    return {**cell, "side": "motley", "what": "streams", **figures, "roofline_step_s": 0.001, **changed}


def found_all() -> list[dict[str, Any]]:
    peer = {"side": "transformers", "what": "streams", "shape": "qwen2.5-7b", "batch": 1}
    peer |= {"prompt_tokens": 128, "output_tokens": 128}
    idled = {"side": "motley", "shape": "qwen2.5-7b", "what": "idle", "between_steps": 0.02, "within_graphs": 0.1}
    return [
        streamed(),
        streamed(shape="llama-3-8b", batch=250, prompt_tokens=1000, output_tokens=1000, output_tokens_per_s=9000.0),
        {**idled, "batch": 1},
        {**idled, "batch": 64},
        {**peer, "variant": "prefill", "seconds": [0.02]},
        {**peer, "variant": "as it comes", "step_s": [0.025, 0.025]},
        {**peer, "variant": "compiled", "step_s": [0.02]},
        {**peer, "variant": "compiled", "error": "out of memory"},
    ]


SIDES = {"qwen2.5-7b motley": {"bytes_per_token": 4.6e9}, "qwen2.5-7b transformers": {"bytes_per_token": 14.1e9}}


def test_rows_stand_beside_their_peers() -> None:
    rows = rows_of(found_all(), SIDES, real=True)
    decode = [row for row in rows if row["metric"] == "decode" and row["workload"]["shape"] == "qwen2.5-7b"]
    assert [(row["peer"], row["ratio"]) for row in decode] == [
        ("transformers bf16, static cache, torch SDPA, as it comes", 12.5),
        ("transformers bf16, static cache, torch SDPA, compiled", 10.0),
    ]  # fmt: skip
    shares = [row["value"] for row in rows if "roofline" in row["metric"]]
    assert shares == [0.5, 0.002], "1 ms of the 2 that a step took, and of 500 where 250 streams had as many tokens"
    (first,) = [row for row in rows if row["metric"] == "time to first token" and row["workload"]["batch"] == 1]
    assert first["ratio"] == 2
    (read,) = [row for row in rows if row["metric"] == "weights read per token"]
    assert read["ratio"] == pytest.approx(14.1 / 4.6)
    assert {row["source"] for row in rows} == {"measured"}


def test_goals_are_met_by_measurements_alone() -> None:
    found = found_all()
    assert [goal["met"] for goal in judge_goals(rows_of(found, SIDES, real=True))] == [True] * 5
    assert [goal["met"] for goal in judge_goals(rows_of(found, SIDES, real=False))] == [None] * 5
    found[0] = streamed(decode_tokens_per_s=399.0)
    found[3]["between_steps"] = 0.03
    found[1]["complete"] = False
    judged = judge_goals(rows_of(found, SIDES, real=True))
    assert [goal["met"] for goal in judged] == [False, False, True, False, None], "7.98 times the compiled peer"
    del found[6]
    beside = judge_goals(rows_of(found, SIDES, real=True))[1]
    assert beside["met"]
    assert "not compiled" in beside["beside"], "a peer that was not compiled counts, and is called so"
    assert goal_line(beside).startswith("met, beside transformers as it comes, not compiled: ")
    del found[5]
    assert judge_goals(rows_of(found, SIDES, real=True))[1]["met"] is None
    assert goal_line(judged[0]).startswith("MISSED")
    assert goal_line(judged[4]).startswith("not measured")


def test_a_side_that_does_not_start_and_time_that_is_over_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_measurement, "CHILD", "no_such_module")
    left = iter([10.0, 10.0])
    measuring = EngineMeasurement("cpu", tmp_path, lambda share: next(left, -1.0))
    group = WorkloadGroup("rehearsal", "motley", (StreamWorkload(1, 8, 8),))
    measuring.group(group)
    measuring.group(group)
    assert "no_such_module" in measuring.failed[0]["error"]
    assert measuring.cut[0]["shape"] == "rehearsal"
    assert measuring.rows == []


class CannedProcess:
    """Instead of the process of one side: it answers what it is asked at once."""

    about: ClassVar = {"side": "motley"}

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        pass

    def ask(self, do: str, *_: object, **task: Any) -> dict[str, Any]:
        reported = {
            "max_streams": 8,
            "warm": {"graphs": 1},
            "run": {"complete": True, "tokens": 4 * task.get("batch", 0)},
        }
        return {"result": reported[do]}


def test_what_was_measured_of_a_shape_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_measurement, "TaskProcess", CannedProcess)
    monkeypatch.setattr(stream_measurement, "rows_of", lambda *_, **__: [])
    monkeypatch.setattr(engine_gpu_streams, "IDLE_BATCHES", ())
    report_of_two_batches(tmp_path)


@pytest.mark.thorough
def test_a_shape_is_measured_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the process that `motley bench engine` starts, on the stand-in for a device."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setattr(stream_measurement, "CHILD", "late_engine_child")
    monkeypatch.setattr(engine_gpu_streams, "IDLE_BATCHES", ())
    report = report_of_two_batches(tmp_path)
    assert {row["source"] for row in report["rows"]} == {"rehearsal"}


def report_of_two_batches(folder: Path) -> dict[str, Any]:
    said: list[tuple[int, int]] = []
    report = engine_gpu_streams.run(
        shapes=["rehearsal"], batches=(1, 2), lengths=((8, 4),), peers=(), device="cpu", out=folder,
        progress=lambda what, step, of: said.append((step, of)),
    )  # fmt: skip
    assert report["bench"] == "engine"
    assert report["machine"]["rehearsal"]
    assert report["sides"].keys() == {"rehearsal motley"}
    assert [(each["batch"], each["tokens"], each["complete"]) for each in report["found"]] == [
        (1, 4, True), (2, 8, True),
    ]  # fmt: skip
    assert report["cut"] == []
    assert said == [(1, 3), (2, 3), (3, 3)]
    return report


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"shapes": ["huge"]}, "shape: 'huge'"),
        ({"batches": [257]}, "batch: 257"),
        ({"peers": ["llama.cpp"]}, "peer: 'llama.cpp'"),
        ({"speculate_ngram": 33}, "speculate_ngram: 33"),
    ],
)
def test_what_is_not_accepted_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        engine_gpu_streams.run(**{"shapes": ["qwen3-0.6b"], **given})
