"""`motley serve`: the service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .config import ConfigFile


def serve(
    model: Annotated[str, typer.Argument(help="A folder, a Hugging Face id, or demo.")] = "demo",
    host: Annotated[
        str, typer.Option(help="Where to listen: on loopback, as there are no API keys yet.")
    ] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="OpenAI's HTTP.", min=1, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(help="motley.v1 over gRPC.", min=1, max=65535)] = 9000,
    dashboard_port: Annotated[
        int | None, typer.Option(help="Ray's dashboard; default: 8265 or another free one.", min=1, max=65535)
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    replicas: Annotated[int, typer.Option(help="Copies of the model.", min=1)] = 1,
    drain_s: Annotated[float, typer.Option(help="Seconds that streams may go on after Ctrl-C.", min=0.0)] = 3.0,
    greet: Annotated[
        bool, typer.Option("--greet", help="Show an answer over gRPC and one over HTTP when ready.")
    ] = False,
    ready_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Written as JSON when ready.")] = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    numerics: options.Numerics = "exact",
    cpu_weights: options.CpuWeights = None,
    threads: options.Threads = None,
    max_model_len: options.MaxModelLen = None,
    kv_memory: options.KVMemory = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Tokens computed per step.", min=1)] = None,
    max_running: Annotated[int | None, typer.Option(help="Sequences per step.", min=1)] = None,
    config: ConfigFile = None,
) -> None:
    """Serve a model over gRPC and OpenAI's HTTP until Ctrl-C, which drains and stops everything it started.

    \b
    Examples:
      motley serve                                     the built-in demo model
      motley serve ./my-gptq-model --http-port 8080 --grpc-port 9090
      motley serve org/name --served-model-name mine --max-model-len 8192 --kv-memory 2GiB
      motley serve --config serve.yaml                 lines such as `http-port: 8080`
    """
    engine = options.engine_config(
        device=device,
        dtype=dtype,
        numerics=numerics,
        cpu_weights=cpu_weights,
        threads=threads,
        max_model_len=max_model_len,
        kv_memory=kv_memory,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
    )
    from ..cluster.options import ServeOptions
    from ..cluster.serve import run_serve

    status = run_serve(
        ServeOptions(
            model=None if model == "demo" else model,
            engine=engine,
            replicas=replicas,
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            dashboard_port=dashboard_port,
            served_model_name=served_model_name,
            drain_s=drain_s,
            greet=greet,
            ready_file=ready_file,
        )
    )
    raise typer.Exit(status)
