"""Fleets in virtual time: nothing is lost, and the same seeds give the same run."""

import pytest

from motley.cluster.routing.prediction.latency_model import Slo
from motley.cluster.simulation.fleet_simulation import simulate
from motley.cluster.simulation.motley_router import MotleyRouter
from motley.cluster.simulation.simulated_fleet import find_model_shape, simulated_fleet
from motley.cluster.simulation.traffic import HIGH_REUSE, LOW_REUSE, arrival_block_hashes, poisson_arrivals
from motley.replicas.errors import InvalidRequest

SLO = Slo(3.0, 0.1)
MODEL = find_model_shape("qwen2.5-7b")
SMALL = "P40+T4+A10"


def a_run(rate=6.0, seconds=20.0, seed=3, reuse=LOW_REUSE):
    replicas = simulated_fleet(SMALL, MODEL, 1)
    traffic = list(poisson_arrivals(rate, seconds, seed, reuse=reuse))
    return replicas, traffic, simulate(replicas, traffic, [MotleyRouter(replicas, SLO, s) for s in (0, 1)], 5)


def test_everything_that_was_taken_ends_once():
    _, traffic, outcome = a_run()
    assert len(outcome.jobs) == len(traffic) > 80
    for job, arrival, replica in zip(outcome.jobs, traffic, outcome.replicas, strict=True):
        assert job.sent_s == arrival.at_s
        if replica is None:
            assert job.first_s is None
            assert job.done_s is None
        else:
            assert arrival.at_s < job.first_s <= job.done_s
            assert (job.first_s == job.done_s) == (arrival.output_tokens == 1)


def test_what_comes_after_those_that_are_counted_is_in_their_way_and_not_waited_for():
    replicas, traffic, alone = a_run(seconds=10.0)
    more = list(poisson_arrivals(6.0, 30.0, 3, reuse=LOW_REUSE))
    assert more[: len(traffic)] == traffic
    routers = [MotleyRouter(replicas, SLO, s) for s in (0, 1)]
    outcome = simulate(replicas, more, routers, 5, until_s=10.0)
    counted = [job for job in outcome.jobs if job.sent_s < 10.0]
    taken = [job for job, replica in zip(outcome.jobs, outcome.replicas, strict=True) if replica is not None]
    assert len(counted) == len(traffic)
    assert all(job.done_s is not None for job in taken if job.sent_s < 10.0)
    assert any(job.done_s is None for job in taken), "the last ones are not waited for"
    both = [(job.done_s, then.done_s) for job, then in zip(counted, alone.jobs, strict=True) if job.done_s]
    assert sum(now for now, _ in both) > sum(then for _, then in both if then), "they are in the way"


def test_the_same_seeds_give_the_same_run():
    times = [[(job.first_s, job.done_s) for job in a_run()[2].jobs] for _ in range(2)]
    assert times[0] == times[1]
    assert times[0] != [(job.first_s, job.done_s) for job in a_run(seed=4)[2].jobs]


def test_truth_differs_from_the_profile_and_with_the_seed():
    known, other = simulated_fleet("2*T4", MODEL, 1), simulated_fleet("2*T4", MODEL, 2)
    assert known[0].published == other[0].published
    assert len({each.true.attained for each in (*known, *other)}) == 4


def test_prompts_with_the_same_beginning_share_its_blocks_alone():
    some = [each for each in poisson_arrivals(20, 20, 1, reuse=HIGH_REUSE) if each.prefix[0] == 1][:2]
    one, two = map(arrival_block_hashes, some)
    common = some[0].prefix[1] // 16
    assert one[:common] == two[:common]
    assert not set(one[common:]) & set(two[common:])
    assert len(one) == some[0].prompt_tokens // 16


def test_a_prefix_is_found_where_it_was_computed():
    *_, outcome = a_run(rate=3.0, reuse=HIGH_REUSE)
    assert sum(job.cached_tokens > 0 for job in outcome.jobs) > 10
    *_, outcome = a_run(rate=3.0)
    assert not any(job.cached_tokens for job in outcome.jobs)


def test_a_fleet_is_read_as_it_is_written():
    assert [each.name for each in simulated_fleet("2*T4 + H100 80GB HBM3", MODEL, 1)] == [
        "T4 0",
        "T4 1",
        "H100 80GB HBM3 2",
    ]
    assert len(simulated_fleet("thousand", MODEL, 1)) == 1000
    for wrong in ("", "0*T4", "2*Tesla K80"):
        with pytest.raises(InvalidRequest):
            simulated_fleet(wrong, MODEL, 1)
    with pytest.raises(InvalidRequest, match="does not hold qwen3-32b"):
        simulated_fleet("T4", find_model_shape("qwen3-32b"), 1)
