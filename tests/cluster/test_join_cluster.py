"""Clusters that others have started: what their nodes lack is told, with the remedy."""

from __future__ import annotations

import pytest

from motley.cluster.fleet.spec.serve_options import ServeOptions
from motley.cluster.security.edge.serve_patches import FORMER_HOOK, HOOK, SPREAD
from motley.cluster.service.startup.join_cluster import join_cluster, missing_setting
from motley.cluster.service.startup.ray_settings import node_settings
from motley.cluster.service.startup.serve_command import check
from motley.cluster.service_errors import ConfigurationError


def test_what_nodes_lack_is_told_with_the_remedy() -> None:
    wanted = node_settings()
    well = {"RAY_AUTH_MODE": "token", **{setting.name: setting.value for setting in wanted}}
    assert {SPREAD, "FORWARDED_ALLOW_IPS"} < well.keys()
    assert well["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == HOOK, "Serve's own paths want no key"
    assert missing_setting(wanted, [("a", well), ("b", well)]) is None
    former = {**well, "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": FORMER_HOOK}
    assert missing_setting(wanted, [("a", former)]) is None, "nodes that an earlier version's remedy has started"
    for setting in wanted:
        told = missing_setting(wanted, [("a", well), ("b", {**well, setting.name: None})])
        assert told is not None
        assert "node b" in told
        assert f"{setting.name}={setting.value or chr(39) * 2}" in told
    assert "RAY_AUTH_MODE=token" in str(missing_setting(wanted, [("a", {**well, "RAY_AUTH_MODE": "disabled"})]))
    assert "without it" in str(missing_setting(wanted, [("a", {**well, "RAY_SERVE_ENABLE_HA_PROXY": "1"})]))


def test_nobody_listens_there() -> None:
    with (
        pytest.raises(ConfigurationError, match=r"--address 127\.0\.0\.1:9: nobody listens there"),
        join_cluster("127.0.0.1:9", {}),
    ):
        pytest.fail("joined")


def test_an_address_is_for_fleet_files() -> None:
    with pytest.raises(ConfigurationError, match="--address: it is accepted with a fleet file only"):
        check(ServeOptions(address="auto"))
