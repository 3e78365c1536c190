"""Drafts on a device that does everything as late as it may: the same tokens, several at a time."""

from __future__ import annotations

from typing import Any

import pytest
from engine_driver import drive
from late_device import LateDevice, LateOps
from tiny_checkpoints import build_checkpoint

from motley.replicas.demo import demo_path
from motley.replicas.engine.drafting.ngram_drafter import NgramDrafter
from motley.replicas.engine.engine import EngineCore
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.engine.kv_reuse.swap_planner import SwapPlanner, SwapRates
from motley.replicas.engine.model_limits import ModelLimits
from motley.replicas.engine.scheduler import Scheduler
from motley.replicas.execution.step_plan import MAX_BIASED, PlanItem, SampleSpec, StepPlan
from motley.replicas.execution.swapper import Swapper
from motley.replicas.gpu import graph_buckets
from motley.replicas.gpu.gpu_runner import GpuRunner
from motley.replicas.gpu.token_chooser import LogitRows
from motley.replicas.kv.blocks import BlockPool, blocks_for
from motley.replicas.kv.memory_budget import MAX_GRAPHS
from motley.replicas.loading.model_loader import LoadedModel, load_model
from motley.replicas.types import Pooling, Request, SamplingParams

LONGEST, RUNNING = 512, 6
PROMPTS = ["with open(path) as f:\n    pass\nwith open(path) as f:\n    pass\n", "1, 2, 1, 2"]
KINDS = ["graphs", "eager"]


def engine(kind: str, drafts: int) -> Engine:
    settings: dict[str, Any] = {"threads": 1, "max_model_len": 256, "max_running": 8, "speculate_ngram": drafts}
    accelerator = None if kind == "cpu" else LateDevice()
    return Engine(demo_path(), ops=LateOps(), accelerator=accelerator, graphs=kind == "graphs", **settings)


@pytest.fixture(scope="module")
def engines() -> dict[tuple[str, int], Engine]:
    kinds = [(kind, drafts) for kind in KINDS for drafts in (0, 6)]
    return {key: engine(*key) for key in [*kinds, ("cpu", 6)]}


@pytest.mark.slow("Five engines load the demo model, of which two answer each case")
@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "seed": 4},
        {"logprobs": 1, "temperature": 0.5, "seed": 3},
        {"repetition_penalty": 1.1},
        {"min_tokens": 20, "stop_token_ids": [7]},  # drafts on both sides of where the host need not choose any more
    ],
)
def test_the_demo_model_says_the_same(
    engines: dict[tuple[str, int], Engine], kind: str, sampling: dict[str, Any]
) -> None:
    """Whoever chooses: the device, the host, or for one sequence both."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **sampling})
    plain, quick = engines[kind, 0], engines[kind, 6]
    expected = [result.outputs for result in plain.generate(PROMPTS, params)]
    before = quick._built.core.load()
    assert [result.outputs for result in quick.generate(PROMPTS, params)] == expected
    assert quick._built.core.load().accepted_tokens > before.accepted_tokens


@pytest.mark.slow("Two engines load the demo model and draw 64 tokens each")
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_counted_as_on_a_cpu(kind: str) -> None:
    """The very steps of the runner that computes at once."""
    found = []
    for each in (kind, "cpu"):
        one = engine(each, 6)
        core = one._built.core
        before = core.load()
        result = one.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))[0].outputs
        load = core.load()
        drafted, accepted = load.drafted_tokens - before.drafted_tokens, load.accepted_tokens - before.accepted_tokens
        assert 0 < accepted < drafted
        found.append((result, drafted, accepted, core.num_steps))
    assert found[0] == found[1]


def test_the_host_waits_once_a_step_and_steps_with_drafts_run_as_graphs(
    engines: dict[tuple[str, int], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the prompt's own step; and the second time nothing is captured."""
    one = engines["graphs", 6]
    core, runner = one._built.core, one._built.runner
    assert isinstance(runner, GpuRunner)
    assert runner.graphs is not None
    device: Any = runner._accelerator
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    one.generate(PROMPTS[0], params)  # captures
    replayed: list[list[PlanItem]] = []
    launch = runner.graphs.launch
    monkeypatch.setattr(runner.graphs, "launch", lambda *args: (replayed.append(args[1]), launch(*args))[1])
    device.waits = device.captures = 0
    before = core.load()
    one.generate(PROMPTS[0], params)
    steps = core.load().steps - before.steps
    assert device.waits == steps
    assert len(replayed) == steps - 1
    assert any(item.verified for items in replayed for item in items)
    assert device.captures == 0
    assert steps < 40, "several tokens at a time"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(build_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2), LateOps())


def make(loaded: LoadedModel, kind: str, drafts: int, *, blocks: int, early: bool = False) -> EngineCore:
    ops, config = LateOps(), loaded.config
    kv = ops.allocate_kv(config.num_layers, blocks + 1, *config.kv_shape)
    device = LateDevice(early=early)
    runner = GpuRunner(
        loaded.decoder, kv, ops, device, max_running=RUNNING, max_model_len=LONGEST,
        longest_blocks=blocks_for(LONGEST), padding_block=blocks, vocab_size=config.vocab_size, max_drafts=drafts,
        graphs=kind == "graphs",
        swapper=Swapper([part for cache in kv for part in ops.kv_parts(cache)], device, 40),
    )  # fmt: skip
    swap = SwapPlanner(40, SwapRates(1e-9, 1e-9, 1.0))
    scheduler = Scheduler(
        BlockPool(blocks), max_batch_tokens=64, max_running=RUNNING, max_drafts=drafts, drafter=NgramDrafter(),
        swap=swap,
    )  # fmt: skip
    return EngineCore(runner, scheduler, ModelLimits(config.vocab_size, min(LONGEST, blocks * 16), (9,)), None)


