"""Every number of a fleet file, as nobody should write it: right, or refused by its name and its line.

Ways to the numbers come from the models, so one that is added is tried too.
"""

from __future__ import annotations

import copy
import itertools
import math
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from motley.cluster.fleet.spec.fleet_file_loader import load_fleet
from motley.cluster.fleet.spec.fleet_spec import FleetSpec, engine_config
from motley.cluster.fleet.spec.scaling_spec import ScalingSpec
from motley.cluster.service_errors import ConfigurationError

At = tuple[str | int, ...]
BEYOND = (".nan", ".inf", "-.inf", "1.0e+300", "-1.0e+300", str(2**64), "1" + "0" * 400, "-1" + "0" * 400)
OTHERS = ('"1e3"', '"0x10"', "true", "-1", "-0.0", "0", "5.0e-324", "2147483648", str(2**63), "1.5", "9" * 5000)
SIZES = ('"1e300"', f'"{"9" * 400}GiB"', '"inf"', '"-1"', '"9000TiB"', '"\u0661"', '"0.1"')
# What else a number needs around it.
AROUND: dict[str, dict[str, Any]] = {
    "hidden": {"simulate": "T4"},
    "attained": {"simulate": "T4"},
    "bundles": {"tensor_parallel": 2, "bundles": [{}, {}]},
}


def numbers(kind: Any, at: At = (), *, size: bool = False) -> Iterator[tuple[At, bool]]:
    """Ways to the numbers of a model, and whether it is a size in bytes; "x" stands for a key of a mapping."""
    inner, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        for each in inner:
            yield from numbers(each, at, size=size)
    elif origin is typing.Annotated:
        yield from numbers(inner[0], at, size=size or any(getattr(each, "func", None) is not None for each in inner))
    elif origin in (list, dict):
        yield from numbers(inner[-1], (*at, 0 if origin is list else "x"))
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            found = any(getattr(each, "func", None) is not None for each in field.metadata)
            yield from numbers(field.annotation, (*at, name), size=found)
    elif kind in (int, float):
        yield at, size


NUMBERS = dict(numbers(FleetSpec))


def written(at: At, text: str) -> str:
    """A fleet file of one pool with that number; YAML as people write it."""
    whole: dict[str, Any] = {"model": "demo", "pools": [{"name": "a"}]}
    if at[0] == "pools":
        whole["pools"][0] |= copy.deepcopy(AROUND.get(str(at[2]), {}))
    elif at[0] == "slo":
        whole["slo"] = {"ttft_ms": 1000, "tpot_ms": 100}
    elif at[0] == "scaling":
        whole["scaling"] = {"policy": "slo" if at[1] in ScalingSpec.SETTINGS["slo"] else "queue"}
    place: Any = whole
    for part, after in itertools.pairwise(at):
        place = place.setdefault(part, [] if isinstance(after, int) else {}) if isinstance(place, dict) else place[part]
    if isinstance(place, list):
        place.append("@")
    else:
        place[at[-1]] = "@"
    return yaml.safe_dump(whole).replace("'@'", text)


def outcome(file: Path, at: At, text: str) -> FleetSpec | None:
    """The fleet, with finite numbers that an engine and JSON take; or None: it is refused as it should be."""
    file.write_text(written(at, text))
    [number] = [n for n, line in enumerate(file.read_text().splitlines(), 1) if line.split()[-1] == text]
    refusal, spec = None, None
    try:
        spec = load_fleet(file).spec
    except ConfigurationError as error:
        refusal = error.message
    if spec is None:
        place, _, told = str(refusal).removeprefix(f"{file}:").partition(": ")
        assert len(told) < 300, (at, text)
        assert place.partition(":")[0] == str(number), (at, text, refusal)
        assert str(next(part for part in reversed(at) if isinstance(part, str))) in told.partition(": ")[0]
        return None
    for pool in spec.pools:
        engine_config(spec, pool)
        assert math.isfinite(pool.booked_cpus * pool.replicas.max)
        assert len(pool.gpus) == pool.processes
        assert math.isfinite(pool.cost_per_hour * pool.replicas.max)
    assert FleetSpec.model_validate_json(spec.model_dump_json()) == spec
    return spec


def test_the_walk_has_what_it_is_for() -> None:
    assert {
        ("pools", 0, "tensor_parallel"), ("pools", 0, "replicas", "start"), ("pools", 0, "pipeline_layers", 0),
        ("pools", 0, "bundles", 0, "resources", "x"), ("tenants", "x", "weight"), ("slo", "ttft_ms"),
        ("scaling", "settle_s"), ("listen", "http_port"), ("prefix_cache", "ttl_s"),
    } <= NUMBERS.keys()  # fmt: skip
    assert {at[-1] for at, size in NUMBERS.items() if size} >= {"kv_memory", "memory", "weights_memory"}


@pytest.mark.parametrize("at", NUMBERS, ids=lambda at: ".".join(map(str, at)))
def test_a_number_is_right_or_refused_by_its_line(tmp_path: Path, at: At) -> None:
    file = tmp_path / "fleet.yaml"
    taken = [text for text in BEYOND if outcome(file, at, text) is not None]
    assert not taken, "beyond all sense"
    for text in (*OTHERS, *(SIZES if NUMBERS[at] else ())):
        found = outcome(file, at, text)
        assert found is None or text not in ('"1e3"', '"0x10"', "true", "9" * 5000, *SIZES), text
