"""Service behind `motley serve`: starts, waits until healthy, serves until Ctrl-C, and stops all that it started."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ....replicas.checkpoint.files.model_hub import resolve_model
from ....replicas.checkpoint.reading.load_progress import read_load_progress
from ....replicas.engine.startup.memory_check import check_memory
from ....replicas.errors import CheckpointError, InvalidRequest, MotleyError
from ....replicas.host.process_logging import FORMAT_VARIABLE, FORMATS
from ....replicas.loading.servable_check import check_servable_in_child
from ....replicas.replica import null_worker
from ....replicas.updates.process_folder import remove_stale_folders
from ...api.common.parsers.parser_selection import check_parser_names
from ...fleet.deployed.deployed_fleet import DeployedFleet
from ...fleet.deployed.prefix_sharing import (
    choose_prefix_sharing,
    describe_prefix_sharing,
    print_shared_dtype,
    start_embedded_redis,
)
from ...fleet.deployed.redis_reachability import warn_if_unreachable
from ...fleet.deployed.running_services import find_running_service, write_service_note
from ...fleet.spec.fleet_file_loader import DEMO
from ...fleet.spec.fleet_flags import error_in_file, fleet_from_options
from ...fleet.spec.fleet_spec import FleetSpec, engine_config, pool_model
from ...fleet.spec.serve_options import ServeOptions
from ...prefix_store.embedded_redis import EmbeddedRedis
from ...process_tree import become_subreaper, end_descendants
from ...security.edge.haproxy_admin import choose_haproxy, proxy_name
from ...security.edge.haproxy_config import HAProxyEdge
from ...security.edge.internal_client import InternalClient
from ...security.edge.ports import bracket_host, check_port
from ...service_errors import ConfigurationError
from ...tracing.otlp_export import check_otlp_endpoint
from ..supervision.guardian import MARK, Guardian
from ..supervision.kept_logs import check_log_folder
from ..supervision.run_folder import ray_folder
from ..supervision.watchdog import EXIT_SERVICE_LOST, ServiceLost, ServiceWatchdog
from .access_options import check_access, choose_haproxy_config, choose_ingress_config, choose_internal_client
from .apply_fleet import apply_locally, apply_to_cluster
from .ray_settings import check_environment, ray_settings
from .ready_file import ReadyFile
from .ready_message import Endpoints, show_endpoints, show_first_responses
from .served_model_name import with_served_model_name
from .torch_build import check_torch

INTERRUPTED = 130  # stopped before it was ready
END_S = 1.5  # how long each step of an end may take before the next, harsher one


Bar = Callable[[str], AbstractContextManager[Callable[[int, int], None] | None]]


def run_serve(options: ServeOptions, make_worker: Any = None, bar: Bar = lambda _: nullcontext()) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status; errors are one line on stderr.

    A fleet file whose ports belong to a running fleet is applied to that fleet, and one with an address to the cluster
    there. Otherwise no cluster is touched that was not started here.

    `make_worker` replaces the engine in tests. A second signal while it stops hurries it. `bar` shows how far the model
    is loaded, if somebody watches.
    """
    _take_signals()
    ready_file = ReadyFile(options.ready_file)
    try:
        ready_file.remove_stale()  # before a download of the model, which takes minutes
        check(options)
        os.environ[FORMAT_VARIABLE] = options.log_format  # before anything of Serve's is imported
        if options.address is not None:
            apply_to_cluster(options, options.address)
            return 0
        running = None if options.fleet is None else find_running_service(options.http_port, options.grpc_port)
        if running is not None:
            apply_locally(options, running)
            return 0
        _check_ports(options)
        ready_file.begin()
        if make_worker is None and not options.null_engine:
            check_torch(fleet_from_options(options), options.fleet)
            _check_memory(options, fleet_from_options(options))
        become_subreaper()
        with ray_folder(options.keep_logs) as folder:
            edge = _choose_edge(options)
            settings = _apply_settings(folder, edge)
            os.environ[MARK] = str(folder.parent)
            _run(options, edge, folder, settings, ready_file, make_worker, bar)
    except ServiceLost as lost:
        _report(f"{lost}; start the service again")
        sys.stdout.flush()
        os._exit(
            EXIT_SERVICE_LOST
        )  # Ray's threads in this process crash as it ends, without the daemons that they know
    except ConfigurationError as error:
        print(f"motley serve: {error_in_file(error, options.fleet).message}", file=sys.stderr, flush=True)
        return 1
    except MotleyError as error:
        print(f"motley serve: {error.message}", file=sys.stderr, flush=True)
        return 1
    except (KeyboardInterrupt, SystemExit):  # ray.init's own handler of SIGTERM raises the latter
        return INTERRUPTED
    return 0


