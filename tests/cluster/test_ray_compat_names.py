"""Titles, paths, files and texts by which Motley knows what is Ray's are still those of the installed Ray."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
from edge_backends import configured, rendered
from ray._private import node, ray_constants
from ray._private.authentication import authentication_token_setup
from ray.serve._private import common, constants, controller, deployment_state, haproxy, replica
from ray.serve.generated import serve_pb2
from ray.serve.schema import ApplicationStatus, DeploymentStatus
from ray_files import RAYLET, compiled_has, strings_of

from motley.cluster.fleet.control.backend import serve_backend
from motley.cluster.ray_compat import haproxy_template, visible_names
from motley.cluster.security.edge.haproxy_config import LOOPBACK, HAProxyEdge
from motley.cluster.service.supervision import watched_processes
from motley.replicas.replica import Replica


def test_titles_of_workers() -> None:
    """Else no process that waits for a replica is counted, and another is started every few seconds."""
    assert ray_constants.WORKER_PROCESS_TYPE_IDLE_WORKER == visible_names.WAITING_WORKER
    assert f'"{visible_names.STARTING_WORKER}"' in inspect.getsource(node)


def test_titles_of_actors() -> None:
    """Else a controller that hangs is not found among the processes, and the service stays without one."""
    assert visible_names.actor_title("A") == "ray::A"
    assert visible_names.controller_title().endswith(controller.ServeController.__name__)
    named = common.DeploymentID("cpu", "motley").to_replica_actor_class_name()
    assert visible_names.replica_title("motley", "cpu") == f"ray::{named}"
    assert visible_names.replica_title("motley", "cpu").startswith(visible_names.replica_title("motley"))


def test_kinds_of_daemons() -> None:
    """Else the end of a daemon that nothing needs ends the service, or the errors of others name them by Ray's kind."""
    kinds = {value for name, value in vars(ray_constants).items() if name.startswith("PROCESS_TYPE_")}
    vital = {visible_names.GCS, visible_names.RAYLET}
    others = {"DASHBOARD", "AUTOSCALING_MONITOR", "LOG_MONITOR", "CLIENT_SERVER"}
    assert set(watched_processes.VITAL) == vital <= kinds
    assert set(watched_processes.NOT_VITAL) == {getattr(visible_names, name) for name in others} <= kinds


def test_own_paths() -> None:
    """Else Serve answers its own paths without a key, or HAProxy takes no ingress for healthy."""
    assert {visible_names.HTTP_HEALTH, f"{visible_names.OWN_PATHS}routes"} <= strings_of("serve/_private/replica.py")
    service = serve_pb2.DESCRIPTOR.services_by_name["RayServeAPIService"]
    assert f"/{service.full_name}/{service.methods_by_name['Healthz'].name}" == visible_names.GRPC_HEALTH
    assert visible_names.GRPC_HEALTH.startswith(visible_names.OWN_GRPC_SERVICES)


def test_the_header_that_ignores_disconnects() -> None:
    """Else a client can ask Serve to compute on for it after it has gone."""
    assert constants.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER == visible_names.DISCONNECTS_IGNORED


def test_the_trailer_of_a_request() -> None:
    """Else an error that says when to try again has Serve's own trailer twice."""
    assert visible_names.REQUEST_ID_TRAILER in strings_of("serve/_private/proxy_request_response.py")


def test_the_module_of_replicas() -> None:
    """Else a process that waits fails to import it, and waits with less than a replica needs."""
    assert replica.__name__ == visible_names.REPLICA_MODULE
    assert importlib.util.find_spec(visible_names.REPLICA_MODULE) is not None


def test_files_of_a_session(tmp_path: Path) -> None:
    """Else errors name a folder of logs that is not there, a failed start's logs are removed, and nobody finds the
    dashboard's token.
    """
    assert visible_names.session_folder(tmp_path) == tmp_path / ray_constants.SESSION_LATEST
    assert visible_names.logs_folder(tmp_path).parent == visible_names.session_folder(tmp_path)
    assert f'"{visible_names.logs_folder(tmp_path).name}"' in inspect.getsource(node.Node)
    assert visible_names.default_token_file() == authentication_token_setup._get_default_token_path()


def test_files_of_haproxy_on_a_node() -> None:
    """Else a drain finds no admin socket of HAProxy, and ends streams that still run."""
    source = inspect.getsource(haproxy)
    path = re.search(r"def _per_node\(path: str\) -> str:\n\s+(.*)\n\s+return (.*)\n", source)
    assert path is not None, "Serve places these files otherwise"
    assert [part.strip() for part in path.groups()] == [
        "d, f = os.path.split(path)",
        "os.path.join(d, self._node_id, f)",
    ]
    assert visible_names.node_file("/a/b.sock", "n1") == Path("/a/n1/b.sock")
    placed = set(re.findall(r"_per_node\((\w+)\)", source))
    assert {"RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"} <= placed


def test_words_of_a_failed_start() -> None:
    """Else `motley fleet status` calls a pool whose replicas fail over and over one that starts."""
    for method, words in (
        (deployment_state.DeploymentState.record_replica_startup_failure, '"A replica {} with exception.'),
        (deployment_state.DeploymentState.check_curr_status, '"The deployment {} "'),  # and how many times
    ):
        assert words.format(visible_names.FAILED_START) in inspect.getsource(method)


