"""Prefixes in the redis-server that a service starts: they get there, and whatever becomes of it, answers stay."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from serve_process import Served, command_line, wait_for

from motley_bench.prefix.redis_process import ping_socket

PROMPT = "A long beginning that many prompts have. " * 40


@pytest.fixture
def client(pair: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pair.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def redis_of(service: Served) -> int:
    """Its process id."""
    found = wait_for(
        lambda: [pid for pid in service.descendants() if "redis-server unixsocket" in command_line(pid)],
        "a redis-server",
    )
    return int(found[0])


def test_faults_of_redis_cost_no_answer(pair: Served, client: openai.OpenAI) -> None:
    path = Path(pair.endpoints["folder"]).parent / "redis.sock"

    def response(question: str) -> str:
        return (
            client.completions.create(model="tiny", prompt=PROMPT + question, max_tokens=8, temperature=0)
            .choices[0]
            .text
        )

    def retained(question: str) -> bool:
        response(question)
        return b":kv:" in (ping_socket(path, "KEYS", "motley:*:kv:*") or b"")

    wait_for(lambda: retained("What is it?"), "a prefix in Redis")
    assert path.stat().st_mode & 0o77 == 0
    right = response("And this?")
    os.kill(redis_of(pair), signal.SIGSTOP)
    try:
        assert {response("And this?") for _ in range(6)} == {right}
    finally:
        os.kill(redis_of(pair), signal.SIGCONT)
    before = redis_of(pair)
    os.kill(before, signal.SIGKILL)
    assert {response("And this?") for _ in range(6)} == {right}
    wait_for(lambda: redis_of(pair) != before and ping_socket(path, "PING"), "another redis-server")
    wait_for(lambda: retained(f"{PROMPT} once more?"), "a prefix in that one")
