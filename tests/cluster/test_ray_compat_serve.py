"""Interfaces of Serve's controller, applications, handles and routers that Motley uses are still there."""

from __future__ import annotations

import asyncio
import inspect
import logging
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve import context
from ray.serve._private import build_app, client, common, constants, controller, logging_utils, replica
from ray.serve._private.config import ReplicaConfig
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.request_router.common import ReplicaQueueLengthCache, RequestRoutingContext
from ray.serve.generated import serve_pb2
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.serve.schema import LoggingConfig

from motley.cluster.ray_compat import serve_controller, serve_deployments, serve_handles, serve_logs
from motley.cluster.routing.serve_router import PoolRouter

CPU = common.DeploymentID("cpu", "motley")


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


class Asked:
    """Stand-in for an actor: each of its methods says with what it was called, as Serve's controller takes it."""

    def __getattr__(self, name: str) -> Any:
        known = inspect.signature(getattr(controller.ServeController, name))

        def remote(*args: Any) -> tuple[str, dict[str, Any]]:
            given = dict(known.bind(None, *args).arguments)
            del given["self"]
            return name, given

        return SimpleNamespace(remote=remote)


def test_the_controller_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the control plane reaches nobody, and on a cluster of others it ends, since Serve seems to be gone."""
    monkeypatch.setattr(ray, "get_actor", lambda *args: args)
    assert serve_controller.find_controller() == (constants.SERVE_CONTROLLER_NAME, constants.SERVE_NAMESPACE)
    assert "get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)" in inspect.getsource(context)
    assert serve_controller.find_replica_actor("r") == ("r", constants.SERVE_NAMESPACE)


def test_the_controller_says_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the watchdog takes a controller that answers for one that hangs, and kills it."""
    asked: list[Any] = []
    monkeypatch.setattr(ray, "get_actor", lambda *args: Asked())
    monkeypatch.setattr(ray, "get", lambda answer, *, timeout: asked.append((answer, timeout)))
    serve_controller.check_controller(3.0)
    assert asked == [(("check_alive", {}), 3.0)]


def test_questions_to_the_controller() -> None:
    """Else `motley fleet` shows no pools, and none is scaled or rolled."""
    there: Any = Asked()
    assert serve_controller.fetch_deployment_ids(there) == ("list_deployment_ids", {})
    asked = ("get_deployment_details", {"app_name": "motley", "deployment_name": "cpu"})
    assert serve_controller.fetch_deployment_details(there, "motley", "cpu") == asked
    asked = ("get_deployment_info", {"name": "cpu", "app_name": "motley"})
    assert serve_controller.fetch_deployment_settings(there, "motley", "cpu") == asked
    wanted = ("update_deployment_replicas", {"deployment_id": CPU, "target_num_replicas": 0})
    assert serve_controller.set_number_of_replicas(there, "motley", "cpu", 0) == wanted


def test_names_of_deployments() -> None:
    """Else the control plane sees no pool, or those of another application."""
    ids = [CPU, common.DeploymentID("a", "motley"), common.DeploymentID("b", "other")]
    assert serve_controller.deployment_names(ids, "motley") == ["a", "cpu"]