def check(options: ServeOptions) -> None:
    """Raise ConfigurationError for options that would fail later, or be insecure."""
    check_access(options)
    if options.address is not None and options.fleet is None:
        raise ConfigurationError("--address: it is accepted with a fleet file only", param="address")
    _check_logs(options)
    if options.otlp_endpoint:
        check_otlp_endpoint(options.otlp_endpoint)
    _check_simulated(options)
    spec = fleet_from_options(options)
    choose_prefix_sharing(spec)  # reads the secret
    _check_models(options, spec)
    check_parser_names(options.tool_parser, options.reasoning_parser)
    check_environment(os.environ)


def _check_models(options: ServeOptions, spec: FleetSpec) -> None:
    """Resolve each model once, so that a wrong path or a bad checkpoint fails at once, and a download shows its
    progress.
    """
    places: dict[str, tuple[str | int, ...]] = {}
    for number, pool in enumerate(spec.pools):
        own = pool.quantization.model is not None
        places.setdefault(pool_model(spec, pool), ("pools", number, "quantization", "model") if own else ("model",))
    for model in sorted(places.keys() - {DEMO}):
        try:
            check_servable_in_child(resolve_model(model))
        except CheckpointError as error:
            if options.fleet is None:
                raise
            raise options.fleet.lines.error(places[model], error.message) from None


def _check_memory(options: ServeOptions, spec: FleetSpec) -> None:
    """Raise ConfigurationError if a pool's model, or each GPU's share of it, does not fit the memory of this
    machine.
    """
    for number, pool in enumerate(spec.pools):
        model, config = pool_model(spec, pool), engine_config(spec, pool)
        mixed = any(pool.gpus) and not all(pool.gpus)
        apart = mixed or pool.simulate is not None or pool.spread or config.weights_memory_bytes is not None
        if apart or not pool.replicas.start or model == DEMO:
            continue
        try:
            check_memory(resolve_model(model), config)
        except InvalidRequest as error:
            if options.fleet is None:
                raise ConfigurationError(error.message, param="model", code="no_place") from None
            raise options.fleet.lines.error(("pools", number), error.message) from None


def _check_ports(options: ServeOptions) -> None:
    check_port(options.host, options.http_port, "--http-port")
    check_port(options.host, options.grpc_port, "--grpc-port")
    if options.control and options.admin_port is not None:
        check_port(options.admin_host, options.admin_port, "--admin-port")
    if options.dashboard_port is not None:
        check_port("127.0.0.1", options.dashboard_port, "--dashboard-port")


def _check_logs(options: ServeOptions) -> None:
    if options.log_format not in FORMATS:
        given = f"--log-format {options.log_format}: {' and '.join(FORMATS)} are accepted"
        raise ConfigurationError(given, param="log_format")
    if options.keep_logs is not None:
        if options.address is not None:
            raise ConfigurationError("--keep-logs: with --address the logs are the cluster's own", param="keep_logs")
        check_log_folder(options.keep_logs)


