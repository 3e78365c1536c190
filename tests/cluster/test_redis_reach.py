"""A Redis that does not answer is told when a service starts; it starts all the same."""

from __future__ import annotations

import pytest

from motley.cluster.fleet.deployed.redis_reachability import connection_failure, warn_if_unreachable
from motley.cluster.fleet.spec.prefix_cache_spec import PrefixCacheSpec
from motley.cluster.security.edge.ports import free_port_block
from motley_bench.prefix.redis_process import RedisProcess


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://:secret@127.0.0.1:{port}/0", "refused"),
        ("unix:///nowhere/redis.sock", "No such file"),
    ],
)
def test_why_it_does_not_answer(url: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    warn_if_unreachable(PrefixCacheSpec(store=url.format(port=free_port_block(1))))
    told = capsys.readouterr().err
    assert told.startswith("prefix cache: ")
    assert words in told
    assert "nothing is shared until it does" in told
    assert "secret" not in told


def test_a_wrong_password_is_told(redis: RedisProcess, capsys: pytest.CaptureFixture[str]) -> None:
    socket = redis.url.partition("://")[2]
    warn_if_unreachable(PrefixCacheSpec(store=f"unix://alice:secret@{socket}"))
    told = capsys.readouterr().err
    assert "password" in told
    assert "secret" not in told


def test_one_that_answers_is_no_news(redis: RedisProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert connection_failure(redis.url) == ""
    for store in (redis.url, "off", "memory", "embedded"):
        warn_if_unreachable(PrefixCacheSpec(store=store))
    warn_if_unreachable(PrefixCacheSpec(store="redis://127.0.0.1:1", reuse=False))
    assert capsys.readouterr().err == ""
