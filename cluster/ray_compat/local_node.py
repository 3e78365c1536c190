"""The Ray node and worker of this process: their start, their daemons, files and job, and calls of the raylet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

_PRESTART_S = 10.0


def start_node(folder: Path, **options: Any) -> Any:
    """Start a new cluster of one node that keeps its files in `folder`, and return `ray.init`'s context.

    Its agent takes a free port. `options` are further arguments of `ray.init`.
    """
    import ray

    with free_agent_port():
        return ray.init(address="local", _temp_dir=str(folder), **options)


@contextmanager
def free_agent_port() -> Iterator[None]:
    """Make `ray.init` start a node whose agent takes a free port (0), instead of Ray's 52365.

    The agents of two clusters on one machine would want the same port: the second would have none, and its dashboard
    could show no logs. `ray.init` has no parameter for it.
    """
    from ray._private import parameter

    whole = parameter.RayParams
    parameter.RayParams = partial(whole, dashboard_agent_listen_port=0)
    try:
        yield
    finally:
        parameter.RayParams = whole


def node_daemons() -> Mapping[str, Sequence[Any]]:
    """Return the daemons that Ray's start has left as children of this process, as Popen objects by Ray's kinds."""
    from ray._private import worker

    return {kind: [info.process for info in infos] for kind, infos in worker._global_node.all_processes.items()}


def node_session_folder() -> Path:
    """Return the folder in which Ray keeps the files of this process's node."""
    from ray._private.worker import _global_node

    return Path(_global_node.get_session_dir_path())


def is_jobless() -> bool:
    """Return whether this worker has no job.

    Workers that Ray starts for an actor or a task have one from the beginning.
    """
    from ray._private.worker import global_worker

    return bool(global_worker.current_job_id.is_nil())


def token_is_required() -> bool:
    """Return whether this process's Ray takes and makes calls with the cluster's token only."""
    import importlib

    raylet: Any = importlib.import_module("ray._raylet")  # whose types do not say all that there is
    return bool(raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN)


def open_channel(address: str) -> Any:
    """Open a gRPC channel to one of Ray's own servers, with the cluster's token and TLS as Ray uses them."""
    from ray._private.grpc_utils import init_grpc_channel

    return init_grpc_channel(address)


def prestart_workers(count: int, keep_s: int) -> None:
    """Make the node's raylet start worker processes that no job has yet. Raises NotImplementedError if it cannot.

    They belong to no job, because those of a job end with its driver, and the driver of a fleet on someone else's
    cluster has long ended. `keep_s`: how long one that nobody takes is kept.
    """
    import grpc
    import ray
    from ray._common.network_utils import build_address
    from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc
    from ray.core.generated.common_pb2 import PYTHON
    from ray.core.generated.runtime_environment_pb2 import RuntimeEnvInfo

    context = ray.get_runtime_context()
    here = context.get_node_id()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == here)
    request = node_manager_pb2.PrestartWorkersRequest(
        language=PYTHON,
        runtime_env_info=RuntimeEnvInfo(serialized_runtime_env=context.get_runtime_env_string()),
        keep_alive_duration_secs=keep_s,
        num_workers=count,
    )
    with open_channel(build_address(node["NodeManagerAddress"], node["NodeManagerPort"])) as channel:
        try:
            node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=_PRESTART_S)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise NotImplementedError(error.details()) from error
            raise
