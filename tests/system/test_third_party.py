"""Unmodified third-party clients over HTTP and gRPC, each in a process and an environment of its own."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
import wire_facts
from client_env import run_client, run_task
from client_requirements import NODE_TASKS, PYTHON, TASKS
from client_scripts import SCRIPTS
from script_checkpoint import build_scripts
from serve_process import Served, served

from motley.cluster.protos import kserve_pb2, kserve_pb2_grpc, vllm_common_pb2, vllm_engine_pb2
from motley.replicas import demo

CALLS = Path(__file__).resolve().parents[1] / "support" / "third_party"
TRITON = ("tritonclient.grpc.service_pb2", "tritonclient.grpc.model_config_pb2")
SMG = ("smg_grpc_proto.generated.vllm_engine_pb2", "smg_grpc_proto.generated.common_pb2")


def run(client: str, script: str, *arguments: str) -> str:
    return run_client(client, (CALLS / script).read_text(), *arguments)


def test_openai(service: Served) -> None:
    assert run("openai", "openai_client.py", service.http) == "done\n"
    service.wait_idle()


def test_tritonclient(service: Served) -> None:
    assert run("triton", "triton_calls.py", service.grpc, service.http) == "done\n"


def test_tritonclient_over_http(service: Served) -> None:
    assert run("triton", "triton_http_calls.py", service.http.removeprefix("http://")) == "done\n"


@pytest.mark.thorough
def test_kserves_clients(service: Served) -> None:
    """Requests of these clients are recorded in test_kserve_clients: installing them takes minutes."""
    assert run("kserve", "kserve_calls.py", service.http, service.grpc) == "done\n"


def test_stubs_of_the_published_vllm_protocol(service: Served) -> None:
    assert run("smg", "smg_calls.py", service.grpc) == "done\n"


def test_health_and_calls_by_reflection(service: Served) -> None:
    assert run("grpc", "reflected_calls.py", service.grpc) == "done\n"


@pytest.mark.thorough
@pytest.mark.parametrize("router", ["vllm_router", "sglang_router"])
def test_a_router_before_the_service(router: str, service: Served) -> None:
    """It sends its own defaults with every request; test_foreign_fields.py has such bodies each time."""
    code = (CALLS / "router_run.py").read_text()
    said = run_client(router, code, f"{router}.launch_router", service.http, "tiny", timeout_s=240)
    assert said == "40 of 40 answered\n"
    service.wait_idle()


@pytest.mark.thorough
def test_guidellm(service: Served) -> None:
    tokenizer = Path(demo.__file__).parent / "model"
    code = (CALLS / "guidellm_run.py").read_text()
    said = run_client("guidellm", code, service.http, "tiny", str(tokenizer), timeout_s=400)
    assert said == "/v1/chat/completions: 12 answered, 0 failed\n/v1/completions: 12 answered, 0 failed\n"
    service.wait_idle()


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service of a model that says what a task needs: see client_scripts."""
    folder = build_scripts(tmp_path_factory.mktemp("scripts"), SCRIPTS)
    arguments = [str(folder), "--served-model-name", "parrot", "--threads", "1", "--kv-memory", "256MiB", "--no-spare"]
    with served(arguments, tmp_path_factory.mktemp("scripted")) as service:
        service.wait_ready()
        yield service


@pytest.mark.thorough
@pytest.mark.parametrize("task", TASKS)
def test_a_client_at_its_task(task: str, scripted: Served) -> None:
    """Tests in tests/cluster hold the part that concerns this service each time, with the bodies that clients send."""
    assert run_task(TASKS[task], CALLS / "tasks" / f"{task}.py", scripted.http, scripted.grpc).endswith("done\n")
    scripted.wait_idle()


@pytest.mark.thorough
@pytest.mark.parametrize("task", NODE_TASKS)
def test_a_client_for_node_at_its_task(task: str, scripted: Served) -> None:
    said = run_task("node", CALLS / "node_tasks" / f"{task}.mjs", scripted.http, scripted.grpc)
    assert said.endswith("done\n")
    scripted.wait_idle()


def test_every_task_is_listed() -> None:
    assert {path.stem for path in (CALLS / "tasks").glob("*.py")} == set(TASKS)
    assert {path.stem for path in (CALLS / "node_tasks").glob("*.mjs")} == set(NODE_TASKS)
    assert set(TASKS.values()) <= set(PYTHON)


def test_kserve_over_http(service: Served) -> None:
    """Sends what `curl` would: the same request over gRPC gives the same text."""
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["abc"]}
    body = {"id": "1", "inputs": [text], "parameters": {"max_tokens": 8, "temperature": 0}}
    answer = fetch(f"{service.http}/v2/models/tiny/infer", body)
    with grpc.insecure_channel(service.grpc) as channel:
        contents = kserve_pb2.InferTensorContents(bytes_contents=[b"abc"])
        tensor = kserve_pb2.ModelInferRequest.InferInputTensor(
            name="text_input", datatype="BYTES", shape=[1], contents=contents
        )
        request = kserve_pb2.ModelInferRequest(inputs=[tensor])
        request.parameters["max_tokens"].int64_param = 8
        request.parameters["temperature"].double_param = 0.0
        over_grpc = kserve_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    assert answer["id"] == "1"
    assert answer["outputs"][0]["data"] == [over_grpc.outputs[0].contents.bytes_contents[0].decode()]
    assert fetch(f"{service.http}/v2/health/ready") == {"ready": True}
    assert fetch(f"{service.http}/v2/models/tiny")["versions"] == ["1"]
    with pytest.raises(urllib.error.HTTPError) as caught:
        fetch(f"{service.http}/v2/models/tiny/infer", {"inputs": []})
    assert json.load(caught.value)["error"].startswith("text_input: ")


def fetch(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


@pytest.mark.parametrize(
    ("client", "published", "ours"),
    [("triton", TRITON, (kserve_pb2,)), ("smg", SMG, (vllm_engine_pb2, vllm_common_pb2))],
    ids=["kserve", "vllm"],
)
def test_our_definitions_are_the_published_ones(
    client: str, published: tuple[str, ...], ours: tuple[ModuleType, ...]
) -> None:
    """Declarations of ours are there and the same: what is left out they would call an unknown field."""
    theirs: dict[str, dict[str, object]] = {"messages": {}, "rpcs": {}, "enums": {}}
    for facts in json.loads(run_client(client, Path(wire_facts.__file__).read_text(), *published)):
        for kind, found in facts.items():
            theirs[kind] |= found
    for module in ours:
        facts = wire_facts.facts(module)
        assert {name: theirs["rpcs"].get(name) for name in facts["rpcs"]} == facts["rpcs"]
        assert {name: theirs["enums"].get(name) for name in facts["enums"]} == facts["enums"]
        for name, fields in facts["messages"].items():
            known = theirs["messages"][name]
            assert isinstance(known, dict)
            assert {field: known.get(field) for field in fields} == fields, name
