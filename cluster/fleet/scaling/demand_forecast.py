"""Forecast of the load from past arrivals."""

from __future__ import annotations

from .rate_forecast import RateForecast
from .replica_capacity import OfferedLoad
from .scaling_hysteresis import SlidingMaximum
from .scaling_policy import FleetObservation

_DEFAULT_OUTPUT_TOKENS = 150.0  # assumed tokens of an answer until some have ended
_LENGTHS_S = 120.0  # time over which the mean length of answers is taken
_SHORTER_S = 600.0  # time over which a shorter mean is adopted, since answers of refused requests are not seen


class DemandForecast:
    """Forecast of a load: rates of requests and prompt tokens are extrapolated, answers have the recent mean length."""

    def __init__(self, *, ttft_s: float, catch_up_s: float, settle_s: float) -> None:
        """Create a forecast.

        ttft_s      objective; prompt tokens that wait beyond it count as additional load
        catch_up_s  seconds within which such prompts are to be worked off
        settle_s    seconds over which the highest load is remembered
        """
        self._ttft_s = ttft_s
        self._catch_up_s = catch_up_s
        self._requests = RateForecast()
        self._prompts = RateForecast()
        self._lengths = RateForecast(recent_s=_LENGTHS_S), RateForecast(recent_s=_LENGTHS_S)
        self._caches = RateForecast(recent_s=_LENGTHS_S), RateForecast(recent_s=_LENGTHS_S)
        self._output_tokens = _DEFAULT_OUTPUT_TOKENS
        self._last: float | None = None
        self._maxima = (
            SlidingMaximum(settle_s),
            SlidingMaximum(settle_s),
            SlidingMaximum(settle_s),
            SlidingMaximum(settle_s),
        )

    @property
    def settled(self) -> bool:
        """Whether the load has been observed for `settle_s` seconds since the start or the last `reset`."""
        return all(each.settled for each in self._maxima)

    def reset(self) -> None:
        """Forget the highest load of the recent past, but not the forecast."""
        for each in self._maxima:
            each.reset()

    def saw(self, observed: FleetObservation, horizon_s: float) -> tuple[OfferedLoad, OfferedLoad]:
        """Record an observation.

        Return the highest load expected until `horizon_s`, and the highest recent value of it.
        """
        now = observed.now
        self._requests.saw(now, observed.requests_per_s)
        self._prompts.saw(now, observed.prompt_tokens_per_s)
        self._follow_output_tokens(observed)
        requests = self._requests.after(horizon_s)
        waiting = sum(pool.queued_tokens for pool in observed.pools)
        behind = max(0.0, waiting - self._prompts.recent * self._ttft_s) / self._catch_up_s
        coming = (
            requests,
            self._prompts.after(horizon_s) + behind,
            requests * self._output_tokens,
            self._computed(observed),
        )
        maximum = (each.saw(now, value) for each, value in zip(self._maxima, coming, strict=True))
        return _offered_load(*coming), _offered_load(*maximum)

    def _computed(self, observed: FleetObservation) -> float:
        """Return the share of prompt tokens that were not cached recently."""
        hits, prompts = self._caches
        hits.saw(observed.now, observed.cached_tokens_per_s)
        prompts.saw(observed.now, observed.prompt_tokens_per_s)
        return 1.0 - min(hits.recent / prompts.recent, 1.0) if prompts.recent > 0 else 1.0

    def _follow_output_tokens(self, observed: FleetObservation) -> None:
        """Adopt longer answers at once, and shorter ones slowly."""
        elapsed_s, self._last = observed.now - (observed.now if self._last is None else self._last), observed.now
        outputs, requests = self._lengths
        outputs.saw(observed.now, observed.output_tokens_per_s)
        requests.saw(observed.now, observed.requests_per_s)
        if requests.recent <= 0:
            return
        mean = outputs.recent / requests.recent
        share = 1.0 if mean > self._output_tokens else min(elapsed_s / _SHORTER_S, 1.0)
        self._output_tokens += share * (mean - self._output_tokens)


def _offered_load(requests: float, prompt_tokens: float, output_tokens: float, computed: float) -> OfferedLoad:
    return OfferedLoad(requests, prompt_tokens, output_tokens, (1.0 - computed) * prompt_tokens)
