"""Files that services of today's version leave behind, for later versions to read: `python
tests/support/earlier_version.py`.

Writes tests/kept. It is run for a release or before names change, never to make a failing test pass.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import torch

from motley.cluster.fleet.control.state import control_state
from motley.cluster.fleet.spec.fleet_spec import FleetSpec
from motley.cluster.fleet.spec.yaml_lines import read_yaml
from motley.cluster.security.auth.api_keys import StoredKey
from motley.cluster.security.auth.key_file import write_keys
from motley.cluster.service.deployment import served_profile
from motley.kernels.canonical_weights import GroupedWeight
from motley.kernels.cpu.layers.cpu_packing import interleave, regroup
from motley.kernels.packed_layer import PackedLayer
from motley.replicas.checkpoint.cache.packed_weights import PackedWeights, write_packed_weights
from motley.replicas.kv.store.sealed_record import Geometry, RecordSealer
from motley.replicas.kv.store.store_keys import StoreKeys, kv_identity
from motley.replicas.types import ModelInfo, ReplicaProfile

FOLDER = Path(__file__).parents[1] / "kept"
EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
SECRET = b"tests keep no secret: 32 bytes.."
STORE_KEY = b"key of a value"
NOON = 1_790_000_000.0  # Unix seconds
GEOMETRIES = {
    "float16": Geometry("float16", layers=2, heads=2, head_dim=4, tokens=16),
    "int8": Geometry("int8", layers=3, heads=1, head_dim=8, tokens=32),
}

KEYS = (
    StoredKey("alice", hashlib.sha256(b"mk-alice").hexdigest()),
    StoredKey("alice", hashlib.sha256(b"mk-alice-2027").hexdigest(), expires=NOON + 86_400),
    StoredKey("operator", hashlib.sha256(b"mk-operator").hexdigest(), scope="admin"),
)
PROFILE = ReplicaProfile(
    "t4-0", ModelInfo("tiny", "qwen2", 1000, 4096, (1, 2), "float16", "int4", "Qwen2ForCausalLM"), "cuda:0", "Tesla T4",
    "7.5", "fp16", "a fingerprint", 1234.5, 0.0125, 100, 512, {"attention": "triton: measured"}, (0.0125, 0.02), 1e-6,
    32, "t4", "0123456789abcdef", 2e-6,
)  # fmt: skip
STATE = control_state.ControlState(
    pools={
        "t4": control_state.PoolPlan(
            2,
            1,
            8,
            0.35,
            90.0,
            "org/new",
            "org/old",
            (control_state.AppliedWeightUpdate("/weights/1.safetensors", True, "a digest"),),
        ),
        "cpu": control_state.PoolPlan(0),
    },
    generation=7,
    policy=control_state.PolicyPlan("slo", 1.5, 0.08, {"headroom": 0.2}),
    deployment="d-1",
    drains={"t4-3": control_state.ReplicaDrain("t4", True, NOON, True)},
    rolls={"t4": control_state.PoolRollout("v2", "org/new", "v1", "it does not start")},
    updates={"cpu": control_state.OngoingWeightUpdate("/weights/2.safetensors", False, "alice", "better")},
    events=(control_state.FleetEvent(3, NOON, "scaled", "t4", "", 1, 2, 7, "alice", "load"),),
    settled=frozenset({"cpu", "t4"}),
)

WEIGHTS_KEY = "weights of a checkpoint, for this CPU"
NORM = torch.linspace(0, 2, 24).to(torch.bfloat16)
LAYER = "model.layers.0.mlp.down_proj"


def int4_weight() -> GroupedWeight:
    """Small int4 weight, [32, 64] in groups of 32."""
    at = torch.arange(32 * 64)
    codes, scales, zeros = at * 7 % 16, (1 + at[:64] % 5) / 64, at[:64] % 16
    return GroupedWeight(
        codes.to(torch.uint8).view(32, 64), scales.view(32, 2), zeros.to(torch.uint8).view(32, 2), 4, 32,
        bias=torch.linspace(-1, 1, 32),
    )  # fmt: skip


def payload(geometry: Geometry, head: int) -> bytes:
    """A head's part of a record: bytes that are told apart."""
    return bytes((head * 31 + at) % 251 for at in range(geometry.payload_bytes))


def digests() -> dict[str, list[str]]:
    """Return what names each geometry in a store: the identity of records, and a key of a value."""
    found = {}
    for name, geometry in GEOMETRIES.items():
        whose = kv_identity("a model's digest", geometry, "float16", "fp16")
        [value] = StoreKeys(SECRET, whose).values([b"one", b"two"], 2)
        found[name] = [whose.hex(), value.key.hex()]
    return found


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    (FOLDER / "fleets").mkdir(parents=True)
    for name in ("keys.yaml", "keys.json"):
        write_keys(FOLDER / name, KEYS)
        (FOLDER / name).chmod(0o644)  # as git keeps it
    (FOLDER / "control.json").write_bytes(control_state.encode_state(STATE) + b"\n")
    (FOLDER / "served.json").write_bytes(served_profile.encode_profile("org/tiny", PROFILE) + b"\n")
    (FOLDER / "digests.json").write_text(json.dumps(digests(), indent=1) + "\n")
    for name, geometry in GEOMETRIES.items():
        seal = RecordSealer(SECRET, geometry)
        header = seal.header()
        sealed = seal.seal(STORE_KEY, header, [payload(geometry, head) for head in range(geometry.heads)])
        (FOLDER / f"record-{name}.bin").write_bytes(header + sealed)
    weight = int4_weight()
    sizes, tensors = (
        {"outputs": 32, "inputs": 64, "group": 32, "bits": 4},
        {"stream": interleave(regroup(weight, 32), 4)},
    )
    assert weight.bias is not None
    layer = PackedLayer("c-int4", sizes, tensors | {"bias": weight.bias})
    with (FOLDER / "weights.bin").open("w+b") as file:
        kept = PackedWeights({"model.norm.weight": NORM}, {LAYER: [layer]}, {"layer, int4": "c-int4"})
        write_packed_weights(file, WEIGHTS_KEY, kept)
    for path in EXAMPLES.glob("*.yaml"):
        shutil.copy(path, FOLDER / "fleets" / path.name)
        spec = FleetSpec.model_validate(read_yaml(path)[0])
        (FOLDER / "fleets" / f"{path.stem}.json").write_text(json.dumps(spec.model_dump(mode="json"), indent=1) + "\n")


if __name__ == "__main__":
    main()
