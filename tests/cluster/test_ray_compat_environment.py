"""Each environment variable that Motley sets for Ray is still one that the installed Ray reads."""

from __future__ import annotations

import ast

import pytest
from ray_files import RAY, RAYLET, compiled_has, strings_of

from motley.cluster.ray_compat import environment

SERVE = "serve/_private/constants.py"
# By the name in `environment`: where Ray reads it, and what breaks in Motley where Ray does not.
READ_AND_BREAKS = {
    "AUTH_MODE": (RAYLET, "`motley serve` cannot tell that Ray's ports are open to everyone, nor can `motley doctor`"),
    "AUTH_TOKEN": (RAYLET, "the ready message names a place of the dashboard's token that Ray does not look at"),
    "AUTH_TOKEN_PATH": (RAYLET, "the ready message names a file of the dashboard's token that Ray does not read"),
    "BEYOND_THIS_MACHINE": ("_private/ray_constants.py", "Ray's ports of a service on one machine are open to others"),
    "START_RAY_ON_CALLS": ("_private/auto_init_hook.py", "a call after the end of Ray starts another Ray"),
    "WORKER_NICENESS": (RAYLET, "any other process of the machine stalls the streams"),
    "WORKERS_AT_START": (RAYLET, "Ray starts a worker for each of its logical CPUs, of which there are 64 at least"),
    "PRELOADED_MODULES": (RAYLET, "no worker imports in advance what a replica needs: each start takes seconds more"),
    "USAGE_REPORTS": ("_common/usage/usage_constants.py", "Ray reports its use to its makers"),
    "HIDE_GPUS_FROM_OTHERS": (
        "_private/accelerators/accelerator.py",
        "a replica that has a GPU by its number sees none",
    ),
    "CALLS_BY_GRPC": (SERVE, "calls of replicas go through actors: streams are 4 times slower"),
    "MAX_REQUEST_BYTES": (SERVE, "a request of 2 GiB is read into memory"),
    "MAX_REPLICA_REPLY_BYTES": (SERVE, "log-probabilities of a long prompt end in an error at 4 MiB"),
    "CONTROL_LOOP_PERIOD_S": (SERVE, "an idle service takes 3% of a core more"),
    "METRICS_PERIOD_MS": (SERVE, "each replica of an idle service exports its metrics ten times as often"),
    "REPLICAS_LOG_TO_STDERR": (SERVE, "logs of replicas are written twice"),
    "FIRST_INGRESS_HTTP_PORT": (SERVE, "two services of one machine get each other's HTTP requests"),
    "LAST_INGRESS_HTTP_PORT": (SERVE, "two services of one machine get each other's HTTP requests"),
    "FIRST_INGRESS_GRPC_PORT": (SERVE, "two services of one machine get each other's gRPC calls"),
    "LAST_INGRESS_GRPC_PORT": (SERVE, "two services of one machine get each other's gRPC calls"),
    "MIN_INGRESS_DRAIN_S": (SERVE, "the end of a service takes 32 s"),
    "PORT_QUARANTINE_S": (SERVE, "a client that comes to an old port may find something else than an ingress"),
    "PROXY_START_TIMEOUT_S": (SERVE, "on a busy machine Serve kills the proxy for which a start waits"),
    "PROXY_CHECK_PERIOD_S": (SERVE, "a dead proxy is found three times as late"),
    "PROXY_HTTP_PORT": (SERVE, "two services that start at once share the HTTP port of Serve's proxy"),
    "PROXY_GRPC_PORT": (SERVE, "two services that start at once share the gRPC port of Serve's proxy"),
    "PROXY_HOOK": (SERVE, "Serve answers its own paths without a key, and its ports are open to other machines"),
    "CONTROLLER_HOOK": (SERVE, "a HAProxy that is lost stays away for half a minute, and takes all streams with it"),
    "HAPROXY": (SERVE, "the service runs behind Serve's own proxy: streams are 15 times slower"),
    "HAPROXY_BINARY": (SERVE, "HAProxy's configuration is not edited: it listens elsewhere, and without TLS"),
    "HAPROXY_BUFFER_BYTES": (SERVE, "a long head ends in 400 instead of 431"),
    "HAPROXY_MAX_CONNECTIONS": (SERVE, "idle connections keep others out"),
    "HAPROXY_CONFIG_FILE": (SERVE, "two clusters of one machine overwrite each other's HAProxy configuration"),
    "HAPROXY_ADMIN_SOCKET": (SERVE, "a drain sees the requests of another cluster's HAProxy"),
    "HAPROXY_METRICS_SOCKET": (SERVE, "two clusters of one machine share a socket of HAProxy's metrics"),
    "HAPROXY_STATE_FOLDER": (SERVE, "HAProxy starts with the servers of another cluster"),
    "HAPROXY_STATE_FILE": (SERVE, "HAProxy starts with the servers of another cluster"),
    "HAPROXY_HARD_STOP_S": (SERVE, "a reload of HAProxy cuts long streams after 30 s"),
}


def reads(file: str, name: str) -> bool:
    return name in strings_of(file) if file.endswith(".py") else compiled_has(file, name.encode() + b"\0")


def test_each_variable_is_in_the_table() -> None:
    assert set(READ_AND_BREAKS) == {name for name in vars(environment) if name.isupper()}
    assert not reads(SERVE, "RAY_SERVE_NONSENSE")
    assert not reads(RAYLET, "RAY_nonsense")


@pytest.mark.parametrize("name", READ_AND_BREAKS)
def test_ray_reads(name: str) -> None:
    file, breaks = READ_AND_BREAKS[name]
    assert reads(file, getattr(environment, name)), f"{file} reads no {getattr(environment, name)}: {breaks}"


def test_calls_by_grpc_come_with_the_setting_for_throughput() -> None:
    """Else messages between ingress and replica travel as calls of actors."""
    constants = ast.parse((RAY / SERVE).read_text(encoding="utf-8"))
    [chosen] = [
        node
        for node in constants.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == environment.CALLS_BY_GRPC
    ]
    assert "RAY_SERVE_USE_GRPC_BY_DEFAULT = get_env_bool('RAY_SERVE_USE_GRPC_BY_DEFAULT', '1')" in ast.unparse(chosen)
