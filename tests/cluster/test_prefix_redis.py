"""The prefix store against a real redis-server, and whatever that may do: never an error, never beyond a deadline."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis as redis_py
from certificates import Certificates
from redis_over_tls import tls_before
from redis_stores import SECRET, SERVERS, SIZE, known, read, storing, value, write
from serve_process import wait_for

from motley.cluster.fleet.deployed.prefix_sharing import PrefixSharing, limit_embedded_redis
from motley.cluster.fleet.spec.fleet_spec import FleetSpec
from motley.cluster.prefix_store.circuit_breaker import FAILURES, LONGEST_S, CircuitBreaker
from motley.cluster.prefix_store.embedded_redis import REPLICA_RULES, EmbeddedRedis
from motley.cluster.prefix_store.redis_binaries import RedisBinary
from motley.cluster.prefix_store.redis_source import RedisSource, check_url, redact_url
from motley.cluster.prefix_store.redis_store import RedisStore
from motley.cluster.prefix_store.value_stamps import STAMP_BYTES, RedisKeyNames
from motley.cluster.service_errors import ConfigurationError
from motley.replicas.kv.store.prefix_store import BreakerState, ValueQuery
from motley_bench.prefix.redis_process import RedisProcess, ping_socket, slow_proxy

READ_S = 0.05  # the deadline that engines give
SLACK_S = 2.0  # what a machine may be late by; the faults would last longer, or for ever


@pytest.fixture
def store(redis: RedisProcess) -> Iterator[RedisStore]:
    with storing(redis.url) as store:
        wait_for(lambda: store._connections.alive, "a connection")
        yield store


def test_flushed_is_written(store: RedisStore) -> None:
    before = store.stats().stored
    assert all(store.put(b"flushed %d" % n, [value(b"flushed %d" % n)], "ann") for n in range(20))
    store.flush(time.monotonic() + 20)
    assert store.stats().stored == before + 20


@pytest.mark.parametrize("ranges", [None, ((0, 7), (100, SIZE))])
def test_values_are_put_where_there_is_room_for_them(
    store: RedisStore, ranges: tuple[tuple[int, int], ...] | None
) -> None:
    keys = [b"near", b"far", b"away"]
    write(store, *keys)
    wanted = [ValueQuery(key, SIZE, ranges) for key in keys]
    for size in (3 * SIZE + 3000, SIZE + 3000, 10):  # for all, for one, for none
        room = memoryview(bytearray(size))
        for _ in range(2):
            found = store.get(wanted, time.monotonic() + 20, room)
            whole = [[value(key)[start:end] for start, end in wanted[0].spans] for key in keys]
            assert [[bytes(part) for part in parts or ()] for parts in found] == whole
            assert (value(keys[0])[100:5000] in bytes(room)) == (size > SIZE)
            assert (value(keys[2])[100:5000] in bytes(room)) == (size > 2 * SIZE)


def recovers(store: RedisStore, seconds: float = 20.0) -> None:
    def again() -> bool:
        store.put(b"again", [value(b"again")], "ann")
        return read(store, b"again") == [value(b"again")]

    wait_for(again, "a store that is well again", seconds)
    assert store.stats().breaker is BreakerState.CLOSED


def in_time(store: RedisStore, *keys: bytes) -> list[bytes | None]:
    began = time.monotonic()
    found = read(store, *keys, seconds=READ_S)
    assert time.monotonic() - began < READ_S + SLACK_S
    return found


@pytest.mark.parametrize("redis", SERVERS, indirect=True)
def test_what_one_replica_writes_another_reads(redis: RedisProcess, store: RedisStore) -> None:
    write(store, b"a", b"b", b"c")
    with storing(redis.url) as other:
        wait_for(lambda: other._connections.alive, "a connection")
        assert read(other, b"a", b"b", b"x", b"c") == [value(b"a"), value(b"b"), None, None]
        assert known(other, b"a", b"b", b"x", b"c") == 2
        ranges = ValueQuery(b"c", SIZE, ((0, 64), (1000, 1500)))
        ((head, heads),) = other.get([ranges], time.monotonic() + 5)  # type: ignore[misc]
        assert (bytes(head), bytes(heads)) == (value(b"c")[:64], value(b"c")[1000:1500])
        stats = other.stats()
        assert (stats.hits, stats.misses, stats.bytes_read) == (3, 2, 2 * SIZE + 564)
    assert read(other, b"a") == [None]  # closed
    assert not other.put(b"a", [b"x"], "ann")


def test_only_its_own_service_reads_it(redis: RedisProcess, store: RedisStore) -> None:
    write(store, b"mine")
    stranger = RedisStore(RedisSource(url=redis.url, secret=b"another secret"))
    wait_for(lambda: stranger._connections.alive, "a connection")
    assert read(stranger, b"mine") == [None]
    stranger.close()


def test_a_value_lasts_for_its_time_more_or_less(redis: RedisProcess) -> None:
    with storing(redis.url, ttl_s=100.0) as store:
        wait_for(lambda: store._connections.alive, "a connection")
        keys = [b"t%d" % number for number in range(8)]
        write(store, *keys)
        lasts = [int((redis.ask("PTTL", RedisKeyNames(SECRET).value(key).decode()) or b"")[1:]) for key in keys]
        assert all(80_000 < last <= 110_000 for last in lasts)
        assert max(lasts) - min(lasts) > 1000  # not all at once


@pytest.mark.parametrize("redis", SERVERS, indirect=True)
def test_what_is_forgotten_nobody_reads(redis: RedisProcess, store: RedisStore) -> None:
    with storing(redis.url) as other:
        wait_for(lambda: other._connections.alive, "a connection")
        write(store, b"of ann")
        write(store, b"of bob", owner="bob")
        assert read(other, b"of ann") == [value(b"of ann")]
        store.forget("ann")
        assert read(store, b"of ann") == [None]  # at once
        wait_for(lambda: read(other, b"of ann") == [None], "another replica to miss")
        assert read(other, b"of bob") == [value(b"of bob")]
        write(store, b"of ann")
        assert read(other, b"of ann") == [value(b"of ann")]
        store.forget(None)
        wait_for(lambda: read(other, b"of bob") == [None] == read(other, b"of ann"), "everything to be forgotten")


def test_what_was_computed_before_is_not_written_after(redis: RedisProcess, store: RedisStore) -> None:
    with storing(redis.url) as other:
        wait_for(lambda: other._connections.alive, "a connection")
        write(other, b"early")
        early = other._epochs.cached(RedisKeyNames(SECRET).owner("ann"))
        assert early is not None
        store.forget("ann")
        wait_for(lambda: not store._epochs.pending_forgets(), "Redis to know")
        other._epochs.learn(early)  # it has not heard of it
        other.put(b"late", [value(b"late")], "ann")
        wait_for(lambda: other.stats().dropped, "a value that was dropped")
        assert other.stats().dropped == {"forgotten": 1}
        write(other, b"new")


def test_what_is_forgotten_is_not_read_before_redis_knows(store: RedisStore) -> None:
    write(store, b"old")
    store._epochs.forget(RedisKeyNames(SECRET).owner("ann"))  # and nobody tells Redis
    assert read(store, b"old") == [None]
    store._epochs.forgotten(RedisKeyNames(SECRET).owner("ann"))
    assert read(store, b"old") == [value(b"old")]


def test_epochs_that_redis_has_lost_bring_nothing_back(redis: RedisProcess, store: RedisStore) -> None:
    write(store, b"old")
    store.forget("ann")
    wait_for(lambda: not store._epochs.pending_forgets(), "Redis to know")
    names = RedisKeyNames(SECRET)
    redis.ask("DEL", names.every.decode(), names.epoch(names.owner("ann")).decode())
    write(store, b"new")
    assert read(store, b"old") == [None]
    assert read(store, b"new") == [value(b"new")]


def test_what_is_forgotten_while_redis_is_away_is_forgotten_when_it_is_back(
    redis: RedisProcess, store: RedisStore
) -> None:
    write(store, b"kept")
    assert redis.process is not None
    with storing(redis.url) as other:
        os.kill(redis.process.pid, signal.SIGSTOP)
        try:
            store.forget("ann")
            assert in_time(store, b"kept") == [None]
        finally:
            os.kill(redis.process.pid, signal.SIGCONT)
        wait_for(lambda: other._connections.alive and not store._epochs.pending_forgets(), "Redis to know")
        assert read(other, b"kept") == [None]


@pytest.mark.parametrize("stored", [b"", b"x", b"x" * SIZE, b"y" * (STAMP_BYTES + SIZE), b"z" * (3 * SIZE)])
def test_a_value_that_is_none_of_ours_is_a_miss(redis: RedisProcess, store: RedisStore, stored: bytes) -> None:
    redis.ask("SET", RedisKeyNames(SECRET).value(b"odd").decode(), stored.decode())
    write(store, b"before", b"after")
    assert read(store, b"before", b"odd", b"after") == [value(b"before"), None, None]
    ranges = ValueQuery(b"odd", SIZE, ((0, 64), (SIZE - 10, SIZE)))
    assert store.get([ranges], time.monotonic() + 5) == [None]
    assert read(store, b"after") == [value(b"after")]  # the connection is in step
    assert sum(store.stats().errors.values()) == (2 if stored else 0)
    write(store, b"odd")
    assert read(store, b"odd") == [value(b"odd")]


@pytest.mark.parametrize("size", [1, SIZE - 1, SIZE + 1])
def test_a_value_of_another_length_is_a_miss(store: RedisStore, size: int) -> None:
    store.put(b"short or long", [bytes(size)], "ann")
    wait_for(lambda: store.stats().stored, "a write")
    assert read(store, b"short or long") == [None]
    assert store.get([ValueQuery(b"short or long", SIZE, ((0, 1),))], time.monotonic() + 5) == [None]
    assert store.stats().errors == {"size": 2}


def test_a_key_of_another_type_is_a_miss(redis: RedisProcess, store: RedisStore) -> None:
    redis.ask("LPUSH", RedisKeyNames(SECRET).value(b"list").decode(), "x")
    assert read(store, b"list") == [None]
    assert store.stats().errors == {"wrongtype": 1}
    assert store.stats().breaker is BreakerState.CLOSED


def test_redis_killed_and_restarted_empty(tmp_path: Path) -> None:
    server = RedisProcess(tmp_path)
    server.start()
    with storing(server.url) as store:
        wait_for(lambda: store._connections.alive, "a connection")
        write(store, b"a")
        server.kill()
        assert not store.away
        wait_for(lambda: in_time(store, b"a") == [None] and store.stats().breaker is BreakerState.OPEN, "the breaker")
        assert store.away
        assert known(store, b"a") is None, "nobody can tell"
        assert not store.put(b"b", [value(b"b")], "ann")
        assert store.stats().dropped == {"breaker_open": 1}
        server.start()
        recovers(store)
        assert not store.away
        assert read(store, b"a") == [None]
        assert known(store, b"a") == 0
    server.kill()


def test_redis_stopped(redis: RedisProcess, store: RedisStore) -> None:
    write(store, b"a")
    assert redis.process is not None
    os.kill(redis.process.pid, signal.SIGSTOP)
    try:
        for _ in range(FAILURES):
            assert in_time(store, b"a") == [None]
        assert store.stats().breaker is BreakerState.OPEN
        assert store.stats().errors["timeout"] >= FAILURES
    finally:
        os.kill(redis.process.pid, signal.SIGCONT)
    wait_for(lambda: read(store, b"a") == [value(b"a")], "a hit")


def test_redis_has_no_memory(tmp_path: Path) -> None:
    server = RedisProcess(tmp_path, "--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
    server.start()
    with storing(server.url) as store:
        wait_for(lambda: store._connections.alive, "a connection")
        store.put(b"a", [value(b"a")], "ann")
        wait_for(lambda: store.stats().dropped, "a value that was dropped")
        assert store.stats().dropped == {"refused": 1}
        assert store.stats().errors == {"oom": 1}
        assert in_time(store, b"a") == [None]
    server.kill()


@pytest.mark.parametrize("slow", [{"delay_s": 2.0}, {"trickle": 20}], ids=["2 s late", "a trickle"])
def test_a_slow_network(redis: RedisProcess, slow: dict[str, float]) -> None:
    with slow_proxy(redis.port) as proxy, storing(f"redis://127.0.0.1:{proxy.port}") as store:
        wait_for(lambda: store._connections.alive >= FAILURES, "a connection for each failure")
        write(store, b"a")
        assert read(store, b"a") == [value(b"a")]
        proxy.slow(**slow)  # type: ignore[arg-type]
        for _ in range(FAILURES):
            assert in_time(store, b"a") == [None]
        assert store.stats().breaker is not BreakerState.CLOSED
        proxy.slow()
        recovers(store)


def test_over_tls(redis: RedisProcess, tmp_path: Path) -> None:
    """By a certificate that can be checked, and for the host that it is for: otherwise nothing is sent."""
    with tls_before(redis, Certificates(tmp_path)) as port:
        ca = f"?ssl_ca_certs={tmp_path}/ca.pem"
        with storing(f"rediss://localhost:{port}{ca}") as store:
            wait_for(lambda: store._connections.alive, "a connection")
            write(store, b"over tls")
            assert read(store, b"over tls") == [value(b"over tls")]
        for url in (f"rediss://localhost:{port}", f"rediss://127.0.0.2:{port}{ca}"):
            with storing(url) as store:
                wait_for(lambda: store.stats().errors, "a refusal")
                assert in_time(store, b"over tls") == [None]
                assert not store._connections.alive


def test_a_wrong_password(tmp_path: Path) -> None:
    server = RedisProcess(tmp_path)
    server.start()
    server.ask("CONFIG", "SET", "requirepass", "right")
    with storing(f"redis://:wrong@127.0.0.1:{server.port}") as store:
        wait_for(lambda: store.stats().errors.get("refused"), "a refusal")
        assert in_time(store, b"a") == [None]
    with storing(f"redis://:right@127.0.0.1:{server.port}") as store:
        recovers(store)
    server.kill()


def test_connections_that_are_killed_all_the_time(redis: RedisProcess, store: RedisStore) -> None:
    write(store, b"a")
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.002):
            redis.ask("CLIENT", "KILL", "TYPE", "normal")

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        found = [in_time(store, b"a")[0] for _ in range(100)]
    finally:
        over.set()
        killer.join()
    assert set(found) <= {None, value(b"a")}
    recovers(store)


def test_a_full_queue_drops_and_counts(redis: RedisProcess) -> None:
    assert redis.process is not None
    with storing(redis.url, queue_bytes=3 * SIZE) as store:
        wait_for(lambda: store._connections.alive, "a connection")
        os.kill(redis.process.pid, signal.SIGSTOP)
        try:
            taken = [store.put(b"%d" % number, [value(b"x")], "ann") for number in range(6)]
        finally:
            os.kill(redis.process.pid, signal.SIGCONT)
        assert taken[:3] == [True] * 3
        assert taken.count(True) <= 4  # one is on its way
        assert store.stats().dropped["queue_full"] == taken.count(False)


def test_a_tenant_has_its_quota(redis: RedisProcess) -> None:
    with storing(redis.url, tenant_bytes=2 * SIZE + 1) as store:
        wait_for(lambda: store._connections.alive, "a connection")
        write(store, b"q1", b"q2", owner="greedy")
        store.put(b"q3", [value(b"q3")], "greedy")
        wait_for(lambda: store.stats().dropped.get("quota"), "a value over the quota")
        assert not store.put(b"q4", [value(b"q4")], "greedy")  # it is known by now
        assert read(store, b"q1", b"q2", b"q3") == [value(b"q1"), value(b"q2"), None]
        write(store, b"q5", owner="modest")


def test_the_breaker_lets_one_call_try() -> None:
    now = [0.0]
    breaker = CircuitBreaker(lambda: now[0])
    for _ in range(FAILURES):
        assert breaker.admit()
        breaker.failed()
    pauses = []
    for _ in range(8):
        pause_s = breaker.due_s()
        assert pause_s is not None
        assert not breaker.admit()
        pauses.append(pause_s)
        now[0] += pause_s
        breaker.answered()
        assert [breaker.admit() for _ in range(3)] == [True, False, False]
        breaker.failed()
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_S
    now[0] += LONGEST_S
    breaker.answered()
    assert breaker.admit()
    breaker.undecided()
    assert breaker.admit()
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.due_s() is None


@pytest.mark.parametrize(
    "url",
    [
        "http://x",
        "redis://u:secret@h:port",
        "redis://:sec/secret@h",
        "unix://",
        "redis://h?nonsense=1",
        "redis://[secret@h",
    ],
)
def test_a_bad_url_is_refused_and_tells_no_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        check_url(url)
    assert "secret" not in str(raised.value)
    assert "secret" not in repr(RedisSource(url=url, secret=b"secret"))


def test_a_url_is_shown_without_its_password() -> None:
    assert redact_url("rediss://ann:pass@host:6380/2?password=pass") == "rediss://***@host:6380/2"
    assert redact_url("unix:///run/redis.sock?db=1") == "unix:///run/redis.sock"


def own_redis(server: str, folder: Path, told: Callable[[str], None]) -> EmbeddedRedis:
    return EmbeddedRedis(SERVERS[server], folder, 64 << 20, told)


def as_supervisor(own: EmbeddedRedis) -> redis_py.Redis:
    password = own.socket.with_suffix(".secret").read_text()
    return redis_py.Redis(unix_socket_path=str(own.socket), username="supervisor", password=password)


each_server = pytest.mark.parametrize("server", SERVERS)


@each_server
def test_a_redis_of_our_own_is_started_again_and_ends(server: str, tmp_path: Path) -> None:
    said: list[str] = []
    own = own_redis(server, tmp_path, said.append)
    own.start()
    try:
        assert tmp_path.joinpath("redis.sock").stat().st_mode & 0o77 == 0
        with storing(own.url) as store:
            wait_for(lambda: store._connections.alive, "a connection")
            write(store, b"a")
            assert own.pid is not None
            os.kill(own.pid, signal.SIGKILL)
            recovers(store)
            assert said == [f"{server} ended with -9; it is started again, empty"]
    finally:
        pid = own.pid
        own.stop()
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@each_server
def test_whoever_opens_its_socket_may_do_what_replicas_do_and_no_more(server: str, tmp_path: Path) -> None:
    """The rules are those of deploy/redis/users.acl. Who knows the supervisor's password sets its memory."""
    acl = Path(__file__).resolve().parents[2] / "deploy" / "redis" / "users.acl"
    assert acl.read_text().splitlines()[-1].endswith(f" {REPLICA_RULES}")
    own = own_redis(server, tmp_path, lambda line: None)
    own.start()
    secret = tmp_path / "redis.secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    try:
        with redis_py.Redis(unix_socket_path=str(own.socket)) as client:
            assert client.ping()
            assert client.set("motley:k", b"v")
            for words in ("CONFIG GET *", "KEYS *", "FLUSHALL", "GET of-another", "EVAL x 0", "ACL LIST", "SHUTDOWN"):
                with pytest.raises(redis_py.exceptions.NoPermissionError):
                    client.execute_command(*words.split())
            with pytest.raises(redis_py.exceptions.AuthenticationError):
                client.execute_command("AUTH", "supervisor", "guessed")
        with as_supervisor(own) as client:
            assert client.config_set("maxmemory", 1 << 20)
            for words in ("GET motley:k", "SAVE", "SHUTDOWN", "ACL LIST"):
                with pytest.raises(redis_py.exceptions.NoPermissionError):
                    client.execute_command(*words.split())
    finally:
        own.stop()


