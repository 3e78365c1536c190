"""Clients that name every speaker (autogen does), before models whose templates show no names."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import asgi
import pytest
from echo_worker import EchoWorker
from local_ingress import make_ingress
from service_checkpoint import write_tokenizer

from motley.cluster.service.deployment.ingress_config import IngressConfig

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SHOWN = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "?"}]
NAMED = [{**message, "name": f"speaker{index}"} for index, message in enumerate(CHAT)]


@pytest.fixture
async def call(tmp_path: Any, request: pytest.FixtureRequest) -> Any:
    """Posts to a service whose model has that template, with that policy for unknown fields."""
    template, policy = request.param
    folder = write_tokenizer(tmp_path, chat_template=template)
    ingress = await make_ingress(folder, EchoWorker(str(folder)), ingress_config=IngressConfig(unknown_fields=policy))
    return partial(asgi.request, ingress.__serve_build_asgi_app__(), "POST")


async def tokens(call: Any, messages: list[dict[str, Any]]) -> Any:
    return (await call("/tokenize", {"messages": messages})).json()["tokens"]


@pytest.mark.parametrize("call", [(PLAIN, "ignore")], indirect=True)
async def test_names_that_no_template_shows_are_ignored_with_one_line(
    call: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert (await call("/v1/chat/completions", {"messages": NAMED, "max_tokens": 2})).status == 200
        assert await tokens(call, NAMED) == await tokens(call, CHAT)
    assert [r.getMessage() for r in caplog.records if "messages[].name" in r.getMessage()] == [
        "a request has the unknown field 'messages[].name', which is ignored (--unknown-fields refuse would refuse it)"
    ]
    wrong = await call("/v1/chat/completions", {"messages": [{**CHAT[0], "name": 5}], "max_tokens": 2})
    assert (wrong.status, wrong.json()["error"]["param"]) == (400, "messages[0].name")


@pytest.mark.parametrize("call", [(PLAIN, "refuse")], indirect=True)
async def test_where_unknown_fields_are_refused_so_are_such_names(call: Any) -> None:
    reply = await call("/v1/chat/completions", {"messages": NAMED, "max_tokens": 2})
    assert (reply.status, reply.json()["error"]["param"]) == (400, "messages[0].name")
    assert "no place for names" in reply.json()["error"]["message"]


@pytest.mark.parametrize("call", [(SHOWN, "refuse"), (SHOWN, "ignore")], indirect=True)
async def test_names_that_the_template_shows_are_shown(call: Any) -> None:
    assert await tokens(call, NAMED) != await tokens(call, CHAT)
