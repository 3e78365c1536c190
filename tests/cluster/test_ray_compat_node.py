"""Interfaces of its own Ray node, worker and cluster that Motley uses are still there. test_warm_workers.py asks a
running Ray.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import ray
from ray import JobID, _raylet
from ray._common import network_utils
from ray._private import grpc_utils, node, parameter, ray_constants, services, state, worker
from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc
from ray.experimental import internal_kv
from ray.serve._private import deployment_scheduler

from motley.cluster.ray_compat import cluster_state, local_node


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_a_node_starts_in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else Ray's files lie in /tmp/ray, where everyone reads them, and two services share a dashboard agent's port."""
    seen: list[tuple[dict[str, Any], set[int]]] = []

    def init(**given: Any) -> str:
        chosen = parameter.RayParams(dashboard_port=None, metrics_export_port=None)
        chosen.update_pre_selected_port()
        seen.append((given, set(chosen.reserved_ports)))
        return "context"

    monkeypatch.setattr(ray, "init", init)
    whole = parameter.RayParams
    assert local_node.start_node(tmp_path, num_cpus=3) == "context"
    assert seen == [({"address": "local", "_temp_dir": str(tmp_path), "num_cpus": 3}, set())]
    assert parameter.RayParams is whole
    assert '"_temp_dir"' in inspect.getsource(worker.init)
    assert "temp_dir" in parameters(parameter.RayParams)


def test_daemons_of_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the end of Ray's GCS or raylet goes unnoticed, and the service hangs."""
    raylet = SimpleNamespace(process="Popen of the raylet")
    monkeypatch.setattr(worker, "_global_node", SimpleNamespace(all_processes={"raylet": [raylet]}))
    assert local_node.node_daemons() == {"raylet": ["Popen of the raylet"]}
    assert "self.all_processes" in inspect.getsource(node.Node.__init__)
    assert "process" in services.ProcessInfo._fields


def test_the_kinds_under_which_ray_keeps_its_daemons() -> None:
    """Else `is_stopped` asks for a kind that is not there, and a stopped raylet is found a minute later."""
    source = inspect.getsource(node.Node)
    for kind in ("PROCESS_TYPE_GCS_SERVER", "PROCESS_TYPE_RAYLET"):
        assert f"ray_constants.{kind}" in source
    assert (ray_constants.PROCESS_TYPE_GCS_SERVER, ray_constants.PROCESS_TYPE_RAYLET) == ("gcs_server", "raylet")


def test_folder_of_this_nodes_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else replicas find no records of the processes that wait on their node, and none waits."""
    monkeypatch.setattr(worker, "_global_node", SimpleNamespace(get_session_dir_path=lambda: "/tmp/ray/session_1"))
    assert local_node.node_session_folder() == Path("/tmp/ray/session_1")
    assert parameters(node.Node.get_session_dir_path) == {"self"}


def test_a_worker_without_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no worker waits for a replica, or each that is to run something else imports torch first."""
    for job, jobless in ((JobID.nil(), True), (JobID.from_int(7), False)):
        monkeypatch.setattr(worker, "global_worker", SimpleNamespace(current_job_id=job))
        assert local_node.is_jobless() is jobless
    assert isinstance(worker.Worker.current_job_id, property)


def test_whether_the_token_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `motley serve --address` deploys on a cluster whose nodes let everyone in."""
    assert callable(_raylet.get_authentication_mode)
    for mode in ("TOKEN", "DISABLED"):
        found = getattr(_raylet.AuthenticationMode, mode)
        monkeypatch.setattr(_raylet, "get_authentication_mode", lambda found=found: found)
        assert local_node.token_is_required() is (mode == "TOKEN")


def test_channels_to_rays_own_servers() -> None:
    """Else the watchdog's calls carry no token, and it takes a raylet that refuses them for one that lives."""
    assert next(iter(inspect.signature(grpc_utils.init_grpc_channel).parameters)) == "address"
    with local_node.open_channel("127.0.0.1:1") as channel:
        assert callable(channel.unary_unary)


