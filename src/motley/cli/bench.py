"""`motley bench …`: measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .bench_engine import engine
from .bench_exchange import exchange
from .bench_load import load
from .bench_shards import shards
from .bench_tiers import tiers
from .config import ConfigFile
from .progress import counted, doing

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Measurements, side by side with peers where they are installed."""


app.command()(engine)
app.command()(exchange)
app.command()(load)
app.command()(shards)
app.command()(tiers)


@app.command(name="kernels")
def kernels_(
    device: options.Device = "cpu",
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Layer shapes of qwen2.5-0.5b, qwen2.5-7b, llama-3-8b, qwen3-32b or qwen3-0.6b; may be repeated."
        ),
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

    from ..kernels.model_shapes import MODELS
    from ..replicas.bench import kernels as bench
    from ..replicas.bench.report import table

    models = model or (["qwen2.5-0.5b"] if quick else [each.name for each in MODELS])
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
def kv(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, Hugging Face id, or demo.")] = "demo",
    device: options.Device = "cpu",
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Activations; may be repeated; default: float32 and bfloat16, on a GPU its own."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="That the model has not read; default: the demo model's.", exists=True, dir_okay=False
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Of the text.", min=1)] = 4096,
    batch: Annotated[list[int] | None, typer.Option(metavar="N", help="May be repeated; default: 1 and 8.")] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Tokens in KV before decode; may be repeated; default: 128 and 1024."),
    ] = None,
    output_tokens: Annotated[int, typer.Option(help="Decoded by each sequence.", min=2)] = 64,
    threads: options.Threads = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON object there as well.")] = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """What KV in int8 (--kv-dtype int8) does to a model: quality on held-out text, memory, and the pace of decode.

    The same tokens go through the same engine twice, with KV in int8 and with KV as the activations are; the
    divergence is of the second's distributions of the next token from the first's. Decodes take turns.

    \b
    Examples:
      motley bench kv
      motley bench kv ./my-model --text pages.txt --context 4096 --batch 16
      motley bench kv --device cuda --out loadtests/results/kv-h200.json
    """
    from ..replicas.bench import kv as bench
    from ..replicas.bench.report import table
    from ..replicas.checkpoint import resolve_model
    from ..replicas.demo import demo_path

    try:
        with counted("starting") as progress:
            report = bench.run(
                resolve_model(options.find_model(model)),
                (text or demo_path() / "heldout.txt").read_text(encoding="utf-8"),
                device=device,
                dtypes=dtype,
                tokens=tokens,
                batches=batch or (1, 8),
                contexts=context or (128, 1024),
                output_tokens=output_tokens,
                threads=threads,
                progress=progress,
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
    part: Annotated[
        list[str] | None,
        typer.Option(help="checks, engine, tuning, kernels or streams, which then has the time; default: all."),
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Everything there is to do on a GPU, in one command: check, tune, measure kernels and engine, write it all down.

    Where this program's own dependencies are not installed, `python -m motley.replicas.bench.gpu` does the same
    with torch, Triton, transformers, safetensors and numpy alone.

    \b
    Examples:
      motley bench gpu --out results/
      motley bench gpu --out results/ --part streams
      motley bench gpu --out results/ --rehearse 6.1
    """
    from ..kernels.capability import CAPABILITIES
    from ..replicas.bench import gpu as bench
    from ..replicas.errors import MotleyError

    known = ["{}.{}".format(*each) for each in CAPABILITIES]
    if rehearse is not None and rehearse not in known:
        raise typer.BadParameter(f"--rehearse {rehearse}: expected one of {', '.join(known)}")
    if unknown := [name for name in part or () if name not in bench.PARTS]:
        raise typer.BadParameter(f"--part {unknown[0]}: expected {', '.join(bench.PARTS)}")
    try:
        right = bench.run(out, seconds, rehearse or "", op or (), part or ())
    except KeyError as error:
        raise typer.BadParameter(f"--op {error.args[0]}") from error
    except RuntimeError as error:
        raise MotleyError(str(error)) from error
    print(f"written to {out}")
    if not right:
        raise MotleyError(f"not all was right: {out / 'summary.json'}")