def test_states_of_pools_and_replicas() -> None:
    """Else a pool that has failed is one that changes, and a replica that ends is one that starts."""
    assert set(serve_backend._STATES) <= {each.value for each in common.ReplicaState}
    assert "STARTING" in {each.value for each in common.ReplicaState}
    assert set(serve_backend._POOL_STATES) <= {each.value for each in DeploymentStatus}
    assert {"DEPLOY_FAILED", "UNHEALTHY", "RUNNING"} <= {each.value for each in ApplicationStatus}


def test_guesses_at_the_end_of_a_process() -> None:
    """Else the error of a divided model is a paragraph of what may have happened to any process."""
    said = "Worker unexpectedly exits with a connection error code 2. End of file."
    assert visible_names.without_guesses(f"{said} Some common causes include: (1) …") == said
    assert visible_names.without_guesses(said) == said
    assert compiled_has(RAYLET, b" Some common causes include")


def test_methods_that_serve_calls_by_name() -> None:
    """Else routers learn neither profiles nor loads of replicas, and requests go anywhere."""
    for name in (
        constants.REQUEST_ROUTING_STATS_METHOD,
        constants.RECORD_REPLICA_METADATA_METHOD,
        constants.HEALTH_CHECK_METHOD,
    ):
        assert inspect.isfunction(getattr(Replica, name))


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Configurations of HAProxy as the installed Serve writes them: before there is an ingress, and then."""
    edge = HAProxyEdge(host=LOOPBACK, http_port=1, grpc_port=2)
    folder = tmp_path_factory.mktemp("h")
    served = rendered(folder, edge, 3, 4).read_text()
    api = configured(folder, edge, 3, 4)
    api.set_backend_configs({})
    api._generate_config_file_internal()
    return (folder / "haproxy.cfg").read_text(), served


@pytest.fixture(scope="module")
def config(configs: tuple[str, str]) -> str:
    return configs[1]


TEMPLATE_AND_BREAKS = {
    "METRICS_FRONTEND": "HAProxy's metrics are open to everyone at a port",
    "STATISTICS_PAGE": "HAProxy's statistics are open to everyone at a port",
    "HTTP_HEALTH_CHECK": "HAProxy asks by the public path, gets 404, and takes no ingress for healthy",
    "GRPC_HEALTH_BYTES": "HAProxy asks by the public method, gets UNIMPLEMENTED, and takes no ingress for healthy",
    "TIMEOUT_CLIENT": "a client that reads nothing keeps its connection for as long as Serve says",
    "GRPC_FRONTEND_LINE": "HAProxy does not start with TLS",
    "THREADS": "HAProxy swallows minutes of a stream in the kernel's buffers",
    "ERROR_FILES": "errors of HAProxy are no JSON",
    "NO_HTTP_ROUTE": "a service that starts says 404 to a client, which does not come again",
    "NO_GRPC_ROUTE": "a service that starts says NOT_FOUND to a client, which does not come again",
    "STATS_SOCKET": "every user of the machine commands HAProxy",
}


@pytest.mark.parametrize("name", TEMPLATE_AND_BREAKS)
def test_a_line_of_the_template(name: str, configs: tuple[str, str]) -> None:
    pattern = getattr(haproxy_template, name)
    config = configs[name != "NO_GRPC_ROUTE"]
    assert re.search(pattern, config, re.MULTILINE), f"there is no {pattern!r}: {TEMPLATE_AND_BREAKS[name]}"


def test_names_in_the_configuration(config: str) -> None:
    """Else the service waits in vain for HAProxy to see the ingress, and a drain sees no open requests."""
    assert re.search(haproxy_template.http_bind(LOOPBACK, 1), config, re.MULTILINE)
    assert re.search(haproxy_template.grpc_bind(LOOPBACK, 2), config, re.MULTILINE)
    for name in (haproxy_template.HTTP_FRONTEND, haproxy_template.GRPC_FRONTEND):
        assert f"frontend {name}\n" in config
    manager = inspect.getsource(haproxy)
    assert 'f"{target_group.protocol.value.lower()}-{target_group.app_name}"' in manager
    protocols = {each.value.lower() for each in common.RequestProtocol}
    assert {prefix.rstrip("-") for prefix in haproxy_template.BACKEND_PREFIXES} <= protocols
    actor = common.ReplicaID("x", common.DeploymentID("ingress", "motley")).to_full_id_str()
    safe = haproxy.HAProxyManager.__ray_metadata__.modified_class.get_safe_name(actor)
    assert safe.startswith(haproxy_template.REPLICA_SERVER_PREFIX)


def test_no_name_is_left_out() -> None:
    patterns = {name for name, value in vars(haproxy_template).items() if name.isupper() and isinstance(value, str)}
    assert patterns - {"HTTP_FRONTEND", "GRPC_FRONTEND", "REPLICA_SERVER_PREFIX", "GRPC_HEALTH", "HTTP_HEALTH"} == set(
        TEMPLATE_AND_BREAKS
    )
