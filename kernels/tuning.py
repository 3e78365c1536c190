"""Which config a kernel is launched with: looked up by device and shape, and the answer says how it was found.

`tuned/sm90-132sm/` is for one device, by capability and SMs; `tuned/sm90/` for its capability. An entry's source is
"measured" (on the GPU that the file names) or "static" (from compiled resources and the roofline; nothing was run).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from .capability import Capability
from .operation import Operation, Shape
from .precision import PrecisionPolicy
from .spills import offered
from .variant import Config

__all__ = [
    "FOLDER",
    "Choice",
    "Entry",
    "Table",
    "choose",
    "exact",
    "fastest",
    "folders",
    "read",
    "read_file",
    "tabled_devices",
    "write",
]

FOLDER = Path(__file__).parent / "tuned"
Source = Literal["measured", "static"]
T = TypeVar("T", bound=Operation)


@dataclass(frozen=True, slots=True)
class Entry:
    """facts: microseconds and the like if measured; registers and the like, and a prediction, if static."""

    config: Config
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """One file.

    about  who made it: GPU, driver, Triton; for static ones the device whose roofline was taken
    """

    op: str
    source: Source
    about: Mapping[str, Any]
    entries: Mapping[Shape, Entry]

    def to_json(self) -> dict[str, Any]:
        shapes = {
            shape.key: {"config": entry.config.to_json(), **entry.facts}
            for shape, entry in sorted(self.entries.items(), key=lambda item: _sizes(item[0]))
        }
        return {"op": self.op, "source": self.source, **self.about, "shapes": shapes}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Table:
        about = {name: value for name, value in fields.items() if name not in ("op", "source", "shapes")}
        entries = {
            Shape.parse(key): Entry(
                Config.from_json(entry["config"]), {name: fact for name, fact in entry.items() if name != "config"}
            )
            for key, entry in fields["shapes"].items()
        }
        return cls(fields["op"], fields["source"], about, entries)


@dataclass(frozen=True, slots=True)
class Choice:
    """config, and how it was found: in words for people, such as "static: nearest shape in sm61, ..."."""

    config: Config
    how: str
    source: Source | Literal["default"]


def choose(operation: Operation, policy: PrecisionPolicy, shape: Shape, sms: int | None = None) -> Choice:
    """The shape itself, then the nearest, then the default; of tables that are as near, the device's own.

    Of other shapes only what the operator offers for this one is taken: there it fits, and is of the right kernel.
    """
    shape = shape.plain
    default, *others = offered(operation, policy, shape)
    fit = {default, *others}
    withheld = set(operation.configs(policy, shape)) - fit
    nearest, choice = float("inf"), Choice(default, "default: no table has such a shape", "default")
    for folder in folders(policy.capability, sms):
        table = read(folder, operation.name)
        if table is None:
            continue
        fitting = [
            other
            for other, entry in table.entries.items()
            if entry.config in fit or (other == shape and entry.config not in withheld)
        ]
        if not fitting:
            continue
        known = min(fitting, key=lambda other: (shape.distance(other, operation.exact), other.key))
        distance = shape.distance(known, operation.exact)
        if distance < nearest:  # a device's own table may have few shapes, far from this one
            where = f"this shape in {folder}" if known == shape else f"nearest shape in {folder}, {known.key}"
            nearest, choice = distance, Choice(table.entries[known].config, f"{table.source}: {where}", table.source)
    return choice


def exact(operation: Operation, policy: PrecisionPolicy, shape: Shape, sms: int | None = None) -> Entry | None:
    """What is known of this very shape, in the first table that has it."""
    for folder in folders(policy.capability, sms):
        table = read(folder, operation.name)
        if table is not None and shape in table.entries:
            return table.entries[shape]
    return None


def fastest(operations: Iterable[T], policy: PrecisionPolicy, shape: Shape, sms: int | None) -> tuple[T, float] | None:
    """Of several that do the same, and its microseconds; None unless more than one was measured on this very shape.

    By the same GPU and Triton, as far as their tables go: times of others are not compared with theirs.
    """
    times: dict[T, float] = {}
    for each in operations:
        entry = exact(each, policy, shape, sms)
        if entry is not None and "microseconds" in entry.facts and "measured_by" not in entry.facts:
            times[each] = float(entry.facts["microseconds"])
    best = min(times, key=lambda each: times[each], default=None)
    return None if best is None or len(times) < 2 else (best, times[best])


def folders(capability: Capability, sms: int | None) -> tuple[str, ...]:
    """Where to look, in order."""
    general = f"sm{capability.major}{capability.minor}"
    return (f"{general}-{sms}sm", general) if sms else (general,)


def tabled_devices(capability: Capability) -> tuple[int, ...]:
    """SMs of the devices of that capability that have tables of their own."""
    names = (path.name for path in FOLDER.glob(f"sm{capability.major}{capability.minor}-*sm") if path.is_dir())
    return tuple(sorted(int(name.partition("-")[2].removesuffix("sm")) for name in names))


@cache
def read(folder: str, op: str) -> Table | None:
    """None where there is no such file."""
    return read_file(FOLDER / folder / f"{op}.json")


def read_file(path: Path) -> Table | None:
    return Table.from_json(json.loads(path.read_text())) if path.exists() else None


def write(table: Table, folder: Path) -> Path:
    """One shape a line, in order, so that a diff shows which shapes changed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{table.op}.json"
    fields = table.to_json()
    shapes = fields.pop("shapes")
    head = json.dumps(fields, indent=2)[:-2]
    lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in shapes.items())
    path.write_text(f'{head},\n  "shapes": {{\n{lines}\n  }}\n}}\n')
    read.cache_clear()
    return path


def _sizes(shape: Shape) -> tuple[tuple[str, bool, int | str], ...]:
    return tuple((name, isinstance(value, str), value) for name, value in shape.fields)
