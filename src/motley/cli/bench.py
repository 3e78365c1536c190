"""`motley bench …`: measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .config import ConfigFile
from .progress import counted, doing

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Measurements, side by side with peers where they are installed."""


@app.command()
def engine(
    more: Annotated[list[int] | None, typer.Argument(metavar="N", help="Further values of --batch.")] = None,
    shape: Annotated[str, typer.Option(help="Shape of the random int4 checkpoint.")] = "qwen2-0.5b",
    batch: Annotated[
        list[int] | None, typer.Option(metavar="N ...", help="Sequences that decode together; default: 1 8 32.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="transformers or llama.cpp; may be repeated; default: both.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the measured prefill.", min=1)] = 512,
    output_tokens: Annotated[int, typer.Option(help="Tokens decoded by each sequence.", min=1)] = 64,
    threads: options.Threads = None,
    repeats: Annotated[int, typer.Option(help="Times that each prefill is measured.", min=1)] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller shape and less of everything.")] = False,
    speculate_ngram: options.SpeculateNgram = 0,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Prefill and decode rates of the engine beside its peers, on this machine.

    \b
    Examples:
      motley bench engine --quick
      motley bench engine --shape qwen2-0.5b --batch 1 8 32 --threads 2
      motley bench engine --peer transformers --peer llama.cpp --json
      motley bench engine --quick --batch 1 --speculate-ngram 8
    """
    batches = [*(batch or ()), *(more or ())] or [1, 8, 32]
    if any(size < 1 for size in batches):
        raise typer.BadParameter(f"--batch {min(batches)}: expected numbers of at least 1")
    from ..replicas.bench import engine as bench
    from ..replicas.bench.peers import PEERS, SideFailed
    from ..replicas.bench.report import table
    from ..replicas.errors import MotleyError

    try:
        with counted("starting") as progress:
            report = bench.run(
                shape=shape,
                batches=batches,
                peers=peer if peer is not None else PEERS,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                threads=threads,
                repeats=repeats,
                quick=quick,
                speculate_ngram=speculate_ngram,
                progress=progress,
            )
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from error
    except SideFailed as error:
        raise MotleyError(" ".join(str(error).split())) from error
    print(json.dumps(report) if as_json else table(report))


@app.command(name="kernels")
def kernels_(
    device: options.Device = "cpu",
    model: Annotated[
        list[str] | None,
        typer.Option(help="Layer shapes of qwen2.5-0.5b, qwen2.5-7b, llama-3-8b or qwen3-32b; may be repeated."),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            metavar="M",
            help="Rows of activations, on a GPU also batches of attention; may be repeated; default: 1 to 2048.",
        ),
    ] = None,
    op: Annotated[list[str] | None, typer.Option(help="Operator; may be repeated; default: all.")] = None,
    threads: options.Threads = None,
    seconds: Annotated[float | None, typer.Option(help="Stop after so long.", min=1.0)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The smallest model, 1, 8 and 64 tokens.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON object there as well.")] = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Operators one by one: time, bandwidth and operations per second, beside torch.matmul, int4pack and SDPA.

    Each result is compared with a reference before its time counts, and inputs are rotated past the cache.

    \b
    Examples:
      motley bench kernels --quick
      motley bench kernels --model qwen2.5-7b --tokens 1 --tokens 16 --json
      motley bench kernels --device cuda --out loadtests/results/kernels-h200.json
    """
    import time

    from ..replicas.bench import kernels as bench
    from ..replicas.bench.report import table

    models = model or (["qwen2.5-0.5b"] if quick else ["qwen2.5-0.5b", "qwen2.5-7b", "llama-3-8b", "qwen3-32b"])
    until = time.monotonic() + (seconds or float("inf"))
    try:
        with counted("starting") as progress:
            report = bench.run(
                device=device,
                models=models,
                tokens=tokens or ((1, 8, 64) if quick else None),
                ops=op or (),
                threads=threads,
                progress=progress,
                enough=lambda: time.monotonic() > until,
            )
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from error
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report) if as_json else table(report))


@app.command()
def gpu(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the results.")],
    seconds: Annotated[float, typer.Option(help="End after so long.", min=1.0)] = 480.0,
    rehearse: Annotated[
        str | None, typer.Option(metavar="CC", help="No GPU: the steps alone, with the kernels of 6.1, say.")
    ] = None,
    op: Annotated[list[str] | None, typer.Option(help="Operator; may be repeated; default: all.")] = None,
    config: ConfigFile = None,
) -> None:
    """Everything there is to do on a GPU, in one command: check every kernel, tune, measure, write it all down.

    Where this program's own dependencies are not installed, `python -m motley.replicas.bench.gpu` does the same
    with torch and Triton alone.

    \b
    Examples:
      motley bench gpu --out results/
      motley bench gpu --out results/ --rehearse 6.1
    """
    from ..kernels.capability import CAPABILITIES
    from ..replicas.bench import gpu as bench
    from ..replicas.errors import MotleyError

    known = ["{}.{}".format(*each) for each in CAPABILITIES]
    if rehearse is not None and rehearse not in known:
        raise typer.BadParameter(f"--rehearse {rehearse}: expected one of {', '.join(known)}")
    try:
        passed = bench.run(out, seconds, rehearse or "", op or ())
    except KeyError as error:
        raise typer.BadParameter(f"--op {error.args[0]}") from error
    except RuntimeError as error:
        raise MotleyError(str(error)) from error
    print(f"written to {out}")
    if not passed:
        raise MotleyError(f"some checks failed: {out / 'checks.json'}")


@app.command()
def service(
    model: Annotated[
        list[str] | None,
        typer.Option(help="Shape with random weights, or demo; may be repeated; default: qwen2-0.5b and demo."),
    ] = None,
    turns: Annotated[int, typer.Option(help="Of each side.", min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="That a turn counts.", min=1.0)] = 10.0,
    clients: Annotated[int, typer.Option(help="Processes that make the load.", min=1)] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller shape, one short turn each.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON object there as well.")] = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """What the service itself costs, in messages, requests and milliseconds: starts all that it needs.

    First with the null engine, which computes nothing: streams and whole answers through HAProxy, ingress and
    pool, beside the same worker without a service and beside a plain gRPC server. Then real engines with the
    service and without.

    \b
    Examples:
      motley bench service --quick
      motley bench service --out loadtests/results/serve-cpu.json
      motley bench service --model qwen2-0.5b --turns 5 --json
    """
    from ..cluster.bench import suite

    plan = suite.Plan(turns=turns, seconds=seconds, clients=clients, models=model or suite.MODELS)
    if quick:
        plan = suite.Plan(turns=1, seconds=2.0, clients=clients, models=model or ("tiny",))
    try:
        with doing("starting") as progress:
            report = suite.run(plan, progress)
    except ValueError as error:
        raise typer.BadParameter(f"--model: {error}") from error
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report) if as_json else suite.text(report))


@app.command()
def serve(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="With --start: of `motley serve`.")
    ] = None,
    protocol: Annotated[str, typer.Option(help="grpc (motley.v1) or http (OpenAI's completions).")] = "grpc",
    target: Annotated[
        str | None, typer.Option(help="Where it runs; default: 127.0.0.1:9000, or http://127.0.0.1:8000.")
    ] = None,
    start: Annotated[bool, typer.Option("--start", help="Start a service for it, and stop it afterwards.")] = False,
    concurrency: Annotated[int, typer.Option(help="Closed loop: requests under way at any time.", min=1)] = 16,
    rate: Annotated[
        float | None, typer.Option(help="Open loop instead: requests per second, arriving as a Poisson process.")
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="LENGTH", help="128, uniform:16:256 or lognormal:128:0.6 (median, sigma).")
    ] = "64",
    output_tokens: Annotated[str, typer.Option(metavar="LENGTH", help="Likewise.")] = "64",
    shared_prefix: Annotated[
        float, typer.Option(help="Share of each prompt that all have in common.", min=0.0, max=1.0)
    ] = 0.0,
    unary: Annotated[bool, typer.Option("--unary", help="Answers in one piece instead of streams.")] = False,
    duration_s: Annotated[float, typer.Option(help="Of the window that counts.", min=0.5)] = 10.0,
    warmup_s: Annotated[float, typer.Option(help="Before it.", min=0.0)] = 1.0,
    drain_s: Annotated[float, typer.Option(help="After it, for what was begun.", min=0.0)] = 30.0,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Goodput: time to first token.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="Goodput: time per token after it.")] = None,
    slo_e2e_ms: Annotated[float | None, typer.Option(help="Goodput: the whole request.")] = None,
    clients: Annotated[int, typer.Option(help="Processes that make the load.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Of lengths, prompts and arrivals.")] = 0,
    api_key: Annotated[str | None, typer.Option(envvar="MOTLEY_API_KEY", help="Sent with every request.")] = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Load on a running service: latencies, throughput and goodput.

    Times count from when a request was meant to be sent. TTFT: to the first message of the answer. TPOT: what is
    left of the request for each further token. ITL: the gaps between messages. Goodput: requests/s that met every
    SLO. With `motley serve --null-engine`, which computes nothing, the figures are the service's own.

    \b
    Examples:
      motley bench serve                               16 streams at a time on 127.0.0.1:9000
      motley bench serve --protocol http --rate 5 --slo-ttft-ms 500 --slo-tpot-ms 50
      motley bench serve --prompt-tokens lognormal:512:0.8 --output-tokens uniform:16:256 --shared-prefix 0.5
      motley bench serve --unary --concurrency 32 --output-tokens 1 --json
      motley bench serve --start -- demo --null-engine
    """
    from ..cluster.bench import run as bench
    from ..cluster.bench.report import text

    asked = bench.Asked(
        workload=bench.workload(
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
        slo=bench.slo(ttft_ms=slo_ttft_ms, tpot_ms=slo_tpot_ms, e2e_ms=slo_e2e_ms),
        target=target,
        start=arguments or () if start else None,
        clients=clients,
        api_key=api_key,
    )
    if arguments and not start:
        raise typer.BadParameter(f"{arguments[0]}: arguments of `motley serve` need --start")
    with doing("starting") as progress:
        report = bench.run(asked, progress)
    print(json.dumps(report) if as_json else text(report))
