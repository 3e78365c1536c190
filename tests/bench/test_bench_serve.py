"""`motley bench serve`: its requests are what was asked for, and its figures what happened."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from certificates import Certificates
from fake_service import FakeService, fake_service
from hypothesis import given
from hypothesis import strategies as st

from motley.cli.app import run
from motley.cluster.simulation.length_distribution import LengthDistribution
from motley_bench.load import load_report
from motley_bench.load.load_generator import LoadGenerator
from motley_bench.load.load_senders import RequestFailed
from motley_bench.load.load_workload import LoadRequest, Workload, generate_requests
from motley_bench.load.measured_service import MeasuredService
from motley_bench.load.request_samples import OK, UNFINISHED, BenchSlo, LoadOutcome, RequestSample
from motley_bench.reporting.duration_histogram import DurationHistogram
from motley_bench.reporting.text_charts import draw_bars, draw_histogram

ALPHABET = tuple(range(100, 150))


@pytest.mark.parametrize("text", ["128", "uniform:16:256", "lognormal:128:0.6"])
def test_lengths_are_written_as_they_are_read(text: str) -> None:
    assert str(LengthDistribution.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "1.5", "nan", "uniform:5", "uniform:9:2", "lognormal:10:9", "normal:1:2", "1e99", "fixed:1:2"],
)
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        LengthDistribution.parse(text)


def test_lengths_have_the_shape_they_name() -> None:
    rng = random.Random(0)
    assert {LengthDistribution.parse("7").draw(rng) for _ in range(10)} == {7}
    assert {LengthDistribution.parse("uniform:3:5").draw(rng) for _ in range(200)} == {3, 4, 5}
    drawn = sorted(LengthDistribution.parse("lognormal:100:1").draw(rng) for _ in range(4001))
    assert drawn[0] >= 1
    assert drawn[2000] == pytest.approx(100, rel=0.1)  # the median
    assert drawn[3365] == pytest.approx(100 * 2.718, rel=0.15)  # one sigma above it


def test_the_same_seed_gives_the_same_requests_to_any_number_of_clients() -> None:
    workload = Workload(
        prompt_tokens=LengthDistribution.parse("uniform:4:20"), rate=50.0, shared_prefix=0.5, duration_s=2.0
    )
    whole = list(generate_requests(workload, ALPHABET))
    parts = [list(itertools.islice(generate_requests(workload, ALPHABET), i, None, 3)) for i in range(3)]
    assert whole == sorted(itertools.chain(*parts), key=lambda job: job.at_s or 0.0)
    assert whole != list(generate_requests(Workload(rate=50.0, duration_s=2.0, seed=1), ALPHABET))


def test_the_shared_part_of_prompts_is_shared() -> None:
    workload = Workload(prompt_tokens=LengthDistribution.parse("uniform:10:60"), shared_prefix=0.5)
    prompts = [job.prompt_ids for job in itertools.islice(generate_requests(workload, ALPHABET), 50)]
    longest = max(prompts, key=len)
    for prompt in prompts:
        assert prompt[: round(len(prompt) * 0.5)] == longest[: round(len(prompt) * 0.5)]
    assert len({prompt[-5:] for prompt in prompts}) == 50


def test_arrivals_are_a_poisson_process_that_ends_with_the_window() -> None:
    workload = Workload(rate=200.0, warmup_s=1.0, duration_s=19.0)
    times = [job.at_s or 0.0 for job in generate_requests(workload, ALPHABET)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[-1] < 20.0
    assert len(times) == pytest.approx(4000, rel=0.06)
    mean = sum(gaps) / len(gaps)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.15)  # exponential


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=200), st.sampled_from([0.0, 0.2, 0.5, 0.99, 1.0]))
def test_a_histogram_has_quantiles_within_a_percent(seconds: list[float], share: float) -> None:
    whole, parts = DurationHistogram(), [DurationHistogram(), DurationHistogram()]
    for i, value in enumerate(seconds):
        whole.add(value)
        parts[i % 2].add(value)
    parts[0].merge(DurationHistogram.from_json(json.loads(json.dumps(parts[1].to_json()))))
    exact = sorted(seconds)[int(share * (len(seconds) - 1))]
    assert whole.quantile(share) == parts[0].quantile(share) == pytest.approx(exact, rel=0.011)
    assert whole.count == len(seconds)
    assert whole.mean == pytest.approx(sum(seconds) / len(seconds))


def test_latencies_are_what_their_definitions_say() -> None:
    sample = RequestSample(intended_s=1.0, sent_s=1.2, end_s=2.5, first_s=1.5, last_s=2.5, tokens=11, messages=11)
    assert sample.ttft_s == pytest.approx(0.5)  # from when it was meant to be sent
    assert sample.tpot_s == pytest.approx(0.1)
    assert sample.e2e_s == pytest.approx(1.5)
    assert RequestSample(0.0, 0.0, 1.0, tokens=5).ttft_s is None  # an answer in one piece
    assert RequestSample(0.0, 0.0, 1.0, first_s=0.5, tokens=1).tpot_s is None
    assert BenchSlo(ttft_s=0.6, tpot_s=0.2).met_by(sample)
    assert not BenchSlo(ttft_s=0.4).met_by(sample)
    assert not BenchSlo().met_by(RequestSample(0.0, 0.0, 1.0, code="UNAVAILABLE"))


class ScriptedSender:
    """`messages` of each request, `gap_s` apart; every request that `fails` says with its code."""

    def __init__(
        self, messages: int = 3, gap_s: float = 0.0, fails: Callable[[int], str | None] = lambda _: None
    ) -> None:
        self._messages, self._gap_s, self._fails = messages, gap_s, fails
        self.sent: list[float] = []
        self.cancelled = 0

    async def stream(self, job: LoadRequest, on_message: Callable[[], None]) -> int:
        number = len(self.sent)
        self.sent.append(time.monotonic())
        if code := self._fails(number):
            raise RequestFailed(code)
        try:
            for _ in range(self._messages):
                await asyncio.sleep(self._gap_s)
                on_message()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return 2 * self._messages

    async def whole(self, job: LoadRequest) -> int:
        return await self.stream(job, lambda: None)

    async def close(self) -> None: ...


async def put(workload: Workload, sender: ScriptedSender) -> LoadOutcome:
    load = LoadGenerator(workload, sender, generate_requests(workload, ALPHABET), time.monotonic())
    return await load.run(workload.concurrency)


async def test_a_closed_loop_keeps_so_many_under_way() -> None:
    sender = ScriptedSender(messages=4, gap_s=0.01)
    outcome = await put(Workload(concurrency=3, warmup_s=0.0, duration_s=1.0), sender)
    assert outcome.samples
    assert all(sample.code == OK and sample.messages == 4 and sample.tokens == 8 for sample in outcome.samples)
    for sample in outcome.samples:
        others = [other for other in outcome.samples if other.sent_s <= sample.sent_s < other.end_s]
        assert len(others) <= 3
    inside = [sample for sample in outcome.samples if sample.end_s < 1.0]
    assert outcome.messages >= 4 * len(inside)
    assert outcome.tokens == pytest.approx(2 * outcome.messages)
    assert outcome.messages == outcome.by_second.total()


async def test_open_loop_latencies_count_from_when_a_request_was_due() -> None:
    """A service that stands still must not look fast because the client stood still with it."""

    class Stalls(ScriptedSender):
        async def stream(self, job: LoadRequest, on_message: Callable[[], None]) -> int:
            if not self.sent:
                time.sleep(0.3)  # the whole event loop, as a client that cannot keep up
            return await super().stream(job, on_message)

    workload = Workload(rate=100.0, warmup_s=0.0, duration_s=0.4)
    outcome = await put(workload, Stalls())
    late = [sample for sample in outcome.samples if sample.sent_s - sample.intended_s > 0.05]
    assert len(late) >= 5
    assert all((sample.ttft_s or 0.0) >= sample.sent_s - sample.intended_s for sample in late)
    found = load_report.client_report(workload, outcome)
    assert found["limited"]
    assert "late" in found["why"]


async def test_a_client_that_stood_still_for_the_whole_window_says_how_long() -> None:
    workload = Workload(concurrency=1, warmup_s=1.0, duration_s=2.0)
    outcome = await LoadGenerator(
        workload, ScriptedSender(), generate_requests(workload, ALPHABET), time.monotonic() - 10
    ).run(1)
    assert not outcome.samples
    assert outcome.lag_s >= 8
    assert load_report.client_report(workload, outcome)["limited"]


async def test_failures_are_counted_by_code_and_are_no_latencies() -> None:
    codes = {0: "RESOURCE_EXHAUSTED", 1: "503"}
    sender = ScriptedSender(gap_s=0.01, fails=codes.get)
    workload = Workload(concurrency=2, warmup_s=0.0, duration_s=1.0)
    outcome = await put(workload, sender)
    found = built(workload, outcome)
    assert found["errors"] == {"RESOURCE_EXHAUSTED": 1, "503": 1}
    assert metric(found, "failed")["value"] == 2
    assert metric(found, "ttft")["count"] == len(outcome.samples) - 2


async def test_what_does_not_end_is_cancelled_and_said() -> None:
    sender = ScriptedSender(messages=1, gap_s=60.0)
    workload = Workload(concurrency=2, warmup_s=0.0, duration_s=1.0, drain_s=0.05)
    outcome = await put(workload, sender)
    assert [sample.code for sample in outcome.samples] == [UNFINISHED] * 2
    assert sender.cancelled == 2
    assert built(workload, outcome)["errors"] == {UNFINISHED: 2}


async def test_answers_in_one_piece_have_no_ttft() -> None:
    workload = Workload(concurrency=2, streaming=False, warmup_s=0.0, duration_s=1.0)
    found = built(workload, await put(workload, ScriptedSender(gap_s=0.005)))
    assert {row["metric"] for row in found["rows"]} == {"requests", "goodput", "output", "e2e", "failed"}


def test_goodput_counts_what_met_every_slo() -> None:
    workload = Workload(warmup_s=1.0, duration_s=2.0)
    samples = [RequestSample(1.0 + i / 10, 1.0 + i / 10, 2.0, OK, 1.1 + i / 5, 2.0, 5, 5) for i in range(10)]
    found = load_report.metric_rows(workload, LoadOutcome(samples=samples), BenchSlo(ttft_s=0.45))
    assert next(row for row in found if row["metric"] == "goodput")["value"] == 4 / 2.0


def test_rates_are_of_what_ended_in_the_window() -> None:
    """However many were begun in it: of the requests that ended no more can have met every SLO."""
    workload = Workload(warmup_s=1.0, duration_s=2.0)
    samples = [
        RequestSample(start, start, start + 1.0, OK, start + 0.1, start + 1.0, 5, 5) for start in (0.5, 1.5, 2.5, 2.6)
    ]
    found = {
        row["metric"]: row["value"]
        for row in load_report.metric_rows(workload, LoadOutcome(samples=samples), BenchSlo(ttft_s=0.45))
    }
    assert found["requests"] == found["goodput"] == 2 / 2.0


def test_charts() -> None:
    assert draw_bars([0, 1, 2, 4]) == "▁▃▅█"
    assert draw_bars([]) == ""
    assert draw_histogram([1.0, 10.0, 10.0, 100.0], bins=3) == "1 ▅█▅ 100"
    assert draw_histogram([5.0, 5.0], bins=3) == "5 █▁▁ 5"


def built(workload: Workload, outcome: LoadOutcome) -> dict[str, object]:
    service = MeasuredService(workload.protocol, "nowhere", "m", ALPHABET, 100, null=True)
    return load_report.build_report(workload, service, outcome, BenchSlo(), 1)


def metric(found: dict[str, object], name: str) -> dict[str, float]:
    rows = found["rows"]
    assert isinstance(rows, list)
    return dict(next(row for row in rows if row["metric"] == name))


@pytest.fixture(scope="module")
def service() -> Iterator[FakeService]:
    with fake_service() as service:
        yield service


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("unary", [False, True])
def test_the_command_measures_a_service(
    service: FakeService, protocol: str, unary: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """By real clients in processes of their own; every third request is refused."""
    target = service.grpc if protocol == "grpc" else service.http
    settings = ["--concurrency", "4", "--clients", "2", "--duration-s", "1", "--warmup-s", "0", "--output-tokens", "5"]
    arguments = ["bench", "serve", "--protocol", protocol, "--target", target, *settings, "--prompt-tokens", "7"]
    service.requests.clear()
    assert run([*arguments, *(["--unary"] if unary else []), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bench"] == "serve"
    assert found["engine"] == "null: computes nothing"
    assert found["settings"]["output_tokens"] == "5"
    assert set(service.requests) == {(7, 5, not unary)}
    refused = "RESOURCE_EXHAUSTED" if protocol == "grpc" else "429"
    assert found["errors"] == {refused: pytest.approx(len(service.requests) / 3, abs=1)}
    assert metric(found, "output")["value"] == pytest.approx(5 * metric(found, "requests")["value"], rel=0.25)
    if not unary:
        assert metric(found, "messages")["value"] == pytest.approx(metric(found, "output")["value"])
        assert metric(found, "itl")["count"] > 0


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_command_over_tls(protocol: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificates = Certificates(tmp_path)
    with fake_service(certificates) as service:
        target = service.grpc if protocol == "grpc" else service.http
        arguments = ["bench", "serve", "--protocol", protocol, "--target", target, "--duration-s", "0.5", "--json"]
        assert run([*arguments, "--warmup-s", "0", "--tls-ca", str(certificates.ca)]) == 0
        assert json.loads(capsys.readouterr().out)["bench"] == "serve"
        assert service.requests, "nothing came; how much of it within half a second is the machine's affair"
        if protocol == "http":
            assert run(arguments) != 0, "nobody it trusts"


def test_the_command_shows_a_table_and_charts(service: FakeService, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--target",
        service.grpc,
        "--rate",
        "40",
        "--duration-s",
        "1",
        "--warmup-s",
        "0",
        "--slo-ttft-ms",
        "1e4",
    ]
    assert run(["bench", "serve", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "Poisson, 40/s, null engine: nothing is computed" in shown
    for word in ("requests/s", "goodput", "ttft", "tpot", "itl", "by second", "× RESOURCE_EXHAUSTED"):
        assert word in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--protocol", "carrier-pigeon"], "--protocol: 'carrier-pigeon': expected grpc or http"),
        (["--prompt-tokens", "many"], "--prompt-tokens: 'many' is no length"),
        (["--rate", "0"], "Invalid value for '--rate': Input should be greater than or equal to 0.000001"),
        (["--start", "--target", "x:1"], "--target: give either the target of a running service, or --start"),
        (["demo"], "arguments of `motley serve` need --start"),
    ],
)
def test_wrong_settings_are_told_in_a_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_service_that_is_not_there_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", "--protocol", "http", "--target", "http://127.0.0.1:9"]) == 1
    assert "no service answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_a_service_that_wants_a_key_is_no_service_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refuse) as server:
        Thread(target=server.handle_request).start()
        target = f"http://127.0.0.1:{server.server_port}"
        assert run(["bench", "serve", "--protocol", "http", "--target", target]) == 1
    assert f"the service at {target} refuses the request: HTTP Error 401" in capsys.readouterr().err


def test_lengths_that_do_not_fit_the_model_are_refused(
    service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "serve", "--target", service.grpc, "--prompt-tokens", "5000"]) == 2
    assert "the context holds 4096" in capsys.readouterr().err
