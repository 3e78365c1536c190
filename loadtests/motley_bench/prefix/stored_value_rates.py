"""Part of `motley bench prefix`: reads and writes of values of one size with a local Redis, beside other clients."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from motley.cluster.prefix_store.redis_source import RedisSource
from motley.cluster.prefix_store.redis_store import RedisStore
from motley.replicas.errors import MotleyError
from motley.replicas.host.measurement_rows import row
from motley.replicas.kv.store.prefix_store import ValueQuery
from motley.replicas.kv.store.sealed_record import Geometry, RecordSealer

from .redis_block_reads import IN_VAIN_S, PAUSE_S, BlocksReader
from .redis_clients import CLIENTS, client_getters
from .redis_process import RedisProcess

GIVEN_S = 60.0  # deadline, long enough to play no role in what is measured
LAYERS, HEAD_DIM, HEADS = 28, 128, 4  # those of Qwen2.5-7B
QUEUE_BYTES = 1 << 30
COPIED_BYTES = 256 << 20
KEYS = 4


def value_mib(geometry: Geometry) -> float:
    return round(geometry.size / 2**20, 2)


def measure_value_size(
    own: RedisProcess, secret: bytes, tokens: int, connections: int, moved: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Measure values of `tokens` tokens and yield rows of results. Each connection has a store with one writer.

    moved  bytes of one sample
    """
    geometry = Geometry("bfloat16", LAYERS, HEADS, HEAD_DIM, tokens)
    with ExitStack() as stack:
        each = [connections, *[1] * (connections - 1)]  # the first store reads over all connections
        stores = [stack.enter_context(_storing(own.url, secret, many)) for many in each]
        count = max(4, moved // geometry.size // connections)
        sides = _sides(own, secret, stores, geometry, count)
        samples: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(repeats):
            for name, side in sides.items():
                samples[name].append(side())
    workload = {"value_mib": value_mib(geometry), "connections": connections}
    compared = [("get", peer, peer) for peer in (*CLIENTS, "memcpy")] + [("get", "redis-benchmark", "benchmark get")]
    for metric in ("read_open_verify", "read_into_blocks"):
        compared += [(metric, f"{name}, not opened", name) for name in CLIENTS] + [(metric, "memcpy", "memcpy")]
    compared.append(("set", "redis-benchmark", "benchmark set"))
    for metric, peer, name in compared:
        yield row(metric, workload, "GB/s", samples[metric], peer=peer, peer_samples=samples.get(name))


def _sides(
    own: RedisProcess, secret: bytes, stores: Sequence[RedisStore], geometry: Geometry, count: int
) -> dict[str, Callable[[], float]]:
    """Return, by name, functions that move `count` values over each connection and return GB/s.

    The first store reads.
    """
    store, connections = stores[0], len(stores)
    seal, size, total = RecordSealer(secret, geometry), geometry.size, geometry.size * count * connections
    values = {key: _record(seal, key) for key in (b"%d of %d" % (n, geometry.tokens) for n in range(KEYS))}
    _write(store, list(values.items()))
    keys = [key for _, key in zip(range(count), itertools.cycle(values), strict=False)]
    readers = [BlocksReader(store, seal, list(values)) for _ in range(connections)]
    buffers = [[memoryview(bytearray(geometry.payload_bytes)) for _ in range(HEADS)] for _ in range(connections)]

    def get(at: int) -> None:
        for key in keys:
            (found,) = store.get([ValueQuery(key, size)], time.monotonic() + GIVEN_S)
            assert found is not None, store.stats()

    def read(at: int) -> None:
        for key in keys:
            (found,) = store.get([ValueQuery(key, size)], time.monotonic() + GIVEN_S)
            assert found is not None, store.stats()
            assert seal.open(key, found, buffers[at]) is None

    def into_blocks(at: int) -> None:
        readers[at].read(size * count)

    def write(at: int) -> None:
        _write(stores[at], [(key, values[key]) for key in keys])

    def theirs(name: str, client: Callable[[bytes], object]) -> Callable[[], float]:
        def peer(at: int) -> None:
            for key in keys:
                assert client(store.name_of(key)), name

        return lambda: _rate(total, lambda: _run_in_parallel(peer, connections))

    memcpy = _memcpy(size, count * connections)
    sides = {
        "get": lambda: _rate(total, lambda: _run_in_parallel(get, connections)),
        "read_open_verify": lambda: _rate(total, lambda: _run_in_parallel(read, connections)),
        "read_into_blocks": lambda: _rate(total, lambda: _run_in_parallel(into_blocks, connections)),
        **{name: theirs(name, client) for name, client in client_getters(own.path).items()},
        "memcpy": lambda: _rate(total, memcpy),
        "set": lambda: _rate(total, lambda: _run_in_parallel(write, connections)),
    }
    benchmark = shutil.which("redis-benchmark")
    for name in ("set", "get") if benchmark is not None else ():  # first set what is read afterwards
        command = [str(benchmark), "-s", str(own.path), "-t", name, "-d", str(size), "-c", str(connections)]
        sides[f"benchmark {name}"] = partial(
            _redis_benchmark, [*command, "-n", str(count * connections), "--csv"], size
        )
    return sides


@contextmanager
def _storing(url: str, secret: bytes, connections: int) -> Iterator[RedisStore]:
    store = RedisStore(RedisSource(url=url, secret=secret, connections=connections + 1, queue_bytes=QUEUE_BYTES))
    try:
        yield store
    finally:
        store.close()


def _record(seal: RecordSealer, key: bytes) -> list[bytes | memoryview]:
    header = seal.header()
    payloads = [os.urandom(seal.geometry.payload_bytes) for _ in range(HEADS)]
    return [header, seal.seal(key, header, payloads)]


def _write(store: RedisStore, items: Sequence[tuple[bytes, list[bytes | memoryview]]]) -> None:
    """Write values and wait for each, since a waiting value is replaced by a later one with the same key.

    Raises MotleyError if Redis repeatedly takes none.
    """
    for key, parts in items:
        before, until = store.stats().stored, time.monotonic() + IN_VAIN_S
        while store.stats().stored == before:
            if time.monotonic() > until:
                raise MotleyError(f"Redis has taken no value within {IN_VAIN_S:g} s: {store.stats()}")
            if store.put(key, parts, "bench"):
                store.flush(time.monotonic() + GIVEN_S)
            else:
                time.sleep(PAUSE_S)  # the machine is busy and the breaker has opened


def _run_in_parallel(one: Callable[[int], None], times: int) -> None:
    threads = [threading.Thread(target=one, args=(at,)) for at in range(1, times)]
    for thread in threads:
        thread.start()
    one(0)
    for thread in threads:
        thread.join()


def _memcpy(size: int, count: int) -> Callable[[], None]:
    """Return a function that copies values within a memory so large that no cache holds it."""
    places = [memoryview(bytearray(b"\1") * size) for _ in range(max(2, COPIED_BYTES // size))]

    def copy() -> None:
        for number in range(count):
            places[number % len(places)][:] = places[number % len(places) - 1]

    return copy


def _redis_benchmark(command: list[str], size: int) -> float:
    """Return the GB/s that redis-benchmark reports."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=GIVEN_S)
    if ended.returncode:
        raise MotleyError(f"redis-benchmark ended with {ended.returncode}: {ended.stderr.strip()[-200:]}")
    lines = [line.split(",") for line in ended.stdout.splitlines()]
    (rate,) = (line[1] for line in lines if line[0].strip('"') in ("GET", "SET"))
    return float(rate.strip('"')) * size / 1e9


def _rate(nbytes: int, action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return nbytes / (time.perf_counter() - began) / 1e9
