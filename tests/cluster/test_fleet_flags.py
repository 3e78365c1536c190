"""Flags are a fleet of one pool; beside a fleet file they may say what that leaves open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from motley.cli import serve as command
from motley.cli.app import run
from motley.cluster.fleet.spec.fleet_flags import fleet_from_options
from motley.cluster.fleet.spec.fleet_spec import FleetSpec, engine_config
from motley.cluster.fleet.spec.pool_spec import ReplicaRange
from motley.cluster.fleet.spec.serve_options import ServeOptions
from motley.cluster.service.startup.access_options import check_access
from motley.cluster.service.startup.served_model_name import with_served_model_name
from motley.cluster.service_errors import ConfigurationError
from motley.replicas.engine_config import EngineConfig

FLEET = "model: demo\npools:\n  - {name: p40, simulate: P40}\nlisten: {http_port: 8123}\nservice: {drain_s: 9}\n"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """Return the options that the command would have started with."""
    found: list[ServeOptions] = []
    monkeypatch.setattr(
        "motley.cluster.service.startup.serve_command.run_serve", lambda options, bar: found.append(options) or 0
    )
    return found


@pytest.fixture
def fleet(tmp_path: Path) -> str:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    return str(tmp_path / "fleet.yaml")


def test_flags_are_a_fleet_of_one_pool(asked: list[ServeOptions]) -> None:
    flags = ["--replicas", "3", "--threads", "2", "--kv-memory", "1GiB", "--cpu-weights", "int8", "--stall-s", "7"]
    flags += [
        "--max-replicas",
        "5",
        "--reader-timeout-s",
        "11",
        "--http-port",
        "8111",
        "--cors-origin",
        "*",
        "--open-health",
        "--unknown-fields",
        "refuse",
    ]
    assert run(["serve", "org/name", *flags]) == 0
    spec = fleet_from_options(asked[0])
    pool = spec.pools[0]
    assert (spec.model, pool.name, pool.replicas) == ("org/name", "cpu", ReplicaRange(min=0, max=5, start=3))
    assert engine_config(spec, pool) == asked[0].engine
    assert asked[0].engine == EngineConfig(threads=2, kv_memory_bytes=2**30, cpu_weights="int8", reader_timeout_s=11.0)
    assert (spec.listen.http_port, spec.service.stall_s, spec.security.open_health) == (8111, 7.0, True)
    assert spec.security.cors_origins == ["*"]
    assert spec.service.unknown_fields == "refuse"
    assert run(["serve", "org/name", "--unknown-fields", "drop"]) == 0
    with pytest.raises(ConfigurationError, match=r"^--unknown-fields: "):
        fleet_from_options(asked[1])


def test_a_simulated_or_a_null_fleet_has_no_other_s_name() -> None:
    def name(null: bool = False, **options: Any) -> str | None:
        return with_served_model_name(fleet_from_options(ServeOptions(**options)), null=null).served_model_name

    assert [name(), name(simulate="P40"), name(null=True)] == ["motley-demo", "simulated", "null-engine"]
    assert name(simulate="P40", served_model_name="mine") == "mine"
    mixed = FleetSpec.model_validate({"model": "demo", "pools": [{"name": "a"}, {"name": "b", "simulate": "T4"}]})
    assert with_served_model_name(mixed).served_model_name == "simulated"


def test_a_file_says_what_flags_would(asked: list[ServeOptions], fleet: str) -> None:
    assert run(["serve", fleet, "--grpc-port", "9123", "--http-port", "8123", "--ready-file", "r", "--greet"]) == 0
    options = asked[0]
    assert (options.http_port, options.grpc_port, options.drain_s, options.greet) == (8123, 9123, 9.0, True)
    assert options.ready_file == Path("r")
    spec = fleet_from_options(options)
    assert (spec.listen.grpc_port, spec.pools[0].simulate) == (9123, "P40")
    check_access(options)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--http-port", "8000"], "--http-port 8000 contradicts FLEET:4:21: listen.http_port is 8123"),
        (["--drain-s", "3"], "--drain-s 3.0 contradicts FLEET:5:20: service.drain_s is 9.0"),
        (["--replicas", "1"], "--replicas: FLEET says that itself, of each pool"),
        (["--threads", "1"], "--threads: FLEET says that itself, of each pool"),
        (["--simulate", "T4"], "--simulate: FLEET says that itself, of each pool"),
        (["--null-engine"], "--null-engine: FLEET says that itself, of each pool"),
    ],
)
def test_flags_that_contradict_are_refused_by_name(
    asked: list[ServeOptions], fleet: str, flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", fleet, *flags]) == 1
    assert told.replace("FLEET", fleet) in capsys.readouterr().err
    assert not asked


def test_a_file_of_flags_contradicts_as_flags_do(
    asked: list[ServeOptions], fleet: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flags.json").write_text(json.dumps({"replicas": 2}))
    assert run(["serve", fleet, "--config", str(tmp_path / "flags.json")]) == 1
    assert "--replicas" in capsys.readouterr().err


def test_every_flag_of_the_service_is_known_to_fleet_files() -> None:
    """A new flag is of the pools, of the service, or of the command: nobody is asked for it in vain."""
    from motley.cli.fleet_file import _NAMES, _OF_THE_COMMAND
    from motley.cluster.fleet.spec.fleet_flags import _PLACES

    of_pools = {
        "replicas", "max_replicas", "null_engine", "null_step_ms", "simulate", "simulate_model", "device", "dtype",
        "numerics", "kv_dtype", "cpu_weights", "threads", "max_model_len", "kv_memory", "swap_memory",
        "tensor_parallel", "pipeline_parallel", "pipeline_layers", "speculate_ngram", "max_batch_tokens", "max_running",
        "max_waiting", "max_waiting_tokens", "watchdog_s", "weights_cache", "weights_memory", "weights_host_memory",
        "frozen_weights",
    }  # fmt: skip
    flags = {_NAMES.get(name, name) for name in command.serve.__annotations__} - {"return", "context"}
    assert flags == of_pools | set(_PLACES) | (_OF_THE_COMMAND & flags)


POOLS = "model: demo\npools:\n  - name: a\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model: ./nosuch\npools:\n  - name: a\n", "1:8: model: ./nosuch: there is no such folder, and it is no Hugg"),
        (
            "model: demo\npools:\n  - name: a\n    quantization: {model: ./missing}\n",
            "4:27: pools[0].quantization.model: ./missing: there is no such folder",
        ),
        (
            POOLS + "security: {tls_cert: cert.pem}\n",
            "4:22: security.tls_cert: HERE/cert.pem: a certificate and its key go together; give security.tls_key too",
        ),
        (
            POOLS + "security:\n  tls_key: key.pem\n",
            "5:12: security.tls_key: HERE/key.pem: a certificate and its key go together; give security.tls_cert too",
        ),
        (
            POOLS + "security: {tls_cert: cert.pem, tls_key: key.pem}\n",
            "4:22: security.tls_cert: HERE/cert.pem: no such file or directory",
        ),
        (POOLS + "security: {client_ca: ca.pem}\n", "4:23: security.client_ca: give security.tls_cert and"),
        (POOLS + "security: {tls_terminated_upstream: true}\n", "4:37: security.tls_terminated_upstream: means that"),
        (POOLS + "security: {api_keys: keys.yaml}\n", "4:22: security.api_keys: HERE/keys.yaml: "),
        (POOLS + "listen: {host: 0.0.0.0}\n", "4:16: listen.host: 0.0.0.0 would let other machines in, and there"),
        (POOLS + "security: {cors_origins: [x]}\n", "4:26: security.cors_origins: x: expected one such as https://"),
        (POOLS + "service: {tool_parser: x}\n", "4:24: service.tool_parser: x: expected one of auto"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_what_a_file_says_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    """Also what is seen only when a service is about to start."""
    monkeypatch.setattr("motley.cluster.service.startup.serve_command._take_signals", lambda: None)
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    assert run(["serve", str(file)]) == 1
    found = capsys.readouterr().err.replace(f"{file}:", "").replace(str(tmp_path), "HERE")
    assert found.startswith(f"motley serve: {told}")


def test_a_flag_is_told_as_a_flag_beside_a_file_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fleet: str
) -> None:
    monkeypatch.setattr("motley.cluster.service.startup.serve_command._take_signals", lambda: None)
    assert run(["serve", fleet, "--tls-cert", "/nowhere.pem"]) == 1
    assert capsys.readouterr().err.startswith("motley serve: --tls-cert /nowhere.pem: a certificate and its key go")
