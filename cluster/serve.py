"""`motley serve`: starts, waits until healthy, serves until Ctrl-C, and stops all that it started."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

from ..replicas.errors import MotleyError
from ..replicas.hub import resolve_model
from ..replicas.loading import read_loading
from ..replicas.servable import check_in_process
from .access import check_access, choose_edge, choose_entrance, choose_inside
from .edge.edge import Edge
from .edge.haproxy import choose_haproxy, proxy_name
from .edge.inside import Inside
from .edge.ports import bracketed, check_port
from .folder import ray_folder, write_whole
from .greeting import Endpoints, greet, show
from .options import ServeOptions
from .parsers.styles import check_names
from .processes import become_subreaper, end_descendants
from .settings import check_environment, ray_settings

DEMO_NAME = "motley-demo"
NULL_NAME = "null-engine"  # never by the name of a model that it is not
INTERRUPTED = 130  # stopped before it was ready
END_S = 1.5  # how long each step of an end may take before the next, harsher one


Bar = Callable[[str], AbstractContextManager[Callable[[int, int], None] | None]]


def run_serve(options: ServeOptions, make_worker: Any = None, bar: Bar = lambda _: nullcontext()) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status; errors are one line on stderr.

    `make_worker` replaces the engine in tests. Never touches a cluster that it did not start. A second
    signal while it stops hurries it. `bar` shows how far the model is loaded, where somebody looks.
    """
    _take_signals()
    try:
        check(options)
        become_subreaper()
        with ray_folder() as folder:
            edge = _choose_edge(options)
            _apply_settings(folder, edge)
            _run(options, edge, folder, make_worker, bar)
    except MotleyError as error:
        print(f"motley serve: {error.message}", file=sys.stderr, flush=True)
        return 1
    except (KeyboardInterrupt, SystemExit):  # ray.init's own handler of SIGTERM raises the latter
        return INTERRUPTED
    return 0


def check(options: ServeOptions) -> None:
    """Raise ConfigurationError for what would fail later, or open a door."""
    check_access(options)
    if options.model is not None:
        # A wrong path and a bad checkpoint are told at once, and a download shows its progress.
        check_in_process(resolve_model(options.model))
    check_names(options.tool_parser, options.reasoning_parser)
    check_environment(os.environ)
    check_port(options.host, options.http_port, "--http-port")
    check_port(options.host, options.grpc_port, "--grpc-port")
    if options.dashboard_port is not None:
        check_port("127.0.0.1", options.dashboard_port, "--dashboard-port")


def _choose_edge(options: ServeOptions) -> Edge | None:
    haproxy, reason = choose_haproxy()
    if not haproxy:
        print(reason, file=sys.stderr)
    return choose_edge(options, haproxy=haproxy)


def _apply_settings(folder: Path, edge: Edge | None) -> None:
    assert "ray.serve" not in sys.modules, "Serve reads its settings when it is imported, which comes later"
    for setting in ray_settings(folder, edge):
        os.environ[setting.name] = setting.value


def _run(options: ServeOptions, edge: Edge | None, folder: Path, make_worker: Any, bar: Bar) -> None:
    began = time.monotonic()
    try:
        inside = choose_inside(options, edge)
        endpoints = _start(options, inside, folder, make_worker, bar, began, proxy_name(haproxy=edge is not None))
        if options.greet:
            greet(inside)
        show(endpoints, keys=options.api_keys is not None)
        if options.ready_file is not None:
            write_whole(options.ready_file, json.dumps(asdict(endpoints)))
        with suppress(KeyboardInterrupt):
            while True:  # a signal that another thread got is seen when this one wakes
                time.sleep(1.0)
        print("\nstopping", flush=True)
    finally:
        _stop(options.drain_s)


def _start(
    options: ServeOptions, inside: Inside, folder: Path, make_worker: Any, bar: Bar, began: float, proxy: str
) -> Endpoints:
    print("starting Ray", flush=True)
    from . import head  # imports ray.serve: after the settings

    dashboard = head.start_ray(folder, options)
    _take_signals()  # ray.init put its own there
    if options.null_engine:
        options = replace(options, served_model_name=options.served_model_name or NULL_NAME)
        print("null engine: nothing is computed, what it says means nothing", flush=True)
    if options.model is None:
        options = replace(options, model=_demo(), served_model_name=options.served_model_name or DEMO_NAME)
    model = str(options.model)
    print(f"loading {model}", flush=True)
    head.deploy(model, options, choose_entrance(options, inside, folder), make_worker, folder)
    with bar(f"loading {model}") as tell:
        head.wait_loaded((lambda: tell(*read_loading(folder))) if tell else lambda: None)
    name = head.wait_ready(inside)
    scheme = "http" if options.tls_cert is None else "https"
    return Endpoints(
        model=name,
        http=f"{scheme}://{bracketed(options.host)}:{options.http_port}",
        grpc=f"{bracketed(options.host)}:{options.grpc_port}",
        proxy=proxy,
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
