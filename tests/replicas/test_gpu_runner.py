"""The runner of a GPU on a device that does everything as late as it may, beside the runner of a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from driven import drive
from late_device import LateDevice, LateOps
from tiny_checkpoints import build_checkpoint

from motley.replicas import rates
from motley.replicas.blocks import BlockPool, blocks_for
from motley.replicas.engine import EngineCore
from motley.replicas.gpu import decode
from motley.replicas.gpu.buckets import batch_sizes, bucket, context_sizes, graph_rows
from motley.replicas.gpu.packed import Packed
from motley.replicas.gpu.rows import Rows
from motley.replicas.gpu.runner import GpuRunner
from motley.replicas.limits import Limits
from motley.replicas.model import load_model
from motley.replicas.plan import SampleSpec
from motley.replicas.protocol import Delta, Pooling, Request, SamplingParams, StreamMessage
from motley.replicas.runner import ModelRunner, Runner
from motley.replicas.scheduler import Scheduler

BLOCKS, LONGEST, RUNNING = 40, 512, 6
Make = Callable[..., tuple[EngineCore, Any]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = build_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)
    loaded = load_model(folder, LateOps())
    config = loaded.config

    def build(kind: str, *, blocks: int = BLOCKS, budget: int = 64, reuse: bool = True) -> tuple[EngineCore, Any]:
        ops = LateOps()
        kv = ops.allocate_kv(config.num_layers, blocks + 1, config.num_kv_heads, config.head_dim)
        runner: Runner
        if kind == "cpu":
            runner = ModelRunner(loaded.decoder, kv, ops.device)
        else:
            runner = GpuRunner(
                loaded.decoder, kv, ops.sample, LateDevice(), max_running=RUNNING, max_model_len=LONGEST,
                longest_blocks=blocks_for(LONGEST), padding_block=blocks, graphs=kind == "graphs",
            )  # fmt: skip
        scheduler = Scheduler(BlockPool(blocks, reuse_prefixes=reuse), max_batch_tokens=budget, max_running=RUNNING)
        limits = Limits(config.vocab_size, min(LONGEST, blocks * 16), ())
        return EngineCore(runner, scheduler, limits, None), runner

    return build


def request(prompt: list[int], pooling: Pooling | None = None, **params: Any) -> Request:
    params = {"temperature": 0.0, "max_tokens": 20, "seed": 5} | params
    return Request("r", tuple(prompt), SamplingParams(**params), pooling=pooling)


def run(core: EngineCore, requests: list[Request], *, apart: int = 0) -> list[list[Delta]]:
    """All deltas of each request; one comes every `apart` steps. An embedding as text."""
    return [
        [delta for message in messages for delta in (*message.deltas, *_embedded(message))]
        for messages in drive(core, requests, apart=apart)
    ]


def _embedded(message: StreamMessage) -> list[Delta]:
    return [Delta(0, text=repr([f"{x:.5f}" for x in message.embedding]))] if message.embedding else []


def ids(deltas: list[Delta], choice: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == choice for token in delta.token_ids]


PROMPTS = [[1, 2, 3], list(range(40)), [7] * 100, list(range(60, 77))]
SEEDED: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "top_p": 0.9}
MIXED = [
    request(PROMPTS[0]),
    request(PROMPTS[1], **SEEDED),
    request(PROMPTS[2], temperature=0.8, n=2, max_tokens=30),
    request(PROMPTS[3], frequency_penalty=1.0, temperature=0.7),
    request(PROMPTS[0], logprobs=3),
    request(PROMPTS[1], logprobs=0, min_tokens=4, stop_token_ids=[9]),
    request(PROMPTS[3], prompt_logprobs=2, max_tokens=5),
    request(PROMPTS[2], logit_bias={5: 4.0}, min_p=0.1, temperature=2.0),
    request(PROMPTS[0], Pooling.MEAN, max_tokens=1),
    request(list(range(250)), max_tokens=40, temperature=1.5, seed=-(2**63)),
]


@pytest.mark.parametrize("kind", ["graphs", "eager"])
def test_greedy_texts_are_those_of_the_cpus_runner(make: Make, kind: str) -> None:
    """Whoever samples: greedy is greedy. Alone, together, one after the other, in little memory."""
    requests = [request(prompt, max_tokens=30) for prompt in [*PROMPTS, list(range(230))]]
    alone = [ids(run(make("cpu")[0], [one])[0]) for one in requests]
    for options in ({}, {"apart": 3}):
        core, _ = make(kind)
        assert [ids(deltas) for deltas in run(core, requests, **options)] == alone
    core, _ = make(kind, blocks=20, budget=24)
    assert [ids(deltas) for deltas in run(core, requests[:4])] == alone[:4]
    core, _ = make(kind, blocks=11, reuse=False)
    assert [ids(deltas) for deltas in run(core, requests[:4])] == alone[:4]
    assert core.scheduler.num_preemptions


@pytest.mark.parametrize("apart", [0, 2])
def test_with_and_without_graphs_every_answer_is_the_same(make: Make, apart: int) -> None:
    """Seeded, filtered, penalised, with log-probabilities of output and prompt, embeddings: token for token."""
    eager, graphs = make("eager")[0], make("graphs")
    assert run(graphs[0], MIXED, apart=apart) == run(eager, MIXED, apart=apart)
    assert {key.filtered for key in graphs[1].graphs.captured} == {None, False, True}
    assert {key.context for key in graphs[1].graphs.captured} == {256, 512}


def test_what_the_host_samples_is_what_the_cpus_runner_samples(make: Make) -> None:
    """History, bias, alternatives: the same sampler on both."""
    for one in (MIXED[3], MIXED[4], MIXED[6], MIXED[7], MIXED[8]):
        assert run(make("graphs")[0], [one]) == run(make("cpu")[0], [one])


def test_the_host_waits_once_a_step_and_launches_the_next_before(make: Make) -> None:
    core, runner = make("graphs")
    device = runner._accelerator
    run(core, [request([1, 2, 3], max_tokens=40), request([4], max_tokens=40, **SEEDED)])  # captures
    device.waits, before = 0, core.num_steps
    captures = device.captures
    for key in range(2):
        core.add(key, request([key + 1, 2, 3], max_tokens=40, **(SEEDED if key else {})))
    while core.busy:
        left = len(device._queue)
        core.step()
        assert left == 0 or not core.launched or len(device._queue) > 0, "a step is on its way while one is awaited"
    assert device.captures == captures
    assert device.waits == core.num_steps - before


def test_a_step_that_fails_leaves_nothing_wrong_behind(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request(prompt, max_tokens=40) for prompt in PROMPTS]
    expected = [ids(deltas) for deltas in run(make("graphs")[0], requests)]
    core, runner = make("graphs")
    submit, countdown = runner._accelerator.submit, iter(range(10_000))

    def fails_sometimes(work: Callable[[], None]) -> None:
        if next(countdown) % 23 == 22:
            raise RuntimeError("out of memory")  # as an allocation does, on the host
        submit(work)

    monkeypatch.setattr(runner._accelerator, "submit", fails_sometimes)
    found: dict[int, list[int]] = {key: [] for key in range(4)}
    faulty = set()
    for key, one in enumerate(requests):
        core.add(key, one)
    for _ in range(2000):
        if not core.busy:
            break
        for emission in core.step():
            found[emission.key] += ids(list(emission.message.deltas))
            if emission.error:
                faulty.add(emission.key)
    assert not core.busy
    assert len(faulty) < 4
    for key, tokens in found.items():
        assert tokens == expected[key][: len(tokens)]
        assert key in faulty or len(tokens) == 40


def test_graphs_beyond_what_is_kept_make_room(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request(prompt, max_tokens=12 + 5 * key) for key, prompt in enumerate(PROMPTS)]
    expected = [ids(deltas) for deltas in run(make("graphs")[0], requests)]
    monkeypatch.setattr(decode, "MAX_GRAPHS", 2)
    core, runner = make("graphs")
    assert [ids(deltas) for deltas in run(core, requests)] == expected
    assert len(runner.graphs.captured) == 2
    assert runner._accelerator.captures > 2


def test_a_step_whose_graph_cannot_be_captured_runs_as_it_comes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [ids(deltas) for deltas in run(make("graphs")[0], MIXED[:2])]
    core, runner = make("graphs")
    asked = []

    def out_of_memory(work: Callable[[], None]) -> Callable[[], None]:
        asked.append(work)
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(runner._accelerator, "capture", out_of_memory)
    assert [ids(deltas) for deltas in run(core, MIXED[:2])] == expected
    assert len(asked) == len(runner.graphs._refused) > 0, "each is tried once"
    assert not runner.graphs.captured


def test_logits_are_kept_for_those_who_read_them(make: Make) -> None:
    core, runner = make("graphs")
    run(core, [MIXED[0], MIXED[1]])
    assert all(static.logits is None for static in runner.graphs._static.values())
    run(core, [MIXED[3]])
    assert [batch for batch, static in runner.graphs._static.items() if static.logits is not None] == [1]


def test_rates_are_of_steps_that_have_landed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    core, runner = make("graphs")
    forward, seconds = runner.model.forward, 0.05
    sizes: list[int] = []

    class Slow:
        def forward(self, batch: Any, kv: Any) -> torch.Tensor:
            sizes.append(batch.num_tokens)
            if batch.num_tokens > 8:
                time.sleep(seconds)
            return forward(batch, kv)

    monkeypatch.setattr(runner, "model", Slow())
    prefill_s, decode_s = rates.alone(core)
    assert prefill_s >= seconds
    assert decode_s < prefill_s
    assert max(sizes) == core.scheduler.max_batch_tokens, "a full step"


def test_sizes_of_graphs() -> None:
    asked = ((1, 0), (1, 8), (6, 3), (20, 8), (64, 8), (256, 8))
    assert [graph_rows(*each) for each in asked] == [1, 9, 24, 64, 64, 256]
    assert batch_sizes(1) == (1,)
    assert batch_sizes(6) == (1, 2, 4, 6)
    assert batch_sizes(256) == (1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32))
    assert context_sizes(100) == (100,)
    assert context_sizes(3000) == (256, 512, 1024, 2048, 3000)
    for most in (1, 2, 3, 5, 64, 100, 333):
        sizes = batch_sizes(most)
        assert [bucket(sizes, count) for count in sizes] == list(sizes)
        assert all(count <= bucket(sizes, count) <= most for count in range(1, most + 1))
        assert list(sizes) == sorted(set(sizes))


def test_rows_of_this_step_and_the_last_are_kept() -> None:
    rows = Rows(3)
    first = rows.take([1, 2, 3])
    second = rows.take([4, 5, 6])
    assert len({*first, *second}) == 6
    assert rows.take([4, 5, 6]) == second
    rows.written[first[0]] = (1, 2)
    third = rows.take([7, 1, 8])  # 1 is used again; 2 and 3 are the ones that were used least recently
    assert third[1] == first[0]
    assert rows.written[first[0]] == (1, 2)
    assert {third[0], third[2]} == set(first[1:])
    assert rows.take([2])[0] not in third


def test_numbers_cross_in_one_copy_and_turns_are_not_taken_from_under_the_device() -> None:
    device = LateDevice()
    fields = {"small": torch.int32, "large": torch.int64, "real": torch.float32}
    packed = Packed(device, 3, fields)
    seen = []
    for number in range(5):
        turn = packed.turn()
        turn.here["small"][:] = [number, -number, 7]
        turn.here["large"][:] = [-(2**63), number, 2**63 - 1]
        turn.here["real"][:] = number / 4
        packed.send(turn)
        device.submit(lambda: seen.append({name: packed.there[name].tolist() for name in fields}))
    device.mark().wait()
    assert seen == [
        {"small": [n, -n, 7], "large": [-(2**63), n, 2**63 - 1], "real": [n / 4] * 3} for n in range(5)
    ]  # fmt: skip


def test_sampling_numbers_are_those_of_the_step_whatever_the_turn_had_before() -> None:
    def spec(position: int, choice: int = 0, **params: Any) -> SampleSpec:
        seed = params.get("seed", 5)
        return SampleSpec(SamplingParams(**{"seed": seed} | params), seed, choice, position, (), (), ())

    device = LateDevice()
    turn = Packed(device, 4, decode.SAMPLING).turn()
    warm, cold = {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1}, {"temperature": 0.0}
    for specs, size in [
        ([spec(0, **warm), spec(4, **cold)], 4),
        ([spec(1, **warm), spec(5, **cold)], 4),
        ([spec(1, **cold), spec(5, **warm)], 4),
        ([spec(1, **cold), spec(5, **warm, seed=6)], 4),
        ([spec(1, 1, **cold), spec(5, **warm, seed=6)], 4),
        ([spec(1, 1, **cold)], 4),
        ([spec(1, 1, **cold), spec(2), spec(3), spec(4)], 4),
        ([spec(1, 1, **cold), spec(2), spec(3), spec(4, 2)], 4),
        ([], 4),
    ]:
        fresh = Packed(device, 4, decode.SAMPLING).turn()
        decode.write_sampling(turn, specs, size)
        decode.write_sampling(fresh, specs, size)
        for name in decode.SAMPLING:
            assert turn.here[name].tolist() == fresh.here[name].tolist(), name
        assert turn.here["place"].tolist() == [one.position for one in specs] + [0] * (size - len(specs))


def test_a_capture_does_as_a_graph_does() -> None:
    """The device that the other tests trust: it does not run Python again, and reads memory when it is replayed."""
    device, number, source = LateDevice(), [1], torch.zeros(2)
    out: list[torch.Tensor] = []
    replay = device.capture(lambda: out.append((source + number[0]).clone()))
    source.fill_(5)
    number[0] = 100
    device.submit(replay)
    assert out[1].tolist() == [1, 1]
    device.mark().wait()
    assert (len(out), out[1].tolist()) == (2, [6, 6])
    with pytest.raises(AssertionError, match="reads a number"):
        device.capture(lambda: out.append(source * float(source[0])))
