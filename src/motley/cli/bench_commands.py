"""Command group `motley bench`, whose commands are in a distribution of their own: loadtests/, motley-bench.

They are found through its entry point, and no module of Motley imports it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from ..replicas.errors import MotleyError
from ..replicas.host.pip_command import pip_install_command

GROUP = "motley.commands"  # of entry points
NOT_INSTALLED = "the benchmarks are a distribution of their own, which is not installed; from a checkout of Motley: "
REMEDY = pip_install_command("-e", "./loadtests")


class InstalledCommands(TyperGroup):
    """Group whose commands are those of an entry point; it is looked for when they are first asked for.

    Asking raises MotleyError, which says how to install them, where there are none.
    """

    @property
    def commands(self) -> MutableMapping[str, Any]:
        return _installed_commands(str(self.name))

    @commands.setter
    def commands(self, commands: object) -> None:
        """Take no commands: typer gives those that it has registered, and there are none."""


@cache
def _installed_commands(name: str) -> MutableMapping[str, Any]:
    found = entry_points(group=GROUP, name=name)
    if not found:
        raise MotleyError(NOT_INSTALLED + REMEDY)
    group: Any = typer.main.get_command(next(iter(found)).load())
    commands: MutableMapping[str, Any] = group.commands
    return commands


bench = typer.Typer(cls=InstalledCommands, rich_markup_mode=None, no_args_is_help=True)


@bench.callback()
def _root() -> None:
    """Measure parts of Motley, side by side with peers that are installed."""
