"""The shape of a load that was chosen, as Locust asks for it."""

from __future__ import annotations

from typing import Any

from locust import LoadTestShape

from .load_shapes import users_at


class ChosenShape(LoadTestShape):
    """The shape that `--shape` names, again and again until the test ends."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """Return the number of users now and how many may start or stop in a second; None: the test is over."""
        runner: Any = self.runner
        options, run_s = runner.environment.parsed_options, float(self.get_run_time())  # type: ignore[no-untyped-call]
        if options.run_time and run_s > options.run_time:
            return None
        peak = options.num_users or 1
        return users_at(options.shape, peak, run_s, options.shape_period), float(peak)
