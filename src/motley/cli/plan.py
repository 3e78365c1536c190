"""Command `motley plan`: which GPUs to rent for a load, by simulation."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .config import ConfigFile
from .numbers import MAX_NUMBER, check_number
from .progress import show_activity

if TYPE_CHECKING:
    from ..cluster.fleet.plan.plan_search import GpuOffer
    from ..cluster.fleet.plan.request_trace import RequestTrace
    from ..cluster.routing.prediction.latency_model import Slo

MAX_REQUESTS = 1_000_000  # each takes memory and is simulated for every mix
# Made-up prices, so that the command runs without --gpus.
EXAMPLES = "T4=0.35,L4=0.70,A10=0.75,A100=1.80,H100=3.50"


def plan(
    trace: Annotated[
        str, typer.Option(metavar="FILE", help="Mooncake's JSON lines, Azure's or BurstGPT's CSV; or: synthetic.")
    ] = "synthetic",
    slo: Annotated[str, typer.Option(help="Seconds to the first token, and per token after it.")] = "ttft=3,tpot=0.1",
    gpus: Annotated[
        str | None, typer.Option(metavar="GPU=PRICE,…", help="GPUs that may be rented, and their prices per hour.")
    ] = None,
    measured: Annotated[
        str | None,
        typer.Option(metavar="GPU=FILE,…", help="JSON files of `motley bench gpu` or `bench engine`, or of profiles."),
    ] = None,
    share: Annotated[float, typer.Option(help="Share of the requests that must be in time.", min=0.01, max=1.0)] = 0.95,
    rate: Annotated[
        float | None, typer.Option(help="Requests/s on average: the trace's times are stretched.", min=1e-6)
    ] = None,
    requests: Annotated[
        int, typer.Option(help="Consecutive requests of the trace, where it is busiest.", min=2, max=MAX_REQUESTS)
    ] = 2000,
    model: Annotated[str, typer.Option(help="int4 weights of qwen2.5-0.5b, qwen2.5-7b or llama-3-8b.")] = "qwen2.5-7b",
    tries: Annotated[int, typer.Option(help="Most mixes that are simulated.", min=1)] = 24,
    seed: Annotated[int, typer.Option(help="Seed of a synthetic trace, and of ties between replicas.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the JSON object there, and a chart beside it.")
    ] = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Find which GPUs to rent for a load: the cheapest mix that serves a trace in time.

    Everything is simulated: the engine's scheduler and Motley's router run in virtual time, on GPUs that take the time
    that the roofline predicts, at shares of it that are assumed, or fitted to the files of --measured. Prices are yours
    to give; without --gpus made-up examples are used. `synthetic` is a mix of chats, documents and writing at --rate
    (default: 5); with `synthetic-reuse` most prompts share a beginning.

    \b
    Examples:
      motley plan --trace trace.jsonl --slo ttft=2,tpot=0.08 --gpus "A10=0.75,H100=3.5"
      motley plan --trace AzureLLMInferenceTrace_conv.csv --rate 20 --requests 5000 --out plan.json
      motley plan --trace synthetic --rate 12 --gpus T4=0.35,A10=0.75 --json
      motley plan --gpus T4=0.35,A10=0.75 --measured T4=t4/streams.json
    """
    from ..cluster.fleet.plan import plan_report as reports
    from ..cluster.fleet.plan.plan_search import PlanRequest, search_cheapest_mix
    from ..replicas.simulated.simulated_device import find_model_shape

    request = PlanRequest(
        trace=_trace(trace, rate, requests, seed), offers=_measured(_offers(gpus or EXAMPLES), measured, model),
        model=find_model_shape(model),
        slo=_slo(slo), share=share, tries=tries, seed=seed,
    )  # fmt: skip
    with show_activity("reckoning") as say:
        chosen, tried = search_cheapest_mix(request, say)
    prices = "given" if gpus else "made-up examples"
    report = reports.plan_report(request, chosen, tried, prices=prices)
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")
        out.with_suffix(".svg").write_text(reports.plan_svg(report))
    print(json.dumps(report)) if as_json else _show(report)


def _trace(name: str, rate: float | None, requests: int, seed: int) -> RequestTrace:
    from ..cluster.fleet.plan import request_trace as traces

    if name in traces.SYNTHETIC_TRACES:
        return traces.synthetic_trace(name, rate or 5.0, requests, seed)
    found = traces.busiest_window(traces.read_trace(Path(name)), requests)
    return found if rate is None else traces.rescale_trace(found, rate)