class Raylet:
    """Stand-in for the raylet's service. error: what it raises."""

    def __init__(self, error: grpc.StatusCode | None = None) -> None:
        self.asked: list[Any] = []
        self._error = error

    def __call__(self, channel: Any) -> Any:
        return SimpleNamespace(PrestartWorkers=self._answer)

    def _answer(self, request: Any, timeout: float) -> Any:
        self.asked.append(request)
        if self._error is not None:
            raise RefusedCall(self._error)
        return node_manager_pb2.PrestartWorkersReply()


class RefusedCall(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "no such method"


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> None:
    told = SimpleNamespace(get_node_id=lambda: "n1", get_runtime_env_string=lambda: '{"env_vars": {}}')
    monkeypatch.setattr(ray, "get_runtime_context", lambda: told)
    nodes = [{"NodeID": f"n{i}", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": i} for i in (1, 2)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)


@pytest.mark.usefixtures("context")
def test_workers_that_wait_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no process waits for a replica, and a warning is logged: each start takes seconds longer."""
    raylet = Raylet()
    monkeypatch.setattr(node_manager_pb2_grpc, "NodeManagerServiceStub", raylet)
    local_node.prestart_workers(2, keep_s=60)
    [request] = raylet.asked
    assert (request.num_workers, request.keep_alive_duration_secs, request.language) == (2, 60, common_pb2.PYTHON)
    assert request.runtime_env_info.serialized_runtime_env == '{"env_vars": {}}'
    assert not request.HasField("job_id"), "workers of a job end with its driver"
    service = node_manager_pb2.DESCRIPTOR.services_by_name["NodeManagerService"]
    assert "PrestartWorkers" in service.methods_by_name
    assert network_utils.build_address("127.0.0.1", 1) == "127.0.0.1:1"
    for name in ("get_node_id", "get_runtime_env_string"):
        assert hasattr(ray.runtime_context.RuntimeContext, name)


@pytest.mark.usefixtures("context")
def test_a_raylet_that_starts_none_ahead_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for code, kind in (
        (grpc.StatusCode.UNIMPLEMENTED, NotImplementedError),
        (grpc.StatusCode.UNAVAILABLE, grpc.RpcError),
    ):
        monkeypatch.setattr(node_manager_pb2_grpc, "NodeManagerServiceStub", Raylet(code))
        with pytest.raises(kind):
            local_node.prestart_workers(1, keep_s=60)


def test_records_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the decisions of the control plane, and what was deployed, are lost with its process."""
    kept: dict[tuple[bytes, bytes], bytes] = {}

    def put(key: bytes, value: bytes, *, overwrite: bool, namespace: bytes) -> None:
        assert overwrite
        kept[namespace, key] = value

    given = parameters(internal_kv._internal_kv_put)
    assert {"key", "value", "overwrite", "namespace"} <= given
    assert {"key", "namespace"} <= parameters(internal_kv._internal_kv_get)
    monkeypatch.setattr(internal_kv, "_internal_kv_put", put)
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda key, *, namespace: kept.get((namespace, key)))
    assert cluster_state.read_record(b"k") is None
    cluster_state.write_record(b"k", b"v")
    assert cluster_state.read_record(b"k") == b"v"
    assert set(kept) == {(b"motley", b"k")}, "what earlier versions have kept is found"


def test_what_is_free_on_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a pool that waits for a GPU is told that nothing is free anywhere."""
    assert parameters(state.available_resources_per_node) == set()
    monkeypatch.setattr(state, "available_resources_per_node", lambda: {"n1": {"CPU": 1.0}})
    assert cluster_state.free_resources() == {"n1": {"CPU": 1.0}}


@pytest.mark.parametrize(
    ("selector", "taken"),
    [
        ({}, True),
        ({"zone": "a"}, True),
        ({"zone": "b"}, False),
        ({"zone": "in(a,b)"}, True),
        ({"zone": "!in(a,b)"}, False),
        ({"rack": "a"}, False),
    ],
)
def test_labels_that_a_selector_takes(selector: dict[str, str], taken: bool) -> None:
    """Else a pool with labels is refused, or waits for ever, though a node has them."""
    assert callable(deployment_scheduler.node_labels_match_selector)
    assert cluster_state.labels_match({"zone": "a"}, selector) is taken
