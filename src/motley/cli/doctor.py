"""Command `motley doctor`: what this machine offers, what would be chosen on it and why, what is missing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .config import ConfigFile

if TYPE_CHECKING:
    from .fact import DoctorFact

MARKS = {"ok": "✓", "note": "·", "missing": "✗"}


def doctor(
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show a GPU that is not here, by capability or name.")
    ] = None,
    as_json: options.Json = False,
    config: ConfigFile = None,
) -> None:
    """Show devices, precision and kernels with the reason for each choice, and versions, memory and helper programs.

    \b
    Examples:
      motley doctor
      motley doctor --gpu 6.1
      motley doctor --gpu "Tesla P40"
      motley doctor --json | python -m json.tool
    """
    from .facts import gather_facts
    from .gpu_facts import named_gpu_facts

    try:
        facts = gather_facts() if gpu is None else named_gpu_facts(gpu)
    except KeyError as error:
        raise typer.BadParameter(f"--gpu {error.args[0]}") from error
    if as_json:
        print(json.dumps({"facts": [fact.as_dict() for fact in facts]}))
    else:
        _print_table(facts)


def _print_table(facts: list[DoctorFact]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for section in dict.fromkeys(fact.section for fact in facts):
        table = Table(title=section, title_justify="left", show_header=False, box=None, padding=(0, 1))
        for fact in (fact for fact in facts if fact.section == section):
            note = f"{fact.value}\n→ {fact.remedy}" if fact.remedy else fact.value
            table.add_row(MARKS[fact.status], fact.name, Text(note))
        console.print(table)
        console.print()
