"""Templates and tokenizers that run away, from models that a real service has loaded: one typed error each.

What they cost a neighbour is reported, and of that no time is asserted. It gets what it gets alone.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc
import pytest
from neighbour import OWN
from serve_process import Served, free_port, served
from service_checkpoint import CHAT_TEMPLATE, build
from whole_streams import whole_streams

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc

pytestmark = pytest.mark.thorough

ROUNDS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LOOPING = "{% if 'loop' in messages[0].content %}" + ROUNDS + "{% endif %}" + CHAT_TEMPLATE
AT_ONCE = 8
BACKTRACKS, GROWS = "a" * 40 + "!", "~" * 61
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$|[^a]+"}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
BOTH = {"type": "Sequence", "pretokenizers": [SPLIT, BYTES]}
Call = tuple[str, dict[str, Any]]  # path and body
Report = Callable[[str], None]


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


CALM: dict[str, Call] = {
    "chat": ("/v1/chat/completions", {"messages": messages("calm")}),
    "completion": ("/v1/completions", {"prompt": "calm"}),
}
MIN_REQUESTS = 20  # of each, by a neighbour, before eight templates that loop are ended


def growing(char: str) -> dict[str, Any]:
    one = {"type": "Replace", "pattern": {"String": char}, "content": char * 10}
    return {"type": "Sequence", "normalizers": [one] * 8}


def rewritten(folder: Path, parts: dict[str, Any]) -> Path:
    """The folder, with other parts of its tokenizer."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        return build(tmp_path_factory.mktemp(name), max_len=65_536, chat_template=LOOPING)

    return make


@pytest.fixture
def looping(folder: Callable[[str], Path], tmp_path: Path) -> Iterator[Served]:
    yield from started(folder("looping"), tmp_path)


@pytest.fixture
def hostile(folder: Callable[[str], Path], tmp_path: Path) -> Iterator[Served]:
    yield from started(rewritten(folder("hostile"), {"normalizer": growing("~"), "pre_tokenizer": BOTH}), tmp_path)


def started(checkpoint: Path, folder: Path) -> Iterator[Served]:
    arguments = [str(checkpoint), "--served-model-name", "tiny", "--threads", "1", "--kv-memory", "128MiB"]
    with served(arguments, folder) as service:
        service.wait_ready()
        before = service.replicas()
        yield service
        assert service.replicas() == before, "none was replaced"


def posted(service: Served, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", service.http_port, timeout=180)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def refused_over_grpc(service: Served, method: str, request: Any) -> str:
    """The words for it."""
    with grpc.insecure_channel(service.grpc, OWN) as channel:
        call = getattr(inference_pb2_grpc.InferenceStub(channel), method)
        with pytest.raises(grpc.RpcError) as caught:
            next(call(request, timeout=180)) if method.endswith("Stream") else call(request, timeout=180)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
    return str(caught.value.details())


def loop(service: Served, number: int) -> None:
    """One of four ways to ask for a chat whose template loops."""
    if number % 2:
        request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="loop")])
        said = refused_over_grpc(service, "ChatStream" if number % 4 == 1 else "Chat", request)
        assert "messages: rendering them was stopped" in said
        return
    status, reply = posted(service, "/v1/chat/completions", {"messages": messages("loop"), "stream": bool(number % 4)})
    assert status == 400
    assert (reply["error"]["code"], reply["error"]["param"]) == ("chat_template_limit", "messages")


