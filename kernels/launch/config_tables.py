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

from ..device.compute_capability import Capability
from ..device.precision import PrecisionPolicy
from .kernel_operation import KernelOperation, ProblemShape
from .known_spills import offered_configs
from .variant import Config

__all__ = [
    "TUNED_FOLDER",
    "TUNED_VARIABLE",
    "ConfigChoice",
    "ConfigEntry",
    "ConfigTable",
    "DeviceIdentity",
    "TabledDevice",
    "choose_config",
    "clear_table_cache",
    "exact_entry",
    "fastest_operation",
    "read_table",
    "read_table_file",
    "table_folder",
    "table_folders",
    "table_roots",
    "tabled_devices",
    "write_table",
]

TUNED_FOLDER = Path(__file__).parent.parent / "tuned"
TUNED_VARIABLE = "MOTLEY_TUNED"  # environment variable: a folder such as FOLDER
ConfigSource = Literal["measured", "static"]
T = TypeVar("T", bound=KernelOperation)


class DeviceIdentity(Protocol):
    """A device, as far as tables go: `Device` is one. name: as torch says it."""

    @property
    def sms(self) -> int: ...

    @property
    def name(self) -> str: ...


class TabledDevice(NamedTuple):
    """As a folder has it. name: what its name has become there; empty for a device that has no table of its own."""

    sms: int
    name: str


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """facts: microseconds and the like if measured; registers and the like, and a prediction, if static."""

    config: Config
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ConfigTable:
    """One file.

    about  who made it: GPU, driver, Triton; for static ones the device whose roofline was taken
    """

    op: str
    source: ConfigSource
    about: Mapping[str, Any]
    entries: Mapping[ProblemShape, ConfigEntry]

    def to_json(self) -> dict[str, Any]:
        shapes = {
            shape.key: {"config": entry.config.to_json(), **entry.facts}
            for shape, entry in sorted(self.entries.items(), key=lambda item: _sizes(item[0]))
        }
        return {"op": self.op, "source": self.source, **self.about, "shapes": shapes}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ConfigTable:
        about = {name: value for name, value in fields.items() if name not in ("op", "source", "shapes")}
        entries = {
            ProblemShape.parse(key): ConfigEntry(
                Config.from_json(entry["config"]), {name: fact for name, fact in entry.items() if name != "config"}
            )
            for key, entry in fields["shapes"].items()
        }
        return cls(fields["op"], fields["source"], about, entries)


@dataclass(frozen=True, slots=True)
class ConfigChoice:
    """config, and how it was found: in words for people, such as "static: nearest shape in sm61, ..."."""

    config: Config
    how: str
    source: ConfigSource | Literal["default"]


def choose_config(
    operation: KernelOperation, policy: PrecisionPolicy, shape: ProblemShape, device: DeviceIdentity | None = None
) -> ConfigChoice:
    """The shape as `rounded`, then the nearest, then the default; of tables that are as near, the device's own.

    So whatever compiles, checks or launches a kernel has the same config. Of other shapes only what the operator offers
    for this one is taken: there it fits, and is of the right kernel.
    """
    asked, shape = shape.plain, shape.plain.rounded
    default, *others = offered_configs(operation, policy, shape)
    fit = {default, *others}
    withheld = set(operation.configs(policy, shape)) - fit
    nearest = math.inf
    choice: ConfigChoice | None = None
    own = table_folder(policy.capability, device)
    for folder in table_folders(policy.capability, device):
        table = read_table(folder, operation.name)
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
            if Path(folder).name not in (own, table_folder(policy.capability)):
                where += f"; of {table.about.get('gpu', 'another GPU')}, which has as many SMs"
            nearest, choice = (
                distance,
                ConfigChoice(table.entries[known].config, f"{table.source}: {where}", table.source),
            )
    if choice is None:
        return ConfigChoice(
            default, f"default: {_why_none(operation, shape, table_folders(policy.capability, device))}", "default"
        )
    return choice


def _why_none(operation: KernelOperation, shape: ProblemShape, among: Iterable[str]) -> str:
    """Of those tables no entry was taken."""
    for folder in among:
        table = read_table(folder, operation.name)
        if table and any(shape.distance(other, operation.exact) < math.inf for other in table.entries):
            return f"no config that {folder} has of such shapes is offered for this one"
    return "no table has such a shape"


