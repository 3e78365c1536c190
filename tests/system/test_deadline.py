"""A deadline that nothing can meet: told at once, and never run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raw_calls import PROTOCOLS, Asked, Protocol, RawCall, deadline_told
from serve_process import Served, wait_for

from motley.client import Client
from motley.replicas.types import BLOCK_TOKENS

MIN_S = 0.001


def calls_in_log(service: Served) -> list[dict[str, Any]]:
    """Return the calls in the log that generate."""
    path = Path(service.endpoints["folder"]) / "session_latest" / "logs" / "access.log"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if not line["call"].startswith("GET")]


def of_call(service: Served, request_id: str) -> list[dict[str, Any]]:
    return [line for line in calls_in_log(service) if line["client_id"] == request_id]


def reported(service: Served, protocol: Protocol, way: str, prompt: str, request_id: str) -> str:
    requested = Asked(prompt, max_tokens=4, timeout_s=MIN_S if way == "field" else None)
    call = RawCall(service, protocol, requested, "1m" if way == "deadline" else "", request_id)
    try:
        return call.outcome()
    finally:
        call.close()


def test_a_millisecond_is_told_at_once_and_never_run(service: Served) -> None:
    """Nothing is made slow for it. No request reaches a replica, and no prefix of its prompt is in KV."""
    before = service.load()["prompt_tokens"]
    for number, protocol in enumerate(PROTOCOLS):
        for way in protocol.deadlines:
            prompt = f"{number} {way}: {protocol.name} " * 4  # several KV blocks, from the first on its own
            said = reported(service, protocol, way, prompt, f"millisecond-{number}-{way}")
            assert deadline_told(said), (protocol.name, said)
    assert service.load()["prompt_tokens"] == before, "no replica has begun any"
    for number, protocol in enumerate(PROTOCOLS):
        for way in protocol.deadlines:
            prompt = f"{number} {way}: {protocol.name} " * 4
            if protocol.chat:
                prompt = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
            with Client(service.grpc) as client:
                first, repeated = (client.complete(prompt, max_tokens=1).usage for _ in range(2))
            assert first.cached_tokens == 0, "no KV of it"
            assert repeated.cached_tokens > 0, "else that would say nothing"
            request_id = f"millisecond-{number}-{way}"
            if way == "field":  # of the other kind gRPC may drop a call that has just come
                wait_for(lambda one=request_id: of_call(service, one), "its line in the log", 20)
            lines = of_call(service, request_id)
            assert len(lines) <= 1
            assert all(line["requests"] == [] for line in lines), "it never left the door"


def test_such_a_prompt_would_be_found_in_kv_had_it_run(service: Served) -> None:
    """So that the test above could fail, over each protocol."""
    for number, protocol in enumerate(PROTOCOLS):
        prompt = f"found {number}: {protocol.name} " * 4
        call = RawCall(service, protocol, Asked(prompt, max_tokens=4), request_id=f"found-{number}")
        assert call.outcome().startswith(("200 ", "0 ")), protocol.name
        call.close()
        if protocol.chat:
            prompt = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        with Client(service.grpc) as client:
            found = client.complete(prompt, max_tokens=1).usage.cached_tokens
        assert found > 2 * BLOCK_TOKENS, protocol.name
        wait_for(lambda number=number: of_call(service, f"found-{number}"), "its line in the log", 20)
        assert [len(line["requests"]) for line in of_call(service, f"found-{number}")] == [1]
