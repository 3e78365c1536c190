"""`motley bench prefix`: what a Redis on this machine gives and takes, and what replicas gain that share one."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...replicas.bench.report import machine, row, versions
from ...replicas.errors import MotleyError
from ...replicas.prefix.keys import with_tokens
from ...replicas.prefix.record import Geometry, Seal
from ...replicas.prefix.store import Wanted
from ...replicas.protocol import BLOCK_TOKENS
from .bench_blocks import BlocksReader
from .bench_replicas import QUESTION, Replicas, first_tokens
from .bench_routed import Fleet, routed
from .bench_simulated import simulated
from .bench_trace import Trace, trace
from .redis_store import RedisStore
from .server import OwnRedis, find_redis
from .source import RedisSource

__all__ = ["Plan", "quick", "run"]

Progress = Callable[[str], None]
PACKAGES = ("motley", "redis", "hiredis", "cryptography", "torch")
GIVEN_S = 60.0  # here a deadline is no part of what is measured
SECRET = b"of this measurement".ljust(32, b".")
LAYERS, HEAD_DIM, HEADS = 28, 128, 4  # Qwen2.5-7B's
TOKEN_BYTES = 2 * LAYERS * HEAD_DIM * HEADS * 2
QUEUE_BYTES = 1 << 30
COPIED_BYTES = 256 << 20
KEYS = 4

SIMULATED = Fleet()
FULL = Trace(shape="qwen2-0.5b", turns=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """
    tokens, connections  of a value, in KV of Qwen2.5-7B in two bytes a number (56 KiB a token); that read at a time
    moved, repeats       bytes of one sample; samples
    shape                of the engines, a name in SHAPES: random weights
    prefixes, asked      tokens of prefixes whose time to the first token is measured; how often each way
    trace                of tenants
    fleet                that is simulated
    """

    tokens: Sequence[int] = (16, 32, 64)
    connections: Sequence[int] = (1, 2)
    moved: int = 256 << 20
    repeats: int = 5
    shape: str = "qwen2-0.5b"
    prefixes: Sequence[int] = (256, 512, 1024, 2048, 4096, 8192)
    asked: int = 3
    trace: Trace = FULL
    fleet: Fleet = SIMULATED


def quick() -> Plan:
    """Within a minute on two cores: one size of values, and engines of a smaller shape."""
    small = Trace(shape="quick", turns=2, tenants=6, prefix_tokens=256, requests=24, unique=12, output_tokens=4)
    return Plan(
        tokens=(32,), connections=(1,), moved=64 << 20, repeats=3, shape="quick", prefixes=(256, 512, 1024), asked=2,
        trace=small, fleet=Fleet(seconds=20.0, seeds=2),
    )  # fmt: skip


def run(plan: Plan, say: Progress) -> dict[str, Any]:
    """The object that `--json` prints. Raises MotleyError without a redis-server."""
    binary, where = find_redis()
    if binary is None:
        raise MotleyError(where)
    rows: list[dict[str, Any]] = []
    before = machine()
    with tempfile.TemporaryDirectory() as folder:
        own = OwnRedis(binary, Path(folder), 2 << 30, say)
        own.start()
        try:
            for tokens in plan.tokens:
                for connections in plan.connections:
                    say(f"values of {tokens} tokens, {connections} connections")
                    rows += _of_size(own, plan, tokens, connections)
            say(f"engines of {plan.shape}")
            replicas = Replicas(plan.shape)
            rows += first_tokens(replicas, plan.shape, own.url, SECRET, plan.prefixes, plan.asked, say)
            rows += trace(plan.trace, own.url, SECRET, say)
        finally:
            own.stop()
    say("a fleet in virtual time")
    rows += _simulated(plan, rows)
    after = {"load_average_1min_after": machine()["load_average_1min"]}
    return {
        "bench": "prefix", "machine": before | after, "versions": versions(*PACKAGES), "redis": where, "rows": rows
    }  # fmt: skip


def _simulated(plan: Plan, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At the rate of the values that replicas of that model would have, over one connection."""
    size = with_tokens(Geometry("bfloat16", LAYERS, HEADS, HEAD_DIM, BLOCK_TOKENS))
    (rate,) = (
        each["value"]
        for each in rows
        if each["metric"] == "read_into_blocks" and each["workload"] == {"value_mib": _mib(size), "connections": 1}
        and each["peer"] == "memcpy"
    )  # fmt: skip
    token_bytes = size.size // size.tokens
    rows = simulated(1e9 * rate, token_bytes, size.tokens, plan.prefixes, QUESTION)
    return [*rows, *routed(plan.fleet, 1e9 * rate, token_bytes)]


def _mib(geometry: Geometry) -> float:
    return round(geometry.size / 2**20, 2)


