"""Configs of launches, each looked up once: a step must not read tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ..device.device_context import DeviceContext
from ..device.device_spec import DeviceSpec
from ..device.precision import PrecisionPolicy
from ..launch.config_tables import ConfigChoice, choose_config
from ..launch.kernel_operation import KernelOperation, ProblemShape, round_up_power_of_two
from ..launch.variant import Config
from ..registry import find_operation

__all__ = ["ConfigCache"]

T = TypeVar("T", bound=KernelOperation)


class ConfigCache:
    """By operator and shape, as the tables of that rig have them: one for all layers, most of which are alike."""

    def __init__(self, rig: DeviceContext) -> None:
        self._rig = rig
        self._known: dict[tuple[str, tuple[tuple[str, int | str], ...]], ConfigChoice] = {}
        self._kernels: dict[tuple[object, tuple[tuple[str, int | str], ...]], Any] = {}

    def of(self, name: str, **fields: int | str) -> Config:
        """Look up a config. Numbers that change with every step are rounded by `round_up_power_of_two` first: else
        there would be no end of them.
        """
        return self.looked_up(name, **fields).config

    def looked_up(self, name: str, **fields: int | str) -> ConfigChoice:
        """The same, and how it was found."""
        key = name, tuple(fields.items())
        found = self._known.get(key)
        if found is None:
            found = choose_config(find_operation(name), self._rig.policy, ProblemShape.of(**fields), self._rig.about)
            self._known[key] = found
        return found

    def kernel(
        self, kernel_for: Callable[[PrecisionPolicy, ProblemShape, DeviceSpec], tuple[T, str]], **fields: int | str
    ) -> T:
        """Which of several operators takes that shape, of any number of rows: `kernel_for` rounds as graphs do."""
        key = kernel_for, tuple(fields.items())
        found: T | None = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = kernel_for(self._rig.policy, ProblemShape.of(**fields), self._rig.about)[0]
        return found

    def used(self, name: str, num_rows: int) -> Iterator[ConfigChoice]:
        """What was found for that operator and about so many rows, and how; of attention for any number."""
        for (known, fields), choice in self._known.items():
            sizes = dict(fields)
            rows = sizes.get("m", sizes.get("t", round_up_power_of_two(num_rows)))
            if known == name and rows == round_up_power_of_two(num_rows):
                yield choice