@app.command()
def routing(
    fleet: Annotated[
        list[str] | None,
        typer.Option(
            help="equal, mixed, classes, thousand, or such as P40+2*T4; may be repeated; default: these four."
        ),
    ] = None,
    load: Annotated[
        list[float] | None,
        typer.Option(
            help="Of the fleet's capacity; may be repeated; default: 0.5 to 1.1, of large fleets fewer.",
            min=0.01,
            max=10.0,
        ),
    ] = None,
    reuse: Annotated[list[str] | None, typer.Option(help="Of prompts' beginnings: low, high; default: both.")] = None,
    requests: Annotated[
        int | None, typer.Option(help="Of one run; default: 1200, of large fleets what comes in some seconds.", min=1)
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Runs at a time; default: as many as there are cores.", min=1)
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="What the file has of other fleets stays: the whole of it part by part.")
    ] = False,
    model: Annotated[str, typer.Option(help="int4 weights of qwen2.5-0.5b, qwen2.5-7b or llama-3-8b.")] = "qwen2.5-7b",
    quick: Annotated[bool, typer.Option("--quick", help="One mixed fleet, one load, a short run.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the JSON object there, and a chart beside it.")
    ] = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Routers on simulated fleets: Motley's and others' under the same requests, beside the optimum.

    In virtual time, on replicas that compute nothing and take the time that the roofline says, each off its profile
    by up to 30%, which no router knows. Nothing here is measured but the time that a decision takes. The whole of it
    takes over an hour on one core; the figures are the same on any.

    \b
    Examples:
      motley bench routing --quick
      motley bench routing --fleet P40+T4+A10 --load 0.9 --reuse low
      motley bench routing --out loadtests/results/routing.json
      motley bench routing --fleet equal --reuse high --keep --out loadtests/results/routing.json
    """
    from dataclasses import replace

    from ..cluster.simulation import bench
    from ..cluster.simulation.chart import svg

    plan = bench.Plan(requests=requests, model=model, loads=load, processes=processes)
    if quick:
        size = bench.Size(loads=(0.9,), seeds=(11,), requests=1200)
        plan = replace(plan, fleets=("mixed",), reuse=("low",), size=size)
    for each in reuse or ():
        if each not in bench.REUSE:
            raise typer.BadParameter(f"--reuse {each}: expected low or high")
    plan = replace(plan, fleets=fleet or plan.fleets, reuse=reuse or plan.reuse)
    with doing("starting") as say:
        report = bench.run(plan, say)
    if keep and out is not None and out.exists():
        report = bench.kept(report, json.loads(out.read_text()))
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")
        out.with_suffix(".svg").write_text(svg(report))
    print(json.dumps(report) if as_json else bench.text(report))


@app.command()
def fleet(
    file: Annotated[
        Path | None,
        typer.Option(
            "--fleet", metavar="FILE", help="With objectives; default: four simulated GPUs and this CPU.", exists=True
        ),
    ] = None,
    rate: Annotated[float, typer.Option(help="Requests per second, arriving as a Poisson process.", min=0.01)] = 6.0,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="LENGTH", help="128, uniform:16:256 or lognormal:128:0.6 (median, sigma).")
    ] = "uniform:200:1800",
    output_tokens: Annotated[str, typer.Option(metavar="LENGTH", help="Likewise.")] = "uniform:20:80",
    turns: Annotated[int, typer.Option(help="Of each side.", min=1)] = 2,
    seconds: Annotated[float, typer.Option(help="That a turn counts, after 10 s of warm-up.", min=1.0)] = 40.0,
    share: Annotated[float, typer.Option(help="Of the requests that are to be in time.", min=0.01, max=1.0)] = 0.95,
    clients: Annotated[int, typer.Option(help="Processes that make the load.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Of lengths, prompts and arrivals.")] = 21,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON object there as well.")] = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """A live fleet whose requests are placed by Motley, and then by power of two choices: the same ones, in turns.

    Starts the fleet, Ray and all, and sends requests over gRPC. Simulated pools take the time that the roofline says
    of their GPUs, off their profiles by up to 30%: what is compared is the choice of a replica, nothing else.

    \b
    Examples:
      motley bench fleet
      motley bench fleet --rate 5 --turns 1 --seconds 20 --json
      motley bench fleet --fleet deploy/examples/laptop.yaml --out loadtests/results/fleet-live.json
    """
    from ..cluster.bench import fleet as bench
    from ..cluster.bench.lengths import Lengths

    try:
        lengths = Lengths.parse(prompt_tokens), Lengths.parse(output_tokens)
    except ValueError as error:
        raise typer.BadParameter(f"--prompt-tokens, --output-tokens: {error}") from error
    plan = bench.Plan(
        fleet=file, rate=rate, prompt_tokens=lengths[0], output_tokens=lengths[1], turns=turns, seconds=seconds,
        share=share, clients=clients, seed=seed,
    )  # fmt: skip
    with doing("starting") as progress:
        report = bench.run(plan, progress)
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report) if as_json else bench.text(report))


@app.command()
def prefix(
    repeats: Annotated[int, typer.Option(help="Of each way, in turn.", min=1)] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller model, one size of values, less of it.")] = False,
    part: Annotated[
        list[str] | None,
        typer.Option(help="values, ttft, trace, faults or simulated; may be repeated; default: all."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON object there as well.")] = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """What prefixes shared through a Redis of this machine cost, and what they save.

    Values to and from it, beside redis-py, redis-benchmark and a memcpy; the time to the first token of a replica that
    computes a prefix, has it, or finds it in Redis; tenants with a prompt each, on two replicas with Redis and without;
    a replica under load whose Redis is killed, stopped, emptied, full, late, locked or cut off. It starts a
    redis-server of its own. What is said of GPUs is simulated, at the rate measured here.

    \b
    Examples:
      motley bench prefix --quick
      motley bench prefix --quick --part faults
      motley bench prefix --out loadtests/results/prefix-cpu.json
    """
    from ..cluster.prefix import bench
    from ..replicas.bench.report import table

    parts = tuple(part or bench.PARTS)
    if unknown := [name for name in parts if name not in bench.PARTS]:
        raise typer.BadParameter(f"--part {unknown[0]}: expected {', '.join(bench.PARTS)}")
    plan = bench.quick(parts) if quick else bench.Plan(parts=parts, repeats=repeats)
    with doing("starting") as say:
        report = bench.run(plan, say)
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report) if as_json else table(report))


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
    tls: Annotated[bool, typer.Option("--tls", help="gRPC over TLS; HTTP is where the target says https://.")] = False,
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Whom to trust, PEM; implies --tls. Default: public ones.", exists=True, dir_okay=False
        ),
    ] = None,
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
      motley bench serve --target gpu-box:9000 --tls-ca ca.pem --api-key "$KEY"
      motley bench serve --start -- demo --null-engine
    """
    from ..client import Tls
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
        tls=Tls(ca=tls_ca) if tls or tls_ca else None,
    )
    if arguments and not start:
        raise typer.BadParameter(f"{arguments[0]}: arguments of `motley serve` need --start")
    with doing("starting") as progress:
        report = bench.run(asked, progress)
    print(json.dumps(report) if as_json else text(report))
