"""Specialization of a Triton kernel: the same object is launched, tuned, and compiled without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .compiled_launch import CompiledLaunch, make_compiled_launch

Constant = int | float | bool | str | tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Config:
    """Launch config of a kernel, chosen by a tuner: named constants, and numbers of warps and pipeline stages."""

    constants: tuple[tuple[str, Constant], ...] = ()
    num_warps: int = 4
    num_stages: int = 1

    @classmethod
    def of(cls, num_warps: int = 4, num_stages: int = 1, **constants: Constant) -> Config:
        return cls(tuple(sorted(constants.items())), num_warps, num_stages)

    def __getitem__(self, name: str) -> Any:
        return dict(self.constants)[name]

    def without(self, name: str) -> Config:
        """Return the config without a constant that affects only the grid, so that one kernel serves all its values."""
        return Config(tuple(item for item in self.constants if item[0] != name), self.num_warps, self.num_stages)

    def number(self, name: str) -> int:
        value = self[name]
        assert isinstance(value, int)
        return value

    def to_json(self) -> dict[str, Any]:
        return {**dict(self.constants), "num_warps": self.num_warps, "num_stages": self.num_stages}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Config:
        constants = {name: value for name, value in fields.items() if name not in ("num_warps", "num_stages")}
        return cls.of(fields["num_warps"], fields["num_stages"], **constants)


@dataclass(frozen=True, slots=True)
class Variant:
    """Triton kernel with everything fixed but its arguments.

    function   result of `triton.jit`
    types      argument -> its Triton type name ("*fp16", "i32", "fp32"), in the kernel's order
    constants  the kernel's tl.constexpr arguments, except those in `config`
    aligned    arguments that are always multiples of 16: pointers, and strides that vector loads rely on
    """

    name: str
    function: Any
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...]
    config: Config
    aligned: tuple[str, ...] = ()
    _launches: dict[int, CompiledLaunch] = field(default_factory=dict, compare=False, repr=False)  # by device index

    @property
    def all_constants(self) -> dict[str, Constant]:
        return {**dict(self.constants), **dict(self.config.constants)}

    @property
    def options(self) -> dict[str, Any]:
        """Options of the compiler, the same for a launch and for compilation ahead of time.

        An option that is left to Triton's default may have another value there.
        """
        return {
            "num_warps": self.config.num_warps, "num_stages": self.config.num_stages, "enable_fp_fusion": True
        }  # fmt: skip

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch the kernel; arguments are in the order of `types`, and of these types.

        Arguments that the kernel does not read must also have their types: Triton looks compiled kernels up by them,
        and would compile again.

        After the first launch Triton is no longer asked which kernel to launch, which takes the host several times as
        long as the launch itself.
        """
        device = arguments[0].get_device()
        if (launch := self._launches.get(device)) is not None and launch.fits(arguments):
            launch(grid, arguments)
            return
        constants = self.all_constants
        compiled = self.function[grid](*arguments, **constants, **self.options)
        if (launch := make_compiled_launch(self.function, compiled, constants, arguments)) is not None:
            self._launches[device] = launch