def _nearest(operation: KernelOperation, shape: ProblemShape, others: Iterable[ProblemShape]) -> ProblemShape:
    return min(others, key=lambda other: (shape.distance(other, operation.exact), other.key))


def exact_entry(operation: KernelOperation, folder: str, shape: ProblemShape) -> ConfigEntry | None:
    """What that table knows of this very shape."""
    table = read_table(folder, operation.name)
    return None if table is None else table.entries.get(shape)


def fastest_operation(
    operations: Iterable[T], policy: PrecisionPolicy, shape: ProblemShape, device: DeviceIdentity | None
) -> tuple[T, float] | None:
    """Of several that do the same, and its microseconds; None unless more than one was measured on this very shape.

    By the same GPU and Triton, as far as their tables go: times of others are not compared with theirs.
    """
    operations = tuple(operations)
    for folder in table_folders(policy.capability, device):
        times: dict[T, float] = {}
        for each in operations:
            entry = exact_entry(each, folder, shape)
            if entry is not None and "microseconds" in entry.facts and "measured_by" not in entry.facts:
                times[each] = float(entry.facts["microseconds"])
        if len(times) > 1:
            best = min(times, key=lambda each: times[each])
            return best, times[best]
    return None


def table_folder(capability: Capability, device: DeviceIdentity | None = None) -> str:
    """Where tables of that device are; of the capability if there is none."""
    general = f"sm{capability.major}{capability.minor}"
    return general if device is None else "-".join(filter(None, (general, f"{device.sms}sm", _slug(device.name))))


def table_folders(capability: Capability, device: DeviceIdentity | None) -> tuple[str, ...]:
    """Where to look, in order: the device's own, those of others with as many SMs, the capability's.

    All of a further folder's before the package's, which alone go by their names.
    """
    found: list[str] = []
    for root in table_roots():
        names = [table_folder(capability, device)]
        if device is not None:
            names += [
                table_folder(capability, each) for each in _devices_in(root, capability) if each.sms == device.sms
            ]
            names.append(table_folder(capability))
        found += [name if root == TUNED_FOLDER else str(root / name) for name in dict.fromkeys(names)]
    return tuple(found)


def table_roots() -> tuple[Path, ...]:
    """Folders of tables, in the order in which they are looked in; what is measured is written to the first."""
    further = os.environ.get(TUNED_VARIABLE, "")
    return (Path(further).absolute(), TUNED_FOLDER) if further else (TUNED_FOLDER,)


def tabled_devices(capability: Capability) -> tuple[TabledDevice, ...]:
    """Those that have tables of their own, and for each number of SMs one that has not."""
    known = tuple(dict.fromkeys(each for root in table_roots() for each in _devices_in(root, capability)))
    return tuple(dict.fromkeys((*known, *(TabledDevice(each.sms, "") for each in known))))


@cache
def _devices_in(root: Path, capability: Capability) -> tuple[TabledDevice, ...]:
    found = (_DEVICE.fullmatch(path.name) for path in root.glob(f"{table_folder(capability)}-*") if path.is_dir())
    return tuple(sorted(TabledDevice(int(match[1]), match[2] or "") for match in found if match))


_DEVICE = re.compile(r"sm\d+-(\d+)sm(?:-(.+))?")


def _slug(name: str) -> str:
    """Such as "nvidia-h100-80gb-hbm3"."""
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


@cache
def read_table(folder: str, op: str) -> ConfigTable | None:
    """None where there is no such file. folder: one of `table_folders`."""
    return read_table_file(TUNED_FOLDER / folder / f"{op}.json")


def read_table_file(path: Path) -> ConfigTable | None:
    return ConfigTable.from_json(json.loads(path.read_text())) if path.exists() else None


def write_table(table: ConfigTable, folder: Path) -> Path:
    """One shape a line, in order, so that a diff shows which shapes changed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{table.op}.json"
    fields = table.to_json()
    shapes = fields.pop("shapes")
    head = json.dumps(fields, indent=2)[:-2]
    lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in shapes.items())
    path.write_text(f'{head},\n  "shapes": {{\n{lines}\n  }}\n}}\n')
    clear_table_cache()
    return path


def clear_table_cache() -> None:
    """Of what was read, all: files have changed."""
    read_table.cache_clear()
    _devices_in.cache_clear()


def _sizes(shape: ProblemShape) -> tuple[tuple[str, bool, int | str], ...]:
    return tuple((name, isinstance(value, str), value) for name, value in shape.fields)
