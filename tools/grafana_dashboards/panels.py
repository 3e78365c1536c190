"""Panels of the dashboards: what each shows, and the queries in PromQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

POOL = '{pool=~"$pool"}'
_RATE = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One query of a panel. legend: name of its lines, with labels in double braces."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """A panel with lines over time.

    title    what is measured
    meaning  what to read from it, in a sentence
    unit     unit of its values, as Grafana names it
    stacked  whether the lines are parts of a whole
    """

    title: str
    meaning: str
    unit: str
    queries: Sequence[PanelQuery]
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class DashboardSpec:
    """A dashboard: panels by the titles of its rows. uid: its name in links, and that of its file."""

    uid: str
    title: str
    rows: Mapping[str, Sequence[PanelSpec]]


def _rate(metric: str, by: str = "", labels: str = POOL) -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate(motley_{metric}{labels}{_RATE}))"


def _state(metric: str, by: str = "", labels: str = POOL) -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (motley_{metric}{labels})"


def _quantiles(histogram: str, labels: str = POOL) -> list[PanelQuery]:
    return [
        PanelQuery(f"histogram_quantile({share}, {_rate(f'{histogram}_bucket', 'le', labels)})", legend)
        for share, legend in ((0.5, "half"), (0.95, "95%"), (0.99, "99%"))
    ]


def _mean(histogram: str, legend: str, labels: str = POOL) -> PanelQuery:
    return PanelQuery(f"{_rate(f'{histogram}_sum', '', labels)} / {_rate(f'{histogram}_count', '', labels)}", legend)


def _share(part: str, whole: str, legend: str, labels: str = POOL) -> PanelQuery:
    return PanelQuery(f"{_rate(part, '', labels)} / {_rate(whole, '', labels)}", legend)


_CLASS = "pool, accelerator, compute_capability"
_CLASS_LEGEND = "{{pool}}: {{accelerator}} {{compute_capability}}"

REQUESTS = DashboardSpec(
    "motley-requests",
    "Motley: requests",
    {
        "Traffic": [
            PanelSpec(
                "Requests",
                "Requests that came, and answers that ended.",
                "reqps",
                [
                    PanelQuery(_rate("requests_total", labels=""), "came"),
                    PanelQuery(_rate("e2e_request_latency_seconds_count", "pool"), "ended: {{pool}}"),
                ],
            ),
            PanelSpec(
                "Tokens",
                "Tokens of prompts whose answers have begun, and tokens that were sent.",
                "short",
                [
                    PanelQuery(_rate("prompt_tokens_total", "pool"), "prompts: {{pool}}"),
                    PanelQuery(_rate("generation_tokens_total", "pool"), "answers: {{pool}}"),
                ],
            ),
            PanelSpec(
                "Under way",
                "Sequences that replicas compute, those that wait there, and requests that no replica takes yet.",
                "short",
                [
                    PanelQuery(_state("num_requests_running"), "running"),
                    PanelQuery(_state("num_requests_waiting"), "waiting on a replica"),
                    PanelQuery(_state("num_requests_held", labels=""), "held by the ingress"),
                ],
            ),
            PanelSpec(
                "Lengths",
                "Mean tokens of prompts and of answers.",
                "short",
                [_mean("request_prompt_tokens", "prompt"), _mean("request_generation_tokens", "answer")],
            ),
        ],
        "Objectives": [
            PanelSpec(
                "Time to first token",
                "From a request's arrival to its first token; beside it the fleet file's objective, if there is one.",
                "s",
                [
                    *_quantiles("time_to_first_token_seconds"),
                    PanelQuery("max (motley_objective_time_to_first_token_seconds)", "objective"),
                ],
            ),
            PanelSpec(
                "Time per token",
                "Mean of each answer after its first message; beside it the fleet file's objective, if there is one.",
                "s",
                [
                    *_quantiles("request_time_per_output_token_seconds"),
                    PanelQuery("max (motley_objective_time_per_output_token_seconds)", "objective"),
                ],
            ),
            PanelSpec(
                "Late answers",
                "Share of answers that missed an objective.",
                "percentunit",
                [_share("requests_late_total", "e2e_request_latency_seconds_count", "late", labels="")],
            ),
            PanelSpec(
                "Time to the end", "From a request's arrival to its last token.", "s",
                _quantiles("e2e_request_latency_seconds"),
            ),
        ],
        "Where the time goes": [
            PanelSpec(
                "Parts of a request",
                "Mean time that a request spends in each part.",
                "s",
                [
                    _mean("request_routing_time_seconds", "until a replica is chosen", labels=""),
                    _mean("request_queue_time_seconds", "waiting on the replica"),
                    _mean("request_prefill_time_seconds", "computing the prompt"),
                    _mean("request_decode_time_seconds", "computing the answer"),
                ],
                stacked=True,
            ),
            PanelSpec(
                "Time between messages", "Gaps between two messages of an answer.", "s",
                _quantiles("inter_token_latency_seconds"),
            ),
        ],
        "Errors": [
            PanelSpec(
                "Ends", "Choices that ended, by reason; abort: the client left.", "reqps",
                [PanelQuery(_rate("request_success_total", "finished_reason"), "{{finished_reason}}")],
            ),
            PanelSpec(
                "Refusals", "Calls that were refused, by the code that the client got.", "reqps",
                [PanelQuery(_rate("request_refusals_total", "code", ""), "{{code}}")],
            ),
            PanelSpec(
                "Failures", "Calls that failed, by code, and answers that moved to another replica.", "reqps",
                [
                    PanelQuery(_rate("request_errors_total", "code", ""), "{{code}}"),
                    PanelQuery(_rate("requests_moved_total", labels=""), "moved"),
                ],
            ),
        ],
    },
)  # fmt: skip

FLEET = DashboardSpec(
    "motley-fleet",
    "Motley: fleet",
    {
        "Replicas by class": [
            PanelSpec(
                "Replicas", "Replicas that serve.", "short",
                [PanelQuery(_state("num_replicas", _CLASS), _CLASS_LEGEND)],
            ),
            PanelSpec(
                "Sequences", "Sequences that a class computes, and those that wait there.", "short",
                [
                    PanelQuery(_state("num_requests_running", _CLASS), f"{_CLASS_LEGEND}, running"),
                    PanelQuery(_state("num_requests_waiting", _CLASS), f"{_CLASS_LEGEND}, waiting"),
                ],
            ),
            PanelSpec(
                "Tokens of a replica", "Tokens a second that each replica of a pool sends.", "short",
                [
                    PanelQuery(
                        f"{_rate('generation_tokens_total', 'pool')} / {_state('num_replicas', 'pool')}", "{{pool}}"
                    )
                ],
            ),
            PanelSpec(
                "KV in use", "Share of the KV blocks that sequences hold.", "percentunit",
                [PanelQuery(f"avg by ({_CLASS}) (motley_kv_cache_usage_perc{POOL})", _CLASS_LEGEND)],
            ),
            PanelSpec(
                "Preemptions", "Sequences that lost their place because KV ran out.", "short",
                [PanelQuery(_rate("num_preemptions_total", "pool"), "{{pool}}")],
            ),
            PanelSpec(
                "Accepted drafts", "Share of the draft tokens that the model accepted.", "percentunit",
                [
                    _share(
                        "spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total", "accepted"
                    )
                ],
            ),
        ],
        "Scaling": [
            PanelSpec(
                "Wanted and serving", "What the control plane wants, beside what there is.", "short",
                [
                    PanelQuery(_state("num_replicas_wanted", "pool"), "{{pool}}, wanted"),
                    PanelQuery(_state("num_replicas", "pool"), "{{pool}}, serving"),
                    PanelQuery(_state("num_replicas_starting", "pool"), "{{pool}}, starting"),
                    PanelQuery(_state("num_replicas_draining", "pool"), "{{pool}}, draining"),
                ],
            ),
            PanelSpec(
                "Decisions", "Changes of the wanted number, by direction and by who decided.", "short",
                [
                    PanelQuery(
                        f"sum by (pool, direction, by) (increase(motley_scaling_decisions_total{POOL}{_RATE}))",
                        "{{pool}} {{direction}}, {{by}}",
                    )
                ],
            ),
        ],
        "Prefixes": [
            PanelSpec(
                "Where prompts come from",
                "Shares of the prompt tokens: found in the replica's own KV, fetched from Redis, or computed.",
                "percentunit",
                [
                    _share("prefix_cache_hits_total", "prefix_cache_queries_total", "own KV"),
                    _share("external_prefix_cache_hits_total", "prefix_cache_queries_total", "Redis"),
                    PanelQuery(
                        # Where there is no store, nothing is told of one.
                        f"1 - ({_rate('prefix_cache_hits_total')} + ({_rate('external_prefix_cache_hits_total')}"
                        f" or 0 * {_rate('prefix_cache_hits_total')}))"
                        f" / {_rate('prefix_cache_queries_total')}",
                        "computed",
                    ),
                ],
                stacked=True,
            ),
            PanelSpec(
                "Fetches", "Time to fetch a prompt's prefix from Redis.", "s",
                _quantiles("external_prefix_cache_fetch_seconds"),
            ),
            PanelSpec(
                "Bytes", "Bytes that were read from Redis and written there.", "Bps",
                [
                    PanelQuery(_rate("external_prefix_cache_read_bytes_total"), "read"),
                    PanelQuery(_rate("external_prefix_cache_written_bytes_total"), "written"),
                ],
            ),
            PanelSpec(
                "Failures of the cache",
                "Calls of Redis that failed, and the share of replicas that leave it alone because of that.",
                "short",
                [
                    PanelQuery(_rate("external_prefix_cache_errors_total", "reason"), "{{reason}}"),
                    PanelQuery(f"avg (motley_external_prefix_cache_breaker{POOL})", "left alone"),
                ],
            ),
        ],
    },
)  # fmt: skip

DASHBOARDS = (REQUESTS, FLEET)
