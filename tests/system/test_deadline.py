"""A deadline that nothing can meet: told at once, and never run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raw_calls import PROTOCOLS, Asked, Protocol, RawCall
from served import Served, wait_for

from motley.client import Client

LEAST_S = 0.001


def calls_in_log(service: Served) -> list[dict[str, Any]]:
    """Of those that generate."""
    path = Path(service.endpoints["folder"]) / "session_latest" / "logs" / "access.log"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if not line["call"].startswith("GET")]


def after(service: Served, seen: int) -> list[dict[str, Any]] | None:
    """The new lines without those of the two requests that came after it, once these are there."""
    lines = calls_in_log(service)[seen:]
    later = [line for line in lines if line["requests"]][-2:]
    return [line for line in lines if line not in later] if len(later) == 2 else None


def told(service: Served, protocol: Protocol, way: str, prompt: str) -> str:
    asked = Asked(prompt, max_tokens=4, timeout_s=LEAST_S if way == "field" else None)
    call = RawCall(service, protocol, asked, "1m" if way == "deadline" else "")
    try:
        return call.outcome()
    finally:
        call.close()


def test_a_millisecond_is_told_at_once_and_never_run(service: Served) -> None:
    """Nothing is made slow for it. No request reaches a replica, and no prefix of its prompt is in KV."""
    for number, protocol in enumerate(PROTOCOLS):
        for way in sorted({"field", "deadline"}.intersection(protocol.ways)):
            prompt = f"{number} {way}: {protocol.name} " * 4  # several KV blocks, from the first on its own
            seen = len(calls_in_log(service))
            said = told(service, protocol, way, prompt)
            assert said.startswith(("504 ", "4 ")) or (protocol.name == "ModelStreamInfer" and "deadline" in said), said
            with Client(service.grpc) as client:
                first, again = (client.complete(prompt, max_tokens=1).usage for _ in range(2))
            assert first.cached_tokens == 0, "no KV of it"
            assert again.cached_tokens > 0, "else that would say nothing"
            wait_for(lambda seen=seen: after(service, seen) is not None, "the lines of what came after it", 20)
            lines = after(service, seen) or []
            assert len(lines) == 1 or (way == "deadline" and not lines), "gRPC may drop a call that has just come"
            assert all(line["requests"] == [] for line in lines), "it never left the door"
