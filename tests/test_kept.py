"""Files that services of an earlier version left behind are read by this one (tests/support/earlier_version.py wrote
them).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from earlier_version import (
    FOLDER,
    GEOMETRIES,
    KEYS,
    LAYER,
    NORM,
    PROFILE,
    SECRET,
    STATE,
    STORE_KEY,
    WEIGHTS_KEY,
    digests,
    int4_weight,
    payload,
)  # fmt: skip

from motley.cluster.fleet.control.state import control_state
from motley.cluster.fleet.spec.fleet_spec import FleetSpec
from motley.cluster.fleet.spec.yaml_lines import read_yaml
from motley.cluster.security.auth.key_file import read_keys
from motley.cluster.service.deployment import served_profile
from motley.kernels.cpu.c_kernels.native_kernels import load_native_kernels
from motley.kernels.cpu.cpu_ops import CpuOps
from motley.replicas.checkpoint.cache.packed_weights import PackedWeightsError, read_packed_weights
from motley.replicas.kv.store.sealed_record import RecordSealer


def test_it_is_small() -> None:
    assert 0 < sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 200_000


@pytest.mark.parametrize("name", ["keys.yaml", "keys.json"])
def test_files_of_keys(name: str) -> None:
    assert read_keys(FOLDER / name) == KEYS


def test_the_control_planes_state() -> None:
    kept = (FOLDER / "control.json").read_bytes()
    assert control_state.decode_state(kept) == STATE
    assert json.loads(control_state.encode_state(STATE)) == json.loads(kept), (
        "an earlier version, rolled back to, reads it too"
    )


def test_what_was_served() -> None:
    kept = (FOLDER / "served.json").read_bytes()
    assert served_profile.decode_profile("org/tiny", kept) == PROFILE
    assert json.loads(kept)["profile"].keys() <= asdict(PROFILE).keys()


def test_digests_by_which_prefixes_are_found() -> None:
    """They hold the text of a geometry, names of class and fields and all."""
    assert digests() == json.loads((FOLDER / "digests.json").read_text())


@pytest.mark.parametrize("name", GEOMETRIES)
def test_records_of_prefixes(name: str) -> None:
    geometry = GEOMETRIES[name]
    room = [bytearray(geometry.payload_bytes) for _ in range(geometry.heads)]
    record = (FOLDER / f"record-{name}.bin").read_bytes()
    assert RecordSealer(SECRET, geometry).open(STORE_KEY, [record], list(map(memoryview, room))) is None
    assert [bytes(one) for one in room] == [payload(geometry, head) for head in range(geometry.heads)]


def test_repacked_weights() -> None:
    """The file is of commit 8b5aabc. Its own key names the sources, so that another version repacks anew."""
    with (FOLDER / "weights.bin").open("rb") as file:
        kept = read_packed_weights(file.fileno(), WEIGHTS_KEY)
        with pytest.raises(PackedWeightsError, match="made for something else"):
            read_packed_weights(file.fileno(), "another version's")
    assert torch.equal(kept.tensors["model.norm.weight"], NORM)
    assert kept.choices == {"layer, int4": "c-int4"}
    [layer] = kept.packed[LAYER]
    native, why = load_native_kernels()
    if native is None:
        pytest.skip(f"the layer is of the C kernels: {why}")
    ops = CpuOps(torch.float32, "exact", None, native, "")
    x, weight = torch.eye(64), int4_weight()
    assert weight.bias is not None
    assert torch.equal(ops.restored(layer, "layer")(x), weight.dequantize().T + weight.bias)
    assert torch.equal(ops.restored(layer, "layer")(x), ops.linear(weight, "layer")(x)), "as packed today"


FLEETS = sorted((FOLDER / "fleets").glob("*.yaml"))


@pytest.mark.parametrize("path", FLEETS, ids=lambda path: path.stem)
def test_files_of_fleets(path: Path) -> None:
    """Fleet files are read as they were written, and as a cluster has kept what was deployed."""
    kept = json.loads(path.with_suffix(".json").read_text())
    spec = FleetSpec.model_validate(read_yaml(path)[0])
    assert FleetSpec.model_validate(kept) == spec
    assert _without_new(spec.model_dump(mode="json"), kept) == kept


def _without_new(whole: object, kept: object) -> object:
    """Fields that have come since may be there as well."""
    if isinstance(whole, dict) and isinstance(kept, dict):
        return {name: _without_new(value, kept[name]) for name, value in whole.items() if name in kept}
    if isinstance(whole, list) and isinstance(kept, list) and len(whole) == len(kept):
        return [_without_new(*pair) for pair in zip(whole, kept, strict=True)]
    return whole


def test_the_fixture_has_fleets() -> None:
    assert FLEETS
