"""Parts of Serve's servers, and of its manager of HAProxy, that Motley replaces are still what Serve uses."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from ray.serve._private import controller, default_impl, grpc_util, haproxy, proxy_request_response, replica
from ray.serve.config import gRPCOptions
from ray.serve.grpc_util import RayServegRPCContext
from serve_process import free_port

from motley.cluster.ray_compat import haproxy_control, replica_port, serve_servers
from motley.cluster.ray_compat.visible_names import GRPC_HEALTH


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back at the end what is replaced in Serve's modules."""
    for module, name in (
        (default_impl, "add_grpc_address"),
        (grpc_util, "add_RayServeAPIServiceServicer_to_server"),
        (grpc_util, "DEFAULT_GRPC_SERVER_OPTIONS"),
        (proxy_request_response, "RayServegRPCContext"),
        (replica, "add_port_to_grpc_server"),
        (controller, "HAProxyManager"),
        (haproxy, "HAProxyApi"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))


async def test_what_is_replaced_in_grpc_servers_is_used() -> None:
    """Else gRPC ports are open to other machines, and Serve's own service and long heads come through them."""
    bound: list[str] = []
    added: list[Any] = []
    serve_servers.replace_grpc_bind(lambda server, address: bound.append(address))
    serve_servers.replace_own_service(lambda servicer, server: added.append(server))
    before = list(grpc_util.DEFAULT_GRPC_SERVER_OPTIONS)
    serve_servers.add_grpc_options([("grpc.max_metadata_size", 99)])
    assert [*before, ("grpc.max_metadata_size", 99)] == grpc_util.DEFAULT_GRPC_SERVER_OPTIONS
    assert "DEFAULT_GRPC_SERVER_OPTIONS" in inspect.getsource(grpc_util.gRPCGenericServer.__init__)
    options = gRPCOptions(port=free_port(), grpc_servicer_functions=[], enable_reflection=False)
    loop = asyncio.get_running_loop()
    _, server = await grpc_util.start_grpc_server(lambda **_: None, options, event_loop=loop)
    assert [address.rpartition(":")[2] for address in bound] == [str(options.port)]
    assert added == [server]
    await server.stop(None)


def test_replicas_start_the_servers_of_the_ingress_by_the_same_function() -> None:
    """Else what is replaced in that of the proxies does not count for the ports that HAProxy reaches."""
    assert "start_grpc_server(" in inspect.getsource(replica)
    assert replica.start_grpc_server is grpc_util.start_grpc_server


