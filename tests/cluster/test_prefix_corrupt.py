"""Whatever becomes of values in a real Redis: a miss that is counted, and the greedy tokens of an engine without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis_engines import VALUE, SharingEngine, patient, prompt
from redis_stores import SECRET
from redis_values import RawValues
from tiny_checkpoints import build_checkpoint

from motley.cluster.prefix_store.value_stamps import STAMP_BYTES, RedisKeyNames, ValueStamp
from motley.replicas.kv.store.sealed_record import HEADER_BYTES
from motley_bench.prefix.redis_process import RedisProcess

NAMES = RedisKeyNames(SECRET)
PROMPT = prompt(7, 2 * VALUE + 40)
RECORD = STAMP_BYTES  # where it begins


class Battery:
    """A reader, what was written for it, and what others have written of the same prompt.

    own            values by their names in Redis; others: those of other tenants, weights and models, by what they are
    expected       tokens with the cache off
    """

    def __init__(self, redis: RedisProcess, folder: Path) -> None:
        models = [folder / name for name in ("this", "other weights", "other model")]
        for i, model in enumerate(models):
            layers, seed = (3, 0) if i == 2 else (2, i)
            build_checkpoint(
                model, "llama", num_hidden_layers=layers, seed=seed, vocab_size=1100, max_position_embeddings=512
            )
        self.raw = RawValues(redis)
        self.others: dict[str, list[bytes]] = {}
        writers = [("own", models[0], "ann"), ("another tenant", models[0], "bob")]
        writers += [(model.name, model, "ann") for model in models[1:]]
        seen: dict[bytes, bytes] = {}
        for what, model, tenant in writers:
            writer = SharingEngine(redis, after=1, model=str(model))
            assert writer.ask(PROMPT, tenant) == 0
            writer.close()
            new = {name: value for name, value in self.raw.all().items() if name not in seen}
            assert len(new) == 2, what
            seen |= new
            if what == "own":
                self.own = new
            self.others[what] = list(new.values())
        off = SharingEngine(None, model=str(models[0]))
        off.ask(PROMPT)
        self.expected = off.tokens
        off.close()
        self.reader = SharingEngine(redis, after=99, model=str(models[0]))

    def counted(self) -> dict[str, int]:
        """Return the faults so far, by what the engine and the store say."""
        stats = self.reader.stats
        outcomes = {reason: count for reason, count in stats.outcomes.items() if reason not in ("hit", "miss")}
        return {**outcomes, **stats.store.errors}

    def close(self) -> None:
        self.reader.close()
        self.raw.close()


@pytest.fixture(scope="module")
def battery(redis: RedisProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Battery]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        patient(monkeypatch)
        battery = Battery(redis, tmp_path_factory.mktemp("models"))
        yield battery
        battery.close()


def flipped(at: int) -> Callable[[bytes], bytes]:
    def flip(value: bytes) -> bytes:
        return value[:at] + bytes([value[at] ^ 1 << random.randrange(8)]) + value[at + 1 :]

    return flip


CHANGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a byte of the stamp's magic": (flipped(1), "foreign"),
    "a byte of the stamp's owner": (flipped(17), "stamp"),
    "a byte of the stamp's epochs": (flipped(50), "stamp"),
    "a byte of the stamp's check": (flipped(79), "stamp"),
    "a byte of the record's magic": (flipped(RECORD), "magic"),
    "a byte of the record's version": (flipped(RECORD + 8), "version"),
    "a byte of the record's geometry": (flipped(RECORD + 12), "geometry"),
    "a byte of the record's salt": (flipped(RECORD + 40), "seal"),
    "a byte of the KV": (flipped(RECORD + HEADER_BYTES + 1000), "seal"),
    "the last byte": (lambda value: value[:-1] + bytes([value[-1] ^ 1]), "seal"),
    "cut by a byte": (lambda value: value[:-1], "size"),
    "cut in the middle": (lambda value: value[: len(value) // 2], "size"),
    "cut in the stamp": (lambda value: value[:30], "size"),
    "a byte more": (lambda value: value + b"x", "size"),
    "zeros": (lambda value: bytes(len(value)), "foreign"),
    "another version's stamp": (lambda value: value.replace(b"motley prefix v2", b"motley prefix v1"), "foreign"),
    "another version's record": (
        lambda value: value[: RECORD + 8] + b"\x02\x00" + value[RECORD + 10 :],
        "version",
    ),
}


def reads_right(battery: Battery, values: dict[bytes, bytes], reason: str) -> None:
    """A miss with its name, and the tokens of an engine without a store; and it is written anew."""
    battery.raw.put(values)
    before = battery.counted()
    assert battery.reader.ask(PROMPT) == 0
    assert battery.reader.tokens == battery.expected
    assert battery.counted() == {**before, reason: before.get(reason, 0) + 1}
    battery.raw.put(battery.own)
    assert battery.reader.ask(PROMPT) == 2 * VALUE
    assert battery.reader.tokens == battery.expected


@pytest.mark.parametrize("what", CHANGED)
def test_what_was_changed_is_a_miss(battery: Battery, what: str) -> None:
    change, reason = CHANGED[what]
    reads_right(battery, {name: change(value) for name, value in battery.own.items()}, reason)


def test_values_that_were_swapped_are_misses(battery: Battery) -> None:
    """Whole, and under stamps that hold for where they are."""
    (first, one), (second, other) = battery.own.items()
    reads_right(battery, {first: other, second: one}, "stamp")
    reads_right(battery, {first: one[:RECORD] + other[RECORD:], second: other[:RECORD] + one[RECORD:]}, "seal")


@pytest.mark.parametrize(
    ("what", "flaw"), [("another tenant", "seal"), ("other weights", "seal"), ("other model", "size")]
)
def test_what_somebody_else_wrote_is_a_miss(battery: Battery, what: str, flaw: str) -> None:
    """The value is another's as it is, and under a stamp that holds for its place, which nobody can make without the
    fleet's secret.
    """
    replayed = battery.others[what]
    reads_right(battery, dict(zip(battery.own, replayed, strict=True)), flaw if flaw == "size" else "stamp")
    stamped = {}
    for name, value in zip(battery.own, replayed, strict=True):
        key = bytes.fromhex(name.rpartition(b":")[2].decode())
        stamp = NAMES.stamp_of(key, battery.own[name][:STAMP_BYTES])
        assert isinstance(stamp, ValueStamp)
        stamped[name] = NAMES.stamped(key, stamp) + value[STAMP_BYTES:]
    reads_right(battery, stamped, flaw)