def memory_of(own: EmbeddedRedis) -> int:
    with as_supervisor(own) as client:
        return int(client.config_get("maxmemory")["maxmemory"])


def fleet(memory: int, store: str = "embedded") -> FleetSpec:
    cache = {"store": store, "memory": memory}
    return FleetSpec.model_validate({"model": "demo", "pools": [{"name": "a"}], "prefix_cache": cache})


@each_server
def test_its_memory_changes_while_it_runs_and_stays_so(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = own_redis(server, tmp_path, lambda line: None)
    own.start()
    shared = PrefixSharing(own=own.url, secret=SECRET)
    try:
        with storing(own.url) as store:
            wait_for(lambda: store._connections.alive, "a connection")
            write(store, b"kept")
            limit_embedded_redis(fleet(32 << 20, "memory"), shared)
            assert memory_of(own) == 64 << 20, "that is each replica's"
            limit_embedded_redis(fleet(32 << 20), shared)
            assert memory_of(own) == 32 << 20
            assert read(store, b"kept") == [value(b"kept")]
        before = own.pid
        os.kill(before or 0, signal.SIGKILL)
        wait_for(lambda: own.pid != before and ping_socket(own.socket, "PING"), "another redis-server")
        assert memory_of(own) == 32 << 20
        assert not capsys.readouterr().err
    finally:
        own.stop()
    limit_embedded_redis(fleet(16 << 20), shared)
    assert "does not answer" in capsys.readouterr().err
    limit_embedded_redis(fleet(16 << 20), PrefixSharing(own=f"unix://{tmp_path}/gone/redis.sock", secret=SECRET))
    assert "stays as it is: No such file or directory" in capsys.readouterr().err
    again = own_redis(server, tmp_path, lambda line: None)
    again.start()
    assert memory_of(again) == 64 << 20, "another service's begins with its own"
    again.stop()


def test_a_redis_that_does_not_start_says_why(tmp_path: Path) -> None:
    own = EmbeddedRedis(RedisBinary("/bin/false", "of a test"), tmp_path, 64 << 20, lambda line: None)
    with pytest.raises(ConfigurationError, match="/bin/false did not start: it ended with 1"):
        own.start()
