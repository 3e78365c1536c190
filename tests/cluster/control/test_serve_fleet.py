"""Reports of a pool that has fewer replicas than it should, made from what Serve says of it."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.deployment_state import DeploymentReplica, DeploymentState

from motley.cluster.fleet.control.backend.pending_reason import NodeResources
from motley.cluster.fleet.control.backend.serve_backend import STARTING, ServeBackend
from motley.cluster.fleet.spec.fleet_spec import FleetSpec
from motley.cluster.ray_compat.serve_controller import fetch_deployment_ids
from motley.cluster.ray_compat.visible_names import FAILED_START
from motley.replicas.demo import demo_path
from motley.replicas.errors import InvalidRequest

TRACE = "Error:\nTraceback (most recent call last):\n  ...\nCheckpointError: delta.safetensors: cannot be read\n"


def told(status: str, message: str, *, placed: bool = True) -> Any:
    replica = SimpleNamespace(state=SimpleNamespace(value="STARTING"), node_id="n" if placed else None)
    return SimpleNamespace(status=SimpleNamespace(value=status), message=message, replicas=[replica])


async def pending(status: str, message: str, **replica: bool) -> str:
    fleet = ServeBackend("motley", lambda models: None)
    fleet._details["cpu"] = told(status, message, **replica)
    return await fleet.pending("cpu")


async def test_those_that_never_did() -> None:
    said = await pending("DEPLOY_FAILED", f"The deployment failed to start 3 times in a row. {TRACE}")
    assert said == "replicas do not start: CheckpointError: delta.safetensors: cannot be read"


@pytest.mark.parametrize("status", ["UNHEALTHY", "UPSCALING", "HEALTHY", "UPDATING"])
@pytest.mark.parametrize(
    "words", ["A replica failed to start with exception. Retrying.", "The deployment failed to start 2 times in a row."]
)
async def test_one_in_the_place_of_one_that_was_lost(status: str, words: str) -> None:
    """Serve tries for ever, whatever it calls the pool meanwhile."""
    said = await pending(status, f"{words} {TRACE}")
    assert said == "the last that was tried did not start: CheckpointError: delta.safetensors: cannot be read"


@pytest.mark.parametrize("message", ["", "A replica's health check failed."])
async def test_one_that_only_takes_its_time(message: str) -> None:
    assert await pending("UNHEALTHY", message) == STARTING


async def test_no_room_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def info(self: ServeBackend, name: str) -> Any:
        return SimpleNamespace()

    monkeypatch.setattr(ServeBackend, "_settings", info)
    monkeypatch.setattr("motley.cluster.fleet.control.backend.serve_backend._needs", lambda info: [])
    monkeypatch.setattr("motley.cluster.fleet.control.backend.serve_backend.living_nodes", list)
    monkeypatch.setattr("motley.cluster.fleet.control.backend.serve_backend.pending_reason", lambda *_: "no GPU free")
    failed = f"A replica failed to start with exception. Retrying. {TRACE}"
    assert await pending("UNHEALTHY", failed, placed=False) == "no GPU free"


@pytest.mark.parametrize("joined", [False, True])
async def test_pools_that_no_node_could_hold_are_known_where_no_node_joins(
    joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleets = [{"device": "cpu"}, {"accelerator": "T4"}], [{"accelerator": "T4"}, {"device": "cpu"}]
    specs = [
        FleetSpec.model_validate(
            {"model": "m", "pools": [{"name": f"p{number}", **pool} for number, pool in enumerate(pools)]}
        )
        for pools in fleets
    ]
    details = SimpleNamespace(target_num_replicas=0, replicas=[], status=SimpleNamespace(value="HEALTHY"), message="")

    async def asked(self: ServeBackend, call: Any, *args: Any) -> Any:
        ids = [SimpleNamespace(app_name="motley", name=name) for name in ("p0", "p1")]
        return ids if call is fetch_deployment_ids else details

    async def info(self: ServeBackend, name: str) -> Any:
        return SimpleNamespace(version="1")

    monkeypatch.setattr(ServeBackend, "_call_controller", asked)
    monkeypatch.setattr(ServeBackend, "_settings", info)
    resources = {"CPU": 8.0, "memory": 2.0**34}
    monkeypatch.setattr(
        "motley.cluster.fleet.control.backend.serve_backend.living_nodes",
        lambda: [NodeResources({}, resources, resources)],
    )
    fleet = ServeBackend("motley", lambda models: None, joined=joined)
    for spec, homeless in zip(specs, ("p1", "p0"), strict=True):
        deployed = SimpleNamespace(fleet=spec)
        monkeypatch.setattr(
            "motley.cluster.fleet.control.backend.serve_backend.read_deployed", lambda deployed=deployed: deployed
        )
        await fleet.planned()
        found = {name for name, pool in (await fleet.snapshots()).items() if not pool.placeable}
        assert found == (set() if joined else {homeless})


def test_these_are_still_serves_words() -> None:
    for method, words in (
        (DeploymentState.record_replica_startup_failure, f'"A replica {FAILED_START} with exception.'),
        (DeploymentState.check_curr_status, f'"The deployment {FAILED_START} "'),  # and how many times
    ):
        assert words in inspect.getsource(method)


def test_a_replica_has_its_node_while_it_loads() -> None:
    """KEDA is told by it that a pod is in use."""
    assert "node_ip=self._actor.node_ip" in inspect.getsource(DeploymentReplica.check_started)


def gguf(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "model.gguf").write_bytes(b"GGUF")


def lora(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "vocab.json")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (gguf, r"model: model\.gguf: is a GGUF file.*; give the folder"),
        (lora, r"model: adapter_config\.json: says that this is an adapter"),
        (no_tokenizer, r"model: .*tokenizer\.json"),
    ],
)
def test_a_roll_to_what_cannot_be_served_names_it(
    spoil: Callable[[Path], None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is the one that `motley serve` makes."""
    deployed = SimpleNamespace(fleet=SimpleNamespace(model=str(demo_path())))
    monkeypatch.setattr("motley.cluster.fleet.control.backend.serve_backend.read_deployed", lambda: deployed)
    fleet = ServeBackend("motley", lambda models: None)
    fleet._check_model(str(demo_path()))
    folder = Path(shutil.copytree(demo_path(), tmp_path / "next"))
    spoil(folder)
    with pytest.raises(InvalidRequest, match=words) as caught:
        fleet._check_model(str(folder))
    assert caught.value.param == "model"


def test_a_roll_between_models_of_which_one_has_no_tokenizer_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer may be made from older files, and then nothing tells whether both read text alike."""
    monkeypatch.setattr(
        "motley.cluster.fleet.control.backend.serve_backend.check_servable_in_child", lambda folder: None
    )
    folder = Path(shutil.copytree(demo_path(), tmp_path / "served"))
    (folder / "tokenizer.json").unlink()
    deployed = SimpleNamespace(fleet=SimpleNamespace(model=str(folder)))
    monkeypatch.setattr("motley.cluster.fleet.control.backend.serve_backend.read_deployed", lambda: deployed)
    with pytest.raises(InvalidRequest, match=r"model: served has no tokenizer\.json.*; write one"):
        ServeBackend("motley", lambda models: None)._check_model(str(demo_path()))
