"""An engine whose model is divided among real processes: what it says, and what becomes of it when one is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from awq_files import build_awq
from gptq_files import build_gptq
from serve_process import alive, children, command_line
from thorough import thorough
from tiny_checkpoints import build_checkpoint

from motley import Engine, SamplingParams
from motley.kernels.cpu.c_kernels import shm_collectives
from motley.kernels.cpu.c_kernels.native_build import load_library
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import EngineFault, EngineLost, InvalidRequest, Unavailable
from motley.replicas.model.parts.dense_feed_forward import MLP
from motley.replicas.types import Request

pytestmark = pytest.mark.skipif(load_library()[0] is None, reason="no C compiler")

PROMPTS = [[7, 3, 200, 41, 41, 90, 5, 250], [17, 33, 101], list(range(60))]
FORMATS: dict[str, Callable[[Path], Path]] = {
    "dense": lambda folder: build_checkpoint(folder, "qwen2", tie_word_embeddings=True),
    "gptq, desc_act": lambda folder: build_gptq(folder, desc_act=True),
    "awq": lambda folder: build_awq(folder)[0],
}


def greedy(**given: Any) -> SamplingParams:
    return SamplingParams(max_tokens=16, temperature=0.0, seed=0, **given)


def engine(folder: Path, ranks: int = 2, **settings: Any) -> Engine:
    return Engine(folder, dtype="float32", kv_memory_bytes=1 << 20, tensor_parallel=ranks, **settings)


def followers(parent: int | None = None) -> list[int]:
    """Processes of ranks that a process has started and that run."""
    started = children(os.getpid() if parent is None else parent)
    return [pid for pid in started if "parallel.follower" in command_line(pid) and alive([pid])]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert followers() == []


@pytest.mark.parametrize("name", [pytest.param("dense", marks=pytest.mark.started), "gptq, desc_act", "awq"])
def test_it_says_what_the_whole_model_does(name: str, tmp_path: Path) -> None:
    """Prompts in pieces, several choices, log-probabilities, embeddings. Last digits differ: another class."""
    folder = FORMATS[name](tmp_path / "model")
    said = []
    for ranks in (1, 2):
        with engine(folder, ranks, max_batch_tokens=32, max_running=8) as made:
            assert len(followers()) == ranks - 1
            outputs = made.generate(PROMPTS, greedy(logprobs=2, prompt_logprobs=1, repetition_penalty=1.2))
            sampled = made.generate(PROMPTS[:1], SamplingParams(max_tokens=8, n=3, seed=5))
            said.append(
                (
                    [output.token_ids for output in outputs],
                    [choice.token_ids for output in sampled for choice in output.outputs],
                    [[entry.logprob for entry in output.logprobs or ()] for output in outputs],
                    made.embed(PROMPTS[:2]).tolist(),
                    (made._built.profile.numerics, made._built.profile.fingerprint),
                )
            )
    whole, divided = said
    assert divided[:2] == whole[:2]
    assert divided[4][0] == f"{whole[4][0]}-2ranks"
    assert divided[4][1] != whole[4][1]
    for found, expected in ((divided[2], whole[2]), (divided[3], whole[3])):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_ends_the_engine(
    fault: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the sequences of one step alone: they could be tried again for ever."""
    folder = build_checkpoint(tmp_path / "model")
    with engine(folder) as made:
        made.generate(PROMPTS, greedy())
        [rank] = followers()
        os.kill(rank, fault)
        began = time.monotonic()
        with pytest.raises(EngineLost):
            made.generate(PROMPTS, greedy())
        assert time.monotonic() - began < shm_collectives.TIMEOUT_S + 30  # that it ends; a busy machine may be slow
        with pytest.raises(EngineLost):
            made.generate(PROMPTS, greedy())


def test_a_step_that_fails_on_the_first_rank_alone_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other is in the middle of it: sums of the next step would be taken for those of this."""
    with engine(build_checkpoint(tmp_path / "model")) as made:
        made.generate(PROMPTS[:1], greedy())

        def fails(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr(MLP, "__call__", fails)
        with pytest.raises(EngineLost):
            made.generate(PROMPTS[:1], greedy())
        monkeypatch.undo()
        with pytest.raises(EngineLost):
            made.generate(PROMPTS[:1], greedy())


# The engine's thread dies of it, as it says.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_worker_that_has_lost_a_rank_is_unhealthy_and_its_streams_can_go_on_elsewhere(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model")
    worker = Worker(folder, EngineConfig(dtype="float32", kv_memory_bytes=1 << 20, tensor_parallel=2))
    await worker.start()
    try:
        await worker.check_health()
        request = Request("r", tuple(PROMPTS[0]), SamplingParams(max_tokens=240, temperature=0.0, seed=0))
        stream = worker.generate(request)
        await anext(stream)
        [rank] = followers()
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(Unavailable) as lost:
            async for _ in stream:
                pass
        assert lost.value.code == "replica_lost"
        with pytest.raises(EngineFault, match="died"):
            await worker.check_health()
    finally:
        await worker.close()


LEADER = """
import sys
from motley import Engine
engine = Engine(sys.argv[1], dtype="float32", kv_memory_bytes=1 << 20, tensor_parallel=2)
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("stopped", [False, *thorough(True)])
def test_ranks_end_with_the_process_that_started_them(stopped: bool, tmp_path: Path) -> None:
    """However that ends, and whatever they do."""
    folder = build_checkpoint(tmp_path / "model")
    with subprocess.Popen(
        [sys.executable, "-c", LEADER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as leader:
        assert leader.stdout is not None
        assert leader.stdout.readline() == "ready\n"
        [rank] = followers(leader.pid)
        if stopped:
            os.kill(rank, signal.SIGSTOP)
        leader.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{rank}/cmdline").exists() and Path(f"/proc/{rank}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_rank_that_cannot_load_is_told(tmp_path: Path) -> None:
    """Its file has changed since the first rank looked."""
    folder = build_checkpoint(tmp_path / "model")
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-4:] = b"\x00\x00\xc0\x7f"  # NaN
    weights.write_bytes(data)
    with pytest.raises(Exception, match="not finite"):
        engine(folder)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"device": "cuda"}, "tensor_parallel"),
        ({"ranks": 3}, "tensor_parallel"),
        ({"ranks": 0}, "tensor_parallel"),
    ],
)
def test_what_ranks_cannot_do_is_refused_by_name(settings: dict[str, Any], names: str, tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model")
    with pytest.raises(InvalidRequest) as refused:
        engine(folder, **settings)
    assert refused.value.param == names