def _of_size(own: OwnRedis, plan: Plan, tokens: int, connections: int) -> Iterator[dict[str, Any]]:
    geometry = Geometry("bfloat16", LAYERS, HEADS, HEAD_DIM, tokens)
    with _storing(own.url, connections) as store:
        sides = _sides(own, store, geometry, connections, max(4, plan.moved // geometry.size // connections))
        samples: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(plan.repeats):
            for name, side in sides.items():
                samples[name].append(side())
    workload = {"value_mib": _mib(geometry), "connections": connections}
    compared = [
        ("get", _parser(), "redis-py"), ("get", "redis-benchmark", "benchmark get"), ("get", "memcpy", "memcpy"),
        ("read_open_verify", f"{_parser()}, not opened", "redis-py"), ("read_open_verify", "memcpy", "memcpy"),
    ]  # fmt: skip
    compared += [("read_into_blocks", f"{_parser()}, not opened", "redis-py"), ("read_into_blocks", "memcpy", "memcpy")]
    if connections == 1:  # a store has one thread that writes
        compared.append(("set", "redis-benchmark", "benchmark set"))
    for metric, peer, name in compared:
        yield row(metric, workload, "GB/s", samples[metric], peer=peer, peer_samples=samples.get(name))


def _sides(
    own: OwnRedis, store: RedisStore, geometry: Geometry, connections: int, count: int
) -> dict[str, Callable[[], float]]:
    """name -> moves `count` values over each connection: at how many GB/s."""
    seal, size, total = Seal(SECRET, geometry), geometry.size, geometry.size * count * connections
    values = {key: _record(seal, key) for key in (b"%d of %d" % (n, geometry.tokens) for n in range(KEYS))}
    _write(store, list(values.items()))
    keys = [key for _, key in zip(range(count), itertools.cycle(values), strict=False)]
    readers = [BlocksReader(store, seal, list(values)) for _ in range(connections)]
    rooms = [[memoryview(bytearray(geometry.payload_bytes)) for _ in range(HEADS)] for _ in range(connections)]

    def get(at: int) -> None:
        for key in keys:
            (found,) = store.get([Wanted(key, size)], time.monotonic() + GIVEN_S)
            assert found is not None, store.stats()

    def read(at: int) -> None:
        for key in keys:
            (found,) = store.get([Wanted(key, size)], time.monotonic() + GIVEN_S)
            assert found is not None, store.stats()
            assert seal.open(key, found, rooms[at]) is None

    def into_blocks(at: int) -> None:
        readers[at].read(size * count)

    import redis

    client = redis.Redis(unix_socket_path=str(own.socket))

    def peer(at: int) -> None:
        for key in keys:
            assert client.get(store.name_of(key))

    memcpy = _memcpy(size, count * connections)
    sides = {
        "get": lambda: _rate(total, lambda: _together(get, connections)),
        "read_open_verify": lambda: _rate(total, lambda: _together(read, connections)),
        "read_into_blocks": lambda: _rate(total, lambda: _together(into_blocks, connections)),
        "redis-py": lambda: _rate(total, lambda: _together(peer, connections)),
        "memcpy": lambda: _rate(total, memcpy),
        "set": lambda: _rate(size * count, lambda: _write(store, [(key, values[key]) for key in keys])),
    }
    benchmark = shutil.which("redis-benchmark")
    for name in ("set", "get") if benchmark is not None else ():  # what is set first is read afterwards
        asked = [str(benchmark), "-s", str(own.socket), "-t", name, "-d", str(size), "-c", str(connections)]
        sides[f"benchmark {name}"] = partial(_redis_benchmark, [*asked, "-n", str(count * connections), "--csv"], size)
    return sides


@contextmanager
def _storing(url: str, connections: int) -> Iterator[RedisStore]:
    store = RedisStore(RedisSource(url=url, secret=SECRET, connections=connections + 1, queue_bytes=QUEUE_BYTES))
    try:
        yield store
    finally:
        store.close()


def _record(seal: Seal, key: bytes) -> list[bytes | memoryview]:
    header = seal.header()
    payloads = [os.urandom(seal.geometry.payload_bytes) for _ in range(HEADS)]
    return [header, seal.seal(key, header, payloads)]


def _write(store: RedisStore, items: Sequence[tuple[bytes, list[bytes | memoryview]]]) -> None:
    """And there. A value that waits is replaced by a later one of its key, so each is waited for."""
    before = store.stats().stored
    for key, parts in items:
        assert store.put(key, parts, "bench")
        store.flush(time.monotonic() + GIVEN_S)
    assert store.stats().stored == before + len(items), store.stats()


def _together(one: Callable[[int], None], times: int) -> None:
    threads = [threading.Thread(target=one, args=(at,)) for at in range(1, times)]
    for thread in threads:
        thread.start()
    one(0)
    for thread in threads:
        thread.join()


def _memcpy(size: int, count: int) -> Callable[[], None]:
    """Among so much memory that no cache holds it."""
    places = [memoryview(bytearray(b"\1") * size) for _ in range(max(2, COPIED_BYTES // size))]

    def copy() -> None:
        for number in range(count):
            places[number % len(places)][:] = places[number % len(places) - 1]

    return copy


def _redis_benchmark(command: list[str], size: int) -> float:
    """GB/s that it says."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=GIVEN_S)
    if ended.returncode:
        raise MotleyError(f"redis-benchmark ended with {ended.returncode}: {ended.stderr.strip()[-200:]}")
    lines = [line.split(",") for line in ended.stdout.splitlines()]
    (rate,) = (line[1] for line in lines if line[0].strip('"') in ("GET", "SET"))
    return float(rate.strip('"')) * size / 1e9


def _parser() -> str:
    return "redis-py with hiredis" if importlib.util.find_spec("hiredis") else "redis-py, its own parser"


def _rate(nbytes: int, action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return nbytes / (time.perf_counter() - began) / 1e9
