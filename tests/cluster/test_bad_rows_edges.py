"""Rows of the battery that want a service of their own: a small context to be filled, and no chat template."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from bad_rows import CHATS, EMBEDDINGS, LONG, MOTLEY_EMBED, OVER_GRPC, OVER_HTTP, VLLM_EMBED
from echo_worker import MAX_MODEL_LEN, EchoWorker
from every_protocol import Protocol, Question, everything
from in_thread import in_thread
from service_checkpoint import write_tokenizer

NAMES = [*OVER_HTTP, *OVER_GRPC]
EMBEDS = EMBEDDINGS + MOTLEY_EMBED + VLLM_EMBED
AROUND = len("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n") - 2 * len("<|im_start|>") - len("<|im_end|>") + 3


@contextmanager
def protocols_of(folder: Path) -> Iterator[dict[str, Protocol]]:
    with in_thread(folder, EchoWorker(str(folder))) as service, grpc.insecure_channel(service.grpc) as channel:
        yield {protocol.name: protocol for protocol in everything(service.http_port, channel, None, "echo")}


@pytest.fixture(scope="module")
def protocols(folder: Path) -> Iterator[dict[str, Protocol]]:
    with protocols_of(folder) as protocols:
        yield protocols


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Protocol]]:
    with protocols_of(write_tokenizer(tmp_path_factory.mktemp("silent"), chat_template=None)) as protocols:
        yield protocols


@pytest.mark.parametrize("name", NAMES)
def test_the_edge_of_the_context(protocols: dict[str, Protocol], name: str) -> None:
    """Room for a token of output is wanted, where there is one."""
    protocol, most = protocols[name], MAX_MODEL_LEN - (name not in EMBEDS)

    def ask(tokens: int) -> tuple[str, str]:
        prompt = "x" * (tokens - AROUND) if name in CHATS else [65] * tokens
        outcome = protocol.ask(Question(prompt))
        assert outcome.code in (None, LONG)
        return outcome.kind, outcome.param

    assert ask(most) == ("ok", "")
    for tokens in (most + 1, most + 2):
        kind, param = ask(tokens)
        assert (kind in ("invalid", "refused"), param) == (True, "prompt")


@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_a_template(silent: dict[str, Protocol], name: str) -> None:
    prompt: str | list[int] = [65] if name in VLLM_EMBED else "abc"
    outcome = silent[name].ask(Question(prompt))
    if name in CHATS:
        assert (outcome.kind, outcome.code) == ("invalid", "chat_template_missing" if name in OVER_HTTP else None)
    else:
        assert outcome.kind == "ok", "everything else still works"
