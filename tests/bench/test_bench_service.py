"""`motley bench service`: its sides, and how they are set beside one another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import service_checkpoint
from fake_service import FakeService, fake_service

from motley.cli.app import run
from motley.cluster.simulation.length_distribution import LengthDistribution
from motley.replicas.errors import EngineFault
from motley.replicas.text.tokenizer.tokenizer import Tokenizer
from motley_bench.checkpoints.served_checkpoint import write_tokenizer
from motley_bench.load.load_clients import run_clients as put
from motley_bench.load.load_workload import Workload
from motley_bench.load.measured_service import MeasuredService
from motley_bench.load.request_samples import OK, LoadOutcome, RequestSample
from motley_bench.processes.bench_child import BenchChild
from motley_bench.reporting.duration_histogram import DurationHistogram
from motley_bench.service import service_cost, service_metrics
from motley_bench.service.bare_worker import BareWorkerProcess

SHORT = Workload(concurrency=4, warmup_s=0.0, duration_s=0.6, output_tokens=LengthDistribution("fixed", 6))
ALPHABET = tuple(range(65, 90))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return service_checkpoint.build(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("null", [True, False])
def test_the_bare_worker_answers_the_same_load(folder: Path, null: bool) -> None:
    with BareWorkerProcess(str(folder), null=null) as bare:
        for _ in range(2):  # one engine for several measurements
            outcome = bare.run(SHORT, ALPHABET)
            assert outcome.samples
            assert {(sample.code, sample.tokens) for sample in outcome.samples} == {(OK, 6)}
            assert outcome.gaps.count > 0


def test_a_process_that_breaks_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match=r"bare_worker of the measurement ended: .*config\.json"):
        BareWorkerProcess(str(tmp_path), null=True).__enter__()


def test_plain_grpc_answers_the_same_load() -> None:
    with BenchChild("motley_bench.service.plain_grpc_server") as plain:
        service = MeasuredService("grpc", plain.read()["target"], "m", ALPHABET, 1000, null=True)
        outcome = put(SHORT, service)
    assert {(sample.code, sample.tokens, sample.messages) for sample in outcome.samples} == {(OK, 6, 6)}
    assert outcome.messages > 0


def test_every_id_of_a_random_checkpoint_has_a_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 1000)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 1000
    assert tokenizer.decode(tokenizer.encode("Ways, and means", False)) == "Ways, and means"
    assert tokenizer.decode([256, 999]) == " w0 w743"


def outcome(messages: int, ttft_s: float) -> LoadOutcome:
    samples = [RequestSample(0.1 * i, 0.1 * i, 1.0, OK, 0.1 * i + ttft_s, 1.0, 5, 5) for i in range(5)]
    gaps = DurationHistogram()
    gaps.add(0.004)
    return LoadOutcome(samples=samples, gaps=gaps, messages=messages, tokens=messages * 1.5)


def test_sides_take_turns_and_are_set_beside_one_another() -> None:
    turns: list[str] = []

    def side(name: str, *outcomes: LoadOutcome) -> Callable[[Workload], LoadOutcome]:
        left = iter(outcomes)

        def take(workload: Workload) -> LoadOutcome:
            turns.append(name)
            assert workload.duration_s == 2.0
            return next(left)

        return take

    plan = service_cost.ServiceBenchPlan(turns=3, seconds=2.0, warmup_s=0.0)
    bench = service_cost._ServiceComparison(plan, lambda _: None, "HAProxy", null=True)
    sides = {
        "service": side("service", outcome(800, 0.03), outcome(600, 0.02), outcome(1000, 0.01)),
        "bare": side("bare", *[outcome(1600, 0.005)] * 3),
    }
    metrics = {"messages": service_metrics.messages, "ttft": service_metrics.ttfts}
    bench.compare("both", Workload(warmup_s=0.0), sides, metrics)
    assert turns == ["service", "bare"] * 3
    rates, ttft = bench.found.rows
    assert (rates["value"], rates["peer"], rates["peer_value"], rates["ratio"]) == (400.0, "bare", 800.0, 0.5)
    assert rates["tokens_per_message"] == pytest.approx(1.5)
    assert rates["workload"]["engine"] == "null"
    assert ttft["value"] == pytest.approx(20.0)
    assert ttft["added"] == pytest.approx(15.0)
    assert ttft["ratio"] == pytest.approx(0.25)
    assert ttft["p99"] == pytest.approx(30.0)


@contextmanager
def instead_of_a_service(service: FakeService) -> Iterator[dict[str, str]]:
    yield {"grpc": service.grpc, "http": service.http, "proxy": "none"}


@pytest.mark.thorough
def test_the_whole_report(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uses a fake service in place of Ray's; every other process is real."""
    monkeypatch.setattr(service_cost, "demo_path", lambda: folder)
    plan: dict[str, Any] = {"turns": 1, "seconds": 1.0, "warmup_s": 0.0, "models": ["demo"]}
    monkeypatch.setattr(service_cost, "ServiceBenchPlan", lambda **given: PLAN(**(given | plan)))
    out = tmp_path / "report.json"
    with fake_service() as fake:
        monkeypatch.setattr(service_cost, "start_service", lambda arguments: instead_of_a_service(fake))
        assert run(["bench", "service", "--quick", "--out", str(out)]) == 0
    shown, report = capsys.readouterr().out, json.loads(out.read_text())
    assert (report["bench"], report["settings"]["models"]) == ("service", ["demo"])
    named = {(row["workload"]["what"], row["metric"], row["peer"]) for row in report["rows"]}
    assert ("unloaded, streams", "ttft", "bare worker") in named
    assert ("16 streams", "messages", "plain grpc server") in named
    assert ("16 short streams", "messages", "plain grpc server") in named
    assert ("32 unary", "requests", "plain grpc server") in named
    assert ("32 unary", "requests", "bare worker") in named
    assert report["through"] == ["none", "ingress", "pool"]
    assert ("demo, 8 streams", "output", "bare worker") in named
    for row in report["rows"]:
        assert row["source"] == "measured"
        assert row["workload"]["what"] in shown
    assert "load average" in shown


PLAN = service_cost.ServiceBenchPlan


def test_unknown_shapes_are_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "service", "--model", "gpt-9"]) == 2
    assert "--model: 'gpt-9' is not known; expected demo or qwen2-0.5b" in capsys.readouterr().err
