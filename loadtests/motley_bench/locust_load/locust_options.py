"""Options of a load test that Locust takes beside its own, and the source of requests that follows from them."""

from __future__ import annotations

import random
from typing import Any

from locust import events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from motley.cluster.routing.prediction.latency_model import Slo
from motley.cluster.simulation.length_distribution import LengthDistribution

from ..load.measured_service import inspect_service
from .load_shapes import NONE, SHAPES
from .request_source import RequestSource

BASE = "http://127.0.0.1:8000"


def add_options(parser: LocustArgumentParser) -> None:
    """Add the options, which Locust's web interface shows too."""
    parser.add_argument("--grpc-host", default="127.0.0.1:9000", help="host and port of gRPC", env_var="MOTLEY_GRPC")
    parser.add_argument("--api-key", default="", help="API key of a tenant", env_var="MOTLEY_API_KEY", is_secret=True)
    parser.add_argument("--prompt-tokens", default="64", help="lengths: 64, uniform:16:256 or lognormal:128:0.6")
    parser.add_argument("--output-tokens", default="64", help="likewise; outputs go on past the end of the text")
    parser.add_argument("--shared-prefix", type=float, default=0.0, help="share of each prompt that all have in common")
    parser.add_argument("--seed", type=int, default=0, help="seed of lengths and prompts")
    parser.add_argument("--slo-ttft", type=float, default=2.0, help="objective: seconds to the first token")
    parser.add_argument("--slo-tpot", type=float, default=0.2, help="objective: seconds per token after it")
    parser.add_argument("--shape", choices=[*SHAPES], default=NONE, help="how the number of users changes")
    parser.add_argument("--shape-period", type=float, default=60.0, help="seconds of one round of the shape")


events.init_command_line_parser.add_listener(add_options)  # type: ignore[no-untyped-call]
_sources: dict[int, RequestSource] = {}  # by the identity of an environment, of which a process has one


def request_source(environment: Environment) -> RequestSource:
    """Return the source of an environment's requests; the first call asks the service what it serves.

    Raises Unavailable if there is no service.
    """
    if id(environment) not in _sources:
        options: Any = environment.parsed_options
        worker = getattr(environment.runner, "worker_index", 0)
        _sources[id(environment)] = RequestSource(
            inspect_service("http", (environment.host or BASE).rstrip("/"), options.api_key or None),
            LengthDistribution.parse(options.prompt_tokens),
            LengthDistribution.parse(options.output_tokens),
            options.shared_prefix,
            Slo(options.slo_ttft, options.slo_tpot),
            random.Random(f"{options.seed} {worker}"),
        )
    return _sources[id(environment)]