def _slo(text: str) -> Slo:
    from ..cluster.routing.prediction.latency_model import Slo

    given = dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)
    try:
        ttft_s, tpot_s = (float(given.pop(name).removesuffix("s")) for name in ("ttft", "tpot"))
    except (KeyError, ValueError) as error:
        raise typer.BadParameter(f"--slo {text}: expected such as ttft=3,tpot=0.1, in seconds") from error
    if given or not (1e-6 <= ttft_s <= MAX_NUMBER and 1e-6 <= tpot_s <= MAX_NUMBER):
        raise typer.BadParameter(f"--slo {text}: expected ttft and tpot, each from 1e-6 to {MAX_NUMBER:g} seconds")
    return Slo(ttft_s, tpot_s)


def _offers(text: str) -> list[GpuOffer]:
    """Parse GPUs and their prices. Raises InvalidRequest for a GPU that is not in the table."""
    from ..cluster.fleet.plan.plan_search import GpuOffer
    from ..replicas.simulated.simulated_device import find_table_device

    offers: dict[str, GpuOffer] = {}  # by the name in the table
    for part in text.split(","):
        found = re.fullmatch(r"\s*(.+?)\s*=\s*(\d+(?:\.\d*)?|\.\d+)\s*", part)
        if found is None:
            raise typer.BadParameter(f"--gpus {part.strip()!r}: expected GPU=PRICE, such as A10=0.75")
        check_number(lambda: "--gpus", float(found[2]))
        device = find_table_device(found[1])
        if device.name in offers:
            raise typer.BadParameter(f"--gpus {found[1]}: {device.name} is there twice")
        offers[device.name] = GpuOffer(found[1], float(found[2]))
    return list(offers.values())


def _measured(offers: list[GpuOffer], text: str | None, model: str) -> list[GpuOffer]:
    """Return the offers with the roofline shares fitted to their files. Raises InvalidRequest for a wrong file or
    another GPU's.
    """
    from ..replicas.simulated.device_measurements import read_attained_shares
    from ..replicas.simulated.simulated_device import find_table_device

    files: dict[str, Path] = {}  # by the name in the table
    for part in text.split(",") if text else ():
        gpu, equals, file = part.strip().partition("=")
        if not (gpu and equals and file):
            raise typer.BadParameter(f"--measured {part.strip()!r}: expected GPU=FILE, such as T4=t4/streams.json")
        if (name := find_table_device(gpu).name) in files:
            raise typer.BadParameter(f"--measured {gpu}: {name} is there twice")
        files[name] = Path(file)
    names = [find_table_device(offer.gpu).name for offer in offers]
    if unknown := sorted(set(files) - set(names)):
        raise typer.BadParameter(f"--measured {unknown[0]}: it is not one of the GPUs in --gpus")
    return [
        replace(offer, attained=read_attained_shares(files[name], offer.gpu, model)) if name in files else offer
        for name, offer in zip(names, offers, strict=True)
    ]


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..cluster.fleet.plan.plan_report import rates_source

    trace, settings = report["trace"], report["settings"]
    table = Table(title=f"simulated, in virtual time ({rates_source(report)})", title_justify="left")
    for column in ("mix", "cost/h", "in time", "good/s", "refused/s", "TTFT p50", "p99 s", "TPOT p50", "p99 ms"):
        table.add_column(column, justify="left" if column == "mix" else "right")
    for row in report["rows"]:
        figures = (
            f"{row['cost_per_hour']:.2f}", f"{row['share']:.1%}", f"{row['goodput']:.2f}", f"{row['rejected']:.2f}",
            f"{row['ttft_p50_s']:.2f}", f"{row['ttft_p99_s']:.2f}", f"{1000 * row['tpot_p50_s']:.0f}",
            f"{1000 * row['tpot_p99_s']:.0f}",
        )  # fmt: skip
        table.add_row(row["mix"], *figures, style="bold" if row["chosen"] else "" if row["enough"] else "dim")
    came = f"{trace['requests']} requests in {trace['seconds']:.0f} s, {trace['rate']:.3g} a second"
    lengths = f"{trace['prompt_tokens']:.0f} + {trace['output_tokens']:.0f} tokens"
    gone = f" ({trace['left_out']} without an answer left out)" if trace["left_out"] else ""
    print(f"{trace['format']}: {came}, of {lengths}{gone}; prices: {settings['prices']}")
    Console().print(table)
    objectives = f"TTFT {settings['ttft_s']:g} s and TPOT {settings['tpot_s']:g} s for {settings['share']:.1%}"
    if report["chosen"] is None:
        print(f"none of these holds {objectives}: looser objectives, or other GPUs")
    else:
        print(f"the cheapest of these that holds {objectives}: {report['chosen']}")
