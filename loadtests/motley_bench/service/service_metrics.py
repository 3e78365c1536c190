"""Metrics by which the sides of `motley bench service` are compared, from the outcomes of their loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from motley.replicas.errors import EngineFault
from motley.replicas.host.measurement_rows import quantile

from ..load.load_workload import Workload
from ..load.request_samples import OK, LoadOutcome, RequestSample, count_codes, samples_in_window


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """Figures of one metric on one side.

    samples  one for each turn
    tail     further figures, of all turns together
    """

    unit: str
    samples: list[float]
    higher_is_better: bool
    tail: dict[str, float]


def messages(workload: Workload, outcomes: Sequence[LoadOutcome]) -> ComparedMetric:
    """Return messages per second, and tokens per message.

    `tokens_per_message` is 1 if no message carries the tokens of two steps.
    """
    rates = [outcome.messages / workload.duration_s for outcome in outcomes]
    together = sum(outcome.tokens for outcome in outcomes) / max(1, sum(outcome.messages for outcome in outcomes))
    return ComparedMetric("messages/s", rates, True, {"tokens_per_message": together})


def output(workload: Workload, outcomes: Sequence[LoadOutcome]) -> ComparedMetric:
    return ComparedMetric("tokens/s", [outcome.tokens / workload.duration_s for outcome in outcomes], True, {})


def requests(workload: Workload, outcomes: Sequence[LoadOutcome]) -> ComparedMetric:
    """Return responses per second that came within the window, for responses in one piece.

    `failed` counts the requests that got none.
    """
    rates = [outcome.messages / workload.duration_s for outcome in outcomes]
    failed = sum(sample.code != OK for outcome in outcomes for sample in outcome.samples)
    return ComparedMetric("requests/s", rates, True, {"failed": float(failed)})


def gaps(workload: Workload, outcomes: Sequence[LoadOutcome]) -> ComparedMetric:
    samples = [outcome.gaps.quantile(0.5) * 1e3 for outcome in outcomes]
    together = merge_outcomes(outcomes).gaps
    return ComparedMetric(
        "ms", samples, False, {f"p{share}": together.quantile(share / 100) * 1e3 for share in (50, 90, 99)}
    )


def ttfts(workload: Workload, outcomes: Sequence[LoadOutcome]) -> ComparedMetric:
    return _latency(workload, outcomes, lambda sample: sample.ttft_s)


def e2es(workload: Workload, outcomes: Sequence[LoadOutcome]) -> ComparedMetric:
    return _latency(workload, outcomes, lambda sample: sample.e2e_s)


def _latency(
    workload: Workload, outcomes: Sequence[LoadOutcome], of: Callable[[RequestSample], float | None]
) -> ComparedMetric:
    """Return the median latency of each turn, in ms, and tail percentiles of all requests together.

    Raises EngineFault if no request of a turn ended well.
    """
    by_turn = [
        [1e3 * seconds for sample in samples_in_window(outcome.samples, workload.warmup_s, workload.end_s)
         if sample.code == OK and (seconds := of(sample)) is not None]
        for outcome in outcomes
    ]  # fmt: skip
    if not all(by_turn):
        found = ", ".join(
            f"{number} × {code}" for code, number in count_codes(merge_outcomes(outcomes).samples).items()
        )
        raise EngineFault(f"no request of a turn was answered: {found or 'none was sent'}")
    everything = [each for turn in by_turn for each in turn]
    tail = {f"p{share}": quantile(everything, share / 100) for share in (50, 90, 99)}
    return ComparedMetric("ms", [quantile(turn, 0.5) for turn in by_turn], False, tail)


def merge_outcomes(outcomes: Sequence[LoadOutcome]) -> LoadOutcome:
    together = LoadOutcome()
    for outcome in outcomes:
        together.merge(outcome)
    return together
