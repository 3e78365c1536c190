"""An engine whose layers are divided among real processes: what it says, and what becomes of it when one is lost."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from awq_files import build_awq
from decoder_steps import exact_ops
from fp8_files import build_fp8
from gptq_files import build_gptq
from late_follower import LateProcesses
from serve_process import alive, children, command_line
from thorough import thorough
from tiny_checkpoints import build_checkpoint

from motley import Engine, SamplingParams
from motley.kernels.cpu.c_kernels.native_build import load_library
from motley.replicas.capacity import kv_sizing
from motley.replicas.capacity.device_fit import local_cpu
from motley.replicas.engine.startup.engine_builder import build_engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import EngineLost, InvalidRequest
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.model.decoder import Decoder, HiddenStream
from motley.replicas.model.parts.dense_feed_forward import MLP
from motley.replicas.parallel.leader.launcher import SubprocessLauncher
from motley.replicas.parallel.leader.leader_model import PipelineLeader
from motley.replicas.parallel.planning.device_report import device_report
from motley.replicas.parallel.planning.layer_assignment import best_layers, choose_layers

PROMPTS = [[7, 3, 200, 41, 41, 90, 5, 250], [17, 33, 101], list(range(60))]
FOUR = {"num_hidden_layers": 4}
FORMATS: dict[str, Callable[[Path], Path]] = {
    "dense": lambda folder: build_checkpoint(folder, "qwen2", tie_word_embeddings=True, **FOUR),
    "gptq, desc_act": lambda folder: build_gptq(folder, desc_act=True, **FOUR),
    "awq": lambda folder: build_awq(folder, **FOUR)[0],
    "fp8": lambda folder: build_fp8(folder, scales="rows", **FOUR)[0],
}
COMPILED = pytest.mark.skipif(load_library()[0] is None, reason="no C compiler")
# Every format with ranks as well; with stages alone, a dense and a quantized one: test_stages.py has the rest.
DIVIDED = [
    pytest.param("dense", 1, marks=pytest.mark.started),
    ("gptq, desc_act", 1),
    pytest.param("dense", 2, marks=[COMPILED, pytest.mark.started, pytest.mark.thorough]),
    pytest.param("gptq, desc_act", 2, marks=COMPILED),
    pytest.param("awq", 2, marks=[COMPILED, pytest.mark.thorough]),
    pytest.param("fp8", 2, marks=COMPILED),
]


def greedy(**given: Any) -> SamplingParams:
    return SamplingParams(max_tokens=16, temperature=0.0, seed=0, **given)


def engine(folder: Path, stages: int = 2, **settings: Any) -> Engine:
    settings = {"kv_memory_bytes": 1 << 20} | settings
    return Engine(folder, dtype="float32", pipeline_parallel=stages, **settings)


def followers(parent: int | None = None) -> list[int]:
    """Processes that a process has started for its model and that run, in the order of their start."""
    started = children(os.getpid() if parent is None else parent)
    return sorted(pid for pid in started if "parallel.follower" in command_line(pid) and alive([pid]))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    assert followers() == []
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2  # what a first engine opens once


def said_by(made: Engine) -> tuple[Any, ...]:
    outputs = made.generate(PROMPTS, greedy(logprobs=2, prompt_logprobs=1, repetition_penalty=1.2))
    sampled = made.generate(PROMPTS[:1], SamplingParams(max_tokens=8, n=3, seed=5))
    return (
        [output.token_ids for output in outputs],
        [choice.token_ids for output in sampled for choice in output.outputs],
        (made._built.profile.numerics, made._built.profile.fingerprint),
        [[entry.logprob for entry in output.logprobs or ()] for output in outputs],
        [[entry.logprob for entry in output.prompt_logprobs or () if entry] for output in outputs],
        made.embed(PROMPTS[:2]).tolist(),
        made._built.logits(tuple(PROMPTS[0])).tolist(),
    )


@pytest.mark.parametrize(("name", "ranks"), DIVIDED)
def test_it_says_what_the_whole_model_does(name: str, ranks: int, tmp_path: Path) -> None:
    """A quarter of the layers and the rest: prompts in pieces, several choices, log-probabilities, embeddings."""
    folder, bounds = FORMATS[name](tmp_path / "model"), {"max_batch_tokens": 32, "max_running": 8}
    with engine(folder, 1, **bounds) as made:
        whole = said_by(made)
    with engine(folder, 2, pipeline_layers=(1, 3), tensor_parallel=ranks, **bounds) as made:
        assert len(followers()) == 2 * ranks - 1
        divided = said_by(made)
    assert divided[:2] == whole[:2]
    if ranks == 1:
        assert divided[:4] == whole[:4]  # to the bit; embeddings sum pieces of prompts, cut as steps come
    else:
        assert divided[2][0] == f"{whole[2][0]}-2ranks"  # in its last digits it does not
    for found, expected in zip(divided[3:], whole[3:], strict=True):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-4)


def test_layers_are_chosen_by_what_stages_cost(tmp_path: Path) -> None:
    """A head of many tokens is as much as several layers; where the layers are given, they are taken."""
    folder = build_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=6, vocab_size=3000)
    with engine(folder, 2) as made:
        assert made._built.group is not None
        assert [stage.layers for stage in made._built.group.stages] == [(0, 5), (5, 6)]
        assert made._built.choices["stages"].startswith(
            "5, 1 layers: the slowest stage takes the least; the head is as"
        )
        on = r"on cpu, \d+ threads of .*, \d+ GB/s \(measured\)"
        assert re.search(rf"stage 0: layers 0 to 4 {on}.*; stage 1: layer 5 {on}", made._built.choices["stages"])
    checkpoint, config = inspect_checkpoint(folder), EngineConfig(pipeline_parallel=2, pipeline_layers=(2, 4))
    assert choose_layers(checkpoint.config, config, lambda: []) == ((2, 4), "2, 4 layers: as configured")
    even = inspect_checkpoint(build_checkpoint(tmp_path / "even", num_hidden_layers=6, vocab_size=16))
    assert best_layers(even.config, [device_report(even, local_cpu(exact_ops))] * 2, 1, 16)[0] == (3, 3)


class Unequal(SubprocessLauncher):
    """The second has three times the threads of the first."""

    def threads(self, number: int) -> int | None:
        return (1, 3)[number]


def test_layers_go_by_the_threads_that_each_process_has(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", num_hidden_layers=12, vocab_size=16)
    config = EngineConfig(dtype="float32", kv_memory_bytes=1 << 20, pipeline_parallel=2)
    made = build_engine(folder, config, launcher=Unequal())
    try:
        assert made.group is not None
        assert [stage.layers for stage in made.group.stages] == [(0, 3), (3, 12)]
    finally:
        made.close()


def test_hosts_are_told_apart_by_what_they_measured(tmp_path: Path) -> None:
    """And processes of one by their threads, whatever each of them has measured beside the other."""
    checkpoint = inspect_checkpoint(build_checkpoint(tmp_path / "model", num_hidden_layers=12, vocab_size=16))
    one = device_report(checkpoint, local_cpu(exact_ops), threads=2, owner="one")
    fast = replace(one, bandwidth=3 * one.bandwidth)
    assert best_layers(checkpoint.config, [one, replace(fast, owner="other")], 1, 16)[0] == (3, 9)
    assert best_layers(checkpoint.config, [one, fast], 1, 16)[0] == (6, 6)
    assert best_layers(checkpoint.config, [fast, replace(one, threads=6)], 1, 16)[0] == (3, 9)


def test_a_host_s_memory_is_counted_once_for_all_of_its_stages(tmp_path: Path) -> None:
    """Two hosts have a memory each; where one has two stages of three, these have less together."""
    checkpoint = inspect_checkpoint(build_checkpoint(tmp_path / "model", num_hidden_layers=12, vocab_size=16))
    whole = device_report(checkpoint, local_cpu(exact_ops))
    needed = sum(whole.layers) + whole.embedding + whole.head + 12 * whole.kv_block
    one, other = (replace(whole, free=int(0.6 * needed), owner=owner) for owner in ("one", "other"))
    assert best_layers(checkpoint.config, [one, other], 1, 16)[0] == (6, 6)
    with pytest.raises(InvalidRequest, match=r"do not fit 2 stages with 0\.00 GiB of cpu, 1 threads$"):
        best_layers(checkpoint.config, [one, one], 1, 16)
    first, second, third = best_layers(checkpoint.config, [one, one, replace(other, bandwidth=1e9)], 1, 16)[0]
    assert (first + second, third) == (7, 5), "seven layers are what fits one of them, and the other is slow"


def test_a_process_of_another_host_has_room_of_its_own_for_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a quarter of what is free is for all four layers, or, where the others are elsewhere, for the first."""
    folder, free = build_checkpoint(tmp_path / "model", **FOUR), 2**23
    monkeypatch.setattr(kv_sizing, "free_memory", lambda: free)
    config = EngineConfig(dtype="float32", threads=2, pipeline_parallel=2, pipeline_layers=(1, 3))
    of_layer = sum(cache.nbytes for cache in exact_ops().allocate_kv(1, 1, 2, 16))
    for says, layers in (({}, 4), ({"owner": "elsewhere"}, 1)):
        made = build_engine(folder, config, launcher=LateProcesses("on_cpu", [says]))
        made.close()
        assert made.profile.kv_blocks_total == free // 4 // (layers * of_layer)