def request(prompt: list[int], pooling: Pooling | None = None, **params: Any) -> Request:
    params = {"temperature": 0.0, "max_tokens": 40, "seed": 5, "ignore_eos": True} | params
    return Request("r", tuple(prompt), SamplingParams(**params), pooling=pooling)


CROWD = [
    request([1, 2, 3] * 10),
    request(list(range(40)), temperature=1.0, top_k=20, top_p=0.9),
    request([7] * 60, temperature=0.3, n=2),
    request(list(range(60, 77)) * 2, frequency_penalty=0.1),
    request([5] * 33, logprobs=2, min_tokens=30, stop_token_ids=[5]),
    request([4, 6] * 24, prompt_logprobs=1, max_tokens=30),
    request([4, 6] * 24, Pooling.MEAN, max_tokens=1),
    request([8, 1, 8, 1], max_tokens=70),
]


def run(core: EngineCore, requests: list[Request]) -> list[dict[int, list[Any]]]:
    """By choice: tokens, and what was told of them."""
    seen = [[delta for message in messages for delta in message.deltas] for messages in drive(core, requests)]
    return [
        {
            index: [
                [token for delta in deltas if delta.index == index for token in delta.token_ids],
                [
                    [token.token_id, [i for i, _ in token.top]]
                    for delta in deltas
                    if delta.index == index
                    for token in delta.logprobs or ()
                ],
            ]
            for index in {delta.index for delta in deltas}
        }
        for deltas in seen
    ]


@pytest.mark.slow("Eight requests of up to 70 tokens, three times over")
@pytest.mark.parametrize(("kind", "early"), [("graphs", False), ("eager", True)])
def test_nobody_can_tell_in_a_crowd(loaded: LoadedModel, kind: str, early: bool) -> None:
    """Where all are preempted, copied to the host and back, with every kind of sampling in one batch."""
    expected = run(make(loaded, kind, 0, blocks=64), CROWD)
    for drafts, blocks in ((3, 64), (12, 8)):
        core = make(loaded, kind, drafts, blocks=blocks, early=early)
        assert run(core, CROWD) == expected
        load = core.load()
        assert 0 < load.accepted_tokens < load.drafted_tokens
        assert (load.preemptions_swapped > 0) == (blocks < 64)


@pytest.mark.slow("Six requests of 40 tokens, with eight drafts each and without")
def test_all_that_may_be_drafted_has_a_place(loaded: LoadedModel) -> None:
    """Sequences run in the largest number allowed, each with as many drafts as are allowed."""
    core = make(loaded, "graphs", 8, blocks=64)
    requests = [request([3, 1, key] * 8, temperature=1e-3) for key in range(RUNNING)]
    seen = []
    runner: Any = core._runner
    launch = runner.launch
    runner.launch = lambda plan: (seen.append(sum(len(item.specs) for item in plan.items)), launch(plan))[1]
    assert run(core, requests) == run(make(loaded, "graphs", 0, blocks=64), requests)
    assert max(seen) > 4 * RUNNING


@pytest.mark.slow("Eight requests of up to 70 tokens, with drafts and without")
def test_drafts_take_no_graphs_of_their_own(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are what counts, however drafts are spread: few sizes, and steps of more rows run as they come."""
    monkeypatch.setattr(graph_buckets, "_MAX_DRAFTED_ROWS", 16)
    core = make(loaded, "graphs", 8, blocks=64)
    runner: Any = core._runner
    plans: list[StepPlan] = []
    launch = runner.launch
    monkeypatch.setattr(runner, "launch", lambda plan: (plans.append(plan), launch(plan))[1])
    assert run(core, CROWD) == run(make(loaded, "graphs", 0, blocks=64), CROWD)
    rows = [plan.num_tokens for plan in plans if any(item.verified for item in plan.items)]
    assert min(rows) <= 16 < max(rows)
    assert {8, 16} <= {key.batch for key in runner.graphs.captured} <= {1, 2, 4, 8, 16}
    assert runner._accelerator.captures == len(runner.graphs.captured) <= MAX_GRAPHS
    assert len({(plan.num_tokens, len(plan.items)) for plan in plans}) > 2 * 5, "many shapes"


def test_rows_of_logits() -> None:
    """Targets of a prompt, nothing, one token, drafts of which the first is the host's."""

    def spec(**more: Any) -> SampleSpec:
        return SampleSpec(SamplingParams(seed=0), 0, 0, 0, more.get("suppressed", ()), (), ())

    plain, told = spec(), spec(suppressed=tuple(range(MAX_BIASED + 1)))
    items = (
        PlanItem(0, 0, (1,), (0,), plain),
        PlanItem(1, 0, (1, 2, 3), (1,), plain, prompt_targets=(2, 3)),
        PlanItem(2, 0, (1, 2), (2,)),
        PlanItem(3, 4, (1, 2, 3), (3,), plain, verified=(told, plain)),
    )
    rows = LogitRows(items, lambda each: each.plain)
    assert rows.plain == {0: (0, plain), 3: (1, plain), 5: (3, plain), 6: (3, plain)}
    assert rows.host == {4: 0}
    assert [list(prompt) for prompt in rows.prompts] == [[], [1, 2], [], []]
    assert [[row for row, _ in pairs] for pairs in rows.sampled] == [[0], [3], [], [4, 5, 6]]
