"""One request as the directory sees it at one moment: whatever is asked of it then is answered from one prediction."""

from __future__ import annotations

from dataclasses import dataclass

from ...replicas.protocol import Request
from .chain import Chain
from .terms import Ask, Predicted

__all__ = ["Look"]

SAME_S = 0.001  # nothing that matters changes so soon, unless it is heard of


@dataclass(slots=True)
class Look:
    """ranked: the replicas for it, best first, late ones too; None: nobody has asked yet."""

    request: Request
    at: float
    chain: Chain
    ask: Ask
    ranked: list[Predicted] | None = None

    def is_of(self, request: Request, now: float) -> bool:
        """Whether it is of that request, which may have been written anew, with less time left."""
        own = self.request
        return now - self.at < SAME_S and (
            own is request
            or (
                own.prompt_ids is request.prompt_ids
                and own.sampling is request.sampling
                and own.request_id == request.request_id
                and own.cache_salt == request.cache_salt
                and own.pooling == request.pooling
                and own.output_ids == request.output_ids
            )
        )
