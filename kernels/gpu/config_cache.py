"""Cache of launch configs, so that a step never reads a tuned table."""

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

T = TypeVar("T", bound=KernelOperation)


class ConfigCache:
    """Launch configs by operator and shape, from the tables of a device; all layers share one cache, since most are
    alike.
    """

    def __init__(self, device_context: DeviceContext) -> None:
        self._device_context = device_context
        self._choices: dict[tuple[str, tuple[tuple[str, int | str], ...]], ConfigChoice] = {}
        self._kernels: dict[tuple[object, tuple[tuple[str, int | str], ...]], Any] = {}

    def of(self, name: str, **fields: int | str) -> Config:
        """Return the config of an operator for a shape.

        Numbers that change with every step must be rounded by `round_up_power_of_two` first, or else the cache would
        grow without end.
        """
        return self.looked_up(name, **fields).config

    def looked_up(self, name: str, **fields: int | str) -> ConfigChoice:
        """Return the launch config of an operator for a shape, and how it was found in tuned tables."""
        key = name, tuple(fields.items())
        found = self._choices.get(key)
        if found is None:
            found = choose_config(
                find_operation(name), self._device_context.policy, ProblemShape.of(**fields), self._device_context.about
            )
            self._choices[key] = found
        return found

    def kernel(
        self, kernel_for: Callable[[PrecisionPolicy, ProblemShape, DeviceSpec], tuple[T, str]], **fields: int | str
    ) -> T:
        """Return the one of several operators that serves a shape, as `kernel_for` chooses it.

        The number of rows may be any: `kernel_for` rounds it to the batch sizes of CUDA graphs.
        """
        key = kernel_for, tuple(fields.items())
        found: T | None = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = kernel_for(
                self._device_context.policy, ProblemShape.of(**fields), self._device_context.about
            )[0]
        return found

    def used(self, name: str, num_rows: int) -> Iterator[ConfigChoice]:
        """Yield the configs that were looked up for an operator and about `num_rows` rows, and how each was found.

        Shapes of attention have no number of rows, so all of them are returned.
        """
        for (operation, fields), choice in self._choices.items():
            sizes = dict(fields)
            rows = sizes.get("m", sizes.get("t", round_up_power_of_two(num_rows)))
            if operation == name and rows == round_up_power_of_two(num_rows):
                yield choice
