"""`motley serve`: starts, waits until healthy, serves until Ctrl-C, and stops all that it started."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

from ..replicas.errors import MotleyError
from ..replicas.hub import resolve_model
from .folder import ray_folder, write_whole
from .greeting import Endpoints, greet, show
from .guard import check_bind
from .haproxy import choose_haproxy
from .options import ServeOptions
from .ports import bracketed, check_port
from .processes import become_subreaper, end_descendants
from .settings import check_environment, ray_settings

DEMO_NAME = "motley-demo"
INTERRUPTED = 130  # stopped before it was ready
END_S = 1.5  # how long each step of an end may take before the next, harsher one


def run_serve(options: ServeOptions, make_worker: Any = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status; errors are one line on stderr.

    `make_worker` replaces the engine in tests. Never touches a cluster that it did not start. A second
    signal while it stops hurries it.
    """
    _take_signals()
    try:
        check(options)
        become_subreaper()
        with ray_folder() as folder:
            _apply_settings(folder)
            _run(options, folder, make_worker)
    except MotleyError as error:
        print(f"motley serve: {error.message}", file=sys.stderr, flush=True)
        return 1
    except (KeyboardInterrupt, SystemExit):  # ray.init's own handler of SIGTERM raises the latter
        return INTERRUPTED
    return 0


def check(options: ServeOptions) -> None:
    """Raise ConfigurationError for what would fail later, or open a door."""
    check_bind(options.host)
    if options.model is not None:
        resolve_model(options.model)  # a wrong path is told at once, and a download shows its progress
    check_environment(os.environ)
    check_port(options.host, options.http_port, "--http-port")
    check_port(options.host, options.grpc_port, "--grpc-port")
    if options.dashboard_port is not None:
        check_port("127.0.0.1", options.dashboard_port, "--dashboard-port")


def _apply_settings(folder: Path) -> None:
    assert "ray.serve" not in sys.modules, "Serve reads its settings when it is imported, which comes later"
    haproxy, reason = choose_haproxy()
    if not haproxy:
        print(reason, file=sys.stderr)
    for setting in ray_settings(folder, haproxy=haproxy):
        os.environ[setting.name] = setting.value


def _run(options: ServeOptions, folder: Path, make_worker: Any) -> None:
    began = time.monotonic()
    try:
        endpoints = _start(options, folder, make_worker, began)
        if options.greet:
            greet(endpoints)
        show(endpoints)
        if options.ready_file is not None:
            write_whole(options.ready_file, json.dumps(asdict(endpoints)))
        with suppress(KeyboardInterrupt):
            while True:  # a signal that another thread got is seen when this one wakes
                time.sleep(1.0)
        print("\nstopping", flush=True)
    finally:
        _stop(options.drain_s)


def _start(options: ServeOptions, folder: Path, make_worker: Any, began: float) -> Endpoints:
    print("starting Ray", flush=True)
    from . import head  # imports ray.serve: after the settings

    dashboard = head.start_ray(folder, options)
    _take_signals()  # ray.init put its own there
    if options.model is None:
        options = replace(options, model=_demo(), served_model_name=options.served_model_name or DEMO_NAME)
    model = str(options.model)
    print(f"loading {model}", flush=True)
    head.deploy(model, options, make_worker)
    name = head.wait_ready(options)
    return Endpoints(
        model=name,
        http=f"http://{bracketed(options.host)}:{options.http_port}",
        grpc=f"{bracketed(options.host)}:{options.grpc_port}",
        dashboard=f"http://{dashboard}",
        pid=os.getpid(),
        start_s=round(time.monotonic() - began, 1),
        folder=str(folder),
    )


def _demo() -> str:
    from ..replicas.demo import demo_path

    return str(demo_path())


def _stop(drain_s: float) -> None:
    """Politely while it lasts, then surely."""
    with suppress(KeyboardInterrupt):
        if "ray" in sys.modules:
            from . import head

            head.stop(drain_s)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    left = end_descendants(polite_s=END_S, patience_s=END_S)
    if left:
        print(f"motley serve: these processes could not be ended: {left}", file=sys.stderr)


def _take_signals() -> None:
    """SIGINT too: a shell starts background jobs with it ignored. SIGHUP: the terminal was closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