@pytest.mark.slow("Engines of one and of three processes answer every kind of request")
def test_three_stages(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", **FOUR)
    with engine(folder, 1) as made:
        whole = said_by(made)
    with engine(folder, 3, pipeline_layers=(1, 1, 2)) as made:
        assert len(followers()) == 2
        assert said_by(made)[:3] == whole[:3]


@pytest.mark.slow("Divides a model among three or four processes in each case")
@pytest.mark.covering
@pytest.mark.parametrize(("stages", "ranks", "lost"), [(3, 1, 0), (3, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stage_that_is_lost_ends_the_engine(
    fault: signal.Signals, stages: int, ranks: int, lost: int, tmp_path: Path
) -> None:
    """The last, one in the middle, or a rank of the last; and whatever is asked of the engine afterwards ends too."""
    if ranks > 1 and load_library()[0] is None:
        pytest.skip("no C compiler")
    with engine(build_checkpoint(tmp_path / "model"), stages, tensor_parallel=ranks) as made:
        made.generate(PROMPTS, greedy())
        os.kill(followers()[lost], fault)
        for _ in range(2):
            with pytest.raises(EngineLost):
                made.generate(PROMPTS, greedy())


def test_a_step_that_fails_on_the_first_stage_alone_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for what it would have given: that of the next step would be taken for it."""
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


@pytest.mark.slow("Two processes draw the same tokens twice, step by step")
def test_a_stage_computes_a_step_while_the_one_before_it_computes_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is stopped until the first is in the middle of the next step, which waits there for its answer.

    And so it goes on: whenever the first begins, a step is on its way that it has handed on.
    """
    with engine(build_checkpoint(tmp_path / "model", **FOUR)) as made:
        expected = [output.token_ids for output in made.generate(PROMPTS[:2], greedy())]
        line, [second] = made._built.runner.model, followers()
        assert isinstance(line, PipelineLeader)
        assert made._built.group is not None
        [inbox] = [follower.inbox for follower in made._built.group._followers]
        assert inbox is not None
        through, on_their_way, results = Decoder.through, [], line._results

        def computes(decoder: Decoder, *step: Any) -> HiddenStream:
            on_their_way.append(results._called - results._answered)
            if len(on_their_way) == 1:
                os.kill(second, signal.SIGSTOP)
            elif len(on_their_way) == 2:
                assert inbox._messages.empty(), "the second stage has computed nothing yet"
                os.kill(second, signal.SIGCONT)
                deadline = time.monotonic() + 60
                while inbox._messages.empty():
                    assert time.monotonic() < deadline, "the second stage waits for the first"
                    time.sleep(0.001)
            return through(decoder, *step)

        monkeypatch.setattr(Decoder, "through", computes)
        try:
            assert [output.token_ids for output in made.generate(PROMPTS[:2], greedy())] == expected
        finally:
            os.kill(second, signal.SIGCONT)
        assert on_their_way == [0] + [1] * 31  # sixteen tokens of each of two sequences, in turn


LEADER = """
import sys
from motley import Engine
engine = Engine(sys.argv[1], dtype="float32", kv_memory_bytes=1 << 20, pipeline_parallel=3)
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("stopped", [True, *thorough(False)])
def test_stages_end_with_the_process_that_started_them(stopped: bool, tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model")
    with subprocess.Popen(
        [sys.executable, "-c", LEADER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as leader:
        assert leader.stdout is not None
        assert leader.stdout.readline() == "ready\n"
        stages = followers(leader.pid)
        assert len(stages) == 2
        if stopped:
            os.kill(stages[0], signal.SIGSTOP)
        leader.kill()
    deadline = time.monotonic() + 60
    while alive(stages):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"device": "cuda"}, "pipeline_parallel"),
        ({"stages": 4}, "pipeline_parallel"),
        ({"stages": 0}, "pipeline_parallel"),
        ({"pipeline_layers": (1, 2), "kv_memory_bytes": 4096}, "kv_memory_bytes"),  # which is a block of one layer
        ({"pipeline_layers": (1, 1)}, "pipeline_layers"),
        ({"pipeline_layers": (1, 1, 1)}, "pipeline_layers"),
        ({"pipeline_layers": (3, 0)}, "pipeline_layers"),
        ({"pipeline_layers": [1, 2]}, "pipeline_layers"),
        ({"stages": 1, "pipeline_layers": (1, 2)}, "pipeline_layers"),
    ],
)
def test_what_stages_cannot_do_is_refused_by_name(settings: dict[str, Any], names: str, tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model")
    with pytest.raises(InvalidRequest) as refused:
        engine(folder, **settings)
    assert refused.value.param == names
