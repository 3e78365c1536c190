"""Command `motley bench fleet`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motley.cli import options
from motley.cli.config import ConfigFile
from motley.cli.progress import show_activity

from .bench_options import BenchOut
from .bench_output import print_report


def fleet(
    file: Annotated[
        Path | None,
        typer.Option(
            "--fleet", metavar="FILE", help="With objectives; default: four simulated GPUs and this CPU.", exists=True
        ),
    ] = None,
    rate: Annotated[float, typer.Option(help="Requests per second, arriving as a Poisson process.", min=0.01)] = 6.0,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="LENGTH", help="Tokens: 128, uniform:16:256 or lognormal:128:0.6 (median, sigma).")
    ] = "uniform:200:1800",
    output_tokens: Annotated[
        str, typer.Option(metavar="LENGTH", help="Tokens of an answer, in the same form.")
    ] = "uniform:20:80",
    turns: Annotated[int, typer.Option(help="Turns of each side.", min=1)] = 2,
    seconds: Annotated[
        float, typer.Option(help="Seconds that a turn is measured, after 10 s of warm-up.", min=1.0)
    ] = 40.0,
    share: Annotated[float, typer.Option(help="Share of the requests that must be in time.", min=0.01, max=1.0)] = 0.95,
    clients: Annotated[int, typer.Option(help="Processes that make the load.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Seed of lengths, prompts and arrivals.")] = 21,
    out: BenchOut = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Compare Motley's routing with power of two choices on a live fleet, with the same requests in turns.

    Starts the fleet, Ray and all, and sends requests over gRPC. Simulated pools take the time that the roofline
    predicts for their GPUs, off their profiles by up to 30%: only the choice of a replica is compared.

    \b
    Examples:
      motley bench fleet
      motley bench fleet --rate 5 --turns 1 --seconds 20 --json
      motley bench fleet --fleet deploy/examples/laptop.yaml --out loadtests/results/fleet-live.json
    """
    from motley.cluster.simulation.length_distribution import LengthDistribution

    from ..fleet import live_fleet as bench
    from ..fleet.fleet_plan import FleetBenchPlan

    try:
        lengths = LengthDistribution.parse(prompt_tokens), LengthDistribution.parse(output_tokens)
    except ValueError as error:
        raise typer.BadParameter(f"--prompt-tokens, --output-tokens: {error}") from error
    plan = FleetBenchPlan(
        fleet=file, rate=rate, prompt_tokens=lengths[0], output_tokens=lengths[1], turns=turns, seconds=seconds,
        share=share, clients=clients, seed=seed,
    )  # fmt: skip
    with show_activity("starting") as progress:
        report = bench.run(plan, progress)
    print_report(report, bench.text, out, as_json=as_json)
