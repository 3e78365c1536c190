"""Counts of drafts and of the tokens that they have brought, for metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...host.metric_fields import counter


@dataclass(slots=True, eq=False)
class DraftCounts:
    """Counts of drafts since the engine's start. The engine's thread writes them; other threads may read them.

    drafts    times that a sequence's next tokens were drafted and tried
    drafted   tokens of these drafts
    accepted  by position in the draft, the tokens that the model accepted
    """

    drafts: int = field(
        default=0,
        metadata=counter("spec_decode_num_drafts", "Times that a sequence's next tokens were drafted and tried"),
    )
    drafted: int = 0
    accepted: list[int] = field(
        default_factory=list,
        metadata=counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that the model has accepted, by position in the draft, from 0 on",
            lambda counts: counts.by_position,
            labels=("position",),
        ),
    )

    def add(self, drafted: int, accepted: int) -> None:
        """Count one draft, of which the first `accepted` tokens were right."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted.extend([0] * (drafted - len(self.accepted)))
        for position in range(accepted):
            self.accepted[position] += 1

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)

    @property
    def by_position(self) -> Mapping[str, int]:
        return {str(position): count for position, count in enumerate(self.accepted)}
