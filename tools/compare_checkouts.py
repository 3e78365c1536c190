"""Compares the speed of two checkouts: `python tools/compare_checkouts.py BEFORE AFTER [engine] [service] [decision]`.

Each checkout has its own `.venv` (`make install`); the Python that runs this has one of them. Both checkouts are
measured in turns, each first in every other pair, since the load of a machine changes. Printed are, for each figure,
the median of the pairs' ratios with an interval of 95% by bootstrap; above 1 the second checkout is the better one.
What is measured uses only what both have: the `Engine`, a running service, and the benchmark's own measurement of a
routing decision.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

from motley_bench.load.measured_service import start_service

Figures = dict[str, float]
RESAMPLES = 10_000
STARTS = 2  # of both services: what two processes of one program differ by is in the interval too

ENGINE = """
import json, os, statistics, sys, time
from motley import Engine, SamplingParams
engine, rates = Engine(sys.argv[1], threads=2), {}
for batch in (1, 8):
    prompts = [[(7 * i * (j + 1)) % 250 + 1 for i in range(16)] for j in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=40, seed=0, ignore_eos=True)
    times = []
    for turn in range(4):
        began = time.perf_counter()
        outputs = list(engine.generate(prompts, params))
        times.append(time.perf_counter() - began)
        assert sum(len(output.token_ids) for output in outputs) == 40 * batch
    rates[f"engine, batch {batch}: tokens/s"] = 40 * batch / statistics.median(times[1:])
print(json.dumps(rates))
"""

DECISION = """
import importlib, json
places = {
    "motley_bench.routing.decision_latency": "measure_decisions",
    "motley.cluster.simulation.decision": "decisions",  # where it was before the benchmarks had a package of their own
}
for place, name in places.items():
    try:
        measure = getattr(importlib.import_module(place), name)
        break
    except ModuleNotFoundError:
        continue
print(json.dumps({
    "decision, {replicas} replicas, {prompt_tokens} tokens: decisions/s".format(**row["workload"]): 1e6 / row["value"]
    for row in measure()
}))
"""


def run_in(checkout: Path, arguments: Sequence[str]) -> Figures:
    """Return the JSON object that the checkout's Python prints last."""
    command = [str(checkout / ".venv/bin/python"), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: Figures = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def compare_engines(before: Path, after: Path, pairs: int) -> Iterator[tuple[Figures, Figures]]:
    made = "from motley_bench.checkpoints.served_checkpoint import random_checkpoint as r; print(r('qwen2-0.5b'))"
    command = [str(after / ".venv/bin/python"), "-c", made]
    folder = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    yield from in_turns(pairs, *(lambda side=side: run_in(side, ["-c", ENGINE, folder]) for side in (before, after)))


def compare_decisions(before: Path, after: Path, pairs: int) -> Iterator[tuple[Figures, Figures]]:
    yield from in_turns(pairs, *(lambda side=side: run_in(side, ["-c", DECISION]) for side in (before, after)))


def compare_services(before: Path, after: Path, pairs: int) -> Iterator[tuple[Figures, Figures]]:
    """Yield what one client, of the second checkout, measures of both services; they run side by side."""
    for start in range(STARTS):
        share = pairs // STARTS + (start < pairs % STARTS)
        with ExitStack() as services:
            pythons = [str(checkout / ".venv/bin/python") for checkout in (before, after)]
            null = ["demo", "--null-engine"]
            ends = [services.enter_context(start_service(null, python)) for python in pythons]
            yield from in_turns(share, *(lambda end=end: service_figures(after, end) for end in ends))


def service_figures(client: Path, end: dict[str, str]) -> Figures:
    def bench(*arguments: str) -> dict[str, dict[str, float]]:
        fixed = ["-m", "motley", "bench", "serve", "--json", "--target", end["grpc"], "--duration-s", "4"]
        command = [str(client / ".venv/bin/python"), *fixed, *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        report = json.loads(done.stdout)
        if report["errors"]:
            raise RuntimeError(f"requests failed: {report['errors']}")
        return {row["metric"]: row for row in report["rows"]}

    streams = bench("--concurrency", "16", "--output-tokens", "512")
    unary = bench("--unary", "--concurrency", "32", "--output-tokens", "1")
    alone = bench("--concurrency", "1", "--output-tokens", "8")
    return {
        "service, 16 streams: messages/s": streams["messages"]["value"],
        "service, unary: requests/s": unary["requests"]["value"],
        "service, first token alone: 1/s": 1e3 / alone["ttft"]["value"],
        "service, one chat: 1/s": 1 / chat_s(end["http"]),
    }


def chat_s(address: str) -> float:
    """Return the median time of a chat of 16 tokens over one connection, in seconds."""
    connection = HTTPConnection(address.removeprefix("http://"))
    connection.request("GET", "/v1/models")
    model = json.load(connection.getresponse())["data"][0]["id"]
    said = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 16, "ignore_eos": True, "seed": 1}
    body = json.dumps({"model": model, **said})
    times = []
    for _ in range(100):
        began = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        payload = response.read()
        times.append(time.perf_counter() - began)
        if response.status != 200:
            raise RuntimeError(f"a chat was answered with {response.status}: {payload.decode()}")
    return statistics.median(times)


def in_turns(
    pairs: int, before: Callable[[], Figures], after: Callable[[], Figures]
) -> Iterator[tuple[Figures, Figures]]:
    for number in range(pairs):
        if number % 2:
            second = after()
            yield before(), second
        else:
            first = before()
            yield first, after()


def bootstrap(ratios: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Return the median of the ratios, and the interval that has it in 95% of all resamples."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return statistics.median(ratios), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


COMPARISONS = {"engine": compare_engines, "service": compare_services, "decision": compare_decisions}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout with its .venv")
    parser.add_argument("after", type=Path, help="another one")
    parser.add_argument("what", nargs="*", choices=COMPARISONS, help="default: all three")
    parser.add_argument("--pairs", type=int, default=10)
    given = parser.parse_args(arguments)
    for name in given.what or COMPARISONS:
        ratios: dict[str, list[float]] = {}
        load = os.getloadavg()[0]
        for before, after in COMPARISONS[name](given.before.resolve(), given.after.resolve(), given.pairs):
            for figure in after:
                ratios.setdefault(figure, []).append(after[figure] / before[figure])
            print(json.dumps({"before": before, "after": after}), file=sys.stderr, flush=True)
        for figure, each in ratios.items():
            median, low, high = bootstrap(each)
            print(f"{figure}: {median:.3f} ({low:.3f} to {high:.3f}), {len(each)} pairs", flush=True)
        print(f"  load average {load:.1f} before {name}, {os.getloadavg()[0]:.1f} after", flush=True)


if __name__ == "__main__":
    main()
