"""Command `motley serve`: runs the service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .config import ConfigFile
from .fleet_file import is_fleet_file, options_with_fleet_file
from .numbers import DAY_S, MAX_REPLICAS, WEEK_S, Between
from .progress import load_bar

ACCESS = "Access"  # heading in --help, where the version of typer shows one
TIMEOUT = Between(0.0, DAY_S, above=True)


def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL|FLEET.yaml", help="A folder, a Hugging Face id, demo, or a fleet file.")
    ] = "demo",
    host: Annotated[
        str, typer.Option(help="Where to listen; off loopback with API keys and TLS only.", rich_help_panel=ACCESS)
    ] = "127.0.0.1",
    api_keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Who may call: a file made by `motley keys`.", rich_help_panel=ACCESS),
    ] = None,
    open_health: Annotated[
        bool, typer.Option("--open-health", help="Allow health checks without a key.", rich_help_panel=ACCESS)
    ] = False,
    open_metrics: Annotated[
        bool,
        typer.Option("--open-metrics", help="Tell metrics on this machine without a key.", rich_help_panel=ACCESS),
    ] = False,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Serve over TLS with this certificate.", rich_help_panel=ACCESS)
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="PEM", help="The certificate's key.", rich_help_panel=ACCESS)
    ] = None,
    client_ca: Annotated[
        Path | None,
        typer.Option(metavar="PEM", help="Admit clients with a certificate of this CA only.", rich_help_panel=ACCESS),
    ] = None,
    tls_terminated_upstream: Annotated[
        bool,
        typer.Option("--tls-terminated-upstream", help="A proxy before this service does TLS.", rich_help_panel=ACCESS),
    ] = False,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Web pages from there may call; repeatable.", rich_help_panel=ACCESS),
    ] = None,
    weights_root: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="`motley fleet update` may take weights from there; repeatable.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    http_port: Annotated[int, typer.Option(help="Port of HTTP.", min=1, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC: motley.v1, KServe and Triton, vLLM.", min=1, max=65535)] = 9000,
    control: Annotated[
        bool, typer.Option("--control/--no-control", help="Run the control plane, for `motley fleet`.")
    ] = True,
    admin_host: Annotated[
        str,
        typer.Option(help="Control plane's address; off loopback with API keys and TLS only.", rich_help_panel=ACCESS),
    ] = "127.0.0.1",
    admin_port: Annotated[
        int | None, typer.Option(help="Control plane's port; default: 9190 or another free one.", min=1, max=65535)
    ] = None,
    dashboard_port: Annotated[
        int | None, typer.Option(help="Port of Ray's dashboard; default: 8265 or another free one.", min=1, max=65535)
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Model name for clients.")] = None,
    replicas: Annotated[int, typer.Option(help="Copies of the model.", min=1, max=MAX_REPLICAS)] = 1,
    max_replicas: Annotated[
        int | None,
        typer.Option(help="Most that `motley fleet` may ask for; default: one for each core.", min=1, max=MAX_REPLICAS),
    ] = None,
    null_engine: Annotated[
        bool, typer.Option("--null-engine", help="Compute nothing, to measure the service itself.")
    ] = False,
    null_step_ms: Annotated[
        float, typer.Option(help="Duration of a null engine's step; 0: as its readers take.", min=0.0)
    ] = 0.0,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="GPU", help="Compute nothing, and take the time that the roofline says it would: P40, T4."
        ),
    ] = None,
    simulate_model: Annotated[
        str | None, typer.Option(help="Model whose time is simulated: qwen2.5-7b, ...; default: its own.")
    ] = None,
    prefix_cache: Annotated[
        str,
        typer.Option(
            metavar="URL|WORD",
            help="Where replicas share prompts' prefixes: embedded (a Redis of its own), redis://, rediss://, unix://, "
            "memory, off.",
        ),
    ] = "embedded",
    prefix_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory of its own Redis, or of each replica.")
    ] = "1GiB",
    prefix_secret: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Secret by which services share prefixes.", rich_help_panel=ACCESS),
    ] = None,
    tool_parser: Annotated[
        str, typer.Option(help="How calls are written: auto (by the chat template), hermes, llama3_json, none.")
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option(help="How reasoning is written: auto (by the chat template), qwen3, none.")
    ] = "auto",
    unknown_fields: Annotated[
        str, typer.Option(metavar="ignore|refuse", help="Fields of a request that nobody knows: ignore logs each name.")
    ] = "ignore",
    vllm_metrics: Annotated[
        bool, typer.Option("--vllm-metrics", help="Tell metrics by vLLM's prefix too, for its dashboards.")
    ] = False,
    otlp_endpoint: Annotated[
        str,
        typer.Option(metavar="URL", help="Tell OpenTelemetry's collector of each request: http://127.0.0.1:4318."),
    ] = "",
    drain_s: Annotated[
        float,
        typer.Option(
            help="Seconds that streams may go on after Ctrl-C, or on a replica that is taken away.", min=0.0, max=WEEK_S
        ),
    ] = 3.0,
    stall_s: Annotated[
        float,
        typer.Option(
            help="Seconds until the streams of a replica that shows no sign of life move.", min=1.0, max=WEEK_S
        ),
    ] = 5.0,
    spare: Annotated[
        bool,
        typer.Option("--spare/--no-spare", help="A process waits for the next replica, which starts sooner: 0.3 GiB."),
    ] = True,
    greet: Annotated[
        bool, typer.Option("--greet", help="Show an answer over gRPC and one over HTTP when ready.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(metavar="auto|HOST:PORT", help="Deploy a fleet file on this Ray cluster, and end."),
    ] = None,
    ready_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Written as JSON when ready.")] = None,
    log_format: Annotated[
        str, typer.Option(metavar="text|json", envvar="MOTLEY_LOG_FORMAT", help="Form of Motley's log lines.")
    ] = "text",
    keep_logs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where logs are kept after the end, a folder for each run.")
    ] = None,
    device: options.Devices = "cpu",
    dtype: options.Dtype = "auto",
    numerics: options.Numerics = None,
    kv_dtype: options.KvDtype = None,
    cpu_weights: options.CpuWeights = None,
    threads: options.Threads = None,
    max_model_len: options.MaxModelLen = None,
    kv_memory: options.KVMemory = None,
    swap_memory: options.SwapMemory = None,
    tensor_parallel: options.TensorParallel = 1,
    pipeline_parallel: options.PipelineParallel = 1,
    pipeline_layers: options.PipelineLayers = None,
    speculate_ngram: options.SpeculateNgram = 0,
    weights_cache: options.WeightsCache = None,
    weights_memory: options.WeightsMemory = None,
    weights_host_memory: options.WeightsHostMemory = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Tokens computed per step.", min=1)] = None,
    max_running: Annotated[int | None, typer.Option(help="Sequences per step.", min=1)] = None,
    max_waiting: Annotated[int | None, typer.Option(help="Requests that may wait; more are refused.", min=1)] = None,
    max_waiting_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens that may wait; more are refused.", min=1)
    ] = None,
    reader_timeout_s: Annotated[
        float | None, typer.Option(help="Seconds until a client that reads nothing is left; default: 30."), TIMEOUT
    ] = None,
    watchdog_s: Annotated[
        float | None, typer.Option(help="Seconds until a step counts as hung; default: 60."), TIMEOUT
    ] = None,
    frozen_weights: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Tensors that no update may change: model.embed_tokens.*; repeatable."),
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Serve a model over gRPC and OpenAI's HTTP until Ctrl-C, which drains and stops everything it started.

    \b
    Examples:
      motley serve                                     the built-in demo model
      motley serve ./my-gptq-model --http-port 8080 --grpc-port 9090
      motley serve org/name --served-model-name mine --max-model-len 8192 --kv-memory 2GiB
      motley serve fleet.yaml                          pools of unequal replicas; again: what has changed
      motley serve --config serve.yaml                 lines such as `http-port: 8080`
      motley serve --host 0.0.0.0 --api-keys keys.yaml --tls-cert cert.pem --tls-key key.pem
    """
    engine = options.engine_config(
        device=device,
        dtype=dtype,
        numerics=numerics,
        kv_dtype=kv_dtype,
        cpu_weights=cpu_weights,
        threads=threads,
        max_model_len=max_model_len,
        kv_memory=kv_memory,
        swap_memory=swap_memory,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        pipeline_layers=pipeline_layers,
        speculate_ngram=speculate_ngram,
        weights_cache=weights_cache,
        weights_memory=weights_memory,
        weights_host_memory=weights_host_memory,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
        reader_timeout_s=reader_timeout_s,
        watchdog_s=watchdog_s,
        frozen_weights=tuple(frozen_weights) if frozen_weights else None,
    )
    from ..cluster.fleet.spec.serve_options import ServeOptions
    from ..cluster.service.startup.serve_command import run_serve

    serve_options = ServeOptions(
        model=None if model == "demo" else model,
        engine=engine,
        replicas=replicas,
        max_replicas=max_replicas,
        host=host,
        api_keys=api_keys,
        open_health=open_health,
        open_metrics=open_metrics,
        vllm_metrics=vllm_metrics,
        otlp_endpoint=otlp_endpoint,
        cors_origins=tuple(cors_origin or ()),
        tls_cert=tls_cert,
        tls_key=tls_key,
        client_ca=client_ca,
        tls_terminated_upstream=tls_terminated_upstream,
        weights_roots=tuple(root.absolute() for root in weights_root or ()),
        http_port=http_port,
        grpc_port=grpc_port,
        control=control,
        admin_host=admin_host,
        admin_port=admin_port,
        dashboard_port=dashboard_port,
        served_model_name=served_model_name,
        null_engine=null_engine,
        null_step_ms=null_step_ms,
        simulate=simulate,
        simulate_model=simulate_model,
        prefix_cache=prefix_cache,
        prefix_memory=options.parse_size(prefix_memory, "--prefix-memory"),
        prefix_secret=prefix_secret,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        unknown_fields=unknown_fields,
        drain_s=drain_s,
        stall_s=stall_s,
        spare=spare,
        greet=greet,
        address=address,
        ready_file=ready_file,
        log_format=log_format,
        keep_logs=keep_logs,
    )
    if is_fleet_file(model):
        serve_options = options_with_fleet_file(context, serve_options, Path(model))
    raise typer.Exit(run_serve(serve_options, bar=load_bar))
