"""Refusals by `motley serve` of what this machine has no place for, with the entry or flag, and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from motley.cluster.fleet.control.backend.pending_reason import NodeResources
from motley.cluster.fleet.spec.fleet_file_loader import load_fleet
from motley.cluster.fleet.spec.fleet_spec import FleetSpec
from motley.cluster.fleet.spec.serve_options import ServeOptions
from motley.cluster.security.edge.ports import free_port_block
from motley.cluster.service.startup import placement_check, torch_build
from motley.cluster.service.startup.serve_command import _check_memory, run_serve
from motley.cluster.service_errors import ConfigurationError
from motley.kernels.device import torch_builds
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import InvalidRequest

HERE = NodeResources({}, {"CPU": 64.0}, {"CPU": 64.0})
GPUS = NodeResources({}, {"CPU": 64.0, "GPU": 1.0}, {"CPU": 64.0, "GPU": 0.0})


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[NodeResources]:
    nodes = [HERE]
    monkeypatch.setattr(placement_check, "living_nodes", lambda: nodes)
    return nodes


def fleet(*pools: dict[str, Any]) -> FleetSpec:
    said = [{"name": f"p{number}", **pool} for number, pool in enumerate(pools)]
    return FleetSpec.model_validate({"model": "m", "pools": said})


def written(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "fleet.yaml"
    path.write_text("model: demo\npools:\n" + text)
    return load_fleet(path)


def test_flags_are_named_with_the_remedy(here: list[NodeResources]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        placement_check.check_local_capacity(fleet({"device": "cuda"}), None)
    assert caught.value.param == "--device"
    for words in ("--device: a replica wants 1 GPU", "motley doctor", "--device cpu", "--address"):
        assert words in caught.value.message
    here[:] = [GPUS]
    with pytest.raises(ConfigurationError, match="--replicas: with 2 the fleet starts with 2 GPUs, and there are 1"):
        placement_check.check_local_capacity(fleet({"device": "cuda", "replicas": {"start": 2}}), None)


def test_the_line_of_the_file_is_named(here: list[NodeResources], tmp_path: Path) -> None:
    file = written(tmp_path, "  - name: a\n  - name: b\n    labels: {zone: x}\n")
    with pytest.raises(ConfigurationError) as caught:
        placement_check.check_local_capacity(file.spec, file)
    assert f"{tmp_path}/fleet.yaml:5:13: pools[1].labels: no node with the label zone=x" in caught.value.message
    assert "start with 0 replicas" in caught.value.message


def test_a_pool_that_starts_with_none_is_told_and_no_fault(
    here: list[NodeResources], capsys: pytest.CaptureFixture[str]
) -> None:
    spec = fleet({}, {"accelerator": "T4", "replicas": {"min": 0, "start": 0}})
    placement_check.check_local_capacity(spec, None)
    assert "pool p1 cannot have a replica here: no node with the label" in capsys.readouterr().out


def test_on_a_cluster_whose_nodes_come_and_go_it_waits_and_says_so(
    here: list[NodeResources], capsys: pytest.CaptureFixture[str]
) -> None:
    placement_check.print_pending_pools(fleet({"accelerator": "T4"}, {}))
    assert capsys.readouterr().out == (
        "pool p0 waits for a node: no node with the label ray.io/accelerator-type=T4, of 1\n"
    )


def test_what_waits_is_told_once_for_each_reason(
    here: list[NodeResources], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(placement_check, "POLL_INTERVAL_S", 0.0)
    waits = {"state": "STARTING"}  # what Serve does not know yet is not among its details
    pools = {"p0": {"replicas": [{"state": "RUNNING", "node_id": "n"}, waits]}, "p1": {"replicas": [waits]}}
    monkeypatch.setattr(placement_check, "application_details", lambda app: {"deployments": pools})
    glance = placement_check.pending_replica_printer(fleet({"device": "cuda"}, {}))
    glance()
    glance()
    assert capsys.readouterr().out == "pool p0 waits: no node has 1 GPU; the most is 0\n"
    here[:] = [GPUS]
    glance()
    assert capsys.readouterr().out == "pool p0 waits: no GPU free: 1 GPU wanted, the most on a node is 0\n"
    pools["p0"]["replicas"][1] = {"state": "STARTING", "node_id": "n"}
    glance()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("cards", "words"),
    [
        ((), ("the driver knows no GPU", "motley doctor", "--device cpu")),
        ((("Tesla T4", (7, 5)),), ("the driver knows a GPU, Tesla T4", "pip install", "torch")),
        ((("Old", (3, 0)),), ("of the GPU, Old", "--device cpu")),
    ],
)
def test_a_torch_for_cpus_is_told_before_ray_is_started(
    cards: Any, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_build, "is_cuda_build", lambda: False)
    monkeypatch.setattr(torch_build, "list_cards", lambda: cards)
    with pytest.raises(ConfigurationError) as caught:
        torch_build.check_torch(fleet({"device": "cuda"}), None)
    for each in words:
        assert each in caught.value.message
    waits = {"min": 0, "start": 0}
    torch_build.check_torch(fleet({}, {"device": "cuda", "replicas": waits}, {"simulate": "H100"}), None)


def test_which_build_it_is_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert torch_builds.is_cuda_build() is (torch.version.cuda is not None)
    for said, built in (("cuda: Optional[str] = None", False), ("cuda = '12.8'", True), ('cuda: str = "13.0"', True)):
        (tmp_path / "version.py").write_text(f"__version__ = '2'\n{said}\nhip = '6'\n")
        monkeypatch.setattr(torch_builds, "find_spec", lambda name: Spec(str(tmp_path / "__init__.py")))
        assert torch_builds.is_cuda_build() is built
    monkeypatch.setattr(torch_builds, "find_spec", lambda name: None)
    assert not torch_builds.is_cuda_build()


class Spec:
    def __init__(self, origin: str) -> None:
        self.origin = origin


def test_serve_ends_at_once_where_the_weights_are_larger_than_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks pools that hold a model in one memory, and start with replicas: others have a place for it."""
    asked: list[EngineConfig] = []

    def check_memory(folder: Path, config: EngineConfig) -> None:
        asked.append(config)
        raise InvalidRequest("model: its weights take 9000.0 GiB on a CPU", param="model")

    monkeypatch.setattr("motley.cluster.service.startup.serve_command.check_memory", check_memory)
    monkeypatch.setattr("motley.cluster.service.startup.serve_command.resolve_model", Path)
    with pytest.raises(ConfigurationError, match="its weights take 9000"):
        _check_memory(ServeOptions(model="m"), fleet({"engine": {"weights_memory": "1GiB"}}, {}))
    assert [config.weights_memory_bytes for config in asked] == [None]
    with pytest.raises(ConfigurationError, match="its weights take 9000"):
        _check_memory(ServeOptions(model="m"), fleet({"device": "cuda", "tensor_parallel": 2}))
    assert [(config.device, config.tensor_parallel) for config in asked[1:]] == [("cuda", 2)]
    waits = {"replicas": {"min": 0, "start": 0}}
    _check_memory(
        ServeOptions(model="m"),
        fleet({"simulate": "H100"}, {"device": "cuda", "engine": {"weights_memory": "1GiB"}}, waits),
    )
    mixed = {"device": "cuda,cpu", "pipeline_parallel": 2}
    _check_memory(ServeOptions(model="m"), fleet(mixed))  # how many layers are on the CPU is chosen by measuring
    assert len(asked) == 2


def test_serve_ends_at_once_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It waited for ever. Nothing has been started by then."""
    monkeypatch.setattr(
        "motley.cluster.service.startup.serve_command.become_subreaper", lambda: pytest.fail("it goes on")
    )
    monkeypatch.setattr("motley.cluster.service.startup.serve_command._take_signals", lambda: None)
    monkeypatch.setattr(torch_build, "is_cuda_build", lambda: False)
    monkeypatch.setattr(torch_build, "list_cards", tuple)
    port = free_port_block(2)
    options = ServeOptions(engine=EngineConfig(device="cuda"), http_port=port, grpc_port=port + 1)
    assert run_serve(options) == 1
    assert "--device: torch is a build for CPUs here" in capsys.readouterr().err
