"""The runner of a GPU on a device that does everything as late as it may, beside the runner of a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_driver import drive
from late_device import LateDevice, LateOps
from thorough import thorough
from tiny_checkpoints import build_checkpoint
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from motley.replicas.engine.engine import EngineCore
from motley.replicas.engine.model_limits import ModelLimits
from motley.replicas.engine.scheduler import Scheduler
from motley.replicas.engine.startup import engine_rates
from motley.replicas.execution.runner import ModelRunner, Runner
from motley.replicas.execution.step_plan import MAX_BIASED, SampleSpec
from motley.replicas.gpu import decode_graphs
from motley.replicas.gpu.decode_graphs import GraphKey
from motley.replicas.gpu.gpu_runner import GpuRunner
from motley.replicas.gpu.graph_buckets import batch_size_totals, batch_sizes, context_sizes, graph_rows, smallest_bucket
from motley.replicas.gpu.packed_transfer import PackedTransfer
from motley.replicas.gpu.sequence_rows import SequenceRows
from motley.replicas.kv.blocks import BlockPool, blocks_for
from motley.replicas.loading.model_loader import load_model
from motley.replicas.types import Delta, Pooling, Request, SamplingParams, StreamMessage

BLOCKS, LONGEST, RUNNING = 40, 512, 6
Make = Callable[..., tuple[EngineCore, Any]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = build_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)
    loaded = load_model(folder, LateOps())
    config = loaded.config

    def build(kind: str, *, blocks: int = BLOCKS, budget: int = 64, reuse: bool = True) -> tuple[EngineCore, Any]:
        ops = LateOps()
        kv = ops.allocate_kv(config.num_layers, blocks + 1, *config.kv_shape)
        runner: Runner
        if kind == "cpu":
            runner = ModelRunner(loaded.decoder, kv, ops.device)
        else:
            runner = GpuRunner(
                loaded.decoder, kv, ops, LateDevice(), max_running=RUNNING, max_model_len=LONGEST,
                longest_blocks=blocks_for(LONGEST), padding_block=blocks, vocab_size=config.vocab_size,
                graphs=kind == "graphs",
            )  # fmt: skip
        scheduler = Scheduler(BlockPool(blocks, reuse_prefixes=reuse), max_batch_tokens=budget, max_running=RUNNING)
        limits = ModelLimits(config.vocab_size, min(LONGEST, blocks * 16), ())
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


@pytest.mark.slow("Five requests alone, then four times together in different conditions")
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
    for requests in (MIXED, MIXED[1:2]):  # alternatives are told beside the ones; the other runs alone
        assert run(graphs[0], requests, apart=apart) == run(eager, requests, apart=apart)
    assert {key.filtered for key in graphs[1].graphs.captured} == {None, False, True}
    assert {key.context for key in graphs[1].graphs.captured} == {256, 512}


def test_what_the_host_samples_is_what_the_cpus_runner_samples(make: Make) -> None:
    """History, bias, prompts: the same sampler on both."""
    for one in (MIXED[3], MIXED[6], MIXED[7], MIXED[8]):
        assert run(make("graphs")[0], [one]) == run(make("cpu")[0], [one])


TOLD = [
    request(PROMPTS[0], logprobs=3, max_tokens=30),
    request(PROMPTS[1], **SEEDED, logprobs=20),
    request(PROMPTS[2], temperature=0.8, n=2, logprobs=1),
    request(PROMPTS[3], logprobs=5, repetition_penalty=1.3, logit_bias={3: 4.0, 9: -100.0}),
    request(PROMPTS[1], logprobs=2, min_tokens=12, stop_token_ids=[1, 2], temperature=1.5),
    request(PROMPTS[3], temperature=0.7),
    request(PROMPTS[2], prompt_logprobs=4, logprobs=2, max_tokens=6),
    request(list(range(90)), prompt_logprobs=0, max_tokens=3),
]


def alternatives(deltas: list[Delta]) -> list[Any]:
    """By choice: each token with its alternatives, ids and log-probabilities apart."""
    found = [[one for delta in deltas if delta.index == choice for one in delta.logprobs or ()] for choice in (0, 1)]
    for one in [one for each in found for one in each if one.top]:
        assert all(logprob <= 0 for _, logprob in one.top), "nothing is likelier than certain"
        assert [value for _, value in one.top] == sorted((value for _, value in one.top), reverse=True)
        assert dict(one.top).get(one.token_id, one.logprob) == one.logprob, "the chosen one is told alike twice"
    ids_of = [[(one.token_id, [i for i, _ in one.top]) for one in each] for each in found]
    values = [[value for one in each for value in (one.logprob, *(value for _, value in one.top))] for each in found]
    return [ids_of, values]


def prompts_told(core: EngineCore, requests: list[Request]) -> list[Any]:
    return [[m.prompt_logprobs for m in each if m.prompt_logprobs] for each in drive(core, requests)]


@pytest.mark.slow("Eight requests twice alone on the host, then nine times together")
@pytest.mark.parametrize("kind", ["graphs", *thorough("eager")])
def test_alternatives_of_the_device_are_those_of_the_host(
    make: Make, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, seeded, penalised, biased, of a prompt in parts and in pieces: in any company."""
    monkeypatch.setattr("motley.replicas.gpu.top_logprobs.PROMPT_ROWS", 7)
    alone = [alternatives(run(make("cpu")[0], [one])[0]) for one in TOLD]
    prompts = [prompts_told(make("cpu")[0], [one])[0] for one in TOLD]
    assert sum(map(bool, prompts)) == 2
    for options in ({}, {"budget": 24}, {"blocks": 16, "reuse": False}):
        core, _ = make(kind, **options)
        for apart in (0, 2):
            for found, expected in zip(run(core, TOLD, apart=apart), alone, strict=True):
                (ids_of, values), (wanted_ids, wanted) = alternatives(found), expected
                assert ids_of == wanted_ids
                for some, others in zip(values, wanted, strict=True):
                    assert some == pytest.approx(others, abs=2e-5)
        assert prompts_told(core, TOLD) == prompts


