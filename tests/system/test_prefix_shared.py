"""Prefixes in the Redis that a service starts: other replicas read them, and whatever becomes of it, answers stay."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import openai
import pytest
from metrics_scraper import scrape, total
from serve_api import pools, replicas
from serve_process import Served, command_line, served, wait_for

from motley.replicas.types import BLOCK_TOKENS
from motley_bench.prefix.redis_process import ping_socket

TEXT = "A long beginning that many prompts have. "
PROMPT = TEXT * 40


class Asked(NamedTuple):
    """One answer, the tokens of its prompt that were not computed, and the seconds until its first token."""

    text: str
    cached: int
    ttft_s: float


def ask(service: Served, prompt: str) -> Asked:
    began, ttft_s, text, cached = time.perf_counter(), 0.0, "", 0
    with openai.OpenAI(base_url=f"{service.http}/v1", api_key="none", max_retries=0) as client:
        model = service.endpoints["model"]
        for chunk in client.completions.create(
            model=model, prompt=prompt, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
        ):
            for choice in chunk.choices:
                ttft_s = ttft_s or time.perf_counter() - began
                text += choice.text
            if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
    return Asked(text, cached, ttft_s)


def counted(service: Served, name: str) -> float:
    return total(scrape(service.http), f"motley_external_prefix_cache_{name}_total")


def replace_replicas(service: Served) -> None:
    """Kill them all, and return when others are there: their own KV is empty."""
    [pool] = pools(service)
    killed = replicas(service, pool)
    for pid in service.replicas():
        if ":ingress" not in command_line(pid):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(replicas(service, pool) - killed) == len(killed), "as many others", 150)


def read_by_others(service: Served, prompts: list[str]) -> None:
    """Ask for each twice, replace all replicas, and ask a third time."""
    before = counted(service, "writes")
    first = [ask(service, prompt) for prompt in prompts]
    assert [ask(service, prompt).text for prompt in prompts] == [each.text for each in first]
    wait_for(lambda: counted(service, "writes") >= before + len(prompts), "values in the store")
    replace_replicas(service)
    hits = counted(service, "hits")
    third = [ask(service, prompt) for prompt in prompts]
    assert [each.text for each in third] == [each.text for each in first]
    read = sum(each.cached for each in third)
    assert read > 0, "on however busy a machine, one of them is worth reading"
    assert read % BLOCK_TOKENS == 0, "whole blocks"
    wait_for(lambda: counted(service, "hits") == hits + read, f"a counter that has grown by {read} tokens")
    for one, three in zip(first, third, strict=True):
        print(f"first token after {1e3 * one.ttft_s:.0f} ms computed, {1e3 * three.ttft_s:.0f} ms: {three.cached} read")


def test_replicas_read_what_those_before_them_have_written(pair: Served) -> None:
    assert "prefixes    shared through " in pair.output
    read_by_others(pair, [f"{number} {PROMPT}" for number in range(3)])


@pytest.mark.thorough
def test_it_is_so_for_who_only_says_serve(tmp_path: Path) -> None:
    """The service is that of `make serve`: the demo model, one replica, no options."""
    with served([], tmp_path) as service:
        service.wait_ready()
        read_by_others(service, [f"{number} {TEXT * 60}" for number in range(3)])


def redis_of(service: Served) -> int:
    """Its process id."""
    found = wait_for(
        lambda: [pid for pid in service.descendants() if "-server unixsocket:" in command_line(pid)], "a Redis"
    )
    return int(found[0])


def test_faults_of_redis_cost_no_answer(pair: Served) -> None:
    path = Path(pair.endpoints["folder"]).parent / "redis.sock"

    def retained(question: str) -> bool:
        before = counted(pair, "writes")
        for _ in range(2):
            ask(pair, f"{question} {PROMPT}")
        return counted(pair, "writes") > before

    wait_for(lambda: retained("What is it?"), "a prefix in Redis")
    assert path.stat().st_mode & 0o77 == 0
    assert b"NOPERM" in (ping_socket(path, "KEYS", "*") or b""), "it is there for what replicas do"
    right = ask(pair, PROMPT).text
    os.kill(redis_of(pair), signal.SIGSTOP)
    try:
        assert {ask(pair, PROMPT).text for _ in range(6)} == {right}
    finally:
        os.kill(redis_of(pair), signal.SIGCONT)
    before = redis_of(pair)
    os.kill(before, signal.SIGKILL)
    assert {ask(pair, PROMPT).text for _ in range(6)} == {right}
    wait_for(lambda: redis_of(pair) != before and ping_socket(path, "PING"), "another one")
    wait_for(lambda: retained("And once more?"), "a prefix in that one")
