"""The null engine: the real scheduler, text and worker, and nothing computed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import service_checkpoint

from motley.replicas.engine.entrypoints import null_engine
from motley.replicas.engine.entrypoints.null_engine import NullRunner, NullWorker, null_token_pattern
from motley.replicas.engine.streams.output_buffer import MAX_MERGED_MESSAGES
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import InvalidRequest
from motley.replicas.execution.step_plan import PlanItem, SampleSpec, StepPlan
from motley.replicas.text.tokenizer.tokenizer import Tokenizer
from motley.replicas.types import NULL_KIND, FinishReason, Pooling, Request, SamplingParams, StreamMessage

TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return service_checkpoint.build(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def worker(folder: Path) -> AsyncIterator[NullWorker]:
    worker = NullWorker(folder, EngineConfig(max_running=16))
    await worker.start()
    yield worker
    await worker.close()


def request(number: int = 0, **params: Any) -> Request:
    sampling = SamplingParams(**({"max_tokens": TOKENS, "seed": 0} | params))
    return Request(f"r{number}", (65, 66, 67), sampling)


async def collect(worker: NullWorker, asked: Request) -> list[StreamMessage]:
    return [message async for message in worker.generate(asked)]


async def test_every_step_is_a_message_with_one_token(worker: NullWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with several streams at once, none of which may run ahead of its reader."""
    monkeypatch.setattr(null_engine, "READER_TIMEOUT_S", 60.0)
    for messages in await asyncio.gather(*(collect(worker, request(number)) for number in range(8))):
        assert [len(delta.token_ids) for message in messages for delta in message.deltas] == [1] * TOKENS
        assert messages[-1].deltas[0].finish_reason is FinishReason.LENGTH


async def test_it_says_the_same_words_and_is_real_about_everything_else(worker: NullWorker, folder: Path) -> None:
    messages = await collect(worker, request(max_tokens=100, stop=["says"], logprobs=2, n=2))
    texts = ["".join(d.text for m in messages for d in m.deltas if d.index == index) for index in (0, 1)]
    said = null_engine.NULL_TEXT
    assert texts[0] == said[: said.index("says")], "stop strings end it"
    assert texts[1].startswith(said[1:20]), "another choice begins elsewhere"
    assert all(entry.logprob == 0.0 for m in messages for d in m.deltas for entry in d.logprobs or ())
    load = worker.load()
    assert load.kv_blocks_free == load.kv_blocks_total


async def test_it_calls_itself_null_everywhere(worker: NullWorker) -> None:
    profile = worker.profile()
    info = profile.model
    assert {profile.device, profile.numerics, info.name, info.family, info.dtype, info.quantization} == {NULL_KIND}
    assert "computes nothing" in profile.device_name


async def test_a_stream_without_a_reader_holds_the_others_up_once(
    worker: NullWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it gets what has piled up merged."""
    monkeypatch.setattr(null_engine, "READER_TIMEOUT_S", 1.0)
    idle = worker.generate(request(max_tokens=400))
    await anext(idle)
    async with asyncio.timeout(60):  # it is not waited for in each of 200 steps
        messages = await collect(worker, request(1, max_tokens=200))
    assert len(messages) == 200
    assert worker._pace is not None
    assert worker._pace.slow
    assert len((await anext(idle)).deltas[0].token_ids) == MAX_MERGED_MESSAGES
    await idle.aclose()  # type: ignore[attr-defined]


async def test_embeddings_are_refused(worker: NullWorker) -> None:
    pooled = Request("r", (65, 66), SamplingParams(seed=0), pooling=Pooling.LAST)
    with pytest.raises(InvalidRequest, match="no embeddings"):
        await collect(worker, pooled)


def test_a_step_takes_as_long_as_asked() -> None:
    runner = NullRunner([1], step_s=0.02)
    spec = SampleSpec(SamplingParams(seed=0), 0, 0, 0, (), (1,), ())
    plan = StepPlan((PlanItem(0, 0, (1,), (0,), spec),))
    runner.run(plan)
    began = time.monotonic()
    for _ in range(3):
        runner.run(plan)
    assert time.monotonic() - began >= 3 * 0.02 - 0.005


def test_what_it_says_never_ends_a_sequence(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = null_token_pattern(tokenizer, tokenizer.vocab_size, ())
    assert tokenizer.decode(ids) == null_engine.NULL_TEXT
    assert ids[3] not in null_token_pattern(tokenizer, tokenizer.vocab_size, (ids[3],))
    assert null_token_pattern(None, 10, (0, 1)) == list(range(2, 10))


def test_a_context_longer_than_the_models_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="max_model_len"):
        null_engine.build_null_engine(folder, EngineConfig(max_model_len=10**6), null_engine.null_device(0.0))


async def test_nothing_is_divided_that_is_not_computed(folder: Path) -> None:
    worker = NullWorker(folder, EngineConfig(tensor_parallel=2))
    with pytest.raises(InvalidRequest, match="tensor_parallel: what computes nothing"):
        await worker.start()
