"""The scaling model: what its arithmetic adds up to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gptq_files import build_gptq
from hollow_checkpoints import INT4, LLAMA_7B, write_hollow

from motley.kernels.device.interconnect import (
    DeviceLink,
    LinkProtocol,
    all_gather_s,
    all_reduce_s,
    available_links,
    send_s,
)
from motley.replicas.capacity.device_fit import FitWorkload, find_table_devices, fit_model
from motley.replicas.model.checkpoint_inspection import Checkpoint, inspect_checkpoint
from motley.replicas.parallel.planning.memory_plan import ParallelLayout, ParallelMemoryPlan, plan_parallel_memory
from motley.replicas.parallel.planning.scaling_estimate import ScalingEstimate, estimate_scaling, link_joins_all

[A100] = find_table_devices("NVIDIA A100-SXM4-80GB")
FREE = DeviceLink("free", "nvlink", 1e30, (LinkProtocol(0, 0, 1), LinkProtocol(0, 0, 1)), None, ())
SLOW = DeviceLink("slow", "ethernet", 1e9, (LinkProtocol(1e-5, 1e-5, 0.5), LinkProtocol(2e-5, 2e-5, 1)), 4, ())
ASKED = FitWorkload(context=1024, batch=8, swap_memory_bytes=0)
HIDDEN, LAYERS, VOCABULARY = 4096, 32, 32_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("scaling") / "model"
    return inspect_checkpoint(write_hollow(folder, {**LLAMA_7B, "quantization_config": INT4}))


def of(checkpoint: Checkpoint, division: ParallelLayout, asked: FitWorkload = ASKED) -> ParallelMemoryPlan:
    return plan_parallel_memory(checkpoint, [A100] * division.stages, asked, division)


def times(
    checkpoint: Checkpoint, division: ParallelLayout, link: DeviceLink | None, asked: FitWorkload = ASKED
) -> ScalingEstimate:
    return estimate_scaling(of(checkpoint, division, asked), link, asked)


def test_one_process_takes_what_the_roofline_says_of_the_whole(checkpoint: Checkpoint) -> None:
    whole = fit_model(checkpoint, A100, ASKED)
    for link in (None, SLOW):
        one = times(checkpoint, ParallelLayout(), link)
        assert (one.tpot_s, one.ttft_s, one.exchange_s) == (whole.tpot_s, whole.ttft_s, 0)
        assert one.tokens_per_s == pytest.approx(8 / one.tpot_s)
        assert one.alone_s == fit_model(checkpoint, A100, replace(ASKED, batch=1)).tpot_s


def test_ranks_over_a_link_that_costs_nothing_share_the_time(checkpoint: Checkpoint) -> None:
    """All but norms and activations' moves, which every rank makes."""
    one, two, four = (times(checkpoint, ParallelLayout(ranks), FREE) for ranks in (1, 2, 4))
    for each in ("tpot_s", "ttft_s"):
        assert 0.5 * getattr(one, each) <= getattr(two, each) < 0.6 * getattr(one, each)
        assert 0.25 * getattr(one, each) <= getattr(four, each) < 0.37 * getattr(one, each)


def test_what_ranks_exchange(checkpoint: Checkpoint) -> None:
    """Two sums a layer and one more for the embedding, and the logits once: of each step, and of each piece."""
    slow, free = (times(checkpoint, ParallelLayout(4), link) for link in (SLOW, FREE))
    for batch, difference in ((8, slow.tpot_s - free.tpot_s), (1, slow.alone_s - free.alone_s)):
        sums = (2 * LAYERS + 1) * all_reduce_s(SLOW, 4, batch * HIDDEN * 2)
        assert difference == pytest.approx(sums + all_gather_s(SLOW, 4, batch * VOCABULARY * 4))
    assert slow.exchange_s == pytest.approx(slow.alone_s - free.alone_s)
    pieces = 2 * (2 * LAYERS + 1) * all_reduce_s(SLOW, 4, 512 * HIDDEN * 2) + all_gather_s(SLOW, 4, VOCABULARY * 4)
    assert slow.ttft_s - free.ttft_s == pytest.approx(pieces)


