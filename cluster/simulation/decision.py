"""How long the live router takes to choose a replica: measured here, where all else of the bench is simulated."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

from ...replicas.bench.report import row
from ...replicas.protocol import ModelInfo, ReplicaLoad, ReplicaProfile, Request
from ...replicas.sampling_params import SamplingParams
from ...replicas.simulated.reckoned import reckoned
from ..routing.live import Live
from ..routing.predict import Slo
from .fleet import fleet, model_named

__all__ = ["decisions"]

REPLICAS = (16, 1000)
PROMPTS = (500, 5000)  # tokens
_TURNS, _WARM_UP = 500, 100
_POOL = "pool"


def decisions() -> Iterator[dict[str, Any]]:
    """From a request to the order of its replicas, in microseconds of a core, whoever else is on the machine.

    Every other prompt begins, for half of its length, as one that a replica has had: so far its hashes are computed.
    """
    for replicas in REPLICAS:
        for tokens in PROMPTS:
            samples = asyncio.run(_decide(replicas, tokens))
            yield row(
                "decision",
                {"replicas": replicas, "prompt_tokens": tokens},
                "µs of a core",
                samples,
                higher_is_better=False,
            )


async def _decide(replicas: int, tokens: int) -> list[float]:
    live = Live({_POOL: _POOL}, Slo(3.0, 0.1), random.Random(0))
    rng = random.Random(1)
    for profile in _profiles(replicas):
        live.joined(profile)
        live.reported(profile.replica_id, ReplicaLoad(rng.randrange(32), 0, rng.randrange(1000), 9000, 10_000, steps=1))
    known = [rng.randrange(32_000) for _ in range(tokens // 2)]
    _to(live, _request(rng, known, tokens))
    await asyncio.sleep(0)  # it is remembered where it went
    samples = []
    for turn in range(_TURNS):
        request = _request(rng, known if turn % 2 else [], tokens)
        began = time.thread_time()
        live.visit([request])
        samples.append((time.thread_time() - began) * 1e6)
    return samples[_WARM_UP:]


def _to(live: Live, request: Request) -> None:
    visit = live.visit([request])
    assert visit.best is not None
    visit.to(visit.best)


def _request(rng: random.Random, begins: list[int], tokens: int) -> Request:
    prompt = (*begins, *(rng.randrange(32_000) for _ in range(tokens - len(begins))))
    return Request("", prompt, SamplingParams(max_tokens=128, seed=0))


def _profiles(count: int) -> Iterator[ReplicaProfile]:
    """Of the GPUs of the fleet of a thousand, in its proportions."""
    model = ModelInfo("", "", 32_000, 32_768, (), "", "")
    every = fleet("thousand", model_named("qwen2.5-7b"), 0)
    for number, replica in enumerate(every[:: len(every) // count][:count]):
        rates = reckoned(replica.known, replica.max_batch_tokens)
        yield ReplicaProfile(
            f"replica {number}", model, "simulated", replica.name, None, "simulated", "", rates.prefill_tokens_per_s,
            rates.decode_s[0], replica.known.num_blocks, replica.max_batch_tokens, {}, rates.decode_s, rates.context_s,
            replica.max_running, _POOL,
        )  # fmt: skip
