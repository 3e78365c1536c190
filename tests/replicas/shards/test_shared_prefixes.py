"""Prefixes of models that are divided among real processes: whoever wrote them, whoever reads them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_prefixes import SECRET, BadStore
from serve_process import alive, children, command_line, wait_for
from store_timeouts import be_patient
from tiny_checkpoints import build_checkpoint

from motley import Engine, SamplingParams
from motley.kernels.cpu.c_kernels.native_build import load_library
from motley.replicas.engine.kv_reuse.swap_planner import SwapRates
from motley.replicas.errors import EngineLost
from motley.replicas.kv.store.fetch_cost import FetchCostModel
from motley.replicas.kv.store.prefix_store import ValueParts, ValueQuery
from motley.replicas.kv.store.store_access import PrefixStoreAccess

COMPILED = pytest.mark.skipif(load_library()[0] is None, reason="no C compiler")
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, seed=0, logprobs=0)
LONG = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True, seed=0)
SYSTEM = [(7 * i) % 101 + 3 for i in range(150)]
HEADS_OF_ONE = {"num_key_value_heads": 1}
DIVISIONS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {  # and heads of layers of the largest process
    "two ranks": ({"tensor_parallel": 2}, {}, 3),
    "two ranks of one KV head": ({"tensor_parallel": 2}, HEADS_OF_ONE, 3),
    "two stages": ({"pipeline_parallel": 2}, {}, 4),
    "two stages of two ranks": ({"pipeline_parallel": 2, "tensor_parallel": 2}, {}, 2),
}
BLOCK_BYTES = 2 * 16 * 16 * 4  # of a head of a layer


def divisions(seldom: Collection[str]) -> Iterator[Any]:
    """All; ranks want a C compiler."""
    for name in DIVISIONS:
        marks = [COMPILED] * (name != "two stages") + [pytest.mark.thorough] * (name in seldom)
        yield pytest.param(name, marks=marks)


class LastingStore(BadStore):
    """A store of several engines: none of them closes it. While it `hangs`, whoever reads waits; `asked`: somebody
    does.
    """

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.goes_on, self.asked = threading.Event(), threading.Event()
        self.goes_on.set()

    def get(
        self, wanted: Sequence[ValueQuery], deadline: float, room: memoryview | None = None
    ) -> Sequence[ValueParts | None]:
        self.asked.set()
        self.goes_on.wait()
        return super().get(wanted, deadline, room)

    def close(self) -> None:
        return None


@pytest.fixture
def store() -> Iterator[LastingStore]:
    store = LastingStore()
    yield store
    store.goes_on.set()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: what is asked for is waited for."""
    be_patient(monkeypatch)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert followers() == []


def followers() -> list[int]:
    return [pid for pid in children(os.getpid()) if "parallel.follower" in command_line(pid) and alive([pid])]


def engine(folder: Path, store: BadStore | None, **settings: Any) -> Engine:
    """To which fetching always seems faster; what it has computed once, it stores."""
    access = None if store is None else PrefixStoreAccess(store, SECRET)
    given = {"kv_memory_bytes": 1 << 20, "threads": 2, "prefix_buffer_bytes": 1 << 22, "prefix_after": 1}
    made = Engine(folder, dtype="float32", access=access, **given | settings)
    if store is not None:
        made._built.core.scheduler.prefixes.cost_model = FetchCostModel(token_s=1.0, block_s=1e-9)
    return made


def finish(made: Engine) -> None:
    """Everything that is to be stored, is; and no block of the host is kept."""
    core = made._built.core

    def done() -> bool:
        core.step()
        pool = core.scheduler.prefixes.pool
        return not core.scheduler.prefixes.waits and pool.available == pool.total

    wait_for(done, "all that is to be stored")


def forget(made: Engine) -> None:
    """Drop what the engine has in its own KV."""
    made._built.core.scheduler.pool.forget_prefixes()


def said(
    made: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY
) -> tuple[list[list[int]], list[float]]:
    outputs = made.generate(prompts, params)
    logprobs = [entry.logprob for output in outputs for entry in output.logprobs or ()]
    return [output.token_ids for output in outputs], logprobs


def cached(made: Engine, prompt: list[int]) -> int | None:
    return made.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, seed=0))[0].cached_tokens


