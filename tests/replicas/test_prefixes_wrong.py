"""Values of a store that are wrong, or none of the reader's business: a miss, by its name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_parts import Clock
from fake_prefixes import FAULTS, BadStore
from prefix_bench import Bench, cached, ids, prompt, request


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in ("none", "few", "many")])
def test_whatever_is_wrong_is_a_miss_with_its_name(fault: str) -> None:
    clock = Clock()
    store = BadStore(clock)
    Bench(store, clock=clock).run([request(prompt(1, 100)), request(prompt(2, 100))])
    store.fault = lambda: fault
    second = Bench(store, clock=clock)
    [messages] = second.run([request(prompt(1, 100))])
    assert cached(messages) == 0
    assert ids(messages) == ids(Bench().run([request(prompt(1, 100))])[0])
    named = {"raise": "error", "late": "timeout", "miss": "miss", "cut": "size", "empty": "size", "zeros": "magic"}
    assert second.prefixes is not None
    [outcome] = second.prefixes.stats(store.stats()).outcomes
    assert outcome in {named.get(fault, "seal"), *(("magic", "version", "geometry") if fault == "flip" else ())}
    assert second.core.load().external_hit_tokens == 0


def test_what_cannot_be_opened_is_stored_anew() -> None:
    store = BadStore(Clock())
    Bench(store).run([request(prompt(1, 50))])
    key, value = next(iter(store._values.items()))
    store._values[key] = replace(value, data=value.data[:-1] + bytes([value.data[-1] ^ 1]))
    Bench(store, after=9).run([request(prompt(1, 50))])
    third = Bench(store)
    [messages] = third.run([request(prompt(1, 50))])
    assert cached(messages) == 48


def test_tenants_do_not_meet_and_cache_groups_do() -> None:
    """Nor does another model, another version of its weights, or another secret's value."""
    store = BadStore(Clock())
    Bench(store).run([request(prompt(1, 100), tenant="one", cache_salt=b"one")])
    owners = [
        ({"tenant": "one", "cache_salt": b"one"}, 96),
        ({"tenant": "two", "cache_salt": b"two"}, 0),
        ({"tenant": "two", "cache_salt": b"one"}, 96),
    ]
    for owner, held in owners:
        assert cached(Bench(store).run([request(prompt(1, 100), **owner)])[0]) == held
    other = Bench(store, identity=b"that model")
    assert cached(other.run([request(prompt(1, 100), cache_salt=b"one")])[0]) == 0


def test_a_value_from_another_tenants_key_is_not_opened() -> None:
    store = BadStore(Clock())
    Bench(store).run([request(prompt(1, 33), cache_salt=b"one")])
    stolen = [value for _, value in sorted(store._values.items())]
    thief = Bench(store)
    thief.run([request(prompt(1, 33), cache_salt=b"two")])
    assert thief.store_worker is not None
    for key, value in zip(thief.store_worker.fetches[0].keys, stolen, strict=True):
        store._values[key] = value
    again = Bench(store)
    [messages] = again.run([request(prompt(1, 33), cache_salt=b"two")])
    assert cached(messages) == 0
    assert again.prefixes is not None
    assert again.prefixes.stats(store.stats()).outcomes == {"seal": 1}