def test_orders_of_their_own_are_gathered(tmp_path: Path) -> None:
    """GPTQ's desc_act scatters the inputs of o and down: ranks gather them all first."""
    plain, scattered = (
        inspect_checkpoint(build_gptq(tmp_path / str(desc_act), desc_act=desc_act, hidden_size=256))
        for desc_act in (False, True)
    )
    asked = replace(ASKED, context=128, batch=1)
    extra = (
        times(scattered, ParallelLayout(2), SLOW, asked).exchange_s
        - times(plain, ParallelLayout(2), SLOW, asked).exchange_s
    )
    config = scattered.config
    widths = [plan.inputs.total for plan in config.layers[0].linears if plan.inputs is not None]
    assert extra == pytest.approx(config.num_layers * sum(all_gather_s(SLOW, 2, 2 * width) for width in widths))


def test_stages_take_their_sum_alone_and_the_slowest_together(checkpoint: Checkpoint) -> None:
    """A quarter of the layers and the rest; eight sequences are two steps of four."""
    whole, split = (times(checkpoint, each, FREE) for each in (ParallelLayout(), ParallelLayout(1, 2, (8, 24))))
    assert split.alone_s == pytest.approx(whole.alone_s)
    four = times(checkpoint, ParallelLayout(), None, replace(ASKED, batch=4)).tpot_s
    assert 2 * 0.75 * four < split.tpot_s < 2 * 0.8 * four, "twice the second stage, which has the head too"
    assert split.tokens_per_s == pytest.approx(8 / split.tpot_s)
    even = times(checkpoint, ParallelLayout(1, 2, (16, 16)), FREE)
    assert even.tpot_s < split.tpot_s
    one = times(checkpoint, ParallelLayout(1, 2, (16, 16)), FREE, replace(ASKED, batch=1))
    assert one.tpot_s == pytest.approx(one.alone_s), "one sequence alone is no faster"


def test_what_stages_hand_on(checkpoint: Checkpoint) -> None:
    """Hidden states and residual to the next, logits back to the first."""
    division = ParallelLayout(1, 2, (16, 16))
    slow, free = (times(checkpoint, division, link) for link in (SLOW, FREE))
    hop, back = send_s(SLOW, 2 * HIDDEN * 2), send_s(SLOW, VOCABULARY * 4)
    assert slow.exchange_s == pytest.approx(hop + back)
    assert slow.alone_s - free.alone_s == pytest.approx(hop + back)


def test_pieces_of_a_prompt_follow_each_other(checkpoint: Checkpoint) -> None:
    """So that a prompt of many takes little more than its slowest stage, and one of one piece takes the sum."""
    short, long = replace(ASKED, context=512, batch=1), replace(ASKED, context=4096, batch=1)
    division = ParallelLayout(1, 2, (16, 16))
    assert times(checkpoint, division, FREE, short).ttft_s == pytest.approx(
        times(checkpoint, ParallelLayout(), None, short).ttft_s
    )
    whole, split = (
        times(checkpoint, ParallelLayout(), None, long).ttft_s,
        times(checkpoint, division, FREE, long).ttft_s,
    )
    assert whole / 2 < split < whole * (1 / 2 + 1 / 8)


def test_unequal_cards_each_take_their_own_time(checkpoint: Checkpoint) -> None:
    """The stages have the same layers on a fast and on a slow card: the slow one has its own time, as if both were
    slow.
    """
    [t4] = find_table_devices("Tesla T4")
    one, division = replace(ASKED, batch=1), ParallelLayout(1, 2, (16, 16))
    places = [t4, t4], [A100, A100], [t4, A100], [A100, t4]
    slow, fast, mixed, turned = (
        estimate_scaling(plan_parallel_memory(checkpoint, each, one, division), FREE, one).alone_s for each in places
    )
    assert fast < turned < slow
    assert mixed + turned == pytest.approx(fast + slow)
    asked = replace(ASKED, batch=16)
    slow, mixed = (
        estimate_scaling(plan_parallel_memory(checkpoint, each, asked, division), FREE, asked).tpot_s
        for each in ([t4, t4], [A100, t4])
    )
    assert mixed == pytest.approx(slow), "a pipeline is as fast as its slowest stage"


def test_slower_links_take_longer_and_join_so_many(checkpoint: Checkpoint) -> None:
    assert A100.device is not None
    links = {link.name: link for link in available_links(A100.device)}
    by_link = [
        times(checkpoint, ParallelLayout(4), links[name]) for name in ("nvlink", "pcie4", "ethernet100", "ethernet10")
    ]
    for each in ("tpot_s", "ttft_s", "exchange_s"):
        found = [getattr(predicted, each) for predicted in by_link]
        assert found == sorted(found)
    assert link_joins_all(None, 1)
    assert not link_joins_all(None, 2)
    assert link_joins_all(SLOW, 4)
    assert not link_joins_all(SLOW, 8)
