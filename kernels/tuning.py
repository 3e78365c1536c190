"""Which config a kernel is launched with: looked up by device and shape, and the answer says how it was found.

`tuned/sm90-132sm-nvidia-h200/` is for one device, by capability, SMs and name; for others of as many SMs it is the next
best, such as for an H100, whose memory is slower; `tuned/sm90/` is for the capability. An entry's source is "measured"
(on the GPU that the file names) or "static" (from compiled resources and the roofline; nothing was run).

$MOTLEY_TUNED names a further folder of such tables, which is looked in first: of two as near, its own is taken.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from .capability import Capability
from .operation import Operation, Shape
from .precision import PrecisionPolicy
from .spills import offered
from .variant import Config

__all__ = [
    "FOLDER",
    "FURTHER",
    "Choice",
    "Entry",
    "Named",
    "Table",
    "Tabled",
    "choose",
    "exact",
    "fastest",
    "folder_of",
    "folders",
    "forget",
    "read",
    "read_file",
    "roots",
    "tabled_devices",
    "write",
]

FOLDER = Path(__file__).parent / "tuned"
FURTHER = "MOTLEY_TUNED"  # environment variable: a folder such as FOLDER
Source = Literal["measured", "static"]
T = TypeVar("T", bound=Operation)


class Named(Protocol):
    """A device, as far as tables go: `Device` is one. name: as torch says it."""

    @property
    def sms(self) -> int: ...

    @property
    def name(self) -> str: ...


class Tabled(NamedTuple):
    """As a folder has it. name: what its name has become there; empty for a device that has no table of its own."""

    sms: int
    name: str


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


def choose(operation: Operation, policy: PrecisionPolicy, shape: Shape, device: Named | None = None) -> Choice:
    """The shape as `rounded`, then the nearest, then the default; of tables that are as near, the device's own.

    So whatever compiles, checks or launches a kernel has the same config. Of other shapes only what the operator offers
    for this one is taken: there it fits, and is of the right kernel.
    """
    asked, shape = shape.plain, shape.plain.rounded
    default, *others = offered(operation, policy, shape)
    fit = {default, *others}
    withheld = set(operation.configs(policy, shape)) - fit
    nearest = math.inf
    choice: Choice | None = None
    own = folder_of(policy.capability, device)
    for folder in folders(policy.capability, device):
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
        known = shape if shape in fitting else _nearest(operation, shape, fitting)
        distance = shape.distance(known, operation.exact)
        if distance < nearest:  # a device's own table may have few shapes, far from this one
            where = "this shape" if known == asked else "this class of shapes" if known == shape else "nearest shape"
            where += f" in {folder}" + ("" if known == asked else f", {known.key}")
            if Path(folder).name not in (own, folder_of(policy.capability)):
                where += f"; of {table.about.get('gpu', 'another GPU')}, which has as many SMs"
            nearest, choice = distance, Choice(table.entries[known].config, f"{table.source}: {where}", table.source)
    if choice is None:
        return Choice(default, f"default: {_why_none(operation, shape, folders(policy.capability, device))}", "default")
    return choice


def _why_none(operation: Operation, shape: Shape, among: Iterable[str]) -> str:
    """Of those tables no entry was taken."""
    for folder in among:
        table = read(folder, operation.name)
        if table and any(shape.distance(other, operation.exact) < math.inf for other in table.entries):
            return f"no config that {folder} has of such shapes is offered for this one"
    return "no table has such a shape"


def _nearest(operation: Operation, shape: Shape, others: Iterable[Shape]) -> Shape:
    return min(others, key=lambda other: (shape.distance(other, operation.exact), other.key))


def exact(operation: Operation, folder: str, shape: Shape) -> Entry | None:
    """What that table knows of this very shape."""
    table = read(folder, operation.name)
    return None if table is None else table.entries.get(shape)


def fastest(
    operations: Iterable[T], policy: PrecisionPolicy, shape: Shape, device: Named | None
) -> tuple[T, float] | None:
    """Of several that do the same, and its microseconds; None unless more than one was measured on this very shape.

    By the same GPU and Triton, as far as their tables go: times of others are not compared with theirs.
    """
    operations = tuple(operations)
    for folder in folders(policy.capability, device):
        times: dict[T, float] = {}
        for each in operations:
            entry = exact(each, folder, shape)
            if entry is not None and "microseconds" in entry.facts and "measured_by" not in entry.facts:
                times[each] = float(entry.facts["microseconds"])
        if len(times) > 1:
            best = min(times, key=lambda each: times[each])
            return best, times[best]
    return None


def folder_of(capability: Capability, device: Named | None = None) -> str:
    """Where tables of that device are; of the capability if there is none."""
    general = f"sm{capability.major}{capability.minor}"
    return general if device is None else "-".join(filter(None, (general, f"{device.sms}sm", _plain(device.name))))


def folders(capability: Capability, device: Named | None) -> tuple[str, ...]:
    """Where to look, in order: the device's own, those of others with as many SMs, the capability's.

    All of a further folder's before the package's, which alone go by their names.
    """
    found: list[str] = []
    for root in roots():
        names = [folder_of(capability, device)]
        if device is not None:
            names += [folder_of(capability, each) for each in _tabled(root, capability) if each.sms == device.sms]
            names.append(folder_of(capability))
        found += [name if root == FOLDER else str(root / name) for name in dict.fromkeys(names)]
    return tuple(found)


def roots() -> tuple[Path, ...]:
    """Folders of tables, in the order in which they are looked in; what is measured is written to the first."""
    further = os.environ.get(FURTHER, "")
    return (Path(further).absolute(), FOLDER) if further else (FOLDER,)


def tabled_devices(capability: Capability) -> tuple[Tabled, ...]:
    """Those that have tables of their own, and for each number of SMs one that has not."""
    known = tuple(dict.fromkeys(each for root in roots() for each in _tabled(root, capability)))
    return tuple(dict.fromkeys((*known, *(Tabled(each.sms, "") for each in known))))


@cache
def _tabled(root: Path, capability: Capability) -> tuple[Tabled, ...]:
    found = (_DEVICE.fullmatch(path.name) for path in root.glob(f"{folder_of(capability)}-*") if path.is_dir())
    return tuple(sorted(Tabled(int(match[1]), match[2] or "") for match in found if match))


_DEVICE = re.compile(r"sm\d+-(\d+)sm(?:-(.+))?")


def _plain(name: str) -> str:
    """Such as "nvidia-h100-80gb-hbm3"."""
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


@cache
def read(folder: str, op: str) -> Table | None:
    """None where there is no such file. folder: one of `folders`."""
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
    forget()
    return path


def forget() -> None:
    """Of what was read, all: files have changed."""
    read.cache_clear()
    _tabled.cache_clear()


def _sizes(shape: Shape) -> tuple[tuple[str, bool, int | str], ...]:
    return tuple((name, isinstance(value, str), value) for name, value in shape.fields)
