"""Part of `motley bench prefix`: faults of a Redis while a replica uses it, and how each ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .redis_process import RedisProcess, SlowProxy

USER, PASSWORD = "motley", "right"
ROOMY = "2gb"
LATE_S = 2.0
KILL_EACH_S = 0.002


@dataclass(frozen=True, slots=True)
class RedisFault:
    """A kind of fault.

    begin, end  start and end the fault; after `end` Redis is as before, except for lost values
    lasts       False: Redis is back when `begin` returns
    remote      the fault affects the way to Redis, through the proxy
    """

    begin: Callable[[], None]
    end: Callable[[], None]
    lasts: bool = True
    remote: bool = False


def make_faulty_redis(folder: Path) -> RedisProcess:
    """Return a Redis that is not yet started, set up like the embedded one, with a user whose password can change."""
    user = ("--user", USER, "on", f">{PASSWORD}", "~*", "+@all")
    return RedisProcess(folder, "--maxmemory", ROOMY, "--maxmemory-policy", "allkeys-lru", *user)


def make_fault(kind: str, redis: RedisProcess, proxy: SlowProxy) -> RedisFault:
    """Return the fault of a kind in KINDS."""
    return KINDS[kind](redis, proxy)


def _killed(redis: RedisProcess, proxy: SlowProxy) -> RedisFault:
    return RedisFault(redis.kill, redis.start)


def _stopped(redis: RedisProcess, proxy: SlowProxy) -> RedisFault:
    return RedisFault(redis.stop, redis.go_on)


def _restarted(redis: RedisProcess, proxy: SlowProxy) -> RedisFault:
    def recover() -> None:
        redis.kill()
        redis.start()

    return RedisFault(recover, lambda: None, lasts=False)


def _out_of_memory(redis: RedisProcess, proxy: SlowProxy) -> RedisFault:
    return RedisFault(
        lambda: _run_admin_command(redis, "CONFIG SET maxmemory 1mb"),
        lambda: _run_admin_command(redis, f"CONFIG SET maxmemory {ROOMY}"),
    )


def _late(redis: RedisProcess, proxy: SlowProxy) -> RedisFault:
    return RedisFault(lambda: proxy.slow(delay_s=LATE_S), proxy.slow, remote=True)


def _wrong_password(redis: RedisProcess, proxy: SlowProxy) -> RedisFault:
    def change() -> None:
        _run_admin_command(redis, f"ACL SETUSER {USER} resetpass >wrong")
        redis.ask("CLIENT", "KILL", "USER", USER)

    return RedisFault(change, lambda: _run_admin_command(redis, f"ACL SETUSER {USER} resetpass >{PASSWORD}"))


def _cut_off(redis: RedisProcess, proxy: SlowProxy) -> RedisFault:
    over = threading.Event()

    def cut() -> None:
        while not over.wait(KILL_EACH_S):
            with suppress(OSError):
                redis.ask("CLIENT", "KILL", "USER", USER)

    cutter = threading.Thread(target=cut, name="bench-cutter", daemon=True)

    def end() -> None:
        over.set()
        cutter.join()

    return RedisFault(cutter.start, end)


KINDS: dict[str, Callable[[RedisProcess, SlowProxy], RedisFault]] = {
    "SIGKILL": _killed,
    "SIGSTOP": _stopped,
    "restarted empty": _restarted,
    "maxmemory 1 MB": _out_of_memory,
    f"{LATE_S:g} s late": _late,
    "wrong password": _wrong_password,
    "CLIENT KILL loop": _cut_off,
}


def _run_admin_command(redis: RedisProcess, line: str) -> None:
    reply = redis.ask(*line.split())
    assert reply == b"+OK\r\n", f"{line}: {reply!r}"
