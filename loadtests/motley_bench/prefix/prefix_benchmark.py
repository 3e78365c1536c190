"""Benchmark `motley bench prefix`: what a Redis on this machine costs, and what replicas gain that share one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motley.cluster.prefix_store.redis_binaries import find_redis_binaries, no_redis
from motley.replicas.errors import MotleyError
from motley.replicas.host.measurement_rows import machine, versions
from motley.replicas.kv.store.sealed_record import Geometry
from motley.replicas.kv.store.store_keys import with_value_tokens
from motley.replicas.types import BLOCK_TOKENS

from .foreign_kv import NumericsPlan, measure_numerics
from .prefix_first_tokens import QUESTION, SharedWeightReplicas, measure_first_tokens
from .redis_fault_load import RedisFaultPlan
from .redis_faults import measure_faults
from .redis_process import RedisProcess
from .routed_savings import RoutedFleetPlan, simulate_routed_fleet
from .simulated_savings import simulate_savings
from .stored_value_rates import HEAD_DIM, HEADS, LAYERS, measure_value_size, value_mib
from .tenant_trace import TenantTracePlan, measure_trace

Progress = Callable[[str], None]
Rows = list[dict[str, Any]]
PARTS = ("values", "ttft", "trace", "faults", "numerics", "simulated")
PACKAGES = ("motley", "redis", "hiredis", "valkey-glide-sync", "cryptography", "torch")
# As of a service, but without its users: peers read other keys, by other commands.
LIMITS = ("--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru")
SECRET = b"of this measurement".ljust(32, b".")

SIMULATED = RoutedFleetPlan()
FULL = TenantTracePlan(shape="qwen2-0.5b", turns=3)
FAULTS = RedisFaultPlan(shape="qwen2-0.5b")
NUMERICS = NumericsPlan()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixBenchPlan:
    """Settings of a run.

    parts                parts to run, of PARTS
    tokens, connections  sizes of values, in tokens of Qwen2.5-7B's KV at two bytes a number (56 KiB a token), and
                         numbers of values that are read at the same time
    moved, repeats       bytes of one sample, and number of samples
    shape                model of the engines, a name in SHAPES, with random weights
    prefixes             lengths in tokens of prefixes whose time to first token is measured
    requests_per_prefix  how often it is measured for each of them, each way
    trace                settings of the trace of tenants
    faults               settings of the faults of Redis under load
    numerics             settings of the exchange of KV between dtypes
    fleet                settings of the simulated fleet
    """

    parts: Sequence[str] = PARTS
    tokens: Sequence[int] = (16, 32, 64)
    connections: Sequence[int] = (1, 2)
    moved: int = 256 << 20
    repeats: int = 5
    shape: str = "qwen2-0.5b"
    prefixes: Sequence[int] = (256, 512, 1024, 2048, 4096, 8192)
    requests_per_prefix: int = 3
    trace: TenantTracePlan = FULL
    faults: RedisFaultPlan = FAULTS
    numerics: NumericsPlan = NUMERICS
    fleet: RoutedFleetPlan = SIMULATED

    def __post_init__(self) -> None:
        assert self.parts
        assert set(self.parts) <= set(PARTS)


def quick(parts: Sequence[str] = PARTS) -> PrefixBenchPlan:
    """Return a plan that takes less than a minute on two cores: one size of values, and engines of a smaller model."""
    small = TenantTracePlan(
        shape="quick", turns=2, tenants=6, prefix_tokens=256, requests=24, unique=4, control_turns=6, output_tokens=4
    )
    return PrefixBenchPlan(
        parts=parts, tokens=(32,), connections=(1,), moved=64 << 20, repeats=3, shape="quick",
        prefixes=(256, 512, 1024), requests_per_prefix=2, trace=small,
        faults=RedisFaultPlan(shape="quick", kinds=("restarted empty",), rounds=2),
        numerics=NumericsPlan(prefix=128, texts=2), fleet=RoutedFleetPlan(seconds=20.0, seeds=2),
    )  # fmt: skip


def run(plan: PrefixBenchPlan, say: Progress) -> dict[str, Any]:
    """Run the benchmark and return the object that `--json` prints. Raises MotleyError without a redis-server."""
    binaries = find_redis_binaries()
    if not binaries:
        raise MotleyError(no_redis())
    rows: Rows = []
    before = machine()
    with tempfile.TemporaryDirectory() as folder:
        own = RedisProcess(Path(folder), *LIMITS, binary=binaries[0])
        own.start()
        try:
            for part in ("values", "ttft", "trace"):
                if part in plan.parts or (part == "values" and "simulated" in plan.parts):
                    rows += _MEASURED[part](plan, own, say)
        finally:
            own.kill()
    if "faults" in plan.parts:
        rows += measure_faults(plan.faults, SECRET, say)
    if "numerics" in plan.parts:
        rows += measure_numerics(plan.numerics, say)
    if "simulated" in plan.parts:
        say("a fleet in virtual time")
        rows += _simulated(plan, rows)
    after = {"load_average_1min_after": machine()["load_average_1min"]}
    model = {"numerics_model": plan.numerics.model} if "numerics" in plan.parts else {}
    return {
        "bench": "prefix", "machine": before | after, "versions": versions(*PACKAGES), "redis": binaries[0].where,
        **model, "rows": rows,
    }  # fmt: skip


def _values(plan: PrefixBenchPlan, own: RedisProcess, say: Progress) -> Iterator[dict[str, Any]]:
    for tokens in plan.tokens:
        for connections in plan.connections:
            say(f"values of {tokens} tokens, {connections} connections")
            yield from measure_value_size(own, SECRET, tokens, connections, plan.moved, plan.repeats)


def _ttft(plan: PrefixBenchPlan, own: RedisProcess, say: Progress) -> Rows:
    say(f"engines of {plan.shape}")
    return measure_first_tokens(
        SharedWeightReplicas(plan.shape), plan.shape, own.url, SECRET, plan.prefixes, plan.requests_per_prefix, say
    )


def _trace(plan: PrefixBenchPlan, own: RedisProcess, say: Progress) -> Rows:
    return measure_trace(plan.trace, own.url, SECRET, say)


_MEASURED = {"values": _values, "ttft": _ttft, "trace": _trace}


def _simulated(plan: PrefixBenchPlan, rows: Sequence[dict[str, Any]]) -> Rows:
    """Simulate fleets at the rate that was measured for values of replicas of that model, over one connection."""
    size = with_value_tokens(Geometry("bfloat16", LAYERS, HEADS, HEAD_DIM, BLOCK_TOKENS))
    (rate,) = (
        each["value"]
        for each in rows
        if each["metric"] == "read_into_blocks" and each["workload"] == {"value_mib": value_mib(size), "connections": 1}
        and each["peer"] == "memcpy"
    )  # fmt: skip
    token_bytes = size.size // size.tokens
    rows = simulate_savings(1e9 * rate, token_bytes, size.tokens, plan.prefixes, QUESTION)
    return [*rows, *simulate_routed_fleet(plan.fleet, 1e9 * rate, token_bytes)]
