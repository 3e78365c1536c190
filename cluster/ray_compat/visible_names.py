"""Names and texts by which Ray's processes, files, paths and errors are told from others. Imports nothing of Ray."""

from __future__ import annotations

import os
from pathlib import Path

# Titles of processes: what their command lines begin with
WAITING_WORKER = "ray::IDLE"  # a worker that nobody has taken
STARTING_WORKER = "default_worker.py"  # in the command line of a worker that has no title yet

# Kinds of daemons that `ray.init` leaves behind, by Ray's own names
GCS, RAYLET, DASHBOARD = "gcs_server", "raylet", "dashboard"
AUTOSCALING_MONITOR, LOG_MONITOR, CLIENT_SERVER = "monitor", "log_monitor", "ray_client_server"

# What Serve answers by itself, over HTTP and gRPC
OWN_PATHS = "/-/"
HTTP_HEALTH = "/-/healthz"
OWN_GRPC_SERVICES = "/ray.serve."
GRPC_HEALTH = "/ray.serve.RayServeAPIService/Healthz"

DISCONNECTS_IGNORED = "x-request-disconnect-disabled"  # header by which Serve no longer cancels for a closed connection
REQUEST_ID_TRAILER = "request_id"  # that Serve adds to gRPC's trailing metadata

REPLICA_MODULE = "ray.serve._private.replica"  # imported by each process that runs a replica

FAILED_START = "failed to start"  # in Serve's message of a replica while others serve, else of the deployment
_GUESSES = " Some common causes"  # after how a process ended


def actor_title(name: str) -> str:
    """Return what the title of an actor's process begins with; `name` is that of its class."""
    return f"ray::{name}"


def controller_title() -> str:
    """Return what the title of the process of Serve's controller begins with."""
    return actor_title("ServeController")


def replica_title(app: str, deployment: str = "") -> str:
    """Return what the title of a replica's process begins with; without a deployment, of a replica of any."""
    return actor_title(f"ServeReplica:{app}:{deployment}")


def session_folder(folder: Path) -> Path:
    """Return the link to the files of the Ray that was started last in `folder`; it exists once Ray has started."""
    return folder / "session_latest"


def logs_folder(folder: Path) -> Path:
    """Return the folder of the logs of the Ray that was started last in `folder`."""
    return session_folder(folder) / "logs"


def node_file(path: str, node_id: str) -> Path:
    """Return where Serve's manager of HAProxy on a node has the file whose path a setting names."""
    folder, name = os.path.split(path)
    return Path(folder, node_id, name)


def default_token_file() -> Path:
    """Return the file from which Ray takes the token of its ports, and into which it writes a new one, where no
    variable says otherwise.
    """
    return Path("~/.ray/auth_token").expanduser()


def without_guesses(line: str) -> str:
    """Return how Ray says that a process ended, without Ray's guesses at causes."""
    return line.partition(_GUESSES)[0]