async def test_handlers_are_added_as_they_are() -> None:
    """Else HAProxy's question for the health of an ingress goes to a method that the ingress has not."""

    def told(service_method: str, streaming_type: Any) -> Any:
        async def answer(request: Any, context: Any) -> bytes:
            return f"{service_method} {streaming_type.value}".encode()

        return answer

    server = grpc_util.gRPCGenericServer(told)
    handlers = {"check": grpc.unary_unary_rpc_method_handler(serve_servers.health_handler(server))}
    serve_servers.add_handlers(server, [grpc.method_handlers_generic_handler("secret", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        said = await channel.unary_unary("/secret/check")(b"", timeout=60)
    assert said.decode() == f"{GRPC_HEALTH} {proxy_request_response.gRPCStreamingType.UNARY_UNARY.value}"
    await server.stop(None)


def test_calls_that_a_proxy_hands_on_carry_the_context() -> None:
    """Else a stream that fails through Serve's own proxy ends as if it were complete."""

    class Marked(RayServegRPCContext):  # type: ignore[misc]
        marked = True

    serve_servers.replace_context_of_forwarded_calls(Marked)
    context = SimpleNamespace(
        invocation_metadata=tuple, peer=str, auth_context=dict, peer_identities=lambda: None,
        peer_identity_key=lambda: None, code=lambda: None, details=lambda: None, trailing_metadata=tuple,
        _rpc_event=SimpleNamespace(call_details=SimpleNamespace()),
    )  # fmt: skip
    request = proxy_request_response.gRPCProxyRequest(
        request_proto=b"", context=context, service_method="/a/B", stream=False
    )
    assert request.ray_serve_grpc_context.marked


async def test_the_port_of_a_replica_is_bound_as_asked() -> None:
    """Else the port by which replicas call one another is open to other machines."""
    assert 'add_port_to_grpc_server(self._server, "[::]:0")' in inspect.getsource(replica)
    replica_port.bind_replica_port("127.0.0.2")
    server = grpc.aio.server()
    port = replica.add_port_to_grpc_server(server, "[::]:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.2:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 60)
    await server.stop(None)


def parts(kind: type) -> set[str]:
    """Names of a class itself, without its bases, and of what it sets in `__init__`."""
    return set(vars(kind)) | set(kind.__init__.__code__.co_names)  # type: ignore[misc]


API = haproxy.HAProxyApi
MANAGER: Any = haproxy.HAProxyManager.__ray_metadata__.modified_class.__ray_actor_class__


@pytest.mark.parametrize(
    ("name", "breaks"),
    [
        ("config_file_path", "HAProxy's workers are not found, and a second one cannot bind the ports"),
        ("cfg", "a new manager does not take over the sockets: the ports are closed for a moment"),
        ("_config_lock", "two managers write the configuration at once"),
        ("_proc", "a HAProxy that ended is not seen"),
        ("_is_running", "a HAProxy that runs is started again"),
        ("_generate_config_file_internal", "HAProxy reloads for a configuration that it has, and keeps another worker"),
        ("_start_and_wait_for_haproxy", "a HAProxy that ended is not started again"),
        ("_graceful_reload", "a reload cuts streams"),
        ("_send_socket_command", "a HAProxy that hangs is not found"),
        ("set_backend_configs", "a new manager takes over before it has routes: requests end in 503"),
        ("start", "a new manager ends the HAProxy that serves"),
        ("reload", "each broadcast of Serve leaves a worker of HAProxy with its streams"),
        ("stop", "HAProxy is revived as the service ends"),
    ],
)
def test_parts_of_the_control_of_haproxy(name: str, breaks: str) -> None:
    assert name in parts(API), f"HAProxyApi has no {name}: {breaks}"


@pytest.mark.parametrize(
    ("name", "breaks"),
    [
        ("event_loop", "no HAProxy is watched"),
        ("_haproxy", "no HAProxy is watched"),
        ("_haproxy_start_task", "HAProxy is watched before it has started, and started twice"),
        ("_reload_lock", "HAProxy is reloaded and started anew at once"),
        ("check_health", "Serve ends a HAProxy that is late, and all streams with it"),
    ],
)
def test_parts_of_the_manager_of_haproxy(name: str, breaks: str) -> None:
    assert name in parts(MANAGER), f"HAProxyManager has no {name}: {breaks}"


def test_a_name_that_is_gone_is_found() -> None:
    assert "_nonsense" not in parts(API) | parts(MANAGER)


def test_names_of_ours_are_none_of_serves() -> None:
    """Else Serve calls what it does not mean."""
    for ours, serves in (
        (haproxy_control.ServeHAProxy, API),
        (haproxy_control.ServeHAProxyManager, MANAGER),
    ):
        own = {name for name in vars(ours) if not name.startswith("_")}
        assert own
        assert not own & parts(serves)


@pytest.mark.parametrize("name", ["_generate_config_file_internal", "_start_and_wait_for_haproxy", "_graceful_reload"])
def test_what_is_put_in_the_place_of_serves_is_called_as_serves_is(name: str) -> None:
    """Else a reload fails, and requests go to ingresses that are gone."""
    theirs = inspect.signature(getattr(API, name))
    assert inspect.iscoroutinefunction(getattr(API, name)) is (name != "_generate_config_file_internal")
    assert [kind for kind, one in theirs.parameters.items() if one.default is one.empty] in (
        ["self"],
        ["self", "extra_args"],
    )


def test_the_manager_controls_haproxy_by_the_class_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Serve's own control runs HAProxy, which it ends for every silence."""
    assert "self._haproxy = HAProxyApi(" in inspect.getsource(MANAGER.__init__)
    seen: list[Any] = []
    monkeypatch.setattr(MANAGER, "__init__", lambda self, *args: seen.append((haproxy.HAProxyApi, args)))

    class Control(haproxy_control.ServeHAProxy):
        pass

    class Manager(haproxy_control.ServeHAProxyManager):
        control = Control

    Manager(1, 2)
    assert seen == [(Control, (1, 2))]


def test_the_controller_starts_the_manager_that_is_asked_for() -> None:
    """Else Serve's own manager runs HAProxy."""

    class Manager(haproxy_control.ServeHAProxyManager):
        pass

    assert "HAProxyManager if self._ha_proxy_enabled else" in inspect.getsource(controller)
    haproxy_control.use_haproxy_manager(Manager)
    assert controller.HAProxyManager.__ray_metadata__.modified_class.__ray_actor_class__ is Manager
