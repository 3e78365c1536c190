"""What will come, from what came."""

from __future__ import annotations

from .capacity import Load
from .forecast import Forecast
from .state import Observed
from .steady import Latest

__all__ = ["Demand"]

_ANSWER = 150.0  # tokens, until some have ended
_LENGTHS_S = 120.0  # over which their mean is taken
_SHORTER_S = 600.0  # over which answers are believed to have become shorter: those of refused requests do not show


class Demand:
    """Rates of requests and of prompts' tokens are forecast; answers are as many, each as long as answers are."""

    def __init__(self, *, ttft_s: float, catch_up_s: float, settle_s: float) -> None:
        """Prompts that wait beyond what `ttft_s` allows are to be worked off in `catch_up_s`."""
        self._ttft_s = ttft_s
        self._catch_up_s = catch_up_s
        self._requests = Forecast()
        self._prompts = Forecast()
        self._lengths = Forecast(recent_s=_LENGTHS_S), Forecast(recent_s=_LENGTHS_S)
        self._caches = Forecast(recent_s=_LENGTHS_S), Forecast(recent_s=_LENGTHS_S)
        self._answer = _ANSWER
        self._last: float | None = None
        self._most = (Latest(settle_s), Latest(settle_s), Latest(settle_s), Latest(settle_s))

    @property
    def settled(self) -> bool:
        """Whether the most of late is that of all of `settle_s`."""
        return all(each.settled for each in self._most)

    def begin_anew(self) -> None:
        """Forgets the most of late, not what is forecast."""
        for each in self._most:
            each.begin_anew()

    def saw(self, observed: Observed, horizon_s: float) -> tuple[Load, Load]:
        """The most until `horizon_s` from now, and the most that this was of late."""
        now = observed.now
        self._requests.saw(now, observed.requests_per_s)
        self._prompts.saw(now, observed.prompt_tokens_per_s)
        self._follow_answers(observed)
        requests = self._requests.after(horizon_s)
        waiting = sum(pool.queued_tokens for pool in observed.pools)
        behind = max(0.0, waiting - self._prompts.recent * self._ttft_s) / self._catch_up_s
        coming = requests, self._prompts.after(horizon_s) + behind, requests * self._answer, self._computed(observed)
        most = (each.saw(now, value) for each, value in zip(self._most, coming, strict=True))
        return _load(*coming), _load(*most)

    def _computed(self, observed: Observed) -> float:
        """Share of the prompts' tokens that caches have not held of late."""
        hits, prompts = self._caches
        hits.saw(observed.now, observed.cached_tokens_per_s)
        prompts.saw(observed.now, observed.prompt_tokens_per_s)
        return 1.0 - min(hits.recent / prompts.recent, 1.0) if prompts.recent > 0 else 1.0

    def _follow_answers(self, observed: Observed) -> None:
        """Longer ones at once, shorter ones slowly."""
        since, self._last = observed.now - (observed.now if self._last is None else self._last), observed.now
        outputs, requests = self._lengths
        outputs.saw(observed.now, observed.output_tokens_per_s)
        requests.saw(observed.now, observed.requests_per_s)
        if requests.recent <= 0:
            return
        mean = outputs.recent / requests.recent
        share = 1.0 if mean > self._answer else min(since / _SHORTER_S, 1.0)
        self._answer += share * (mean - self._answer)


def _load(requests: float, prompt_tokens: float, output_tokens: float, computed: float) -> Load:
    return Load(requests, prompt_tokens, output_tokens, (1.0 - computed) * prompt_tokens)
