"""Redis values that nobody may read are as good as gone: nobody counts on them, and who misses one writes it anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from redis_engines import VALUE, SharingEngine, patient, prompt
from redis_stores import SECRET, known, read, value, write
from redis_values import RawValues
from serve_process import wait_for

from motley.cluster.prefix_store.redis_store import RedisStore
from motley.cluster.prefix_store.value_stamps import STAMP_BYTES, RedisKeyNames
from motley_bench.prefix.redis_process import RedisProcess

NAMES = RedisKeyNames(SECRET)
ANN = NAMES.epoch(NAMES.owner("ann"))
TOKENS, KEPT = 300, 2 * VALUE


@pytest.fixture
def raw(redis: RedisProcess) -> Iterator[RawValues]:
    values = RawValues(redis)
    yield values
    values.close()


Loss = Callable[[RawValues, bytes], None]

LOSSES: dict[str, Loss] = {
    "magic": lambda raw, name: raw.flip(name, 3),
    "owner": lambda raw, name: raw.flip(name, 20),
    "epoch of all": lambda raw, name: raw.flip(name, 40),
    "epoch of the owner": lambda raw, name: raw.flip(name, 60),
    "check": lambda raw, name: raw.flip(name, 70),
    "cut in its stamp": lambda raw, name: raw.cut(name, STAMP_BYTES - 1),
    "cut in its record": lambda raw, name: raw.cut(name, STAMP_BYTES + 100),
    "another type": lambda raw, name: (raw.client.delete(name), raw.client.lpush(name, "x")),  # type: ignore[dict-item]
    "lost": lambda raw, name: raw.client.delete(name),
    "Redis lost the owner's epoch": lambda raw, name: raw.client.delete(ANN),
    "Redis lost the epoch of all": lambda raw, name: raw.client.delete(NAMES.every),
    "Redis lost everything": lambda raw, name: raw.client.flushall(),
}


def damage_of(loss: str) -> str:
    """Return the name that a damage is counted by."""
    return {"magic": "foreign", "another type": "wrongtype"}.get(loss, "size" if "cut" in loss else "stamp")


def test_whatever_bit_of_a_stamp_changes_is_counted(stores: list[RedisStore], raw: RawValues) -> None:
    one, _ = stores
    write(one, b"a")
    for count, at in enumerate(range(STAMP_BYTES), 1):
        raw.flip(NAMES.value(b"a"), at)
        assert read(one, b"a") == [None]
        assert sum(one.stats().errors.values()) == count
        raw.flip(NAMES.value(b"a"), at)
    assert one.stats().errors == {"foreign": 16, "stamp": STAMP_BYTES - 16}
    assert read(one, b"a") == [value(b"a")]


def test_a_stamp_is_of_its_place_alone(stores: list[RedisStore], raw: RawValues) -> None:
    one, _ = stores
    write(one, b"a", b"b")
    values = raw.all()
    first, second = (NAMES.value(key) for key in (b"a", b"b"))
    raw.put({first: values[second], second: values[first]})
    assert [read(one, key) for key in (b"a", b"b")] == [[None], [None]]
    assert one.stats().errors == {"stamp": 2}
    assert known(one, b"a") == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_what_would_not_be_read_is_not_known(stores: list[RedisStore], raw: RawValues, loss: str) -> None:
    one, other = stores
    write(one, b"a", b"b", b"c")
    assert known(other, b"a", b"b", b"c") == 3
    LOSSES[loss](raw, NAMES.value(b"b"))
    for store in stores:
        before = store.stats().errors
        readable = [found is not None for found in read(store, b"a", b"b", b"c")]
        assert known(store, b"a", b"b", b"c") == readable.index(False)
        damaged = "lost" not in loss  # else it is a miss like any other
        assert store.stats().errors == ({**before, damage_of(loss): 1} if damaged else before)
    wanted = [key for key in (b"a", b"b", b"c") if read(one, key) == [None]]
    for store in stores:  # each has known the epochs of before
        assert known(store, *wanted) == 0
    write(one, *wanted)
    write(other, *wanted)
    assert not one.stats().dropped
    assert read(other, b"a", b"b", b"c") == [value(b"a"), value(b"b"), value(b"c")]


@pytest.mark.parametrize("owner", ["ann", None])
def test_what_is_forgotten_is_not_known(stores: list[RedisStore], owner: str | None) -> None:
    one, other = stores
    write(one, b"a")
    assert known(other, b"a") == 1
    one.forget(owner)
    wait_for(lambda: known(other, b"a") == 0 == known(one, b"a"), "Redis to know")
    write(other, b"a")
    assert [known(store, b"a") for store in stores] == [1, 1]


def test_nothing_is_known_of_who_is_being_forgotten(stores: list[RedisStore]) -> None:
    one, _ = stores
    write(one, b"a")
    one._epochs.forget(NAMES.owner("ann"))  # and nobody tells Redis
    assert known(one, b"a") == 0
    assert one._epochs.cached(NAMES.owner("ann")) is None, "what Redis has is of before"


def test_what_was_forgotten_stays_so_whoever_makes_new_epochs(stores: list[RedisStore], raw: RawValues) -> None:
    one, other = stores
    write(one, b"old")
    one.forget("ann")
    wait_for(lambda: not one._epochs.pending_forgets(), "Redis to know")
    for lost in (ANN, NAMES.every):
        raw.client.delete(lost)
        for store in stores:
            assert known(store, b"old") == 0
            assert read(store, b"old") == [None]
        write(other, b"new")
        assert read(one, b"old") == [None]
        assert read(one, b"new") == [value(b"new")]


def test_what_is_forgotten_after_the_asking_is_not_written(stores: list[RedisStore]) -> None:
    one, other = stores
    assert known(other, b"late") == 0  # and then it computes
    one.forget("ann")
    wait_for(lambda: not one._epochs.pending_forgets(), "Redis to know")
    other.put(b"late", [value(b"late")], "ann")
    wait_for(lambda: other.stats().dropped, "a value that was dropped")
    assert other.stats().dropped == {"forgotten": 1}
    assert read(one, b"late") == [None]


@pytest.fixture(scope="module")
def engines(redis: RedisProcess) -> Iterator[list[SharingEngine]]:
    redis.ask("FLUSHALL")
    engines = [SharingEngine(redis) for _ in range(2)]
    yield engines
    for engine in engines:
        engine.close()


def told(engine: SharingEngine) -> list[int]:
    return [stored.tokens for stored in engine.stored if stored is not None]


@pytest.mark.parametrize("loss", [*LOSSES, "forgotten", "forgotten of all"])
def test_the_next_who_misses_it_writes_it_anew(
    engines: list[SharingEngine], raw: RawValues, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch)
    raw.client.flushall()
    one, other = engines
    asked = prompt(3 + 2 * [*LOSSES, "forgotten", "forgotten of all"].index(loss), TOKENS)
    assert [one.ask(asked) for _ in range(3)] == [0, 0, KEPT]
    assert [other.ask(asked), other.ask(asked)] == [KEPT, KEPT]
    if loss in LOSSES:
        for name in raw.names():
            LOSSES[loss](raw, name)
    else:
        one.forget("ann" if loss == "forgotten" else None)
    assert other.ask(asked) == 0
    assert told(other)[0] == 0, "until it is written"
    assert one.ask(asked) == KEPT
    assert told(one)[0] == KEPT