def test_settings_of_a_deployment_with_bundles() -> None:
    """Else a divided pool that waits is told a wrong reason, and each roll of it takes away a replica first."""
    bundles, labels = [{"CPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}], [{"zone": "a"}, {"zone": "b"}]
    config = ReplicaConfig.create(
        "module.function",
        ray_actor_options={"num_cpus": 1.0},
        placement_group_bundles=bundles,
        placement_group_bundle_label_selector=labels,
        placement_group_strategy="SPREAD",
    )
    route = serve_pb2.DeploymentRoute(
        deployment_info=serve_pb2.DeploymentInfo(version="v1", replica_config=config.to_proto())
    )
    found = serve_controller.read_settings(route.SerializeToString())
    assert (found.version, found.bundles, found.bundle_labels, found.strategy) == ("v1", bundles, labels, "SPREAD")


def test_settings_of_a_deployment_of_single_actors() -> None:
    options = {"num_cpus": 2.0, "num_gpus": 1.0, "resources": {"disk": 1.0}, "label_selector": {"zone": "a"}}
    config = ReplicaConfig.create("module.function", ray_actor_options=options)
    route = serve_pb2.DeploymentRoute(deployment_info=serve_pb2.DeploymentInfo(replica_config=config.to_proto()))
    found = serve_controller.read_settings(route.SerializeToString())
    assert not found.bundles
    assert {name: found.actor_options[name] for name in options} == options


def test_settings_are_in_what_the_controller_says() -> None:
    answer = inspect.getsource(controller.ServeController.get_deployment_info)
    assert "DeploymentRoute(" in answer
    assert "deployment_info=deployment_info.to_proto()" in answer
    assert {"version", "replica_config"} <= set(parameters(DeploymentInfo.__init__))


class Client:
    """Stand-in for Serve's client; deployed: applications that were deployed, with how."""

    def __init__(self) -> None:
        self.deployed: list[Any] = []
        self._controller = Asked()

    def get_serve_details(self) -> Any:
        return {"applications": {"motley": {"status": "RUNNING"}}}

    def deploy_applications(self, applications: list[Any], **how: Any) -> None:
        assert set(how) <= set(parameters(client.ServeControllerClient.deploy_applications))
        self.deployed += [(one, how) for one in applications]


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Client:
    found = Client()
    monkeypatch.setattr(context, "_get_global_client", lambda raise_if_no_controller_running=True: found)
    return found


@pytest.mark.usefixtures("there")
def test_details_of_an_application() -> None:
    """Else `motley serve` never sees that its model is loaded, and an apply deploys a running fleet anew."""
    for ask in (serve_controller.application_details, serve_controller.find_application):
        assert ask("motley") == {"status": "RUNNING"}
        assert ask("other") is None
    assert "get_serve_instance_details" in inspect.getsource(client.ServeControllerClient.get_serve_details)
    fields = inspect.getsource(controller.ServeController.get_serve_instance_details)
    assert "applications=" in fields


def test_details_where_serve_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parameters(context._get_global_client) == ["raise_if_no_controller_running"]
    monkeypatch.setattr(context, "_get_global_client", lambda *, raise_if_no_controller_running: None)
    assert serve_controller.find_application("motley") is None


def test_versions_of_deployments(there: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an apply of a fleet file replaces replicas whose pools have been rolled."""
    assert "_controller" in client.ServeControllerClient.__init__.__code__.co_names
    route = serve_pb2.DeploymentRoute(deployment_info=serve_pb2.DeploymentInfo(version="v1"))
    monkeypatch.setattr(ray, "get", lambda asked: [route.SerializeToString() for _ in asked])
    assert serve_controller.deployed_versions("motley", ["a", "b"]) == {"a": "v1", "b": "v1"}


def test_the_name_of_serves_log() -> None:
    """Else what is said of a HAProxy that was lost is in no file."""
    assert serve_logs.serve_log_name() == "ray.serve"


def test_the_file_of_serves_log_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the pages of replicas in Ray's dashboard have none of Motley's lines."""
    monkeypatch.setattr(logging.getLogger("ray.serve"), "handlers", [])
    assert serve_logs.serve_log_file() is None
    config = LoggingConfig(logs_dir=str(tmp_path))
    logging_utils.configure_component_logger(
        component_name="pool", component_id="abc", logging_config=config, max_bytes=1, backup_count=1
    )
    assert serve_logs.serve_log_file() == tmp_path / "pool_abc.log"


class Pool:
    """A deployment's class."""


def test_a_deployment_gets_a_version_and_no_replicas() -> None:
    """Else each apply of a fleet file restarts all replicas, and a pool cannot start with none."""
    deployment = serve.deployment(Pool, name="cpu")
    serve_deployments.pin_deployment(deployment, "v1", 0)
    assert (deployment.version, deployment.num_replicas) == ("v1", 0)
    bound = deployment.bind()
    assert bound._bound_deployment.version == "v1"


def test_an_application_is_deployed_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a start shows no progress of loading, and Serve's autoscaler, not Motley's, sets the pools."""
    seen: dict[str, Any] = {}

    def run(app: Any, **how: Any) -> None:
        seen.update(how)

    known = parameters(serve.api._run)
    monkeypatch.setattr(serve, "_run", run)
    serve_deployments.deploy_application("app", "motley")
    assert seen == {"name": "motley", "route_prefix": "/", "external_scaler_enabled": True, "_blocking": False}
    assert set(seen) <= set(known)


def test_an_application_is_deployed_again_with_changes(there: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a roll restarts all pools, sets targets back to the file's, or takes replicas away before new ones serve."""
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(runtime_env={"env_vars": {"A": "b"}}))
    changes = {
        "cpu": serve_deployments.DeploymentChange(version="v2", replicas=0, max_surge_percent=50),
        "ingress": serve_deployments.DeploymentChange(version="v1"),
    }
    pool = serve.deployment(Pool, name="cpu", num_replicas=2).bind()
    ingress = serve.deployment(Pool, name="ingress", num_replicas=3).bind(pool)
    serve_deployments.redeploy_application(ingress, "motley", changes.__getitem__)
    [(application, how)] = there.deployed
    assert how == {"wait_for_ingress_deployment_creation": False, "wait_for_applications_running": False}
    assert isinstance(application, build_app.BuiltApplication)
    assert (application.name, application.route_prefix, application.external_scaler_enabled) == ("motley", "/", True)
    found = {one.name: one for one in application.deployments}
    assert {name: (one.version, one.num_replicas) for name, one in found.items()} == {
        "cpu": ("v2", 0),
        "ingress": ("v1", 3),
    }
    assert found["cpu"]._deployment_config.max_surge_percent == 50
    assert all(one.ray_actor_options["runtime_env"] == {"env_vars": {"A": "b"}} for one in found.values())


def test_an_ingress_builds_its_app_when_it_is_initialised() -> None:
    """Else the ingress answers nothing over HTTP: its routes know the model only once a replica runs."""

    class Door(serve_deployments.LateAppDeployment):
        def build_asgi_app(self) -> Any:
            return "app"

    wrapped = serve.ingress()(Door)
    assert getattr(Door(), replica.SERVE_BUILD_ASGI_APP_METHOD)() == "app"
    assert issubclass(wrapped, Door)
    with pytest.raises(NotImplementedError):
        getattr(serve_deployments.LateAppDeployment(), replica.SERVE_BUILD_ASGI_APP_METHOD)()


def test_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each message takes a trip through Ray's object store, or a handle of a pool that comes later fails."""
    assert "_by_reference" in parameters(DeploymentHandle.options)
    handle = SimpleNamespace(options=lambda **options: options)
    assert serve_handles.by_value(handle) == {"_by_reference": False}
    known = parameters(serve.get_deployment_handle)
    assert [*known[:2], *known[2:3]] == ["deployment_name", "app_name", "_check_exists"]
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *args, **options: (args, options))
    assert serve_handles.deployment_handle("cpu", "motley") == (("cpu", "motley"), {"_check_exists": False})
    assert hasattr(DeploymentHandle, "broadcast")
    assert "return_exceptions" in parameters(serve.handle.DeploymentBroadcastResponse.results_async)


@pytest.mark.parametrize("kind", [DeploymentResponse, DeploymentResponseGenerator])
def test_the_call_behind_a_response(kind: Any) -> None:
    """Else a call that is cancelled as it is handed over runs to its end, and nobody reads it."""
    call: Future[Any] = Future()
    metadata = SimpleNamespace(is_streaming=True, _by_reference=False)
    assert serve_handles.replica_call(kind(call, metadata)) is call
    assert serve_handles.replica_call(object()) is None


def router() -> Any:
    made: Any = object.__new__(PoolRouter)
    made._deployment_id = CPU
    made._replica_queue_len_cache = ReplicaQueueLengthCache()
    return made


def test_a_router_knows_its_deployment() -> None:
    """Else every ingress takes the replicas of all pools for those of one."""
    assert "_deployment_id" in RequestRouter.__init__.__code__.co_names
    assert serve_handles.router_deployment(router()) == "cpu"


def test_a_router_knows_how_long_queues_are() -> None:
    """Else a replica that has just failed gets requests that Serve does not ask for first."""
    one, made = SimpleNamespace(replica_id=common.ReplicaID("r", CPU)), router()
    assert serve_handles.cached_queue_len(made, one) == 0
    made.replica_queue_len_cache.update(one.replica_id, 3)
    assert serve_handles.cached_queue_len(made, one) == 3
    serve_handles.forget_queue_len(made, one)
    assert serve_handles.cached_queue_len(made, one) == 0


async def test_a_router_waits_before_it_chooses_again() -> None:
    """Else an ingress whose replicas are all refused chooses in a loop, with a whole core."""
    future = asyncio.get_running_loop().create_future()
    pending = PendingRequest([], {}, SimpleNamespace(), future=future)
    assert isinstance(pending.routing_context, RequestRoutingContext)
    for pause in (True, False):
        serve_handles.pause_before_next_choice(pending, pause)
        assert pending.routing_context.should_backoff is pause
    assert "routing_context.should_backoff" in inspect.getsource(RequestRouter)


def test_a_router_is_told_of_replicas() -> None:
    """Else an ingress learns neither which replicas there are nor that one has died."""
    assert parameters(RequestRouter.update_replicas)[1:] == ["replicas"]
    assert parameters(RequestRouter.on_replica_actor_died)[1:] == ["replica_id"]
    assert parameters(RequestRouter.choose_replicas)[1:] == ["candidate_replicas", "pending_request"]
    assert {"replica_id", "replica_metadata", "routing_stats"} <= set(dir(RunningReplica))