def streamed(service: Served, call: Call) -> tuple[str, float]:
    """The text of a short stream, and the seconds to its first event."""
    path, body = call
    fields = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", service.http_port, timeout=180)
    began = time.monotonic()
    try:
        connection.request("POST", path, json.dumps(body | fields), {"Content-Type": "application/json"})
        response = connection.getresponse()
        first = response.readline()
        took = time.monotonic() - began
        assert response.status == 200, first
        *events, end = (first + response.read()).decode().removesuffix("\n\n").split("\n\n")
    finally:
        connection.close()
    assert end == "data: [DONE]"
    choices = [choice for event in events for choice in json.loads(event.removeprefix("data: "))["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices), took


def send_until(enough: Callable[[int], bool], service: Served) -> dict[str, list[tuple[str, float]]]:
    """Ask calmly, one after the other, until the number of each is enough."""
    found: dict[str, list[tuple[str, float]]] = {name: [] for name in CALM}
    while not enough(len(found["chat"])):
        for name, call in CALM.items():
            found[name].append(streamed(service, call))
    return found


@pytest.mark.parametrize("beside", ["alone", "beside a stream"])
def test_templates_that_loop_at_once(looping: Served, report: Report, beside: str) -> None:
    """Each is refused, and a neighbour is answered meanwhile as it is without them."""
    with whole_streams(looping.grpc) if beside != "alone" else nullcontext():
        without = send_until(lambda count: count >= MIN_REQUESTS, looping)
        for begun in ("the first", "again"):  # the process that they go on in is started for the first of them
            began = time.monotonic()
            with ThreadPoolExecutor(AT_ONCE) as threads:
                loops = [threads.submit(loop, looping, number) for number in range(AT_ONCE)]
                found = send_until(lambda _, loops=loops: all(one.done() for one in loops), looping)
            for one in loops:
                one.result()
            report(f"{AT_ONCE} looping templates, {begun}, {beside}: refused within {time.monotonic() - began:.1f} s")
            for name, responses in found.items():
                assert len(responses) >= MIN_REQUESTS, "they are answered before all those that loop are"
                assert {text for text, _ in responses} == {without[name][0][0]}
                report(f"  {name}'s first token: {shown(responses)}; without {shown(without[name])}")


def shown(responses: list[tuple[str, float]]) -> str:
    times = sorted(took for _, took in responses)
    return f"median {times[len(times) // 2]:.3f} s, longest {times[-1]:.3f} s of {len(times)}"


HOSTILE = {
    "backtracking": (BACKTRACKS, {"tokenizer_refused", "tokenizer_limit"}),  # the library's own limit, or ours
    "growing": (GROWS, {"tokenizer_limit"}),
}


def test_texts_that_a_tokenizer_runs_away_with(hostile: Served, report: Report) -> None:
    calm = [streamed(hostile, call)[0] for call in CALM.values()]
    for name, (text, codes) in HOSTILE.items():
        bodies: dict[str, tuple[str, dict[str, Any]]] = {
            "/v1/completions": ("prompt", {"prompt": text}),
            "/v1/chat/completions": ("messages", {"messages": messages(text)}),
            "/v1/embeddings": ("input", {"input": text}),
            "/tokenize": ("prompt", {"prompt": text}),
        }
        chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content=text)])
        calls = {
            "Complete": pb.CompleteRequest(text=text),
            "CompleteStream": pb.CompleteRequest(text=text),
            "Chat": chat,
            "ChatStream": chat,
            "Tokenize": pb.TokenizeRequest(text=text),
        }
        took, found = [], set()
        with whole_streams(hostile.grpc):
            for path, (param, body) in bodies.items():
                began = time.monotonic()
                status, reply = posted(hostile, path, body)
                took.append(time.monotonic() - began)
                assert status == 400, reply
                assert reply["error"]["param"].startswith(param)
                found.add(reply["error"]["code"])
            for method, requested in calls.items():
                began = time.monotonic()
                assert "the model's tokenizer" in refused_over_grpc(hostile, method, requested)
                took.append(time.monotonic() - began)
        assert found <= codes
        report(f"{name}: {sorted(found)}, after {min(took):.2f} to {max(took):.2f} s")
    assert [streamed(hostile, call)[0] for call in CALM.values()] == calm
    for number in range(4):
        loop(hostile, number)  # a template has its own code where everything is read aside, too


MODEL = {"type": "BPE", "vocab": {}, "merges": []}
AT_LOAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "empty": ({"model": MODEL, "added_tokens": []}, ("model", "empty vocabulary")),
    "grows": ({"normalizer": growing("e")}, ("normalizer", "takes more time or memory")),
    "expression": ({"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "(a"}}}, ("pre_tokenizer", "parenthesis")),
}


@pytest.mark.parametrize("what", AT_LOAD)
def test_tokenizers_that_are_refused_at_load(what: str, folder: Callable[[str], Path], report: Report) -> None:
    parts, says = AT_LOAD[what]
    ports = ["--http-port", str(free_port()), "--grpc-port", str(free_port())]
    command = [sys.executable, "-m", "motley", "serve", str(rewritten(folder(what), parts)), *ports]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1, ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert all(part in last for part in ("tokenizer.json", *says)), ended.stderr
    assert "Traceback" not in ended.stderr
    report(f"{what}, at load: {last}")
