"""Plan of `motley bench fleet`: the fleet, its objectives, and the load of each turn."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motley.cluster.simulation.length_distribution import LengthDistribution

from ..load.load_workload import Workload

# Four GPUs of unequal speed, and this CPU; the seeds decide how far the GPUs are off their profiles.
FLEET: dict[str, Any] = {
    "model": "demo",
    "slo": {"ttft_ms": 1500, "tpot_ms": 150},
    "pools": [
        *(
            {"name": gpu.lower(), "simulate": gpu, "simulate_model": "qwen2.5-7b", "hidden": {"seed": seed}}
            for seed, gpu in enumerate(("P40", "T4", "L4", "A10"))
        ),
        # Short prompts only: cores that compute are missing for the service and its clients.
        {"name": "cpu", "engine": {"threads": 1, "kv_memory": "128MiB", "max_running": 2, "max_model_len": 768}},
    ],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetBenchPlan:
    """Settings of `motley bench fleet`. In each turn both sides get the same requests at the same times.

    fleet  fleet file, which must have objectives; None: FLEET
    rate   requests per second, arriving as a Poisson process
    share  share of the requests that must meet the objectives for a turn to be met
    """

    fleet: Path | None = None
    rate: float = 6.0
    prompt_tokens: LengthDistribution = LengthDistribution("uniform", 200, 1800)  # noqa: RUF009  frozen
    output_tokens: LengthDistribution = LengthDistribution("uniform", 20, 80)  # noqa: RUF009  frozen
    turns: int = 2
    seconds: float = 40.0
    warmup_s: float = 10.0
    clients: int = 1
    seed: int = 21
    share: float = 0.95


@contextmanager
def written_fleet(plan: FleetBenchPlan) -> Iterator[Path]:
    if plan.fleet is not None:
        yield plan.fleet
        return
    with tempfile.TemporaryDirectory(prefix="motley-bench-") as folder:
        path = Path(folder, "fleet.yaml")
        path.write_text(json.dumps(FLEET))  # JSON is YAML too
        yield path


def turn_workload(plan: FleetBenchPlan, turn: int) -> Workload:
    return Workload(
        rate=plan.rate, prompt_tokens=plan.prompt_tokens, output_tokens=plan.output_tokens, seed=plan.seed + turn,
        warmup_s=plan.warmup_s, duration_s=plan.seconds,
    )  # fmt: skip
