"""One table of bad fields over every protocol of a live service: refused by name, and nothing else happens."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import protocols_said as said
import pytest
from bad_requests import BAD_JSON_FIELDS, BAD_SAMPLING
from served import Served
from service_checkpoint import VOCABULARY

from motley.client import Client
from motley.replicas.limits import Limits

CONTEXT = 65_536
ABOUT_HTTP = {"stream", "stream_options", "echo", "user", "model", "priority", "timeout_s"}  # fields of the call


@pytest.fixture(autouse=True, scope="module")
def _nothing_else_happens(service: Served) -> Iterator[None]:
    """Same processes, same greedy answer, queues and KV as they were."""
    with Client(service.grpc) as client:

        def answer() -> list[int]:
            return list(client.complete("neighbour", temperature=0.0, max_tokens=48).choices[0].token_ids)

        before, replicas = answer(), service.replicas()
        yield
        assert answer() == before
        assert service.replicas() == replicas
        service.wait_idle()


@pytest.fixture(scope="module")
def channel(service: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(service.grpc) as channel:
        yield channel


def _everything(service: Served, channel: grpc.Channel) -> dict[str, tuple[said.Say, str, int]]:
    """Protocol -> how to ask, how it refuses, and for how many rows of the table it must have words."""
    rows = len(BAD_SAMPLING)
    return {
        "openai completions": (said.openai_completions(service.http_port), "400", rows),
        "openai chat": (said.openai_chat(service.http_port), "400", rows),
        "kserve rest": (said.kserve_rest(service.http_port, "tiny"), "400", 20),
        "motley.v1": (said.motley(channel), "INVALID_ARGUMENT", rows - 2),
        "motley.v1 stream": (said.motley_stream(channel), "INVALID_ARGUMENT", rows - 2),
        "kserve": (said.kserve(channel, "tiny"), "INVALID_ARGUMENT", 20),
        "vllm": (said.vllm(channel), "INVALID_ARGUMENT", 18),
        "python": (said.python(Limits(VOCABULARY, CONTEXT, (258,))), "InvalidRequest", rows),
    }


def test_the_same_field_is_refused_by_the_same_name_everywhere(service: Served, channel: grpc.Channel) -> None:
    wrong = []
    for protocol, (say, status, least) in _everything(service, channel).items():
        found = [(fields, param, say(fields)) for fields, param in BAD_SAMPLING]
        told = [row for row in found if row[2] is not None]
        wrong += [(protocol, *row) for row in told if row[2] != said.Refusal(status, row[1])]
        print(f"{protocol}: {len(told)} of {len(found)} rows can be said")
        assert len(told) >= least, protocol
    assert not wrong


def test_what_only_json_and_python_can_say(service: Served) -> None:
    asks = {
        "400": (said.openai_completions(service.http_port), said.openai_chat(service.http_port)),
        "InvalidRequest": (said.python(Limits(VOCABULARY, CONTEXT, (258,))),),
    }
    rows = [(fields, param) for fields, param in BAD_JSON_FIELDS if not ABOUT_HTTP & set(fields)]
    assert len(rows) >= 14
    for status, ways in asks.items():
        for say in ways:
            for fields, param in rows:
                assert say(fields) == said.Refusal(status, param), fields