def _check_simulated(options: ServeOptions) -> None:
    if options.fleet is not None:
        return  # as it was read
    if options.simulate is None:
        if options.simulate_model is not None:
            raise ConfigurationError("--simulate-model: it needs --simulate, which names a GPU")
        return
    if options.null_engine:
        raise ConfigurationError("--simulate and --null-engine: only one of them is accepted")
    from ....replicas.simulated.simulated_device import find_model_shape, find_table_device  # imports torch

    find_table_device(options.simulate)
    if options.simulate_model is not None:
        find_model_shape(options.simulate_model)


def _choose_edge(options: ServeOptions) -> HAProxyEdge | None:
    haproxy, reason = choose_haproxy()
    if not haproxy:
        print(reason, file=sys.stderr)
    return choose_haproxy_config(options, haproxy=haproxy)


def _apply_settings(folder: Path, edge: HAProxyEdge | None) -> dict[str, str]:
    assert "ray.serve" not in sys.modules, "Serve reads its settings when it is imported, which comes later"
    settings = {setting.name: setting.value for setting in ray_settings(folder, edge)}
    os.environ.update(settings)
    return settings


def _run(
    options: ServeOptions, edge: HAProxyEdge | None, folder: Path, settings: Mapping[str, str], ready_file: ReadyFile,
    make_worker: Any, bar: Bar,
) -> None:  # fmt: skip
    began = time.monotonic()
    redis: Future[EmbeddedRedis | None] | None = None
    guardian = Guardian(folder.parent, ready_file.path)
    watch = ServiceWatchdog(_report, lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        guardian.start()
        inside = choose_internal_client(options, edge)
        redis = start_embedded_redis(
            fleet_from_options(options), folder.parent, null=options.null_engine or make_worker is not None
        )
        warn_if_unreachable(fleet_from_options(options).prefix_cache)
        proxy = proxy_name(haproxy=edge is not None)
        endpoints = _start(options, inside, folder, make_worker, bar, began, proxy, redis, watch, guardian)
        if options.greet:
            show_first_responses(inside)
        show_endpoints(endpoints, keys=options.api_keys is not None)
        from ..deployment.ray_head import cluster_address
        from ..supervision.watched_processes import service_probes

        watch.also(service_probes(inside, redis.result(), control=options.control))

        write_service_note(
            folder.parent,
            pid=os.getpid(),
            address=cluster_address(),
            http_port=options.http_port,
            grpc_port=options.grpc_port,
            environment={**settings, FORMAT_VARIABLE: options.log_format},
        )
        ready_file.write(endpoints)
        with suppress(KeyboardInterrupt):
            while True:  # a signal that another thread got is seen when this one wakes
                time.sleep(1.0)
        print("\nstopping", flush=True)
    except KeyboardInterrupt:  # while it starts
        if watch.why is None:
            raise
    finally:
        watch.end()
        ready_file.remove()  # nobody is to take what ends for what is ready
        _stop(options.drain_s, redis, guardian, lost=watch.why is not None)
    if watch.why is not None:
        raise ServiceLost(watch.why)


def _start(
    options: ServeOptions, inside: InternalClient, folder: Path, make_worker: Any, bar: Bar, began: float, proxy: str,
    redis: Future[EmbeddedRedis | None], watch: ServiceWatchdog, guardian: Guardian,
) -> Endpoints:  # fmt: skip
    print("starting Ray", flush=True)
    remove_stale_folders()  # what one that was killed has left
    from ..deployment import ray_head
    from ..supervision import watched_processes  # they import ray.serve: after the settings
    from . import placement_check

    spec = with_served_model_name(fleet_from_options(options), null=options.null_engine)
    dashboard = ray_head.start_ray(folder, spec)
    _take_signals()  # ray.init put its own there
    watch.start(watched_processes.ray_children(), watched_processes.ray_probes(), guardian.restart_if_ended)
    placement_check.check_local_capacity(spec, options.fleet)
    _print_simulated(options, spec)
    model = spec.model
    print(f"loading {model}", flush=True)
    ingress_config = choose_ingress_config(options, inside, folder)
    own_key = ingress_config.own_key.sha256 if ingress_config.own_key is not None else ""
    logs = ingress_config.log_folder
    own = redis.result()
    prefixes = choose_prefix_sharing(spec, "" if own is None else own.url)
    print_shared_dtype(spec, prefixes)
    by_file = options.fleet is not None
    deployed = DeployedFleet(fleet=spec, own_key=own_key, folder=logs, by_file=by_file, prefixes=prefixes)
    make_worker = make_worker or _null(options, spec)
    ray_head.deploy(deployed, ingress_config, make_worker, folder)
    control = ray_head.start_control_plane(options, ingress_config, make_worker, folder) if options.control else None
    with bar(f"loading {model}") as show_progress:
        ray_head.wait_loaded(
            partial(_show_progress, placement_check.pending_replica_printer(spec), show_progress, folder)
        )
    name = ray_head.wait_ready(inside, spec.service.ingresses)
    if control is not None:
        control.wait_ready()
    scheme = "http" if options.tls_cert is None else "https"
    return Endpoints(
        model=name,
        http=f"{scheme}://{bracket_host(options.host)}:{options.http_port}",
        grpc=f"{bracket_host(options.host)}:{options.grpc_port}",
        proxy=proxy,
        admin="" if control is None else control.contact.address,
        dashboard=f"http://{dashboard}",
        pid=os.getpid(),
        prefixes=describe_prefix_sharing(spec, own),
        start_s=round(time.monotonic() - began, 1),
        folder=str(folder),
    )


def _show_progress(waiting: Callable[[], None], show_progress: Callable[[int, int], None] | None, folder: Path) -> None:
    """Report during a start which replicas wait for a place, and how far the others have loaded if somebody watches."""
    waiting()
    if show_progress:
        show_progress(*read_load_progress(folder))


def _print_simulated(options: ServeOptions, spec: FleetSpec) -> None:
    nothing = "nothing is computed, what it says means nothing"
    if options.null_engine:
        print(f"null engine: {nothing}", flush=True)
    for pool in spec.pools:
        if pool.simulate is not None:
            measured = "" if pool.attained is None else pool.attained.measured
            as_measured = f" as measured ({measured})" if measured else ""
            print(f"{pool.simulate}, simulated{as_measured}: {nothing}", flush=True)


def _null(options: ServeOptions, spec: FleetSpec) -> Callable[[], Any] | None:
    if not options.null_engine:
        return None
    config = engine_config(spec, spec.pools[0])
    return partial(null_worker, spec.model, config, spec.served_model_name, options.null_step_ms / 1e3)


def _stop(drain_s: float, redis: Future[EmbeddedRedis | None] | None, guardian: Guardian, *, lost: bool) -> None:
    """Stop the service gently, then by force. `lost`: a part of Ray has ended, so the others may not hear."""
    with suppress(KeyboardInterrupt):
        if "ray" in sys.modules:
            from ..deployment import ray_head

            (ray_head.stop_after_loss if lost else ray_head.stop_gracefully)(drain_s)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(TimeoutError):  # one that still starts ends with this process
        if redis is not None and redis.exception(END_S) is None and (own := redis.result()) is not None:
            own.stop()
    guardian.stop()
    left = end_descendants(polite_s=0.0 if lost else END_S, timeout_s=END_S)
    remove_stale_folders()
    if left:
        print(f"motley serve: these processes could not be ended: {left}", file=sys.stderr)


def _report(line: str) -> None:
    print(f"motley serve: {line}", file=sys.stderr, flush=True)


def _take_signals() -> None:
    """Handle SIGINT too, since a shell starts background jobs with it ignored, and SIGHUP, sent when the terminal
    closes.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
