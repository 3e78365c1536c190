"""How long sequences wait and are computed in an engine, for metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ..host.metric_fields import histogram
from ..kv.histogram import Histogram

if TYPE_CHECKING:  # an ingress reads the table of metrics, and needs nothing of an engine
    from .sequence import Sequence as EngineSequence

__all__ = ["REQUEST_S", "EngineTimings"]

# Bounds of the buckets in seconds, as vLLM has them for times of a request.
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_Times = partial(Histogram, REQUEST_S)


@dataclass(slots=True, eq=False)
class EngineTimings:
    """Times of an engine's sequences, one for each choice of a request. The engine's thread writes them; other threads
    may read them.

    A sequence that is preempted counts as computed from its first place in a batch on. One that moved here from
    another replica begins anew.
    """

    queue: Histogram = field(
        default_factory=_Times,
        metadata=histogram(
            "request_queue_time_seconds", "Seconds from a sequence's arrival at the replica to its place in a batch"
        ),
    )
    prefill: Histogram = field(
        default_factory=_Times,
        metadata=histogram(
            "request_prefill_time_seconds", "Seconds from a sequence's place in a batch to its first token there"
        ),
    )
    decode: Histogram = field(
        default_factory=_Times,
        metadata=histogram(
            "request_decode_time_seconds", "Seconds from a sequence's first token on the replica to its last one"
        ),
    )
    inference: Histogram = field(
        default_factory=_Times,
        metadata=histogram(
            "request_inference_time_seconds", "Seconds from a sequence's place in a batch to its last token"
        ),
    )

    def admitted(self, sequences: Sequence[EngineSequence], now: float) -> None:
        """Record that these sequences have a place in a batch. `now`: in seconds of the engine's clock."""
        for sequence in sequences:
            if sequence.admitted_s is None and not sequence.is_probe:
                sequence.admitted_s = now
                self.queue.add(max(0.0, now - sequence.arrived_s))

    def begun(self, sequence: EngineSequence, now: float) -> None:
        """Record a sequence's first token here."""
        assert sequence.admitted_s is not None
        sequence.first_token_s = now
        self.prefill.add(now - sequence.admitted_s)

    def ended(self, sequence: EngineSequence, now: float) -> None:
        """Record the end of a sequence; one that has no token is in no time but the first.

        now  when its last token was known
        """
        if sequence.first_token_s is not None and sequence.admitted_s is not None:
            self.decode.add(now - sequence.first_token_s)
            self.inference.add(now - sequence.admitted_s)
