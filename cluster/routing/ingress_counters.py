"""Counters and histograms of one ingress's requests, by pool and in all, as metrics export them.

What clients see is counted here and not in replicas, so that a request counts once wherever it is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from ...replicas.engine.engine_timings import REQUEST_S
from ...replicas.host.metric_fields import counter, gauge, histogram
from ...replicas.kv.histogram import Histogram
from ...replicas.types import FinishReason

__all__ = ["IngressCounters", "PoolCounters"]

# Bounds of the buckets, as vLLM has them.
_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TOKENS = tuple(digit * 10.0**power for power in range(7) for digit in (1, 2, 5) if digit * 10**power <= 10**6)
_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.DEADLINE: "deadline",
    FinishReason.REPLICA_LOST: "replica_lost",
    FinishReason.ERROR: "error",
}


@dataclass(slots=True, eq=False)
class PoolCounters:
    """Counts of one ingress's requests to a pool. A request that moves counts in each pool by what came from there."""

    prompt_tokens: int = field(
        default=0, metadata=counter("prompt_tokens", "Prompt tokens of the requests whose answers have begun")
    )
    generation_tokens: int = field(
        default=0, metadata=counter("generation_tokens", "Output tokens that were sent to clients")
    )
    finished: Counter[FinishReason] = field(
        default_factory=lambda: Counter(dict.fromkeys(FinishReason, 0)),
        metadata=counter(
            "request_success",
            "Choices that have ended, by reason; abort: the client left",
            lambda counters: counters.by_reason,
            labels=("finished_reason",),
        ),
    )
    ttft: Histogram = field(
        default_factory=partial(Histogram, _TTFT_S),
        metadata=histogram(
            "time_to_first_token_seconds", "Seconds from a request's arrival at the ingress to its first token"
        ),
    )
    itl: Histogram = field(
        default_factory=partial(Histogram, _TOKEN_S),
        metadata=histogram(
            "inter_token_latency_seconds", "Seconds between two messages of an answer that carry tokens"
        ),
    )
    tpot: Histogram = field(
        default_factory=partial(Histogram, _TOKEN_S),
        metadata=histogram(
            "request_time_per_output_token_seconds", "Mean seconds per token of an answer, after its first message"
        ),
    )
    e2e: Histogram = field(
        default_factory=partial(Histogram, REQUEST_S),
        metadata=histogram(
            "e2e_request_latency_seconds", "Seconds from a request's arrival at the ingress to the end of its answer"
        ),
    )
    prompt_lengths: Histogram = field(
        default_factory=partial(Histogram, _TOKENS),
        metadata=histogram("request_prompt_tokens", "Prompt tokens of a request whose answer has begun"),
    )
    output_lengths: Histogram = field(
        default_factory=partial(Histogram, _TOKENS),
        metadata=histogram("request_generation_tokens", "Output tokens of a request that has ended, all choices"),
    )

    @property
    def by_reason(self) -> Mapping[str, int]:
        return {_REASONS[reason]: count for reason, count in self.finished.items()}


@dataclass(slots=True, eq=False)
class IngressCounters:
    """Counts of one ingress's requests, whichever pool they went to."""

    requests: int = field(default=0, metadata=counter("requests", "Requests that came, those that were refused too"))
    held: int = field(
        default=0, metadata=gauge("num_requests_held", "Requests that wait in an ingress for a replica to take them")
    )
    moved: int = field(
        default=0,
        metadata=counter("requests_moved", "Answers that had begun and went on on another replica"),
    )
    late: int = field(
        default=0,
        metadata=counter("requests_late", "Answers that missed a latency objective of the fleet file, if it has any"),
    )
    routing: Histogram = field(
        default_factory=partial(Histogram, _TTFT_S),
        metadata=histogram(
            "request_routing_time_seconds",
            "Seconds from a request's arrival at the ingress to the moment when it may be sent to a replica",
        ),
    )
