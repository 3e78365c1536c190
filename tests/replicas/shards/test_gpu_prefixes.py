"""KV of a model divided among GPUs, on the host: real processes, each with the stand-in for one.

Prefixes go to a store and come from there, and of sequences that are preempted it waits there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_driver import drive
from fake_prefixes import SECRET, BadStore
from late_device import LateDevice
from late_exchange import LateExchange
from late_shards import RANKS, STAGES, built, followers
from serve_process import wait_for
from store_timeouts import be_patient
from thorough import thorough
from tiny_checkpoints import build_checkpoint

from motley.replicas.engine.kv_reuse.swap_planner import SwapRates
from motley.replicas.engine.startup.engine_builder import BuiltEngine
from motley.replicas.kv.store.fetch_cost import FetchCostModel
from motley.replicas.kv.store.store_access import PrefixStoreAccess
from motley.replicas.parallel.leader import follower_group
from motley.replicas.types import Request, SamplingParams

SYSTEM = [(7 * i) % 101 + 3 for i in range(150)]
CROWD = [[*SYSTEM[: 40 * part], *range(part, 60 + part)] for part in (1, 2, 3)] + [[*SYSTEM, 1, 2, 3], SYSTEM[::-1]]
LONG = [list(range(first, first + 30)) for first in range(0, 180, 30)]
WAYS = {"ranks": RANKS, "stages": STAGES, "stages of ranks": RANKS | STAGES}
# How a model is divided, and whether copies are early.
CASES = [("stages of ranks", True), *thorough(("ranks", False), ("ranks", True), ("stages", False))]


class LastingStore(BadStore):
    """A store of several engines: none of them closes it."""

    def close(self) -> None:
        return None


@pytest.fixture(autouse=True)
def _processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(follower_group, "CollectiveExchange", LateExchange)
    be_patient(monkeypatch)
    yield
    assert followers() == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", num_hidden_layers=4, tie_word_embeddings=True)


def engine(folder: Path, store: BadStore | None, early: bool = False, what: str = "serves", **way: Any) -> BuiltEngine:
    """To which fetching always seems faster; what it has computed once, it stores. early: so are its copies made."""
    access = None if store is None else PrefixStoreAccess(store, SECRET)
    given = {"prefix_buffer_bytes": 1 << 22, "prefix_after": 1, "prefix_any_numerics": True} | way
    made = built(folder, what, stand_in=LateDevice(early=early), access=access, **given)
    if store is not None:
        made.core.scheduler.prefixes.cost_model = FetchCostModel(token_s=1.0, block_s=1e-9)
    return made


def said(made: BuiltEngine, prompts: Sequence[Sequence[int]], tokens: int = 12) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=5)
    answers = drive(made.core, [Request("r", tuple(prompt), params) for prompt in prompts], apart=1)
    return [[token for each in messages for delta in each.deltas for token in delta.token_ids] for messages in answers]


def finish(made: BuiltEngine) -> None:
    """Everything that is to be stored, is; and no block of the host is kept."""

    def done() -> bool:
        made.core.step()
        pool = made.core.scheduler.prefixes.pool
        return not made.core.scheduler.prefixes.waits and pool.available == pool.total

    wait_for(done, "all that is to be stored")


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    return _of_one_gpu(folder, CROWD)


@pytest.fixture(scope="module")
def alone_for_long(folder: Path) -> list[list[int]]:
    return _of_one_gpu(folder, LONG, 70)


def _of_one_gpu(folder: Path, prompts: Sequence[Sequence[int]], tokens: int = 12) -> list[list[int]]:
    made = built(folder)
    try:
        return said(made, prompts, tokens)
    finally:
        made.close()


@pytest.mark.slow("Five processes with stand-ins, of which four answer a crowd twice")
@pytest.mark.parametrize(("name", "early"), CASES)
def test_what_one_gpu_wrote_several_read_and_the_reverse(
    name: str, early: bool, folder: Path, alone: list[list[int]]
) -> None:
    """Tokens are those without a store; then of many at once, with hardly any room for KV: while others compute,
    prefixes come and go.
    """
    first, second = CROWD[3], CROWD[4]
    store = LastingStore(time.monotonic)
    whole = engine(folder, store, early)
    blocks = 24
    divided = engine(folder, store, early, kv_memory_bytes=blocks * _block_bytes(name), **WAYS[name])
    try:
        assert divided.core.scheduler.pool.total == blocks
        assert whole.core.scheduler.prefixes.shares == divided.core.scheduler.prefixes.shares != ""
        for writer, reader, prompt, expected in (
            (whole, divided, first, alone[3]),
            (divided, whole, second, alone[4]),
        ):
            assert said(writer, [prompt]) == [expected]
            finish(writer)
            before = store.stats().hits
            assert said(reader, [prompt]) == [expected]
            assert store.stats().hits > before
        for _ in range(2):
            divided.core.scheduler.pool.forget_prefixes()
            assert said(divided, CROWD) == alone
            finish(divided)
    finally:
        whole.close()
        divided.close()


def test_stages_on_unlike_cards_share_with_their_like_alone(folder: Path) -> None:
    """Stages of one arithmetic compute to the bit what one card does; some layers here are another's."""
    store, shares = LastingStore(time.monotonic), []
    for what, way in (("serves", {}), ("serves", STAGES), ("unlike", STAGES)):
        made = engine(folder, store, what=what, prefix_any_numerics=False, **way)
        shares.append(made.core.scheduler.prefixes.shares)
        made.close()
    assert shares[0] == shares[1] != shares[2] != ""


@pytest.mark.slow("Four processes with stand-ins draw 70 tokens of six sequences twice")
@pytest.mark.thorough  # each time: test_shared_prefixes, and one process in test_swapper
@pytest.mark.parametrize(("name", "early"), CASES)
def test_a_preempted_sequence_finds_its_kv_again(
    name: str, early: bool, folder: Path, alone_for_long: list[list[int]]
) -> None:
    """On the host, in every process; others find no room there, and are computed again."""
    made = built(
        folder, stand_in=LateDevice(early=early), kv_memory_bytes=16 * _block_bytes(name),
        swap_memory_bytes=10 * 4 * 2 * 2 * 16 * 16 * 4, **WAYS[name],
    )  # fmt: skip
    try:
        assert made.core.scheduler.swap.pool.total == 10
        made.core.scheduler.swap.rates = SwapRates(0.0, 0.0, 1.0)  # to copy always seems faster
        for _ in range(2):
            assert said(made, LONG, 70) == alone_for_long
            made.core.scheduler.pool.forget_prefixes()
        load = made.core.load()
        assert load.preemptions_swapped > 2
        assert load.preemptions_recomputed > 0
    finally:
        made.close()


def _block_bytes(name: str) -> int:
    """Return the bytes of a block in the process that has the most layers."""
    heads, layers = (1 if "ranks" in name else 2), (3 if "stages" in name else 4)
    return layers * heads * 2 * 16 * 16 * 4
