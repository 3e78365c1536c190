"""Two services of one machine share none of Ray's ports: each is one that is free when it is bound."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import parameter, worker

from motley.cluster.fleet.spec.fleet_spec import FleetSpec
from motley.cluster.ray_compat.local_node import free_agent_port
from motley.cluster.service.deployment import ray_head
from motley.cluster.service.supervision.watchdog import ServiceLost

SPEC = FleetSpec.model_validate({"model": "m", "pools": [{"name": "cpu"}]})


def fixed() -> set[int]:
    """Ports that a node would take whoever else has them, as ray.init makes its parameters."""
    parameters = parameter.RayParams(dashboard_port=None, metrics_export_port=None)
    parameters.update_pre_selected_port()
    return set(parameters.reserved_ports)


def test_ray_alone_would_give_every_agent_the_same_port() -> None:
    """And makes its parameters by the name that is replaced: else nothing would change."""
    assert fixed() == {52365}
    assert "ray._private.parameter.RayParams(" in inspect.getsource(worker.init)
    assert "dashboard_agent_listen_port" not in inspect.signature(worker.init).parameters, "it has a parameter: use it"


def test_a_service_starts_ray_without_a_port_that_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = []

    def init(**given: Any) -> Any:
        seen.append(fixed())
        assert given["dashboard_port"] is None
        return SimpleNamespace(dashboard_url="127.0.0.1:8265")

    monkeypatch.setattr(ray_head.ray, "init", init)
    monkeypatch.setattr(ray_head, "node_labels", dict)
    ray_head.start_ray(ray_head.Path("/tmp"), SPEC)
    assert seen == [set()]
    assert fixed() == {52365}, "what others start is as it was"


def test_ray_is_as_it_was_where_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """And whoever started the service is told to start it again: on a busy machine Ray's raylet gives up soon."""

    def init(**given: Any) -> Any:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray_head.ray, "init", init)
    whole = parameter.RayParams
    with pytest.raises(ServiceLost, match=r"^Ray did not start: The current node timed out during startup$"):
        ray_head.start_ray(ray_head.Path("/tmp"), SPEC)
    assert parameter.RayParams is whole
    with free_agent_port():
        assert parameter.RayParams is not whole
