"""Command `motley bench serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motley.cli import options
from motley.cli.config import ConfigFile
from motley.cli.progress import show_activity

from .bench_output import print_report


def serve(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="With --start: arguments of `motley serve`.")
    ] = None,
    protocol: Annotated[str, typer.Option(help="grpc (motley.v1) or http (OpenAI's completions).")] = "grpc",
    target: Annotated[
        str | None,
        typer.Option("--target", "--address", help="Its address; default: 127.0.0.1:9000, or http://127.0.0.1:8000."),
    ] = None,
    start: Annotated[bool, typer.Option("--start", help="Start a service for it, and stop it afterwards.")] = False,
    concurrency: Annotated[int, typer.Option(help="Closed loop: requests under way at any time.", min=1)] = 16,
    rate: Annotated[
        float | None,
        typer.Option(help="Open loop instead: requests per second, arriving as a Poisson process.", min=1e-6),
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="LENGTH", help="Tokens: 128, uniform:16:256 or lognormal:128:0.6 (median, sigma).")
    ] = "64",
    output_tokens: Annotated[str, typer.Option(metavar="LENGTH", help="Tokens of an answer, in the same form.")] = "64",
    shared_prefix: Annotated[
        float, typer.Option(help="Share of each prompt that all have in common.", min=0.0, max=1.0)
    ] = 0.0,
    unary: Annotated[bool, typer.Option("--unary", help="Request whole answers instead of streams.")] = False,
    duration_s: Annotated[float, typer.Option(help="Seconds of the measured window.", min=0.5)] = 10.0,
    warmup_s: Annotated[float, typer.Option(help="Seconds before the window.", min=0.0)] = 1.0,
    drain_s: Annotated[float, typer.Option(help="Seconds after it, for open requests.", min=0.0)] = 30.0,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Goodput: time to first token.", min=0.0)] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="Goodput: time per token after it.", min=0.0)] = None,
    slo_e2e_ms: Annotated[float | None, typer.Option(help="Goodput: the whole request.", min=0.0)] = None,
    clients: Annotated[int, typer.Option(help="Processes that make the load.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Seed of lengths, prompts and arrivals.")] = 0,
    api_key: Annotated[str | None, typer.Option(envvar="MOTLEY_API_KEY", help="API key for every request.")] = None,
    tls: Annotated[bool, typer.Option("--tls", help="gRPC over TLS; HTTP is where the target says https://.")] = False,
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Authorities to trust, PEM; implies --tls. Default: public.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Put load on a running service and measure latencies, throughput and goodput.

    Times count from when a request was meant to be sent. TTFT: time to the first message of the answer. TPOT: the
    remaining time of the request for each further token. ITL: the gaps between messages. Goodput: requests/s that met
    every SLO. With `motley serve --null-engine`, which computes nothing, the figures are the service's own.

    \b
    Examples:
      motley bench serve                               16 streams at a time on 127.0.0.1:9000
      motley bench serve --protocol http --rate 5 --slo-ttft-ms 500 --slo-tpot-ms 50
      motley bench serve --prompt-tokens lognormal:512:0.8 --output-tokens uniform:16:256 --shared-prefix 0.5
      motley bench serve --unary --concurrency 32 --output-tokens 1 --json
      motley bench serve --target gpu-box:9000 --tls-ca ca.pem --api-key "$KEY"
      motley bench serve --start -- demo --null-engine
    """
    from motley.client import Tls

    from ..load import serve_load as bench
    from ..load.load_report import text

    bench_config = bench.ServeBenchConfig(
        workload=bench.parse_workload(
            protocol=protocol,
            streaming=not unary,
            concurrency=concurrency,
            rate=rate,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            shared_prefix=shared_prefix,
            seed=seed,
            warmup_s=warmup_s,
            duration_s=duration_s,
            drain_s=drain_s,
        ),
        slo=bench.parse_slo(ttft_ms=slo_ttft_ms, tpot_ms=slo_tpot_ms, e2e_ms=slo_e2e_ms),
        target=target,
        start=arguments or () if start else None,
        clients=clients,
        api_key=api_key,
        tls=Tls(ca=tls_ca) if tls or tls_ca else None,
    )
    if arguments and not start:
        raise typer.BadParameter(f"{arguments[0]}: arguments of `motley serve` need --start")
    with show_activity("starting") as progress:
        report = bench.run(bench_config, progress)
    print_report(report, text, None, as_json=as_json)
