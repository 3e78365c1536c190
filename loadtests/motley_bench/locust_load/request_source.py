"""Requests that the users of one process send."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from motley.cluster.routing.prediction.latency_model import Slo
from motley.cluster.simulation.length_distribution import LengthDistribution

from ..load.load_workload import LoadRequest
from ..load.measured_service import MeasuredService


@dataclass(slots=True)
class RequestSource:
    """Source of requests for all users of a process.

    shared_prefix  share of each prompt's tokens, at its beginning, that all prompts have in common
    slo            objectives that a good answer meets
    rng            from which lengths and prompts are drawn
    """

    service: MeasuredService
    prompt_tokens: LengthDistribution
    output_tokens: LengthDistribution
    shared_prefix: float
    slo: Slo
    rng: random.Random
    _prefix: list[int] = field(default_factory=list)

    def next(self) -> LoadRequest:
        """Return the next request, which fits the model's context."""
        output = min(self.output_tokens.draw(self.rng), self.service.max_model_len - 1)
        length = max(1, min(self.prompt_tokens.draw(self.rng), self.service.max_model_len - output))
        shared = round(length * self.shared_prefix)
        while len(self._prefix) < shared:  # the same in every process
            self._prefix.append(random.Random(len(self._prefix)).choice(self.service.alphabet))
        own = self.rng.choices(self.service.alphabet, k=length - shared)
        return LoadRequest(None, (*self._prefix[:shared], *own), output)
