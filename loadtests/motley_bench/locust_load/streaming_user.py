"""User that sends one streamed request after the other, whatever the protocol."""

from __future__ import annotations

from collections.abc import Iterator

from locust import User, constant, task
from locust.env import Environment

from motley.replicas.errors import MotleyError

from ..load.load_workload import LoadRequest
from .locust_options import request_source
from .stream_series import StreamTimer


class StreamingUser(User):
    """Base of the users of each protocol.

    protocol  name of the protocol in tables
    failures  errors with which an answer can end; others end the user
    """

    abstract = True
    wait_time = constant(0)
    protocol = ""
    failures: tuple[type[Exception], ...] = (MotleyError, OSError)

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.source = request_source(environment)

    def stream(self, request: LoadRequest) -> Iterator[int]:
        """Send a request; yield the number of tokens of each message that carries part of the answer."""
        raise NotImplementedError

    @task
    def answer(self) -> None:
        request = self.source.next()
        timer = StreamTimer(self.environment, self.protocol, self.source.slo)
        error: Exception | None = None
        try:
            for tokens in self.stream(request):
                timer.message(tokens)
        except self.failures as caught:
            error = caught
        timer.ended(error)