def test_where_alternatives_are_told_no_logits_are_copied_and_steps_are_planned_ahead(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is requested crosses; the host waits once a step, when the next one is on its way."""
    core, runner = make("graphs")
    copied: list[torch.Tensor] = []

    def to_host(values: torch.Tensor) -> torch.Tensor:
        copied.append(values)
        return values.clone()

    monkeypatch.setattr("motley.replicas.gpu.token_chooser.copy_to_host", to_host)
    requests = [request([key, 2, 3], max_tokens=40, logprobs=20, **(SEEDED if key else {})) for key in (0, 1)]
    run(core, requests)  # captures
    device = runner._accelerator
    device.waits, before, captures = 0, core.num_steps, device.captures
    for key, one in enumerate(requests):
        core.add(key, one)
    ahead = 0
    while core.busy:
        core.step()
        ahead += core.launched
    assert ahead >= 39, "the next step is launched before this one's tokens are known"
    assert device.captures == captures
    assert device.waits == core.num_steps - before <= 43
    assert copied == [], "tokens and alternatives come with what every step brings"
    run(core, [TOLD[6], TOLD[7]])
    vocabulary = runner._state.vocab_size
    assert copied
    assert max(values.shape[-1] for values in copied) == 5 < vocabulary
    assert {key.filtered for key in runner.graphs.captured} == {None}, "tokens are chosen apart from these"


def test_a_row_that_is_not_finite_has_a_fault_and_no_alternatives(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    core, runner = make("graphs")
    forward = runner.model.forward

    class Broken:
        def forward(self, batch: Any, kv: Any) -> torch.Tensor:
            logits: torch.Tensor = forward(batch, kv)
            return torch.where((batch.token_ids[batch.logit_rows] == 7)[:, None], torch.nan, logits)

    monkeypatch.setitem(runner.models, 0, Broken())
    core.add(0, request([1, 2, 7], logprobs=3))
    core.add(1, request([1, 2, 3], logprobs=3, max_tokens=1))
    found: dict[int, Any] = {}
    while core.busy:
        for emission in core.step():
            found.setdefault(emission.key, emission)
    assert "not finite" in str(found[0].error)
    assert [len(one.top) for one in found[1].message.deltas[0].logprobs] == [3]


PENALISED = [
    request(PROMPTS[0], repetition_penalty=1.05, max_tokens=40),
    request(PROMPTS[1], repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.3, max_tokens=30),
    request(PROMPTS[2], frequency_penalty=0.3, temperature=0.8, n=2, max_tokens=30),
    request(PROMPTS[3], repetition_penalty=0.7, presence_penalty=0.5, **SEEDED),
    request(list(range(200)), repetition_penalty=1.1, presence_penalty=0.1, max_tokens=25, min_tokens=5),
    request(PROMPTS[3], temperature=1.2, top_p=0.8, seed=9),
    request(PROMPTS[1], repetition_penalty=1.2, logprobs=0, temperature=0.4, min_p=0.02),
]


def told(found: list[list[Delta]]) -> list[Any]:
    """By request and choice: tokens; log-probabilities to what fp32 can tell."""
    return [
        [
            (
                ids(deltas, choice),
                [round(one.logprob, 4) for delta in deltas if delta.index == choice for one in delta.logprobs or ()],
            )
            for choice in (0, 1)
        ]
        for deltas in found
    ]


@pytest.mark.slow("Seven requests alone on the host, then twice together")
@pytest.mark.covering
@pytest.mark.parametrize("kind", ["graphs", "eager"])
@pytest.mark.parametrize(
    "options",
    [{}, {"budget": 24}, {"blocks": 20, "reuse": False}, {"blocks": 18, "reuse": False, "budget": 40}],
    ids=["all at once", "prompts in parts", "preempted", "preempted and in parts"],
)
def test_penalties_on_the_device_are_those_of_the_host(make: Make, kind: str, options: dict[str, Any]) -> None:
    """Greedy and seeded, in every step that may be planned ahead; in more requests than there are rows."""
    alone = [told(run(make("cpu")[0], [one]))[0] for one in PENALISED]
    core, runner = make(kind, **options)
    for apart in (0, 2):
        assert told(run(core, PENALISED, apart=apart)) == alone
    assert (core.scheduler.num_preemptions > 0) == ("blocks" in options)
    if kind == "graphs":
        assert any(key.penalised for key in runner.graphs.captured)
        assert not runner.graphs._refused
    history = runner._state.history
    assert (len(history), history.dtype) == (2 * RUNNING + 1, torch.int16)


FAVOURITE = {"logit_bias": {3: 4.0}, "temperature": 0.9}
BIASED = [
    request(PROMPTS[0], logit_bias={5: 6.0, 9: -100.0, 0: 2.5}),
    request(PROMPTS[1], **FAVOURITE, repetition_penalty=1.2, logprobs=0),
    request(PROMPTS[2], min_tokens=12, stop_token_ids=list(range(0, 64, 5)), n=2, temperature=1.5),
    request(PROMPTS[3], min_tokens=30, max_tokens=30, stop_token_ids=[1, 2], logit_bias={1: 100.0, 4: 8.0}, top_k=3),
    request(PROMPTS[0], logit_bias=dict.fromkeys(range(MAX_BIASED), 3.0)),
    request(PROMPTS[0], logit_bias=dict.fromkeys(range(MAX_BIASED + 1), 3.0), temperature=0.5),
    request(PROMPTS[1], temperature=0.7, logprobs=0),
    request(PROMPTS[0], logit_bias={5: 6.0, 9: False, 0: False}, temperature=5.0),
]


@pytest.mark.slow("Eight requests alone on the host, then six times together")
@pytest.mark.parametrize("kind", ["graphs", "eager"])
def test_biases_and_ids_held_back_are_those_of_the_host(make: Make, kind: str) -> None:
    alone = [told(run(make("cpu")[0], [one]))[0] for one in BIASED]
    for options in ({}, {"budget": 24}, {"blocks": 16, "reuse": False}):
        core, runner = make(kind, **options)
        for apart in (0, 2):
            assert told(run(core, BIASED, apart=apart)) == alone
        if kind == "graphs":
            assert {(key.penalised, key.biased) for key in runner.graphs.captured} >= {(False, True), (False, False)}
            assert not runner.graphs._refused


def test_few_biases_are_planned_ahead(make: Make) -> None:
    core, runner = make("graphs")
    requests = [BIASED[0], BIASED[3], BIASED[4]]
    run(core, requests)  # captures
    device = runner._accelerator
    device.waits, before, captures = 0, core.num_steps, device.captures
    run(core, requests)
    assert device.captures == captures
    assert device.waits == core.num_steps - before
    assert all(key.filtered is not None for key in runner.graphs.captured)
    plain = [SampleSpec(one.sampling, 0, 0, 0, (), (), ()).plain for one in BIASED]
    assert plain == [True] * 5 + [False, True, True]
    sixteen = SampleSpec(BIASED[3].sampling, 0, 0, 0, tuple(range(MAX_BIASED - 2)), (), ())
    assert (sixteen.plain, sixteen._replace(suppressed=tuple(range(MAX_BIASED - 1))).plain) == (True, False)


def test_graphs_that_do_as_well_are_those_with_more() -> None:
    assert GraphKey(1, 256, None).covers == ()
    assert GraphKey(1, 256, True, True, True).covers == ()
    assert GraphKey(1, 256, True, True).covers == (GraphKey(1, 256, True, True, True),)
    of_none = GraphKey(4, 512, False).covers
    assert (len(of_none), len(set(of_none))) == (7, 7)
    assert [sum(key[2:]) for key in of_none] == [1, 1, 1, 2, 2, 2, 3]


@pytest.mark.slow("Four requests with penalties and without, on eight runners")
def test_penalties_change_what_is_said(make: Make) -> None:
    for one in PENALISED[:4]:
        sampling = replace(one.sampling, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
        other = replace(one, sampling=sampling)
        assert ids(run(make("graphs")[0], [one])[0]) != ids(run(make("graphs")[0], [other])[0])


def test_a_stream_that_is_resumed_has_its_history(make: Make) -> None:
    for one in (PENALISED[1], PENALISED[3], PENALISED[4]):
        whole = ids(run(make("cpu")[0], [one])[0])
        for done in (1, 7, 15):
            again = replace(one, output_ids=(tuple(whole[:done]),))
            assert ids(run(make("graphs")[0], [again])[0]) == whole[done:]


def test_steps_with_penalties_are_planned_ahead(make: Make) -> None:
    """A history is brought once, when its sequence begins, and memory for histories is taken when one is asked for."""
    core, runner = make("graphs")
    run(core, [request([4, 5]), request([6], **SEEDED)])
    assert runner._state._history is None
    requests = [
        request([key, 2, 3], max_tokens=40, repetition_penalty=1.05, **(SEEDED if key else {})) for key in (0, 1)
    ]
    run(core, requests)  # captures
    device = runner._accelerator
    device.waits, before, captures = 0, core.num_steps, device.captures
    brought = []
    write = runner._state._write_history
    runner._state._write_history = lambda *args: (brought.append(args), write(*args))[1]
    run(core, requests)
    assert device.captures == captures
    assert device.waits == core.num_steps - before <= 43
    assert len(brought) == 2


def test_a_row_that_asks_for_no_penalty_does_not_feel_its_neighbours(make: Make) -> None:
    plain = [request(prompt, max_tokens=30, logprobs=0) for prompt in PROMPTS[:3]]
    alone = told(run(make("eager")[0], plain))
    found = told(run(make("graphs")[0], [*plain, request([1, 2, 3], repetition_penalty=1.9, max_tokens=30)]))
    assert found[:3] == alone


@pytest.mark.parametrize("nth", [17, 23])
def test_a_step_that_fails_leaves_no_history_wrong(make: Make, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    requests = [replace(one, sampling=replace(one.sampling, n=1, max_tokens=30)) for one in PENALISED[:4]]
    expected = [ids(deltas) for deltas in run(make("cpu")[0], requests)]
    core, runner = make("graphs")
    submit, countdown = runner._accelerator.submit, iter(range(10_000))

    def fails_sometimes(work: Callable[[], None]) -> None:
        if next(countdown) % nth == nth - 1:
            raise RuntimeError("out of memory")
        submit(work)

    monkeypatch.setattr(runner._accelerator, "submit", fails_sometimes)
    found: dict[int, list[int]] = {key: [] for key in range(4)}
    for key, one in enumerate(requests):
        core.add(key, one)
    for _ in range(2000):
        if not core.busy:
            break
        for emission in core.step():
            found[emission.key] += ids(list(emission.message.deltas))
    assert not core.busy
    assert sum(map(len, found.values())) > 60
    for key, tokens in found.items():
        assert tokens == expected[key][: len(tokens)]


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


@pytest.mark.slow("Four requests of 40 tokens, with steps that fail and without")
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
    monkeypatch.setattr(decode_graphs, "MAX_GRAPHS", 2)
    core, runner = make("graphs")
    assert [ids(deltas) for deltas in run(core, requests)] == expected
    assert len(runner.graphs.captured) == 2
    assert runner._accelerator.captures > 2


def test_a_graph_that_makes_room_is_not_on_its_way(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once what was submitted is done, for which the host waits once; a CUDA graph must not go while it is launched."""
    monkeypatch.setattr(decode_graphs, "MAX_GRAPHS", 2)
    _, runner = make("graphs")
    device, graphs = runner._accelerator, runner.graphs
    first, second, third = (GraphKey(batch, 256, True) for batch in (1, 2, 4))
    assert graphs.has(first)
    assert graphs.has(second)
    assert device.waits == 0
    seen: list[tuple[GraphKey, ...]] = []
    device.submit(lambda: seen.append(graphs.captured))
    assert graphs.has(third)
    assert (seen, device.waits, graphs.captured) == ([(first, second)], 1, (second, third))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA out of memory"),
        OutOfResources(200_000, 101_376, "shared memory"),
        CompilationError("def kernel(): ...", None, "no such instruction"),
        AssertionError("a tile is too large"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_step_whose_graph_cannot_be_captured_runs_as_it_comes(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Whatever the reason, which is told once a graph."""
    expected = [ids(deltas) for deltas in run(make("graphs")[0], MIXED[:2])]
    core, runner = make("graphs")
    asked = []

    def fails(work: Callable[[], None]) -> Callable[[], None]:
        asked.append(work)
        raise error

    monkeypatch.setattr(runner._accelerator, "capture", fails)
    assert [ids(deltas) for deltas in run(core, MIXED[:2])] == expected
    assert len(asked) == len(runner.graphs._refused) > 0, "each is tried once"
    assert not runner.graphs.captured
    told = [record.getMessage() for record in caplog.records if "no graph for" in record.getMessage()]
    assert len(told) == len(asked)
    assert type(error).__name__ in told[0]


def test_what_was_captured_at_warm_up_is_all_that_decode_needs(make: Make) -> None:
    """Few rows, many, contexts of both lengths, with filters and without; what the host chooses as well."""
    core, runner = make("graphs")
    said = runner.warm_up(60.0, penalised=True)
    assert said.startswith("16 captured at warm-up"), "8 shapes that filter, and 8 whose logits are read"
    assert not runner.graphs._refused
    captures = runner._accelerator.captures
    requests = [one for one in MIXED if not (one.sampling.logit_bias or one.sampling.min_tokens)]
    found = run(core, requests, apart=2)
    assert runner._accelerator.captures == captures
    assert found == run(make("eager")[0], requests, apart=2)
    assert make("eager")[1].warm_up(60.0) == "none: steps run without them"


def test_a_warm_up_ends_in_time_and_keeps_the_likeliest_longest(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    _, runner = make("graphs")
    runner.warm_up(0.0)
    assert runner.graphs.captured == (GraphKey(1, 256, True),), "the first, whatever it takes"
    monkeypatch.setattr("motley.replicas.gpu.gpu_runner.MAX_GRAPHS", 4)
    monkeypatch.setattr(decode_graphs, "MAX_GRAPHS", 4)
    _, runner = make("graphs")
    runner.warm_up(60.0)
    three = {GraphKey(1, 256, True), GraphKey(1, 512, True), GraphKey(2, 256, True)}
    assert set(runner.graphs.captured) == {*three, GraphKey(1, 256, None)}
    assert runner.graphs.has(GraphKey(6, 512, True))
    assert GraphKey(1, 256, None) not in runner.graphs.captured
    assert runner.graphs.has(GraphKey(6, 256, True))
    assert {GraphKey(1, 256, True), GraphKey(1, 512, True)} <= set(runner.graphs.captured)


def test_how_many_graphs_are_captured_at_warm_up_follows_from_what_each_takes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that captures alone move on: the next is not begun if it would end too late, and that is told."""
    for seconds, within_s, count in ((10.0, 35.0, 3), (2.0, 35.0, 16), (2.0, 19.9, 9), (50.0, 35.0, 1)):
        _, runner = make("graphs")
        now, capture = [0.0], runner._accelerator.capture

        def slow(work: Callable[[], None], seconds: float = seconds, now: list[float] = now, do: Any = capture) -> Any:
            now[0] += seconds
            return do(work)

        monkeypatch.setattr(runner._accelerator, "capture", slow)
        monkeypatch.setattr(decode_graphs.time, "monotonic", lambda now=now: now[0])
        said = runner.warm_up(within_s)
        assert len(runner.graphs.captured) == count
        assert runner.longest_s() == seconds
        assert said.startswith(f"{count} captured at warm-up in {count * seconds:.1f} s, {seconds:.2f} s each")
        late = f"{16 - count} more would have taken {(16 - count) * seconds:.1f} s"
        assert (late in said) == (count < 16)
    monkeypatch.undo()


def test_a_graph_that_filters_does_for_rows_that_do_not(make: Make) -> None:
    core, runner = make("graphs")
    greedy = request(PROMPTS[0])
    expected = run(make("graphs")[0], [greedy])
    assert runner.graphs.has(GraphKey(1, 256, True))
    assert run(core, [greedy]) == expected
    assert runner.graphs.captured == (GraphKey(1, 256, True),)
    assert runner.graphs.has(GraphKey(1, 256, False))
    run(core, [greedy])
    assert runner.graphs.captured[-1] == GraphKey(1, 256, False), "its own, where there is one"


def test_logits_are_kept_for_those_who_read_them(make: Make) -> None:
    core, runner = make("graphs")
    run(core, [MIXED[0], MIXED[1], MIXED[3]])
    assert all(static.logits is None for static in runner.graphs._static.values())
    run(core, [MIXED[4]])
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

    monkeypatch.setitem(runner.models, 0, Slow())
    monkeypatch.setattr(engine_rates, "BUDGET_S", 0.0)
    monkeypatch.setattr(engine_rates, "PROMPT_S", 0.0)
    found = engine_rates.measure_rates(core, compiles=True)
    assert found.prefill_tokens_per_s <= core.scheduler.max_batch_tokens / seconds
    assert found.decode_s[0] < seconds
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
        assert [smallest_bucket(sizes, count) for count in sizes] == list(sizes)
        assert all(count <= smallest_bucket(sizes, count) <= most for count in range(1, most + 1))
        assert list(sizes) == sorted(set(sizes))


def test_sizes_of_graphs_are_counted_without_a_list() -> None:
    """`motley fit --batch 2147483647` listed them all: 3.8 GB, and no answer after 100 s."""
    for most in (*range(1, 400), 1000, 1023, 1024, 1025, 4097):
        assert batch_size_totals(most) == (len(batch_sizes(most)), sum(batch_sizes(most)))
    count, total = batch_size_totals(2**31 - 1)
    assert count == len(batch_sizes(128)) + len(range(160, 2**31 - 1, 32)) + 1
    assert total > 2**31 * (count - 20) // 2


def test_rows_of_this_step_and_the_last_are_kept() -> None:
    rows = SequenceRows(3)
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
    packed = PackedTransfer(device, 3, fields)
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
    turn = PackedTransfer(device, 4, decode_graphs.SAMPLING).turn()
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
        fresh = PackedTransfer(device, 4, decode_graphs.SAMPLING).turn()
        decode_graphs.write_sampling(turn, specs, size)
        decode_graphs.write_sampling(fresh, specs, size)
        for name in decode_graphs.SAMPLING:
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
