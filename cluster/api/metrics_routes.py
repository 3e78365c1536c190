"""Route that tells the metrics of the whole service to Prometheus and those who read its forms."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response

from ..metrics.metric_series import MetricSeries
from ..metrics.metrics_text import PREFIXES, render_metrics
from ..transport.http_server.http_responses import Route

PATH = "/metrics"


class MetricsRoutes:
    """Route of the metrics.

    totals      returns the sums over all processes of the service
    vllm_names  whether every metric is told a second time, by the prefix that vLLM has
    """

    def __init__(self, totals: Callable[[], Awaitable[Sequence[MetricSeries]]], *, vllm_names: bool = False) -> None:
        self._totals = totals
        self._prefixes = PREFIXES if vllm_names else PREFIXES[:1]

    def routes(self) -> tuple[Route, ...]:
        return (Route("GET", PATH, self._get, metrics=True, any_query=True),)

    async def _get(self, request: Request) -> Response:
        text, media_type = render_metrics(await self._totals(), request.headers.get("accept", ""), self._prefixes)
        return Response(text, media_type=None, headers={"content-type": media_type, "cache-control": "no-store"})
