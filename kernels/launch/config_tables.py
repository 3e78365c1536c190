"""Tables of tuned configs, looked up by device and shape; the result says how it was found.

`tuned/sm90-132sm-nvidia-h200/` is for one device, by compute capability, SMs and name; for other devices with as many
SMs it is the next best, such as for an H100, whose memory is slower; `tuned/sm90/` is for the whole capability. An
entry's source is "measured" (on the GPU that the file names) or "static" (from compiled resources and the roofline,
without running anything).

$MOTLEY_TUNED names a further folder of such tables, which is looked up first: if entries of both are equally near, its
entry is used.
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

TUNED_FOLDER = Path(__file__).parent.parent / "tuned"
TUNED_VARIABLE = "MOTLEY_TUNED"  # environment variable that names a folder like TUNED_FOLDER
ConfigSource = Literal["measured", "static"]
T = TypeVar("T", bound=KernelOperation)


class DeviceIdentity(Protocol):
    """Device in so far as tables distinguish devices, e.g. a `DeviceSpec`; `name` is the name that torch reports."""

    @property
    def sms(self) -> int: ...

    @property
    def name(self) -> str: ...


class TabledDevice(NamedTuple):
    """Device as a folder of tables names it; `name` is the name in the folder, empty for a device without its own
    table.
    """

    sms: int
    name: str


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """Entry of a table.

    `facts` are microseconds and similar if measured; registers and similar, and a prediction, if static.
    """

    config: Config
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ConfigTable:
    """Table of configs of one operator, in one file.

    about  origin of the table: GPU, driver, Triton; for static ones the device whose roofline was used
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
    """Config, and a text that says how it was found, such as "static: nearest shape in sm61, ..."."""

    config: Config
    how: str
    source: ConfigSource | Literal["default"]


def choose_config(
    operation: KernelOperation, policy: PrecisionPolicy, shape: ProblemShape, device: DeviceIdentity | None = None
) -> ConfigChoice:
    """Return the config for a shape: that of the shape as `rounded`, else of the nearest shape, else the default.

    Of tables with equally near shapes the device's own wins. So a kernel has the same config wherever it is compiled,
    checked or launched. A config of another shape is used only if the operator offers it for this shape: then it fits
    and belongs to the right kernel.
    """
    exact_shape, shape = shape.plain, shape.plain.rounded
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
        tabled = shape if shape in fitting else _nearest(operation, shape, fitting)
        distance = shape.distance(tabled, operation.exact)
        if distance < nearest:  # since a device's own table may have few shapes, far from this one
            where = (
                "this shape"
                if tabled == exact_shape
                else "this class of shapes"
                if tabled == shape
                else "nearest shape"
            )
            where += f" in {folder}" + ("" if tabled == exact_shape else f", {tabled.key}")
            if Path(folder).name not in (own, table_folder(policy.capability)):
                where += f"; of {table.about.get('gpu', 'another GPU')}, which has as many SMs"
            nearest, choice = (
                distance,
                ConfigChoice(table.entries[tabled].config, f"{table.source}: {where}", table.source),
            )
    if choice is None:
        return ConfigChoice(
            default, f"default: {_why_none(operation, shape, table_folders(policy.capability, device))}", "default"
        )
    return choice


def _why_none(operation: KernelOperation, shape: ProblemShape, among: Iterable[str]) -> str:
    """Return a text that says why none of the tuned tables in these folders has a usable config for a shape."""
    for folder in among:
        table = read_table(folder, operation.name)
        if table and any(shape.distance(other, operation.exact) < math.inf for other in table.entries):
            return f"no config that {folder} has of such shapes is offered for this one"
    return "no table has such a shape"


def _nearest(operation: KernelOperation, shape: ProblemShape, others: Iterable[ProblemShape]) -> ProblemShape:
    return min(others, key=lambda other: (shape.distance(other, operation.exact), other.key))


def exact_entry(operation: KernelOperation, folder: str, shape: ProblemShape) -> ConfigEntry | None:
    """Return the entry that the tuned table of an operator in a folder has for exactly this shape, or None."""
    table = read_table(folder, operation.name)
    return None if table is None else table.entries.get(shape)


def fastest_operation(
    operations: Iterable[T], policy: PrecisionPolicy, shape: ProblemShape, device: DeviceIdentity | None
) -> tuple[T, float] | None:
    """Return the fastest of several equivalent operators, and its time in microseconds.

    None unless more than one was measured for exactly this shape. Only times of one folder, and so of one GPU and
    Triton, are compared with each other.
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
    """Name of the folder with the tables of a device, or of the whole capability if `device` is None."""
    general = f"sm{capability.major}{capability.minor}"
    return general if device is None else "-".join(filter(None, (general, f"{device.sms}sm", _slug(device.name))))


def table_folders(capability: Capability, device: DeviceIdentity | None) -> tuple[str, ...]:
    """Return the folders to look in, in order: the device's own, those of others with as many SMs, the capability's.

    All folders of $MOTLEY_TUNED come before those of the package, which are given by name only.
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
    """Return the root folders of tables in lookup order; new measurements are written to the first."""
    further = os.environ.get(TUNED_VARIABLE, "")
    return (Path(further).absolute(), TUNED_FOLDER) if further else (TUNED_FOLDER,)


def tabled_devices(capability: Capability) -> tuple[TabledDevice, ...]:
    """Return the devices that have their own tables, and for each number of SMs one device without its own table."""
    devices = tuple(dict.fromkeys(each for root in table_roots() for each in _devices_in(root, capability)))
    return tuple(dict.fromkeys((*devices, *(TabledDevice(each.sms, "") for each in devices))))


@cache
def _devices_in(root: Path, capability: Capability) -> tuple[TabledDevice, ...]:
    found = (_DEVICE.fullmatch(path.name) for path in root.glob(f"{table_folder(capability)}-*") if path.is_dir())
    return tuple(sorted(TabledDevice(int(match[1]), match[2] or "") for match in found if match))


_DEVICE = re.compile(r"sm\d+-(\d+)sm(?:-(.+))?")


def _slug(name: str) -> str:
    """Convert a device name to the form in folder names, such as "nvidia-h100-80gb-hbm3"."""
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


@cache
def read_table(folder: str, op: str) -> ConfigTable | None:
    """Return the table of an operator in one of `table_folders`; None if there is no such file."""
    return read_table_file(TUNED_FOLDER / folder / f"{op}.json")


def read_table_file(path: Path) -> ConfigTable | None:
    return ConfigTable.from_json(json.loads(path.read_text())) if path.exists() else None


def write_table(table: ConfigTable, folder: Path) -> Path:
    """Write a table, one shape per line and sorted, so that a diff shows which shapes changed; return the path."""
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
    """Forget all tuned tables that were read, so that changed files are read again."""
    read_table.cache_clear()
    _devices_in.cache_clear()


def _sizes(shape: ProblemShape) -> tuple[tuple[str, bool, int | str], ...]:
    return tuple((name, isinstance(value, str), value) for name, value in shape.fields)
