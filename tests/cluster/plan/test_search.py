"""The planner: what it claims it has simulated, the same for the same seed, and more load is never cheaper."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.cli.app import run
from motley.cluster.fleet.plan import plan_report as reports
from motley.cluster.fleet.plan.plan_search import GpuOffer, PlanRequest, guess_mix, search_cheapest_mix
from motley.cluster.fleet.plan.request_trace import synthetic_trace
from motley.cluster.routing.prediction.latency_model import Slo
from motley.cluster.simulation.fleet_simulation import simulate
from motley.cluster.simulation.motley_router import MotleyRouter
from motley.cluster.simulation.simulated_fleet import find_model_shape, simulated_fleet
from motley.cluster.simulation.simulation_metrics import measure_outcome
from motley.replicas.errors import InvalidRequest
from motley.replicas.types import PROFILED_BATCH_SIZES

MODEL = find_model_shape("qwen2.5-7b")
OFFERS = (GpuOffer("T4", 0.4), GpuOffer("A10", 0.75))  # prices are only made up


def asked(rate, requests=100, **fields):
    given = {
        "trace": synthetic_trace("synthetic", rate, requests, 1),
        "offers": OFFERS,
        "model": MODEL,
        "slo": Slo(3.0, 0.1),
    }
    return PlanRequest(**given | fields)


def cost(mix):
    return sum(offer.price * count for offer, count in zip(OFFERS, mix, strict=True))


@settings(derandomize=True, max_examples=30, deadline=None)
@given(st.floats(0.5, 100.0), st.floats(1.0, 5.0))
def test_more_load_is_never_reckoned_cheaper(rate, by):
    trace = synthetic_trace("synthetic", 1.0, 100, 1)
    one = asked(1.0, trace=trace)
    assert cost(guess_mix(one, rate)) <= cost(guess_mix(one, rate * by)) + 1e-9


@pytest.fixture(scope="module")
def plans():
    return {rate: search_cheapest_mix(asked(rate, tries=10)) for rate in (2.0, 8.0)}


@pytest.mark.slow("Two searches, each of whose tried mixes is simulated for 100 requests")
def test_more_load_is_never_found_cheaper(plans):
    assert plans[2.0][0].cost < plans[8.0][0].cost


def test_what_it_claims_is_what_a_simulation_gives(plans):
    chosen, tried = plans[8.0]
    assert chosen.share >= 0.95
    assert not any(each.share >= 0.95 for each in tried if each.cost < chosen.cost)
    assert [each.cost for each in tried] == sorted(each.cost for each in tried)
    text = "+".join(f"{n}*{offer.gpu}" for n, offer in zip(chosen.mix, OFFERS, strict=True) if n)
    replicas, one = simulated_fleet(text, MODEL, 0, hidden=0.0), asked(8.0)
    outcome = simulate(replicas, one.trace.arrivals, [MotleyRouter(replicas, one.slo, 0)], 0)
    again = measure_outcome(outcome, one.slo, 0.0, one.trace.seconds)
    assert again == chosen.measured
    assert chosen.share == again.goodput / again.offered


def test_the_same_seed_plans_the_same(plans):
    assert search_cheapest_mix(asked(2.0, tries=10)) == plans[2.0]


def test_objectives_that_no_gpu_holds_are_refused_and_too_few_tries_find_nothing():
    with pytest.raises(InvalidRequest, match=r"none of T4, A10 holds ttft=3, tpot=0\.001"):
        search_cheapest_mix(asked(2.0, slo=Slo(3.0, 0.001)))
    chosen, tried = search_cheapest_mix(asked(8.0, tries=1, share=1.0, slo=Slo(0.3, 0.05)))
    assert chosen is None
    assert len(tried) == 1


def test_the_report_says_what_is_simulated_and_whose_prices_they_are(plans):
    chosen, tried = plans[2.0]
    report = reports.plan_report(asked(2.0), chosen, tried, prices="made-up examples")
    assert report["source"] == "simulated"
    assert [row["chosen"] for row in report["rows"]].count(True) == 1
    chart = reports.plan_svg(report)
    assert "simulated" in chart
    assert "made-up examples" in chart
    assert chart.count("<circle") == len(tried)


def test_the_command_reads_a_trace_and_names_the_gpus(tmp_path, capsys):
    lines = [
        json.dumps({"timestamp": 300 * at, "input_length": 700, "output_length": 40, "hash_ids": [1, 100 + at]})
        for at in range(40)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    out = tmp_path / "plan.json"
    arguments = ["plan", "--trace", str(tmp_path / "trace.jsonl"), "--gpus", "T4=0.4, A10=0.75", "--tries", "6"]
    assert run([*arguments, "--rate", "2", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "simulated" in said
    assert "40 requests in 20 s" in said
    report = json.loads(out.read_text())
    assert report["chosen"] in said
    assert report["trace"]["format"] == "Mooncake"
    assert report["settings"]["prices"] == "given"
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


@pytest.mark.slow("Two plans, each of whose tried mixes is simulated for 60 requests")
def test_gpus_are_as_measured_where_they_were(tmp_path, capsys):
    """Takes more of a GPU that was measured to be slow, and shows everywhere which of them was measured."""
    trace = ["--trace", "synthetic", "--requests", "60", "--rate", "4", "--tries", "8", "--gpus", "A10=0.5,T4=90"]
    rates = {
        "prefill_tokens_per_s": 600.0,
        "decode_s": [0.05 + 6e-4 * batch for batch in PROFILED_BATCH_SIZES],
        "context_s": 4e-7,
    }
    (tmp_path / "a10.json").write_text(json.dumps(rates))
    costs = []
    for more, said, file in (
        ([], "rates: assumed", ""),
        (["--measured", f"A10={tmp_path / 'a10.json'}"], "rates: A10 as measured, others assumed", "a10.json"),
    ):
        out = tmp_path / "plan.json"
        assert run(["plan", *trace, *more, "--out", str(out)]) == 0
        report = json.loads(out.read_text())
        assert said in " ".join(capsys.readouterr().out.split())
        assert said in out.with_suffix(".svg").read_text()
        assert [each["attained"]["measured"] for each in report["settings"]["gpus"]] == [file, ""]
        costs.append(min(row["cost_per_hour"] for row in report["rows"] if row["chosen"]))
    assert costs[0] < costs[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--slo", "ttft=3"], "--slo ttft=3"), (["--slo", "ttft=3,tpot=0"], "each from 1e-6 to 1e+09 seconds"),
        (["--gpus", "A10"], "expected GPU=PRICE"), (["--gpus", "K80=1"], "'K80' is not in the table"),
        (["--gpus", "T4=1,Tesla T4=2"], "there twice"), (["--trace", "/nowhere"], "No such file"),
        (["--measured", "T4"], "expected GPU=FILE"), (["--measured", "P40=x.json"], "not one of the GPUs in --gpus"),
        (["--measured", "T4=/nowhere/x.json"], "/nowhere/x.json: No such file"),
        (["--model", "gpt-5"], "'gpt-5' is not a simulated model"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named(arguments, said, capsys):
    assert run(["plan", "--requests", "10", *arguments]) == 2
    assert said in capsys.readouterr().err