@pytest.mark.slow("Three to five engines, some of several processes, answer the same prompts")
@pytest.mark.parametrize("name", divisions(seldom=("two ranks", "two stages of two ranks")))
def test_what_one_process_wrote_several_read_and_the_reverse(
    name: str, patient: None, store: LastingStore, tmp_path: Path
) -> None:
    """Tokens are those without a store, log-probabilities too, as far as sums in another order go.

    Where there are ranks, because both are told to take KV whatever its numerics: by themselves they share nothing.

    Then many at once, with hardly any room for KV: prefixes come and go while others compute.
    """
    division, options, heads = DIVISIONS[name]
    folder = build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=3, **options)
    first, second = [*SYSTEM, 1, 2, 3], [*SYSTEM[::-1], 4, 5]
    crowd = [[*SYSTEM[: 40 * part], *range(part, 60 + part)] for part in (1, 2, 3)] + [first, second]
    ranks = "tensor_parallel" in division
    if ranks:
        with engine(folder, store) as whole, engine(folder, store, **division) as divided:
            assert len({made._built.profile.shares for made in (whole, divided)}) == 2
    division = {**division, "prefix_any_numerics": ranks}
    with engine(folder, None) as alone:
        expected = [said(alone, [prompt]) for prompt in (first, second)]
        expected_crowd = said(alone, crowd)[0]
    with (
        engine(folder, store, prefix_any_numerics=ranks) as whole,
        engine(folder, store, kv_memory_bytes=16 * heads * BLOCK_BYTES, max_running=4, **division) as divided,
    ):
        assert divided._built.core.scheduler.pool.total == 16
        shared = [made._built.profile.shares for made in (whole, divided)]
        assert shared[0] == shared[1] != ""
        keeps = [share.keeps for share in divided._built.group.shares]  # type: ignore[union-attr]
        assert keeps == ([True, False] if options else [True] * len(keeps))
        for writer, reader, prompt, (tokens, logprobs) in (
            (whole, divided, first, expected[0]),
            (divided, whole, second, expected[1]),
        ):
            assert said(writer, [prompt])[0] == tokens
            finish(writer)
            before = store.stats().hits
            found = said(reader, [prompt])
            assert store.stats().hits == before + 1
            assert found[0] == tokens
            assert found[1] == pytest.approx(logprobs, abs=1e-4)
            forget(reader)
            assert cached(reader, prompt) == 128
        for _ in range(2):
            forget(divided)
            assert said(divided, crowd)[0] == expected_crowd
            finish(divided)


@pytest.mark.slow("Two engines draw 70 tokens of five sequences, the divided one twice")
@pytest.mark.parametrize("name", divisions(seldom=("two ranks", "two ranks of one KV head")))
def test_a_preempted_sequence_finds_its_kv_on_the_host(name: str, tmp_path: Path) -> None:
    """Where CPUs are told to keep it there, and that of every process; where there is no room, it is computed again."""
    division, options, heads = DIVISIONS[name]
    folder = build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=3, **options)
    crowd = [list(range(part, 30 + part)) for part in range(5)]
    with engine(folder, None) as alone:
        expected = said(alone, crowd, LONG)
    settings = {"kv_memory_bytes": 16 * heads * BLOCK_BYTES, "max_running": 5, "swap_memory_bytes": 1 << 16}
    with engine(folder, None, **settings, **division) as made:
        swap = made._built.core.scheduler.swap
        assert swap.pool.total > 4
        swap.rates = SwapRates(0.0, 0.0, 1.0)  # to copy always seems faster
        for _ in range(2):
            forget(made)
            assert said(made, crowd, LONG) == expected
        assert swap.swapped > 2


@COMPILED
def test_whatever_a_store_does_ranks_answer(store: LastingStore, tmp_path: Path) -> None:
    """It loses, changes and cuts values, raises, and hangs: nobody is failed, and nobody waits for it."""
    folder = build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=3)
    prompt = [*SYSTEM, 1, 2, 3]
    with engine(folder, None) as alone:
        expected = said(alone, [prompt])[0]
    with engine(folder, store, tensor_parallel=2) as made:
        for fault in ("none", "flip", "cut", "zeros", "empty", "miss", "raise", "few"):
            store.fault = lambda fault=fault: fault  # type: ignore[misc]
            forget(made)
            assert said(made, [prompt])[0] == expected, fault
        store.fault = lambda: "none"
        store.asked.clear()
        store.goes_on.clear()
        forget(made)
        assert said(made, [prompt])[0] == expected
        assert store.asked.is_set()
        assert not store.goes_on.is_set(), "the answer did not wait for it"
        store.goes_on.set()
        finish(made)


@COMPILED
def test_a_rank_that_dies_while_a_prefix_is_fetched_ends_the_engine(
    patient: None, store: LastingStore, tmp_path: Path
) -> None:
    """Whoever waits for the prefix is told, when it has come."""
    folder = build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=3)
    prompt, raised = [*SYSTEM, 1, 2, 3], []
    with engine(folder, store) as writer:
        said(writer, [prompt])
        finish(writer)

    def ask(made: Engine) -> None:
        try:
            made.generate([prompt], GREEDY)
        except EngineLost as error:
            raised.append(error)

    store.goes_on.clear()
    store.asked.clear()
    with engine(folder, store, tensor_parallel=2) as made:
        thread = threading.Thread(target=ask, args=(made,), daemon=True)
        thread.start()
        assert store.asked.wait(60)
        [rank] = followers()
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: not alive([rank]), "its end")
        store.goes_on.set()
        thread.join(60)
        assert not thread.is_alive()
        assert len(raised) == 1
